"""From pages to copies: the cheapest list of strided and plain copies between a pool and host memory.

Owns the choice of the form and the refusal of pages or host places that must not reach a copy. It is pure: it sees
addresses as numbers, issues nothing, and makes no Python object per page.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from devipc.errors import BoundsError, UsageError
from devipc.hicache.expand import Assembly, CopyList, PageRuns
from devipc.hicache.layout import PoolLayout
from devipc.hicache.strips import Cell, CostModel, Limits, StripTable, cells_of, compile_strips

__all__ = ["LAYER_GROUPS", "CopyPlan", "Direction", "HostPages", "Planner", "layer_groups", "page_runs"]

U64 = npt.NDArray[np.uint64]
AnyIntegers = npt.NDArray[np.integer]

LAYER_GROUPS = (1, 2, 4, 8)
"""Layers in the first groups of a restore; the last group takes the rest. Each group has a fence of its own."""

_ONE = np.uint64(1)


class Direction(enum.StrEnum):
    """Which way pages move."""

    BACKUP = "backup"
    RESTORE = "restore"


@dataclass(frozen=True, slots=True)
class HostPages:
    """Where pages lie in host memory, one entry a page.

    A *block* holds one page, all planes one after the other. An *extent* holds a run of pages plane by plane: all its
    pages' bytes of plane 0, then of plane 1, and so on; a page is a strided view of it.

    Parameters
    ----------
    base : numpy.ndarray
        uint64 ``(n,)``: address of the page's block or extent.
    span, index : numpy.ndarray or None
        uint64 ``(n,)``: pages in the extent, and which of them this is; None when all are blocks.
    """

    base: U64
    span: U64 | None = None
    index: U64 | None = None

    @classmethod
    def blocks(cls, addresses: AnyIntegers) -> HostPages:
        """Describe one block a page."""
        return cls(_unsigned("host addresses", addresses))

    @classmethod
    def extents(cls, addresses: AnyIntegers, span: AnyIntegers, index: AnyIntegers) -> HostPages:
        """Describe pages in extents; a ``span`` of 1 is a block. All three of shape ``(n,)``."""
        columns = (
            _unsigned("host addresses", addresses),
            _unsigned("extent lengths", span),
            _unsigned("indices in extents", index),
        )
        if len({len(column) for column in columns}) != 1:
            raise UsageError("host places of unequal length", code="shape", remedy="pass one entry a page in each")
        return cls(*columns)

    @classmethod
    def one_extent(cls, address: int, page_count: int) -> HostPages:
        """Describe ``page_count`` pages that fill one extent in order."""
        count = np.full(page_count, page_count, np.uint64)
        return cls(np.full(page_count, address, np.uint64), count, np.arange(page_count, dtype=np.uint64))


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """What to submit, in order: one list a layer group (a single one unless groups were asked for).

    Parameters
    ----------
    groups : tuple of CopyList
        A fence may be signalled behind each.
    page_count, nbytes : int
        What is moved.
    estimate_s : float
        Sum of the cost model over all copies.
    """

    groups: tuple[CopyList, ...]
    page_count: int
    nbytes: int
    estimate_s: float


def layer_groups(layers: Sequence[int], sizes: Sequence[int] = LAYER_GROUPS) -> tuple[tuple[int, ...], ...]:
    """Cut ``layers`` into groups of ``sizes`` and the rest; never an empty group."""
    groups, at = [], 0
    for size in (*sizes, max(len(layers), 1)):
        if layers[at : at + size]:
            groups.append(tuple(layers[at : at + size]))
        at += size
    return tuple(groups)


def page_runs(pages: AnyIntegers) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return start index and length of each run of neighbouring pages, in the order given.

    A backup may store each run as one host extent.
    """
    ids = _unsigned("pages", pages)
    if not len(ids):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    breaks = np.flatnonzero(ids[1:] != ids[:-1] + _ONE)
    starts = np.concatenate((np.zeros(1, np.int64), breaks + 1))
    return starts, np.diff(starts, append=len(ids))


def _unsigned(what: str, values: AnyIntegers) -> U64:
    """Return ``values`` as contiguous uint64 of one dimension; a negative number or another type is refused."""
    if values.dtype == np.uint64 and values.ndim == 1:
        return np.ascontiguousarray(values)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise UsageError(
            f"{what} are {values.dtype} of shape {values.shape}", code="shape", remedy="pass integers (n,)"
        )
    if values.dtype.kind == "i" and len(values) and int(values.min()) < 0:
        raise BoundsError(f"{what} contain {int(values.min())}", code="negative", remedy="pass numbers from 0 on")
    return values.astype(np.uint64)


@dataclass(frozen=True, slots=True)
class _Tables:
    blocks: StripTable
    extents: StripTable


