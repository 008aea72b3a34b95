"""Pieces of a page that are contiguous everywhere, and which of them lie at one distance.

Owns the step from a layout at known addresses to *cells*, and their joining into strips by distances alone: in arrays,
since a layout may have tens of thousands of cells, and several tables are made of them. It knows neither a cost nor a
page id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from devipc.errors import UsageError
from devipc.hicache.layout import PoolLayout
from devipc.types import HandleKind

__all__ = ["Cells", "Joined", "cells_of", "join"]

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_ADDRESS, _PLANE, _ROW, _STRIDE, _WIDTH, _NBYTES = range(6)
_STEPS, _ALIKE = slice(0, 3), slice(3, 7)


@dataclass(frozen=True, slots=True)
class Cells:
    """Contiguous pieces of every page, in the order of host memory.

    On the device a piece is at ``address + page * page_stride``; in a host extent of ``E`` pages, whose planes follow
    each other, that of page ``k`` is ``E * plane_offset + k * plane_nbytes + row_offset`` bytes behind the extent's
    start.

    Parameters
    ----------
    columns : numpy.ndarray
        int64 ``(7, n)``: address, plane_offset, row_offset, then page_stride, width, plane_nbytes, and a number for the
        region. Addresses are those of 64 bits in two's complement.
    """

    columns: I64

    def __len__(self) -> int:
        return len(self.columns[0])

    def _column(self, which: int) -> I64:
        found: I64 = self.columns[which]
        return found

    @property
    def address(self) -> I64:
        """Of page 0."""
        return self._column(_ADDRESS)

    @property
    def plane_offset(self) -> I64:
        """Bytes of a page that planes before this one take."""
        return self._column(_PLANE)

    @property
    def row_offset(self) -> I64:
        """Bytes of the plane before this piece."""
        return self._column(_ROW)

    @property
    def page_stride(self) -> I64:
        """Bytes from a page to the next."""
        return self._column(_STRIDE)

    @property
    def width(self) -> I64:
        """Bytes of the piece."""
        return self._column(_WIDTH)

    @property
    def plane_nbytes(self) -> I64:
        """Bytes of a page in this plane."""
        return self._column(_NBYTES)

    def at(self, which: I64 | Mask) -> Cells:
        """Return the cells with these numbers, or that a mask keeps."""
        return Cells(self.columns[:, which])

    def in_blocks(self, block_nbytes: int) -> Cells:
        """Fold the row's place into the plane's: an extent of one page whose next page is the next block."""
        columns = self.columns.copy()
        columns[_PLANE] += columns[_ROW]
        columns[_ROW] = 0
        columns[_NBYTES] = block_nbytes
        return Cells(columns)

    def row_count(self) -> int:
        """Return how many pieces the first plane has: 1 unless rows have gaps."""
        return int(np.count_nonzero(self.plane_offset == self.plane_offset[0]))


def cells_of(layout: PoolLayout, addresses: Sequence[int], regions: Sequence[int]) -> tuple[I64, Cells]:
    """Return the layer of each piece of a page, and the pieces.

    Parameters
    ----------
    layout : PoolLayout
        The pool.
    addresses : sequence of int
        Where each chunk is mapped.
    regions : sequence of int
        For each chunk an identity that is shared by those which one strided copy may span.

    Raises
    ------
    UsageError
        For addresses or regions that do not match the layout's chunks, or a region that joins a classic allocation.
    """
    _check_chunks(layout, addresses, regions)
    numbers = {region: number for number, region in enumerate(dict.fromkeys(regions))}
    of_chunk = [numbers[region] for region in regions]
    planes, first, plane_offset = [], [], 0
    for component, plane in layout.planes():
        rows, row = component.page_rows, plane.row_nbytes
        pieces, width = (1, rows * row) if plane.row_stride_nbytes == row else (rows, row)
        first.append(addresses[plane.chunk] + plane.offset)
        planes.append(
            (
                *(plane.layer, pieces, plane.row_stride_nbytes, plane_offset),
                *(plane.page_stride_nbytes, width, rows * row, of_chunk[plane.chunk]),
            )
        )
        plane_offset += rows * row
    layer, count, stride, offset, *alike = np.array(planes, np.int64).T
    which = np.repeat(np.arange(len(planes)), count)
    nth = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
    address = np.array(first, np.uint64).view(np.int64)[which] + nth * stride[which]
    rest = np.stack(alike)[:, which]
    return layer[which], Cells(np.stack((address, offset[which], nth * rest[1], *rest)))


def _check_chunks(layout: PoolLayout, addresses: Sequence[int], regions: Sequence[int]) -> None:
    if not len(addresses) == len(regions) == len(layout.chunks):
        raise UsageError(
            f"{len(addresses)} addresses and {len(regions)} regions for {len(layout.chunks)} chunks",
            code="chunks",
            remedy="pass one of each a chunk, in chunk order",
        )
    used = Counter(regions)
    if any(
        used[region] > 1 and chunk.kind is HandleKind.LEGACY
        for chunk, region in zip(layout.chunks, regions, strict=True)
    ):
        raise UsageError(
            "a classic allocation shares a region with another chunk",
            code="regions",
            remedy="give every chunk with a legacy handle a region of its own: no copy may span it",
        )


@dataclass(frozen=True, slots=True)
class Joined:
    """Strips of cells, lane by lane.

    Parameters
    ----------
    first : numpy.ndarray
        int64 ``(strips,)``: the first cell of each.
    count : numpy.ndarray
        int64 ``(strips,)``: cells that are joined.
    steps : numpy.ndarray
        int64 ``(3, strips)``: distance between two of them on the device, between their planes, and between their
        places in these; of a single cell without meaning.
    """

    first: I64
    count: I64
    steps: I64

    def __len__(self) -> int:
        return len(self.first)


def join(cells: Cells, period: int, *, max_pitch_nbytes: int, max_height: int) -> Joined:
    """Join cells at one distance, each with the one ``period`` behind it: from the first on, as many as there are.

    Cells ``n``, ``n + period``, ``n + 2 * period`` and so on are a lane, for each ``n`` below ``period``.

    Parameters
    ----------
    cells : Cells
        At least ``period``.
    max_pitch_nbytes, max_height : int
        Longest distance, and most cells of a strip.
    """
    count = len(cells)
    if period == 1:
        order, columns = None, cells.columns
    else:
        order = np.arange(-(-count // period) * period).reshape(-1, period).T.reshape(-1)
        order = order[order < count]
        columns = cells.columns[:, order]
    step = columns[:, 1:] - columns[:, :-1]
    width, host = columns[_WIDTH, :-1], step[_PLANE] + step[_ROW]
    fits = (step[_ADDRESS] >= width) & (step[_ADDRESS] <= max_pitch_nbytes) & (step[_ROW] >= 0)
    fits &= (host >= width) & (host <= max_pitch_nbytes) & (np.bitwise_or.reduce(step[_ALIKE], axis=0) == 0)
    if order is not None:
        fits &= order[1:] >= period  # else another lane begins
    used = _used(fits, step[_STEPS], max_height)
    starts = np.flatnonzero(np.concatenate((np.ones(1, np.bool_), ~used)))
    lengths = np.diff(starts, append=count)
    steps = step[_STEPS, np.minimum(starts, max(count - 2, 0))] if count > 1 else np.zeros((3, 1), np.int64)
    return Joined(starts if order is None else order[starts], lengths, steps)


def _used(fits: Mask, step: I64, most: int) -> Mask:
    """Return which pairs of neighbours are in one strip, of those that ``fits`` allows; a strip has one step.

    Pairs of one step that follow each other are a run. A strip up to the end of one run has its last cell, so that the
    next run, where it follows at once, loses its first pair; a strip that begins there loses none. So what becomes of a
    run may depend on the one before. Then it is the same, or the other way round, since the last that did not.
    """
    heads = np.ones(len(fits), np.bool_)
    heads[1:] = ~(fits[1:] & fits[:-1]) | (np.bitwise_or.reduce(step[:, 1:] ^ step[:, :-1], axis=0) != 0)
    starts = np.flatnonzero(heads)
    lengths = np.diff(starts, append=len(fits))
    some = fits[starts]
    starts, lengths = starts[some], lengths[some]
    if not len(starts):
        return fits
    follows = np.zeros(len(starts), np.bool_)
    follows[1:] = starts[1:] == starts[:-1] + lengths[:-1]
    lost = np.zeros(len(starts), np.bool_)
    if follows.any():
        # Whether a run's first pair is lost, when that of the run before was not, and when it was.
        kept_before, lost_before = follows.copy(), follows.copy()
        kept_before[1:] &= lengths[:-1] % most != 0
        lost_before[1:] &= (lengths[:-1] - 1) % most != 0
        turns = np.cumsum(kept_before & ~lost_before)
        known = np.maximum.accumulate(np.where(kept_before == lost_before, np.arange(len(starts)), 0))
        lost = kept_before[known] ^ ((turns - turns[known]) % 2 == 1)
    used = fits.copy()
    used[starts[lost]] = False
    if int(lengths.max()) >= most:
        begin = np.repeat(starts + lost, lengths)
        pairs = np.flatnonzero(fits)
        used[pairs[(pairs - begin) % most == most - 1]] = False
    return used
