"""Random pools in a flat memory, and a byte-by-byte oracle of what a plan must do.

An address is an index into one array of bytes, so that a wrong copy is an index error or wrong bytes, never a crash.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from devipc.hicache.layout import Component, Plane, PoolChunk, PoolLayout, Rule
from devipc.hicache.planning.forms import Entries, Submitting
from devipc.hicache.planning.planner import CopyPlan, Direction, HostPages
from devipc.types import HandleKind

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Pool:
    layout: PoolLayout
    addresses: tuple[int, ...]
    regions: tuple[int, ...]
    end: int


@dataclass
class _Chunks:
    """Grows chunks: regions of planes are appended one after the other."""

    sizes: list[int] = field(default_factory=lambda: [0])

    def place(self, nbytes: int, gap: int, *, fresh: bool) -> tuple[int, int]:
        if fresh and self.sizes[-1]:
            self.sizes.append(0)
        offset = self.sizes[-1]
        self.sizes[-1] += nbytes + gap
        return len(self.sizes) - 1, offset


@st.composite
def components(draw: st.DrawFn, name: str, page_tokens: int, page_count: int, chunks: _Chunks) -> Component:
    """One component in one of four arrangements, each with its own gaps."""
    rows = draw(st.sampled_from([page_tokens, 1]))
    row = draw(st.integers(1, 6))
    layers, parts = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    arrangement = draw(st.sampled_from(["apart", "rows_woven", "pages_woven", "all_woven"]))
    fresh, gap = draw(st.booleans()), draw(st.integers(0, 3))
    row_gap, page_gap = draw(st.sampled_from([0, 0, 2])), draw(st.sampled_from([0, 0, 5]))
    planes = []
    if arrangement == "all_woven":  # page first: all planes of a page side by side
        piece = rows * (row + row_gap) + page_gap
        stride = layers * parts * piece
        chunk, offset = chunks.place(page_count * stride, gap, fresh=fresh)
        for index in range(layers * parts):
            planes.append(Plane(index // parts, chunk, offset + index * piece, row, row + row_gap, stride))
    for layer in range(layers if arrangement != "all_woven" else 0):
        if arrangement == "apart":
            stride = rows * (row + row_gap) + page_gap
            for _ in range(parts):
                chunk, offset = chunks.place(page_count * stride, gap, fresh=fresh)
                planes.append(Plane(layer, chunk, offset, row, row + row_gap, stride))
            continue
        row_stride = row + row_gap if arrangement == "pages_woven" else parts * (row + row_gap)
        shift = rows * row_stride if arrangement == "pages_woven" else row + row_gap
        stride = rows * parts * (row + row_gap)
        chunk, offset = chunks.place(page_count * stride, gap, fresh=fresh)
        planes += [Plane(layer, chunk, offset + part * shift, row, row_stride, stride) for part in range(parts)]
    rule = draw(st.sampled_from(list(Rule)))
    return Component(name, rule, page_tokens, rows, tuple(planes))


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    page_tokens, page_count = draw(st.integers(1, 4)), draw(st.integers(2, 9))
    chunks = _Chunks()
    parts = tuple(
        draw(components(f"c{index}", page_tokens, page_count, chunks)) for index in range(draw(st.integers(1, 2)))
    )
    joined = draw(st.booleans())
    kinds = st.sampled_from([HandleKind.VMM_FD] if joined else [HandleKind.LEGACY, HandleKind.VMM_FD])
    layout = PoolLayout(
        page_count, tuple(PoolChunk(size, draw(kinds)) for size in chunks.sizes), parts, draw(st.integers(0, 1))
    )
    order = draw(st.permutations(range(len(chunks.sizes)))) if draw(st.booleans()) else list(range(len(chunks.sizes)))
    addresses, at, gap = [0] * len(order), 16, draw(st.integers(0, 4))
    for index in order:
        addresses[index] = at
        at += chunks.sizes[index] + gap
    regions = (0,) * len(order) if joined else tuple(range(len(order)))
    return Pool(layout, tuple(addresses), regions, at)


@dataclass(frozen=True)
class Places:
    """Pages and their host places, inside ``arena``."""

    pages: npt.NDArray[np.int64]
    host: HostPages
    arena: tuple[int, int]
    block_nbytes: int


@st.composite
def places(draw: st.DrawFn, pool: Pool) -> Places:
    """Distinct pages, mostly in runs, in blocks, extents or both; the arena lies behind the pool."""
    layout, orderly = pool.layout, draw(st.sampled_from([True, True, False]))
    ids = list(range(layout.first_page, layout.page_count))
    if not orderly:
        ids = draw(st.permutations(ids))
    ids = ids[draw(st.integers(0, 2)) : draw(st.integers(1, len(ids)))]
    if len(ids) > 3 and draw(st.booleans()):
        del ids[len(ids) // 2]
    page, gap = layout.page_nbytes, draw(st.sampled_from([0, 3]))
    start, at, left = pool.end + 8, 0, len(ids)
    base, span, index = [], [], []
    while left:
        length = draw(st.integers(1, 6))
        taken = list(range(min(left, length)))
        if not orderly:
            taken = sorted(draw(st.sets(st.integers(0, length - 1), min_size=1, max_size=min(left, length))))
        base += [start + at] * len(taken)
        span += [length] * len(taken)
        index += taken
        at += length * page + gap
        left -= len(taken)
    pages = np.array(ids, np.int64)
    nbytes, block = max(at, page), page + gap
    if draw(st.booleans()):
        slots = list(range(len(ids))) if orderly else draw(st.permutations(range(len(ids))))
        addresses = np.array([start + slot * block for slot in slots], np.int64)
        return Places(pages, HostPages.blocks(addresses), (start, max(len(ids), 1) * block), block)
    extents = HostPages.extents(np.array(base, np.int64), np.array(span, np.int64), np.array(index, np.int64))
    return Places(pages, extents, (start, nbytes), block)


def pairs(pool: Pool, where: Places) -> list[tuple[int, int]]:
    """The definition: ``(device address, host address)`` of every byte of every page."""
    found = []
    for n, page in enumerate(where.pages.tolist()):
        span = 1 if where.host.span is None else int(where.host.span[n])
        index = 0 if where.host.index is None else int(where.host.index[n])
        before = 0
        for component, plane in pool.layout.planes():
            piece = component.page_rows * plane.row_nbytes
            for row in range(component.page_rows):
                device = pool.addresses[plane.chunk] + plane.offset
                device += page * plane.page_stride_nbytes + row * plane.row_stride_nbytes
                host = int(where.host.base[n]) + span * before + index * piece + row * plane.row_nbytes
                found += [(device + byte, host + byte) for byte in range(plane.row_nbytes)]
            before += piece
    return found


def execute(plan: CopyPlan, memory: Bytes) -> npt.NDArray[np.int64]:
    """Do all copies of ``plan`` in ``memory``; return how often each byte was written."""
    written = np.zeros(len(memory), np.int64)
    source = memory.copy()  # a list has no order: no copy may read what another wrote

    def copy(dst: int, src: int, nbytes: int) -> None:
        assert nbytes > 0
        assert max(dst, src) + nbytes <= len(memory)
        memory[dst : dst + nbytes] = source[src : src + nbytes]
        written[dst : dst + nbytes] += 1

    for group in plan.groups:
        assert group.strided.flags.c_contiguous
        for dst, src, dst_pitch, src_pitch, width, height in group.strided.tolist():
            assert height > 0
            assert height == 1 or width <= min(dst_pitch, src_pitch)
            for row in range(height):
                copy(dst + row * dst_pitch, src + row * src_pitch, width)
        for dst, src, nbytes in zip(group.dst.tolist(), group.src.tolist(), group.nbytes.tolist(), strict=True):
            copy(dst, src, nbytes)
    return written


def by_several(threads: int, long_s: float, short_s: float = 0.0) -> Submitting:
    """Entries take so long both ways."""
    return Submitting(threads, Entries(long_s, short_s), Entries(long_s, short_s))


def direction_of(*, to_host: bool) -> Direction:
    return Direction.BACKUP if to_host else Direction.RESTORE
