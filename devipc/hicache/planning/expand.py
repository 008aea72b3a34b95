"""Pages times strips: runs are found, and multiplied out into the arrays that a transfer takes.

Owns the arithmetic of a plan and the choice among forms for a class of runs. Bounds were checked before: nothing here
looks at a page's or an address's worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from devipc.hicache.few import largest
from devipc.hicache.planning.strips import Choice, CostModel, Limits, Strips, StripTable

__all__ = ["Assembly", "CopyList", "PageRuns", "parts_of", "with_first"]

U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

_ONE = np.uint64(1)
_ZERO = np.uint64(0)
_NOTHING: U64 = np.empty(0, np.uint64)
_NO_RECTS: U64 = np.empty((0, 6), np.uint64)


@dataclass(frozen=True, slots=True)
class CopyList:
    """Copies in the form of :class:`devipc.interfaces.transfer.DeviceTransfer`; no order among them.

    Parameters
    ----------
    strided : numpy.ndarray
        uint64 ``(n, 6)`` for ``copy_strided``: dst, src, dst_pitch, src_pitch, width, height.
    dst, src, nbytes : numpy.ndarray
        uint64 ``(m,)`` for ``copy_batch``.
    """

    strided: U64
    dst: U64
    src: U64
    nbytes: U64

    @classmethod
    def empty(cls) -> CopyList:
        """Return a list without copies."""
        return cls(_NO_RECTS, _NOTHING, _NOTHING, _NOTHING)

    @classmethod
    def of(cls, lists: Sequence[CopyList]) -> CopyList:
        """Return the copies of all ``lists``."""
        some = [one for one in lists if len(one.strided) or len(one.nbytes)] or [cls.empty()]
        if len(some) == 1:
            return some[0]
        columns = ([getattr(one, name) for one in some] for name in ("strided", "dst", "src", "nbytes"))
        return cls(*map(np.concatenate, columns))

    @property
    def total_nbytes(self) -> int:
        """Bytes that all copies move."""
        return int((self.strided[:, 4] * self.strided[:, 5]).sum()) + int(self.nbytes.sum())

    def overhead_s(self, cost: CostModel) -> float:
        """Return what the copies cost beside their bytes."""
        entries = len(self.nbytes) * (cost.entry_s + cost.copy_s) if len(self.nbytes) else 0.0
        calls = len(self.strided) * (cost.call_s + cost.strided_s)
        return calls + int(self.strided[:, 5].sum()) * cost.row_s + entries


@dataclass(frozen=True, slots=True)
class PageRuns:
    """Runs of one class, as columns ``(runs,)`` of uint64.

    Parameters
    ----------
    page, base : U64
        First page of each run, and the address of its block or extent.
    span, index : U64 or None
        Length of the extent, and the place of the first page in it; None for blocks.
    length : U64 or None
        Pages in each run; None when all are single pages.
    """

    page: U64
    base: U64
    span: U64 | None
    index: U64 | None
    length: U64 | None
    block_nbytes: int = 0

    @classmethod
    def classify(cls, page: U64, base: U64, span: U64 | None, index: U64 | None, block_nbytes: int) -> list[PageRuns]:
        """Sort pages into up to four classes: runs or single pages, in blocks or in extents.

        A run is neighbouring on both sides: the next page, and the extent's next place or the next block.
        """
        step = np.uint64(block_nbytes)
        if span is None or index is None:
            return cls(page, base, None, None, None, block_nbytes)._runs(step, _ZERO)
        blocks = span == _ONE
        some = np.count_nonzero(blocks)
        if some == len(page):
            return cls(page, base, None, None, None, block_nbytes)._runs(step, _ZERO)
        found = []
        if some:
            found += cls(page[blocks], base[blocks], None, None, None, block_nbytes)._runs(step, _ZERO)
            rest = ~blocks
            page, base, span, index = page[rest], base[rest], span[rest], index[rest]
        return found + cls(page, base, span, index, None, block_nbytes)._runs(_ZERO, _ONE)

    def _runs(self, base_step: np.uint64, index_step: np.uint64) -> list[PageRuns]:
        if len(self.page) == 1:
            return [self]
        joined = (self.page[1:] == self.page[:-1] + _ONE) & (self.base[1:] == self.base[:-1] + base_step)
        if self.index is not None:
            joined &= self.index[1:] == self.index[:-1] + index_step
        if not np.count_nonzero(joined):
            return [self]
        starts = np.concatenate((np.zeros(1, np.int64), np.flatnonzero(~joined) + 1))
        length = np.diff(starts, append=len(self.page)).astype(np.uint64)
        single = length == _ONE
        found = [self._take(starts[~single], length[~single])]
        return [*found, self._take(starts[single], None)] if bool(single.any()) else found

    def _take(self, at: npt.NDArray[np.int64], length: U64 | None) -> PageRuns:
        span = None if self.span is None else self.span[at]
        index = None if self.index is None else self.index[at]
        return PageRuns(self.page[at], self.base[at], span, index, length, self.block_nbytes)

    def part(self, begin: int, end: int) -> PageRuns:
        """Return runs ``begin .. end - 1``."""
        at = slice(begin, end)
        span, index, length = (one if one is None else one[at] for one in (self.span, self.index, self.length))
        return PageRuns(self.page[at], self.base[at], span, index, length, self.block_nbytes)

    def cut(self, most: int) -> PageRuns:
        """Return the same pages in runs of at most ``most``."""
        if self.length is None or int(self.length.max()) <= most:
            return self
        limit = np.uint64(most)
        pieces = ((self.length + limit - _ONE) // limit).astype(np.int64)
        run = np.repeat(np.arange(len(pieces)), pieces)
        nth = (np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)).astype(np.uint64) * limit
        return self._shifted(run, nth, np.minimum(limit, self.length[run] - nth))

    def pages(self) -> PageRuns:
        """Return the same pages one by one."""
        if self.length is None:
            return self
        return self.cut(1)._take(np.arange(int(self.length.sum())), None)

    def _shifted(self, run: npt.NDArray[np.int64], pages: U64, length: U64) -> PageRuns:
        base = self.base[run] + (pages * np.uint64(self.block_nbytes) if self.span is None else _ZERO)
        span = None if self.span is None else self.span[run]
        index = None if self.index is None else self.index[run] + pages
        return PageRuns(self.page[run] + pages, base, span, index, length, self.block_nbytes)


def parts_of(classes: Sequence[PageRuns], most: int) -> list[list[PageRuns]]:
    """Return the same runs in parts of at most ``most``."""
    return [[runs.part(at, at + most)] for runs in classes for at in range(0, len(runs.page), most)]


def with_first(parts: list[list[PageRuns]], most: int) -> list[list[PageRuns]]:
    """Return the same parts, but for a first one of at most ``most`` runs: what it takes is submitted sooner."""
    begin, *more = parts
    taken, rest = list[PageRuns](), list[PageRuns]()
    for runs in begin:
        count = min(most, len(runs.page))
        most -= count
        taken += [runs.part(0, count)] if count else []
        rest += [runs.part(count, len(runs.page))] if count < len(runs.page) else []
    return [taken, *([rest] if rest else []), *more]


class Assembly:
    """Collects the copies of one list. Not thread-safe; lives for one plan.

    Parameters
    ----------
    limits, cost : Limits, CostModel
        Of the device.
    to_host : bool
        Direction: True reads the pool.
    """

    def __init__(self, limits: Limits, cost: CostModel, *, to_host: bool) -> None:
        self._limits = limits
        self._cost = cost
        self._to_host = to_host
        self._strided: list[U64] = []
        self._batches: list[tuple[U64, U64, U64]] = []

    def add(self, runs: PageRuns, strips: Strips) -> None:
        """Add the copies of ``runs`` over ``strips``, each strip in its cheapest form."""
        if runs.span is not None:
            widest = largest(runs.span) * strips.table.plane_step + strips.table.row_step
            if largest(widest) > self._limits.max_pitch_nbytes:
                strips = Strips.of(strips.table.split())
        if runs.length is None:
            if runs.span is None:
                self._add_blocks(runs, strips)
            else:
                self._add_choice(runs, strips.pages)
            return
        for wide in strips.wide:
            if wide is not None:
                most = self._limits.max_width_nbytes // int(wide.width.max())
                self._add_choice(runs.cut(max(most, 1)), strips.wide)
                break
        if strips.rest is not None:
            self._rows(runs, strips.rest)

    def _add_blocks(self, runs: PageRuns, strips: Strips) -> None:
        """Single pages in blocks, the most common: all but two columns are the same for each."""
        strided, cells = strips.pages
        if strided is not None:
            out = np.empty((len(runs.page), len(strided), 6), np.uint64)
            out[...] = strips.rows[0 if self._to_host else 1]
            out[..., 0 if self._to_host else 1] += runs.base[:, None]
            out[..., 1 if self._to_host else 0] += runs.page[:, None] * strided.page_stride
            self._strided.append(out.reshape(-1, 6))
        if cells is not None:
            self._add_batch(runs, cells)

    def _add_choice(self, runs: PageRuns, choice: Choice) -> None:
        """One copy a run and strip, one entry a run and cell; runs widen the rows."""
        strided, cells = choice
        if strided is not None:
            self._add_strided(runs, strided, tall=False)
        if cells is not None:
            self._add_batch(runs, cells)

    def _rows(self, runs: PageRuns, strips: StripTable) -> None:
        """Runs whose pages are rows of their own: as taller strips, across pages, page by page, or as a batch."""
        assert runs.length is not None
        cost, count = self._cost, strips.count.astype(np.float64)
        run_total, page_total = len(runs.page), int(runs.length.sum())
        rows = page_total * count * cost.row_s
        pitch_limit = np.uint64(self._limits.max_pitch_nbytes)
        step = np.uint64(runs.block_nbytes) if runs.span is None else strips.plane_nbytes
        fits = strips.width <= np.uint64(self._limits.max_width_nbytes)
        spans = fits & (strips.page_stride <= pitch_limit) & (step <= pitch_limit)
        forms = np.stack(
            (
                np.where(fits & strips.joins_height, run_total * cost.call_s + rows, np.inf),
                np.where(spans, run_total * count * cost.call_s + rows, np.inf),
                np.where(fits, page_total * cost.call_s + rows, np.inf),
                page_total * count * min(cost.entry_s, cost.call_s + cost.row_s),
            )
        ).argmin(axis=0)
        tallest = int(strips.count.max())
        chosen = [strips.where(forms == form) for form in range(4)]
        if chosen[0] is not None:
            self._add_strided(runs.cut(max(self._limits.max_height // tallest, 1)), chosen[0], tall=True)
        if chosen[1] is not None:
            self._add_across(runs.cut(self._limits.max_height), chosen[1].split())
        if chosen[2] is not None:
            self._add_strided(runs.pages(), chosen[2], tall=False)
        if chosen[3] is not None:
            self._add_batch(runs.pages(), chosen[3].split())

    def _places(self, runs: PageRuns, strips: StripTable) -> tuple[U64, U64]:
        """Return device and host addresses, ``(runs, strips)``."""
        device = runs.page[:, None] * strips.page_stride + strips.address
        if runs.span is None or runs.index is None:
            return device, runs.base[:, None] + strips.plane_offset
        host = runs.span[:, None] * strips.plane_offset
        host += runs.index[:, None] * strips.plane_nbytes
        host += strips.row_offset + runs.base[:, None]
        return device, host

    def _add_strided(self, runs: PageRuns, strips: StripTable, *, tall: bool) -> None:
        width, height, device_pitch = strips.width, strips.count, strips.step
        host_pitch = strips.plane_step if runs.span is None else runs.span[:, None] * strips.plane_step
        host_pitch = host_pitch + strips.row_step
        if runs.length is not None and tall:
            height = runs.length[:, None] * height
        elif runs.length is not None:
            width = runs.length[:, None] * width
            # Only where there is one row, whose pitch means nothing, can a run be wider than the pitch.
            device_pitch, host_pitch = np.maximum(device_pitch, width), np.maximum(host_pitch, width)
        self._emit(runs, strips, width, height, device_pitch, host_pitch)

    def _add_across(self, runs: PageRuns, cells: StripTable) -> None:
        assert runs.length is not None
        host_pitch = np.uint64(runs.block_nbytes) if runs.span is None else cells.plane_nbytes
        self._emit(runs, cells, cells.width, runs.length[:, None], cells.page_stride, host_pitch)

    def _emit(
        self,
        runs: PageRuns,
        strips: StripTable,
        width: U64,
        height: U64,
        device_pitch: U64,
        host_pitch: U64 | np.uint64,
    ) -> None:
        device, host = self._places(runs, strips)
        out = np.empty((*device.shape, 6), np.uint64)
        to, back = (0, 1) if self._to_host else (1, 0)
        out[..., to], out[..., back] = host, device
        out[..., 2 + to], out[..., 2 + back] = host_pitch, device_pitch
        out[..., 4], out[..., 5] = width, height
        self._strided.append(out.reshape(-1, 6))

    def _add_batch(self, runs: PageRuns, cells: StripTable) -> None:
        device, host = self._places(runs, cells)
        nbytes = cells.width if runs.length is None else runs.length[:, None] * cells.width
        if self._cost.call_s + self._cost.row_s < self._cost.entry_s:
            self._emit(runs, cells, nbytes, cells.count, nbytes, nbytes)
            return
        sizes = np.empty(device.shape, np.uint64)
        sizes[...] = nbytes
        dst, src = (host, device) if self._to_host else (device, host)
        self._batches.append((dst.reshape(-1), src.reshape(-1), sizes.reshape(-1)))

    def done(self) -> CopyList:
        """Return the list."""
        strided = self._strided or [_NO_RECTS]
        batches = self._batches or [(_NOTHING, _NOTHING, _NOTHING)]
        dst, src, nbytes = batches[0] if len(batches) == 1 else map(np.concatenate, zip(*batches, strict=True))
        return CopyList(strided[0] if len(strided) == 1 else np.concatenate(strided), dst, src, nbytes)
