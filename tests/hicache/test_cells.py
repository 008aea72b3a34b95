"""Pieces of a page are joined as one by one they would be, and soon, however many a layout has."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devipc.hicache.layout import MAX_CELLS, MAX_CHUNKS, MAX_PLANES, Component, Plane, PoolChunk, PoolLayout, Rule
from devipc.hicache.planning.cells import Cells, join
from devipc.types import HandleKind
from tests.hicache.test_planner import best_s, planner_for

# Address, plane_offset, row_offset, page_stride, width, plane_nbytes, region: as the columns of cells.
Piece = tuple[int, int, int, int, int, int, int]


@st.composite
def pieces(draw: st.DrawFn) -> list[Piece]:
    """Few distances, so that some follow each other and others do not."""
    found: list[Piece] = []
    address, plane, row = draw(st.sampled_from([0, 2**40, 2**63 - 50, 0xFF00_0000_0020_0000])), 0, 0
    for _ in range(draw(st.integers(1, 30))):
        alike = (64, draw(st.sampled_from([4, 4, 4, 8])), 16, draw(st.sampled_from([0, 0, 0, 1])))
        found.append((address, plane, row, *alike))
        address += draw(st.sampled_from([4, 8, 8, 12]))
        if draw(st.integers(0, 3)):
            row += draw(st.sampled_from([4, 4, 8]))
        else:
            plane, row = plane + draw(st.sampled_from([0, 4, 8, 16])), 0
    return found


def joined_one_by_one(lane: list[Piece], pitch: int, height: int) -> list[tuple[Piece, int, tuple[int, ...]]]:
    """The definition: each piece goes to the strip before it as long as that has one distance, which is allowed."""
    strips: list[tuple[Piece, int, tuple[int, ...]]] = [(lane[0], 1, ())]
    for last, this in pairwise(lane):
        first, count, step = strips[-1]
        by = tuple(b - a for a, b in zip(last[:3], this[:3], strict=True))
        fits = last[3:] == this[3:] and by[2] >= 0 and all(this[4] <= one <= pitch for one in (by[0], by[1] + by[2]))
        if fits and count < height and by == (step or by):
            strips[-1] = first, count + 1, by
        else:
            strips.append((this, 1, ()))
    return strips


@pytest.mark.once
@settings(max_examples=300)
@given(
    pieces(), st.integers(1, 6), st.sampled_from([5, 8, 9, 2**31 - 1, 2**64]), st.sampled_from([1, 2, 3, 5, 2**31 - 1])
)
def test_strips_are_those_that_pieces_make_one_by_one(made: list[Piece], period: int, pitch: int, height: int) -> None:
    period = min(period, len(made))
    rest = np.array([one[1:] for one in made], np.int64).T
    cells = Cells(np.concatenate((np.array([[one[0] for one in made]], np.uint64).view(np.int64), rest)))
    joined = join(cells, period, max_pitch_nbytes=pitch, max_height=height)
    found = [
        (made[first], count, tuple(step) if count > 1 else ())
        for first, count, step in zip(
            joined.first.tolist(), joined.count.tolist(), joined.steps.T.tolist(), strict=True
        )
    ]
    lanes = (made[lane::period] for lane in range(period))
    assert found == [strip for lane in lanes for strip in joined_one_by_one(lane, pitch, height)]


def with_gaps(planes: int, rows: int, *, uneven: bool) -> PoolLayout:
    """Rows with gaps, each a piece by itself; of ``uneven`` planes few are alike, and none at one distance."""
    made, end = [], 0
    for at in range(planes):
        row = 512 + at % 7 * 8 * uneven
        stride = row + 128 + at % 3 * 64 * uneven
        made.append(Plane(at, 0, end, row, stride, rows * stride))
        end += 4 * rows * stride + at % 11 * 64 * uneven
    component = Component("kv", Rule.FULL_ATTENTION, rows, rows, tuple(made))
    return PoolLayout(4, (PoolChunk(end, HandleKind.LEGACY),), (component,))


@pytest.mark.timing
@pytest.mark.parametrize("rows", [16, 512])
@pytest.mark.parametrize("uneven", [False, True])
def test_a_planner_for_as_many_pieces_as_there_may_be_is_made_soon(rows: int, *, uneven: bool) -> None:
    """A daemon makes it when a client registers a pool, whatever that has thought of."""
    layout = with_gaps(MAX_CELLS // rows, rows, uneven=uneven)
    assert best_s(lambda: planner_for(layout), 2) <= 2.5


@pytest.mark.timing
def test_a_planner_for_as_many_allocations_as_there_may_be_is_made_soon() -> None:
    planes = tuple(Plane(at, at, 0, 2048, 2048, 16 * 2048) for at in range(MAX_PLANES))
    component = Component("kv", Rule.FULL_ATTENTION, 16, 16, planes)
    layout = PoolLayout(4, (PoolChunk(4 * 16 * 2048, HandleKind.LEGACY),) * MAX_CHUNKS, (component,))
    assert best_s(lambda: planner_for(layout), 2) <= 0.3
