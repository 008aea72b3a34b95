"""Many copies of one form against a plain loop: which of them run together, and that nothing beside them is passed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from devipc.host import copies, rows
from devipc.host.backend import HostDevice
from devipc.host.copies import Rect
from devipc.host.maps import view_at
from devipc.spi import PAGE_NBYTES

WIDTH, PLANES, PAGES = 512, 6, 96
PITCH = PAGES * WIDTH
POOL = PLANES * PITCH
COUNT = 80


class Moves:
    """A pool and host blocks with random bytes, and what ran how."""

    def __init__(self, device: HostDevice, patch: pytest.MonkeyPatch) -> None:
        self._device = device
        self._stream = device.transfer.create_stream()
        self.rng = np.random.default_rng(5)
        pool, blocks = device.memory.allocate(POOL), device.memory.allocate(PAGES * PLANES * WIDTH)
        self.pool, self.blocks = pool.ptr, blocks.ptr
        self.memory = [(pool.ptr, pool.nbytes), (blocks.ptr, blocks.nbytes)]
        self.single: list[int] = []
        self.views: list[tuple[int, int]] = []
        self._one_by_one = copies.run_rects
        patch.setattr(copies, "run_rects", self._count)
        patch.setattr(rows, "view_at", self._view)

    def _count(self, rects: Sequence[Rect]) -> None:
        self.single.append(len(rects))
        self._one_by_one(rects)

    def _view(self, address: int, nbytes: int) -> memoryview:
        self.views.append((address, address + nbytes))
        return view_at(address, nbytes)

    def check(self, rects: Sequence[Rect]) -> None:
        """Run ``rects`` on fresh bytes; every byte of all memory that they lie in must be as a plain loop leaves it."""
        before = {}
        for start, nbytes in self.memory:
            before[start] = bytearray(self.rng.bytes(nbytes))
            ctypes.memmove(start, bytes(before[start]), nbytes)
        expected = {start: bytearray(content) for start, content in before.items()}

        def place(address: int) -> tuple[int, int]:
            return next((start, address - start) for start, nbytes in self.memory if start <= address < start + nbytes)

        for dst, src, dst_pitch, src_pitch, width, height in rects:
            for row in range(height):
                (to, at), (of, begin) = place(dst + row * dst_pitch), place(src + row * src_pitch)
                expected[to][at : at + width] = before[of][begin : begin + width]
        self._device.transfer.copy_strided(self._stream, np.array(rects, np.uint64))
        self._device.transfer.synchronize_stream(self._stream)
        for start, nbytes in self.memory:
            assert ctypes.string_at(start, nbytes) == expected[start]

    def rects(self, restore: bool, pages: Sequence[int], blocks: Sequence[int], *, height: int = PLANES) -> list[Rect]:
        """One copy a page."""
        made: list[Rect] = []
        for page, block in zip(pages, blocks, strict=True):
            there, here = self.pool + page * WIDTH, self.blocks + block * PLANES * WIDTH
            if restore:
                made.append((there, here, PITCH, WIDTH, WIDTH, height))
            else:
                made.append((here, there, WIDTH, PITCH, WIDTH, height))
        return made

    def some(self, count: int = COUNT) -> list[int]:
        return [int(page) for page in self.rng.permutation(PAGES)[:count]]


@pytest.fixture
def moves(device: HostDevice) -> Iterator[Moves]:
    with pytest.MonkeyPatch.context() as patch:
        yield Moves(device, patch)


@pytest.mark.parametrize("restore", [False, True])
def test_scattered_rows_run_together(moves: Moves, restore: bool) -> None:
    """With blocks side by side, in any order, and of which only a part is moved; rows of one plane need no pitch."""
    moves.check(moves.rects(restore, moves.some(), range(COUNT)))
    moves.check(moves.rects(restore, moves.some(), moves.some()))
    moves.check(moves.rects(restore, moves.some(), moves.some(), height=PLANES - 2))
    flat = moves.rects(restore, moves.some(), moves.some(), height=1)
    moves.check([(dst, src, index, 2**63, width, 1) for index, (dst, src, *_, width, _) in enumerate(flat)])
    assert not moves.single
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_AT_ONCE", 7 * PLANES)
        moves.check(moves.rects(restore, moves.some(), range(COUNT)))
    assert not moves.single


@pytest.mark.parametrize("restore", [False, True])
def test_no_view_reaches_beyond_the_rows(moves: Moves, restore: bool) -> None:
    """The last rows end where their memory does, and behind each is a page that nobody may touch."""
    assert POOL % PAGE_NBYTES == 0
    pages, blocks = [*range(PAGES - COUNT, PAGES)], [*range(PAGES - COUNT, PAGES)]
    moves.check(moves.rects(restore, pages, blocks))
    first, last = PAGES - COUNT, PAGES - 1
    assert sorted(moves.views) == sorted(
        [
            (moves.pool + first * WIDTH, moves.pool + (PLANES - 1) * PITCH + (last + 1) * WIDTH),
            (moves.blocks + first * PLANES * WIDTH, moves.blocks + PAGES * PLANES * WIDTH),
        ]
    )


@pytest.mark.parametrize("restore", [False, True])
def test_sources_that_overlap(moves: Moves, restore: bool) -> None:
    """One page backed up many times, and one block restored to many pages."""
    same, others = [3] * COUNT, moves.some()
    moves.check(moves.rects(restore, others if restore else same, same if restore else others))
    assert not moves.single


@pytest.mark.parametrize("restore", [False, True])
def test_what_does_not_fit_together_runs_one_by_one(moves: Moves, restore: bool) -> None:
    """Another width, height or pitch among them, places and pitches no whole rows apart, and both scattered."""
    good = moves.rects(restore, moves.some(), moves.some(), height=PLANES - 1)
    dst, src, dst_pitch, src_pitch, width, height = good[40]
    wide, narrow = (dst_pitch, src_pitch) if restore else (src_pitch, dst_pitch)
    for odd in (
        (dst, src, dst_pitch, src_pitch, width - 8, height),
        (dst, src, dst_pitch, src_pitch, width, height - 1),
        (dst, src, dst_pitch + 512 * restore, src_pitch + 512 * (not restore), width, height),
        (dst + 24, src, dst_pitch, src_pitch, width, height),
        (dst, src + 1, dst_pitch, src_pitch, width, height),
    ):
        moves.single.clear()
        others = [one for number, one in enumerate(good) if number != 40]
        if odd[0] != dst or odd[2:] != good[40][2:]:  # rows that would be written twice have no defined result
            others = [one for one in others if abs(one[0] - dst) > 2 * WIDTH * (1 if restore else PLANES)]
        moves.check([*others, odd])
        assert moves.single == [len(others) + 1]
    moves.single.clear()
    shift = (wide + 8, narrow) if restore else (narrow, wide + 8)
    moves.check([(one[0], one[1], *shift, width, 2) for one in good])
    both = moves.rects(restore, moves.some(), moves.some(), height=2)
    moves.check(
        [(one[0], one[1], one[2] * (1 if restore else 3), one[3] * (3 if restore else 1), width, 2) for one in both]
    )
    assert moves.single == [COUNT, COUNT]


def test_few_narrow_and_wide_rows_run_one_by_one(moves: Moves) -> None:
    moves.check(moves.rects(True, moves.some(64), moves.some(64)))
    for width, limit in ((248, rows._WIDEST), (WIDTH, WIDTH - 8)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rows, "_WIDEST", limit)
            moves.check([(moves.pool + n * width, moves.blocks + n * width, 1, 1, width, 1) for n in moves.some()])
    assert moves.single == [COUNT, COUNT]
    assert not moves.views


def test_copies_inside_one_allocation(moves: Moves) -> None:
    """Apart they run together; not so rows between each other, whose arrays would reach over one another."""
    apart = [(moves.blocks + (PAGES + n) * WIDTH, moves.blocks + n * WIDTH, 1, 1, WIDTH, 1) for n in range(PAGES)]
    moves.check(apart)
    assert not moves.single
    between = [(moves.blocks + (2 * n + 1) * WIDTH, moves.blocks + 2 * n * WIDTH, 1, 1, WIDTH, 1) for n in moves.some()]
    moves.check(between)
    assert moves.single == [COUNT]


@pytest.mark.parametrize("restore", [False, True])
def test_rows_in_two_ranges_that_lie_side_by_side(device: HostDevice, moves: Moves, restore: bool) -> None:
    """Each row is inside of one; no array reaches over both, of which one may be given back by itself."""
    half = PAGES * WIDTH
    assert half % PAGE_NBYTES == 0
    extents = [device.memory.export(device.memory.allocate(half).ptr, half) for _ in range(2)]
    low, high = device.memory.open_side_by_side(extents)
    assert low.ptr + half == high.ptr
    moves.memory.append((low.ptr, 2 * half))
    made: list[Rect] = [
        (low.ptr + page * WIDTH, moves.blocks + number * 2 * WIDTH, half, WIDTH, WIDTH, 2)
        for number, page in enumerate(moves.some())
    ]
    if not restore:
        made = [(src, dst, *pitches[::-1], width, height) for dst, src, *pitches, width, height in made]  # type: ignore[misc]
    moves.check(made)
    assert moves.single == [COUNT]
    assert all(end <= high.ptr or high.ptr <= start for start, end in moves.views)
    for extent in extents:
        device.memory.release(extent)
