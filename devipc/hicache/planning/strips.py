"""A page's pieces, joined over planes: the tables that a planner multiplies with pages.

Owns the step from a layout at known addresses to *cells* (pieces of a page that are contiguous everywhere) and
*strips* (cells at a constant distance on the device and in host memory, which one strided copy can span). Made once a
pool and layer group. It sees no page id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from devipc.hicache.layout import PoolLayout

__all__ = ["Cell", "CostModel", "Limits", "StripTable", "Strips", "cells_of", "compile_strips"]

U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

_PERIODS = 8
_NO_ROWS: U64 = np.empty((0, 6), np.uint64)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one strided copy may be, in bytes and rows.

    The defaults suit drivers that describe a pitch in 31 bits; the caller passes what the device reports.
    """

    max_pitch_nbytes: int = 2**31 - 1
    max_width_nbytes: int = 2**31 - 1
    max_height: int = 2**31 - 1


@dataclass(frozen=True, slots=True)
class CostModel:
    """What copies cost, in seconds, beside their bytes; used to choose among forms and to estimate a plan.

    The defaults were read on one H200 over PCIe 5 x16 (2026-11-29: a driver call from Python about 4 us, a row 30 to
    65 ns, an entry of a batch .5 to 1 us, 55 GB/s; 2026-11-30, lists one behind the other: the device takes 3 to 5 us
    more for each strided copy, of 32 to 64 rows, and 15 to 50 ns for each entry that several threads submit). An
    engine measures the calls, rows, entries and bytes of its own device when it begins:
    :func:`~devipc.hicache.moving.floor.measured_costs`.

    Parameters
    ----------
    call_s : float
        One strided copy.
    row_s : float
        One row of a strided copy.
    entry_s : float
        One entry of a batch; infinity where there is no batch call.
    byte_s : float
        One byte.
    copy_s, strided_s : float
        One plain and one strided copy, on the device: what it leaves before the next.
    """

    call_s: float = 4e-6
    row_s: float = 45e-9
    entry_s: float = 0.7e-6
    byte_s: float = 1 / 55e9
    copy_s: float = 30e-9
    strided_s: float = 5e-6


@dataclass(frozen=True, slots=True)
class Cell:
    """A contiguous piece of every page.

    On the device it is at ``address + page * page_stride``; in a host extent of ``E`` pages, whose planes follow each
    other, that of page ``k`` is ``E * plane_offset + k * plane_nbytes + row_offset`` bytes behind the extent's start.
    """

    address: int
    region: int
    page_stride: int
    width: int
    plane_offset: int
    plane_nbytes: int
    row_offset: int


def cells_of(layout: PoolLayout, addresses: Sequence[int], regions: Sequence[int]) -> list[tuple[int, Cell]]:
    """Return ``(layer, cell)`` for all pieces of a page, in the order of host memory.

    Parameters
    ----------
    layout : PoolLayout
        The pool.
    addresses : sequence of int
        Where each chunk is mapped.
    regions : sequence of int
        For each chunk an identity that is shared by those which one strided copy may span.
    """
    cells, plane_offset = [], 0
    for component, plane in layout.planes():
        rows, row = component.page_rows, plane.row_nbytes
        pieces, width = (1, rows * row) if plane.row_stride_nbytes == row else (rows, row)
        for index in range(pieces):
            cell = Cell(
                address=addresses[plane.chunk] + plane.offset + index * plane.row_stride_nbytes,
                region=regions[plane.chunk],
                page_stride=plane.page_stride_nbytes,
                width=width,
                plane_offset=plane_offset,
                plane_nbytes=rows * row,
                row_offset=index * row,
            )
            cells.append((plane.layer, cell))
        plane_offset += rows * row
    return cells


