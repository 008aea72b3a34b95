"""Copies against a plain loop over bytes, with and without numpy; and every address that must be refused."""

from __future__ import annotations

import array
import ctypes
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devipc.host import copies, ranges, rows
from devipc.host.backend import HostBackend, HostDevice
from devipc.host.copies import Rect
from devipc.spi import PAGE_NBYTES, UsageError
from tests.host.conftest import Words
from tests.host.peer import ROOT

SIZE = 8 * PAGE_NBYTES
PATTERN = bytes((i * 31 + i // 256) % 251 for i in range(SIZE))
BLANK = b"\xee" * SIZE


@pytest.fixture(params=["numpy", "tables", "plain"])
def vectors(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Copies one by one, all together where they can be, however few and narrow, and without numpy."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "tables":
            patch.setattr(copies, "_FEW", 0)
            patch.setattr(rows, "_NARROWEST", 1)
        if request.param == "plain":
            patch.setattr(ranges, "loaded_numpy", lambda: None)
            patch.setattr(copies, "loaded_numpy", lambda: None)
        yield request.param != "plain"


class Pair:
    """A source with a known pattern and a destination, far apart."""

    def __init__(self) -> None:
        self.device = HostBackend().open_device()
        self.stream = self.device.transfer.create_stream()
        self.source = self.device.memory.allocate(SIZE).ptr
        self.gap = self.device.memory.allocate(PAGE_NBYTES)
        self.target = self.device.memory.allocate_grown([PAGE_NBYTES, SIZE - PAGE_NBYTES]).ptr
        self.device.memory.free(self.gap)

    def reset(self) -> None:
        ctypes.memmove(self.source, PATTERN, SIZE)
        ctypes.memmove(self.target, BLANK, SIZE)

    def result(self) -> bytes:
        self.device.transfer.synchronize_stream(self.stream)
        assert ctypes.string_at(self.source, SIZE) == PATTERN
        return ctypes.string_at(self.target, SIZE)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    made.reset()
    yield made
    made.device.close()


def oracle(rects: list[Rect]) -> bytes:
    """Move byte by byte; offsets instead of addresses."""
    target = bytearray(BLANK)
    for dst, src, dst_pitch, src_pitch, width, height in rects:
        for row in range(height):
            for column in range(width):
                target[dst + row * dst_pitch + column] = PATTERN[src + row * src_pitch + column]
    return bytes(target)


@st.composite
def rect(draw: st.DrawFn) -> Rect:
    """A copy inside both buffers, often aligned so that wide units are taken, often touching the very end."""
    unit = draw(st.sampled_from([1, 8]))
    height = draw(st.integers(0, 12))
    width = draw(st.integers(0, 200)) if draw(st.booleans()) else 8 * draw(st.integers(0, 40))
    places, pitches = [], []
    for _ in range(2):
        pitch = -(-width // unit) * unit + draw(st.integers(0, 20)) * unit
        last = (SIZE - (max(height, 1) - 1) * pitch - width) // unit
        places.append(draw(st.one_of(st.integers(0, last), st.just(last))) * unit)
        # The pitch of a single row means nothing.
        pitches.append(pitch if height > 1 else draw(st.sampled_from([0, 1, 2**63])))
    return places[0], places[1], pitches[0], pitches[1], width, height


def as_array(rects: list[Rect], pair: Pair) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    rows = [(d + pair.target, s + pair.source, *rest) for d, s, *rest in rects]
    return np.array(rows, np.uint64).reshape(len(rects), 6)


@settings(max_examples=300)
@given(rects=st.lists(rect(), max_size=24))
def run_strided(pair: Pair, rects: list[Rect]) -> None:
    pair.reset()
    pair.device.transfer.copy_strided(pair.stream, as_array(rects, pair))
    assert pair.result() == oracle(rects)


@settings(max_examples=300)
@given(rows=st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE), st.integers(0, 9000)), max_size=40))
def run_batch(pair: Pair, rows: list[tuple[int, int, int]]) -> None:
    pair.reset()
    clipped = [(d, s, min(n, SIZE - d, SIZE - s)) for d, s, n in rows]
    columns = np.array(clipped, np.uint64).reshape(len(rows), 3).T.copy()
    dst, src = columns[0] + np.uint64(pair.target), columns[1] + np.uint64(pair.source)
    pair.device.transfer.copy_batch(pair.stream, dst, src, columns[2])
    dst[:] = src[:] = columns[:] = 0  # the arrays were snapshot
    assert pair.result() == oracle([(d, s, n, n, n, 1) for d, s, n in clipped])


@pytest.mark.once
def test_strided_copies_equal_the_oracle(pair: Pair, vectors: bool) -> None:
    run_strided(pair)


@pytest.mark.once
def test_batches_equal_the_oracle(pair: Pair, vectors: bool) -> None:
    run_batch(pair)


@given(dst=st.integers(0, SIZE), src=st.integers(0, SIZE), nbytes=st.integers(0, SIZE))
def run_single(pair: Pair, dst: int, src: int, nbytes: int) -> None:
    pair.reset()
    nbytes = min(nbytes, SIZE - dst, SIZE - src)
    pair.device.transfer.copy(pair.stream, pair.target + dst, pair.source + src, nbytes)
    assert pair.result() == oracle([(dst, src, nbytes, nbytes, nbytes, 1)])


def test_single_copies_equal_the_oracle(pair: Pair) -> None:
    run_single(pair)


def test_wide_rows_and_overlapping_spans_of_one_allocation(device: HostDevice, vectors: bool) -> None:
    """Rows that interleave in one pool, narrow and wide: the spans overlap, the rows do not."""
    stream = device.transfer.create_stream()
    for width in (24, 1000, 40000):
        height, pitch = 5, 2 * width
        pool = device.memory.allocate(pitch * height)
        filled = bytes(range(250)) * (pitch * height // 250 + 1)
        ctypes.memmove(pool.ptr, filled, pitch * height)
        copy = np.array([[pool.ptr + width, pool.ptr, pitch, pitch, width, height]], np.uint64)
        device.transfer.copy_strided(stream, copy)
        device.transfer.synchronize_stream(stream)
        for row in range(height):
            at = row * pitch
            assert ctypes.string_at(pool.ptr + at, pitch) == filled[at : at + width] * 2
        device.memory.free(pool)


def test_registered_and_opened_memory_can_be_copied(device: HostDevice, words: Words) -> None:
    stream = device.transfer.create_stream()
    made = device.memory.allocate(PAGE_NBYTES)
    extent = device.memory.export(made.ptr + 5, 100)
    opened = device.memory.open(extent)
    words.words[1] = 0x0123456789ABCDEF
    device.transfer.copy(stream, opened.ptr + 92, words.at(1), 8)
    device.transfer.copy(stream, words.at(3), made.ptr + 97, 8)
    device.transfer.synchronize_stream(stream)
    assert words.words[3] == 0x0123456789ABCDEF
    device.memory.release(extent)


ROW = (0, 0, 16, 16, 16, 2)


def outside(pair: Pair) -> Iterator[tuple[int, int, int]]:
    for good, is_dst in ((pair.target, True), (pair.source, False)):
        other = pair.source if is_dst else pair.target
        for bad, nbytes in (
            (good - 1, 1),
            (good - 1, 2),
            (good + SIZE, 1),
            (good + SIZE - 1, 2),
            (good, SIZE + 1),
            (good, 2**64 - 1),
            (2**64 - 1, 1),
            (0, 8),
            (8, 2**64 - 8),
            (pair.gap.ptr, 1),
        ):
            yield (bad, other, nbytes) if is_dst else (other, bad, nbytes)


def test_addresses_outside_are_refused_before_anything_runs(pair: Pair, vectors: bool) -> None:
    transfer = pair.device.transfer
    for dst, src, nbytes in outside(pair):
        good = [(pair.target, pair.source, 4)] * 20
        rows = np.array([*good, (dst, src, nbytes)], np.uint64)
        with pytest.raises(UsageError, match="live range"):
            transfer.copy(pair.stream, dst, src, nbytes)
        with pytest.raises(UsageError, match=r"\[20\]"):
            transfer.copy_batch(pair.stream, *(np.ascontiguousarray(column) for column in rows.T))
        strided = np.array([(d, s, n, n, n, 1) for d, s, n in rows.tolist()], np.uint64)
        with pytest.raises(UsageError):
            transfer.copy_strided(pair.stream, strided)
        # the same range as two rows whose pitch alone leaves the memory
        if nbytes < 2**40:
            half = [dst, src, max(nbytes, 1), max(nbytes, 1), 1, 2]
            with pytest.raises(UsageError):
                transfer.copy_strided(pair.stream, np.array([half], np.uint64))
    assert pair.result() == BLANK


@pytest.mark.parametrize(
    "rect",
    [
        (0, 0, 15, 16, 16, 2),
        (0, 0, 16, 15, 16, 2),
        (0, 0, 2**63, 16, 16, 2**63),
        (0, 0, 2**32, 2**32, 16, 2**32),
        (0, 0, 2**64 - 1, 2**64 - 1, 2**64 - 1, 2**64 - 1),
        (0, 0, SIZE, 16, 1, 2),
        (0, 0, 1, 1, 1, SIZE + 1),
    ],
)
def test_rectangles_that_wrap_or_leave_are_refused(pair: Pair, vectors: bool, rect: Rect) -> None:
    with pytest.raises(UsageError):
        pair.device.transfer.copy_strided(pair.stream, as_array([ROW] * 20 + [rect], pair))
    assert pair.result() == BLANK


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: rows.astype(np.int64),
        lambda rows: rows.astype(np.float64),
        lambda rows: rows.astype(">u8"),
        lambda rows: rows.astype(np.uint32),
        lambda rows: rows[:, :5].copy(),
        lambda rows: rows.reshape(-1).copy(),
        lambda rows: rows[::2],
        lambda rows: np.asfortranarray(rows),
        lambda rows: rows[None],
        lambda rows: rows.tolist(),
        lambda rows: rows[0, 0],
        lambda rows: None,
    ],
)
def test_wrong_arrays_are_refused(pair: Pair, make: Callable[..., object]) -> None:
    rows = as_array([ROW] * 4, pair)
    wrong = make(rows)
    with pytest.raises(UsageError):
        pair.device.transfer.copy_strided(pair.stream, wrong)  # type: ignore[arg-type]
    column = rows[:, 0].copy()
    with pytest.raises(UsageError):
        pair.device.transfer.copy_batch(pair.stream, wrong, column, column)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        pair.device.transfer.copy_batch(pair.stream, column[1:].copy(), column, column)
    assert pair.result() == BLANK


