"""A page's pieces, joined over planes: the tables that a planner multiplies with pages.

Owns the step from *cells* (pieces of a page that are contiguous everywhere) to *strips* (cells at a constant distance
on the device and in host memory, which one strided copy can span), and what is done with each. Made once a pool and
layer group. It sees no page id.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from devipc.hicache.planning.cells import Cells, Joined, join

__all__ = ["CostModel", "Limits", "StripTable", "Strips", "compile_strips"]

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
class StripTable:
    """Strips as columns of shape ``(strips,)``, uint64 unless said; the first names are those of :class:`Cells`.

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


def compile_strips(cells: Cells, *, limits: Limits, cost: CostModel, block_nbytes: int | None = None) -> StripTable:
    """Join ``cells`` into the fewest strips, for extents of any length or for blocks of one page.

    Parameters
    ----------
    cells : Cells
        At least one.
    limits, cost : Limits, CostModel
        What may be joined, and what is cheaper.
    block_nbytes : int or None
        For blocks, the distance between neighbouring ones; in a block the planes' distances are fixed, which joins
        more than in an extent. None makes the table for extents.
    """
    if block_nbytes is not None:
        cells = cells.in_blocks(block_nbytes)
    rows = cells.row_count()
    best: Joined | None = None
    for period in sorted({*range(1, _PERIODS + 1), rows, 2 * rows}):
        if period > len(cells) or (best is not None and period >= len(best)):  # there are as many strips at least
            break
        joined = join(cells, period, max_pitch_nbytes=limits.max_pitch_nbytes, max_height=limits.max_height)
        if best is None or len(joined) < len(best):
            best = joined
    assert best is not None
    return _table(cells, best, limits, cost, blocks=block_nbytes is not None)


def _table(cells: Cells, joined: Joined, limits: Limits, cost: CostModel, *, blocks: bool) -> StripTable:
    first, count = cells.at(joined.first), joined.count
    width, (step, plane_step, row_step) = first.width, joined.steps
    if blocks:  # what has no gaps on either side is one cell
        whole = (step == width) & (plane_step == width) & (row_step == 0) & (width * count <= limits.max_width_nbytes)
        width, count = np.where(whole, width * count, width), np.where(whole, 1, count)
    single = count == 1
    step, plane_step, row_step = (
        np.where(single, one, other) for one, other in ((width, step), (0, plane_step), (width, row_step))
    )
    # The next page's strip follows at the same distance, on both sides: in an extent only the rows of one plane keep
    # theirs, whatever its length.
    host_step, moving = (plane_step, row_step) if blocks else (row_step, plane_step)
    continues = (
        ~single & (moving == 0) & (step * count == first.page_stride) & (host_step * count == first.plane_nbytes)
    )
    calls_s, entries_s = cost.call_s + count * cost.row_s, count * cost.entry_s
    return StripTable(
        address=_unsigned(first.address),
        page_stride=_unsigned(first.page_stride),
        width=_unsigned(width),
        plane_offset=_unsigned(first.plane_offset),
        plane_nbytes=_unsigned(first.plane_nbytes),
        row_offset=_unsigned(first.row_offset),
        count=_unsigned(count),
        step=_unsigned(step),
        plane_step=_unsigned(plane_step),
        row_step=_unsigned(row_step),
        joins_width=(first.page_stride == width) & (width == first.plane_nbytes),
        joins_height=continues,
        strided=(width <= limits.max_width_nbytes) & (calls_s < entries_s),
    )


def _unsigned(column: npt.NDArray[np.int64]) -> U64:
    return np.ascontiguousarray(column).view(np.uint64)