@dataclass(frozen=True, slots=True)
class StripTable:
    """Strips as columns of shape ``(strips,)``, uint64 unless said; the names are those of :class:`Cell`.

    ``count`` cells are joined, ``step`` bytes apart on the device and ``extent * plane_step + row_step`` in host
    memory (both the width for single cells). ``joins_width``: neighbouring pages continue each row; ``joins_height``:
    they continue the strip; ``strided``: one strided copy is cheaper than ``count`` entries of a batch.
    """

    address: U64
    page_stride: U64
    width: U64
    plane_offset: U64
    plane_nbytes: U64
    row_offset: U64
    count: U64
    step: U64
    plane_step: U64
    row_step: U64
    joins_width: Mask
    joins_height: Mask
    strided: Mask

    def __len__(self) -> int:
        return len(self.address)

    def where(self, mask: Mask) -> StripTable | None:
        """Return the strips that ``mask`` keeps; None when there is none."""
        kept = np.count_nonzero(mask)
        if kept == len(mask):
            return self
        return StripTable(*(getattr(self, name)[mask] for name in self.__slots__)) if kept else None

    def split(self) -> StripTable:
        """Return the cells of all strips, as strips of one."""
        counts = self.count.astype(np.int64)
        strip = np.repeat(np.arange(len(self)), counts)
        nth = (np.arange(len(strip)) - np.repeat(np.cumsum(counts) - counts, counts)).astype(np.uint64)
        none, width = np.zeros(len(strip), np.bool_), self.width[strip]
        return StripTable(
            address=self.address[strip] + nth * self.step[strip],
            page_stride=self.page_stride[strip],
            width=width,
            plane_offset=self.plane_offset[strip] + nth * self.plane_step[strip],
            plane_nbytes=self.plane_nbytes[strip],
            row_offset=self.row_offset[strip] + nth * self.row_step[strip],
            count=np.ones(len(strip), np.uint64),
            step=width,
            plane_step=np.zeros(len(strip), np.uint64),
            row_step=width,
            joins_width=self.joins_width[strip],
            joins_height=none,
            strided=none,
        )

    def choice(self) -> Choice:
        """Return the strips that are cheaper as strided copies, and the cells of the others."""
        return self.where(self.strided), _cells_or_none(self.where(~self.strided))


def _cells_or_none(table: StripTable | None) -> StripTable | None:
    return None if table is None else table.split()


Choice = tuple[StripTable | None, StripTable | None]


@dataclass(frozen=True, slots=True)
class Strips:
    """A table, sorted beforehand by what is done with its strips.

    Parameters
    ----------
    table : StripTable
        All strips.
    pages : tuple of (StripTable or None)
        For single pages: strided copies, and cells for a batch.
    wide : tuple of (StripTable or None)
        The same for runs, where pages continue each row.
    rest : StripTable or None
        For runs, the strips where they do not.
    rows : numpy.ndarray
        uint64 ``(strips, 6)``, the strided copies of page 0 to a block at address 0, and back to the device.
    """

    table: StripTable
    pages: Choice
    wide: Choice
    rest: StripTable | None
    rows: tuple[U64, U64]

    @classmethod
    def of(cls, table: StripTable, *, plain: bool = False) -> Strips:
        """Sort ``table``; ``plain``: whatever can be entries of a batch is, strided or not."""
        if plain:
            table = replace(table, strided=np.zeros(len(table), np.bool_))
        pages, wide = table.choice(), table.where(table.joins_width)
        return cls(
            table,
            pages,
            (None, None) if wide is None else wide.choice(),
            table.where(~table.joins_width),
            _rows(pages[0]),
        )


def _rows(strips: StripTable | None) -> tuple[U64, U64]:
    if strips is None:
        return _NO_ROWS, _NO_ROWS
    pitch = strips.plane_step + strips.row_step
    columns = (strips.plane_offset, strips.address, pitch, strips.step, strips.width, strips.count)
    to_host = np.stack(columns, axis=1)
    return to_host, to_host[:, (1, 0, 3, 2, 4, 5)]


@dataclass(slots=True)
class _Strip:
    first: Cell
    count: int = 1
    step: tuple[int, int, int] = (0, 0, 0)


def compile_strips(
    cells: Sequence[Cell], *, limits: Limits, cost: CostModel, block_nbytes: int | None = None
) -> StripTable:
    """Join ``cells`` into the fewest strips, for extents of any length or for blocks of one page.

    Parameters
    ----------
    cells : sequence of Cell
        In the order of host memory.
    limits, cost : Limits, CostModel
        What may be joined, and what is cheaper.
    block_nbytes : int or None
        For blocks, the distance between neighbouring ones; in a block the planes' distances are fixed, which joins
        more than in an extent. None makes the table for extents.
    """
    blocks = block_nbytes is not None
    if blocks:
        cells = [_in_block(cell, block_nbytes or 0) for cell in cells]
    rows = sum(cell.plane_offset == cells[0].plane_offset for cell in cells)  # 1 unless rows have gaps
    best: list[_Strip] = []
    for period in sorted({*range(1, _PERIODS + 1), rows, 2 * rows}):
        if period > len(cells):
            break
        strips = [strip for lane in range(period) for strip in _join(cells[lane::period], limits)]
        if blocks:
            strips = [_coalesced(strip, limits) for strip in strips]
        if not best or len(strips) < len(best):
            best = strips
    return _table(best, limits, cost, blocks=blocks)