@pytest.mark.parametrize("arguments", [(None, 1, 1), ("a", 1, 1), (1.5, 1, 1), (-1, 1, 1), (1, 1, -1), (2**64, 1, 1)])
def test_wrong_numbers_are_refused(pair: Pair, arguments: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError):
        pair.device.transfer.copy(pair.stream, *arguments)


def test_empty_copies_do_nothing_wherever_they_point(pair: Pair, vectors: bool) -> None:
    transfer = pair.device.transfer
    transfer.copy(pair.stream, 0, 0, 0)
    zero = np.zeros(20, np.uint64)
    transfer.copy_batch(pair.stream, zero, zero, zero)
    transfer.copy_batch(pair.stream, zero[:0], zero[:0], zero[:0])
    transfer.copy_strided(pair.stream, np.zeros((0, 6), np.uint64))
    transfer.copy_strided(pair.stream, np.array([(0, 0, 1, 1, 0, 9), (1, 1, 1, 1, 9, 0)] * 10, np.uint64))
    assert pair.result() == BLANK


def test_large_batches_are_checked_quickly(pair: Pair) -> None:
    """20,000 copies are submitted in far less time than a loop over Python objects and locks would take."""
    n = 20_000
    offsets = np.arange(n, dtype=np.uint64) % np.uint64(SIZE - 8)
    sizes = np.full(n, 8, np.uint64)
    started = time.perf_counter()
    pair.device.transfer.copy_batch(
        pair.stream, offsets + np.uint64(pair.target), offsets + np.uint64(pair.source), sizes
    )
    assert time.perf_counter() - started < 1.0
    pair.device.transfer.synchronize_stream(pair.stream)