class Planner:
    """Plans for one pool that is mapped at known addresses. Immutable once made; any thread may plan.

    Parameters
    ----------
    layout : PoolLayout
        The pool's geometry.
    addresses : sequence of int
        Device address of each chunk's first shared byte, in chunk order.
    arena : tuple of (int, int)
        Address and length in bytes of the host memory that pages may be copied to and from.
    block_nbytes : int
        Distance between neighbouring blocks of one page in the arena; at least the page's bytes. 0 takes those.
    regions : sequence of int or None
        For each chunk an identity; one strided copy may span chunks of one region (mapped side by side, of a kind that
        the driver lets a copy span). None: no copy spans chunks.
    limits, cost : Limits, CostModel
        Of the device.
    groups : sequence of int
        Sizes of the first layer groups.

    Raises
    ------
    UsageError
        For addresses or regions that do not match the layout's chunks.
    """

    def __init__(
        self,
        layout: PoolLayout,
        addresses: Sequence[int],
        *,
        arena: tuple[int, int],
        block_nbytes: int = 0,
        regions: Sequence[int] | None = None,
        limits: Limits | None = None,
        cost: CostModel | None = None,
        groups: Sequence[int] = LAYER_GROUPS,
    ) -> None:
        regions = range(len(layout.chunks)) if regions is None else regions
        if not len(addresses) == len(regions) == len(layout.chunks):
            raise UsageError(
                f"{len(addresses)} addresses and {len(regions)} regions for {len(layout.chunks)} chunks",
                code="chunks",
                remedy="pass one of each a chunk, in chunk order",
            )
        if 0 < block_nbytes < layout.page_nbytes:
            raise UsageError(f"blocks of {block_nbytes} bytes hold no page", code="block", remedy="pass 0 or more")
        self.layout = layout
        self.page_nbytes = layout.page_nbytes
        self.block_nbytes = block_nbytes or layout.page_nbytes
        self.cost = cost or CostModel()
        self._limits = limits or Limits()
        self._arena = arena
        self.groups = layer_groups(layout.layers, groups)
        cells = cells_of(layout, addresses, regions)
        self._whole = self._tables([cell for _, cell in cells])
        self._by_group = tuple(self._tables([c for layer, c in cells if layer in group]) for group in self.groups)

    def _tables(self, cells: list[Cell]) -> _Tables:
        return _Tables(
            compile_strips(cells, limits=self._limits, cost=self.cost, block_nbytes=self.block_nbytes),
            compile_strips(cells, limits=self._limits, cost=self.cost),
        )

    def plan(
        self, direction: Direction, pages: AnyIntegers, host: HostPages, *, by_layer_group: bool = False
    ) -> CopyPlan:
        """Return the copies that move ``pages``.

        Parameters
        ----------
        direction : Direction
            BACKUP reads the pool, RESTORE writes it.
        pages : numpy.ndarray
            Integer page ids, ``(n,)``; copied from before the call returns.
        host : HostPages
            One place a page.
        by_layer_group : bool
            One list for each of ``groups`` instead of one for all.

        Raises
        ------
        BoundsError
            Before anything is planned: a page outside the pool or reserved, a host place outside the arena, host
            places that overlap, or one page restored twice.
        UsageError
            For arrays of another shape or type.
        """
        ids = _unsigned("pages", pages)
        if len(ids) != len(host.base):
            raise UsageError(f"{len(ids)} pages and {len(host.base)} host places", code="shape", remedy="pass pairs")
        if not len(ids):
            return CopyPlan(tuple(CopyList.empty() for _ in (self.groups if by_layer_group else (0,))), 0, 0, 0.0)
        self._check_pages(direction, ids)
        self._check_host(direction, host)
        classes = PageRuns.classify(ids, host.base, host.span, host.index, self.block_nbytes)
        lists = []
        for tables in self._by_group if by_layer_group else (self._whole,):
            assembly = Assembly(self._limits, self.cost, to_host=direction is Direction.BACKUP)
            for runs in classes:
                assembly.add(runs, tables.blocks if runs.span is None else tables.extents)
            lists.append(assembly.done())
        nbytes = len(ids) * self.page_nbytes
        estimate_s = nbytes * self.cost.byte_s + sum(copies.overhead_s(self.cost) for copies in lists)
        return CopyPlan(tuple(lists), len(ids), nbytes, estimate_s)

    def _check_pages(self, direction: Direction, ids: U64) -> None:
        ordered = np.sort(ids)
        low, high = int(ordered[0]), int(ordered[-1])
        if low < self.layout.first_page or high >= self.layout.page_count:
            raise BoundsError(
                f"pages {low} .. {high}, the pool moves {self.layout.first_page} .. {self.layout.page_count - 1}",
                code="page",
                remedy="pass page ids, not token slots; reserved pages are never moved",
            )
        if direction is Direction.RESTORE and bool((ordered[1:] == ordered[:-1]).any()):
            raise BoundsError(
                "a page is the destination of two restores", code="duplicate", remedy="pass every destination once"
            )

    def _check_host(self, direction: Direction, host: HostPages) -> None:
        address, nbytes = self._arena
        base, page = host.base, np.uint64(self.page_nbytes)
        if host.span is None or host.index is None:
            slots = np.sort(base)
            bases, ends = slots, slots + page
            low, high, bad = int(slots[0]), int(slots[-1]) + self.page_nbytes, False
        else:
            longest = nbytes // self.page_nbytes
            bad = not longest or int(host.span.max()) > longest or bool((host.index >= host.span).any())
            low, high = int(base.min()), int(base.max())
            if not bad and address <= low and high <= address + nbytes:
                high = int((base + host.span * page).max())
                # A page's own number inside its extent: distinct for distinct pages of extents that do not overlap.
                order = np.argsort(base + host.index, kind="stable")
                bases, slots = base[order], (base + host.index)[order]
                ends = bases + host.span[order] * page
        if bad or low < address or high > address + nbytes:
            raise BoundsError(
                f"host places from {low:#x} on leave the {nbytes} bytes of host memory",
                code="host_bounds",
                remedy="pass addresses inside the arena, and indices below the extent's length",
            )
        same = (bases[1:] == bases[:-1]) & (ends[1:] == ends[:-1])
        twice = slots[1:] == slots[:-1]
        wrong = (~same & (bases[1:] < ends[:-1])) | (same & twice if direction is Direction.BACKUP else False)
        if bool(wrong.any()):
            raise BoundsError(
                "host places overlap", code="overlap", remedy="give every page of an operation a place of its own"
            )