def _in_block(cell: Cell, block_nbytes: int) -> Cell:
    """Fold the row's place into the plane's: an extent of one page whose next page is the next block."""
    place = cell.plane_offset + cell.row_offset
    return Cell(cell.address, cell.region, cell.page_stride, cell.width, place, block_nbytes, 0)


def _join(cells: Sequence[Cell], limits: Limits) -> list[_Strip]:
    strips: list[_Strip] = []
    previous: Cell | None = None
    for cell in cells:
        strip = strips[-1] if strips else None
        if strip is None or previous is None or not _extend(strip, previous, cell, limits):
            strips.append(_Strip(cell))
        previous = cell
    return strips


def _extend(strip: _Strip, previous: Cell, cell: Cell, limits: Limits) -> bool:
    step = (
        cell.address - previous.address,
        cell.plane_offset - previous.plane_offset,
        cell.row_offset - previous.row_offset,
    )
    same = (cell.region, cell.page_stride, cell.width, cell.plane_nbytes)
    if same != (previous.region, previous.page_stride, previous.width, previous.plane_nbytes):
        return False
    fits = cell.width <= step[0] <= limits.max_pitch_nbytes and strip.count < limits.max_height
    if not fits or step[2] < 0 or not cell.width <= step[1] + step[2] <= limits.max_pitch_nbytes:
        return False
    if strip.count > 1 and step != strip.step:
        return False
    strip.step = step
    strip.count += 1
    return True


def _coalesced(strip: _Strip, limits: Limits) -> _Strip:
    """Turn a strip without gaps on either side into one cell."""
    first, width = strip.first, strip.first.width * strip.count
    if strip.count == 1 or strip.step != (first.width, first.width, 0) or width > limits.max_width_nbytes:
        return strip
    whole = Cell(
        first.address, first.region, first.page_stride, width, first.plane_offset, first.plane_nbytes, first.row_offset
    )
    return _Strip(whole)


def _continues(strip: _Strip, *, blocks: bool) -> bool:
    """Return True when the next page's strip follows this one's at the same distance, on both sides."""
    step, plane_step, row_step = strip.step
    # In an extent only the rows of one plane keep their distance, whatever its length.
    host_step = plane_step if blocks else row_step
    fixed = row_step == 0 if blocks else plane_step == 0
    first = strip.first
    return (
        strip.count > 1
        and fixed
        and step * strip.count == first.page_stride
        and host_step * strip.count == first.plane_nbytes
    )


def _table(strips: list[_Strip], limits: Limits, cost: CostModel, *, blocks: bool) -> StripTable:
    def column(values: list[int]) -> U64:
        return np.array(values, np.uint64)

    firsts = [strip.first for strip in strips]
    steps = [strip.step if strip.count > 1 else (strip.first.width, 0, strip.first.width) for strip in strips]
    return StripTable(
        address=column([cell.address for cell in firsts]),
        page_stride=column([cell.page_stride for cell in firsts]),
        width=column([cell.width for cell in firsts]),
        plane_offset=column([cell.plane_offset for cell in firsts]),
        plane_nbytes=column([cell.plane_nbytes for cell in firsts]),
        row_offset=column([cell.row_offset for cell in firsts]),
        count=column([strip.count for strip in strips]),
        step=column([step[0] for step in steps]),
        plane_step=column([step[1] for step in steps]),
        row_step=column([step[2] for step in steps]),
        joins_width=np.array([cell.page_stride == cell.width == cell.plane_nbytes for cell in firsts], np.bool_),
        joins_height=np.array([_continues(strip, blocks=blocks) for strip in strips], np.bool_),
        strided=np.array([_prefers_strided(strip, limits, cost) for strip in strips], np.bool_),
    )


def _prefers_strided(strip: _Strip, limits: Limits, cost: CostModel) -> bool:
    fits = strip.first.width <= limits.max_width_nbytes
    return fits and cost.call_s + strip.count * cost.row_s < strip.count * cost.entry_s