NO_NUMPY = """
import array, ctypes, sys
from devipc.host.backend import HostBackend
device = HostBackend().open_device()
a, b = device.memory.allocate(4096), device.memory.allocate(4096)
ctypes.memset(a.ptr, 3, 4096)
stream = device.transfer.create_stream()
table = memoryview(array.array("Q", [b.ptr, a.ptr, 64, 32, 16, 8])).cast("B").cast("Q", (1, 6))
device.transfer.copy_strided(stream, table)
one = lambda value: array.array("Q", [value])
device.transfer.copy_batch(stream, one(b.ptr + 4000), one(a.ptr), one(96))
device.transfer.synchronize_stream(stream)
expected = bytearray(4096)
for row in range(8):
    expected[row * 64 : row * 64 + 16] = bytes([3]) * 16
expected[4000:] = bytes([3]) * 96
assert ctypes.string_at(b.ptr, 4096) == expected
device.close()
print(sorted({"numpy", "torch"} & set(sys.modules)))
"""


def test_numpy_is_not_needed_and_never_imported() -> None:
    done = subprocess.run([sys.executable, "-c", NO_NUMPY], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_any_buffer_of_unsigned_words_will_do(pair: Pair) -> None:
    table = array.array("Q", [pair.target])
    sources, sizes = array.array("Q", [pair.source]), array.array("Q", [10])
    pair.device.transfer.copy_batch(pair.stream, table, sources, sizes)  # type: ignore[arg-type]
    assert pair.result() == oracle([(0, 0, 10, 10, 10, 1)])
