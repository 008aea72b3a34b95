"""From pages to copies: the cheapest list of strided and plain copies between a pool and host memory.

Owns the choice of the form and the refusal of pages or host places that must not reach a copy. It is pure: it sees
addresses as numbers, issues nothing, and makes no Python object per page.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from devipc.errors import UsageError
from devipc.hicache.few import FEW
from devipc.hicache.layout import PoolLayout
from devipc.hicache.planning.bounds import check_pages, check_places
from devipc.hicache.planning.cells import cells_of
from devipc.hicache.planning.expand import Assembly, CopyList, PageRuns, parts_of, with_first
from devipc.hicache.planning.forms import Part, Submitting, choose_parts
from devipc.hicache.planning.grouping import Load
from devipc.hicache.planning.strips import CostModel, Limits, Strips, compile_strips

__all__ = ["LAYER_GROUPS", "CopyPlan", "Direction", "HostPages", "Planner", "layer_groups", "page_runs", "run_lengths"]

U64 = npt.NDArray[np.uint64]
AnyIntegers = npt.NDArray[np.integer]

LAYER_GROUPS = (1, 2, 4, 8)
"""Layers in the first groups of a restore; the last group takes the rest. Each group has a fence of its own."""

_ONE = np.uint64(1)
_BY_ONE = Submitting()
_BESIDE = 0.5
"""What is left of the driver for one direction while the other submits to it too: an entry takes both twice as long."""


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
    """What to submit, in order: one list unless layer groups were asked for.

    Parameters
    ----------
    groups : tuple of CopyList
        A fence may be signalled behind each.
    ends : tuple of int
        How many layer groups are complete behind each.
    page_count, nbytes : int
        What is moved.
    cost : CostModel
        What strided copies were chosen by, and what is estimated by.
    """

    groups: tuple[CopyList, ...]
    ends: tuple[int, ...]
    page_count: int
    nbytes: int
    cost: CostModel

    @property
    def estimate_s(self) -> float:
        """What all copies cost by the model, in seconds."""
        return self.nbytes * self.cost.byte_s + sum(copies.overhead_s(self.cost) for copies in self.groups)


def layer_groups(layers: Sequence[int], sizes: Sequence[int] = LAYER_GROUPS) -> tuple[tuple[int, ...], ...]:
    """Cut ``layers`` into groups of ``sizes`` and the rest; never an empty group."""
    if min(sizes, default=1) < 1:
        raise UsageError(f"layer groups of {tuple(sizes)}", code="groups", remedy="pass sizes of at least one layer")
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
    if len(ids) < 2:
        return np.zeros(len(ids), np.int64), np.ones(len(ids), np.int64)
    if len(ids) <= FEW:
        named = ids.tolist()
        starts = [0, *(at for at, (last, this) in enumerate(pairwise(named), 1) if this != last + 1)]
        return np.array(starts), np.diff([*starts, len(named)])
    breaks = np.flatnonzero(ids[1:] != ids[:-1] + _ONE)
    edges = np.concatenate(((0,), breaks + 1, (len(ids),)))
    return edges[:-1], edges[1:] - edges[:-1]


def run_lengths(pages: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """Return the length of each run of neighbouring pages, in the order given; None when each is one by itself."""
    if len(pages) < 2 or (len(pages) > FEW and not (pages[1:] - pages[:-1] == 1).any()):
        return None
    lengths = page_runs(pages)[1]
    return None if len(lengths) == len(pages) else lengths


def _unsigned(what: str, values: AnyIntegers) -> U64:
    """Return ``values`` as contiguous uint64 of one dimension; negative numbers become ones beyond every bound."""
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise UsageError(
            f"{what} are {values.dtype} of shape {values.shape}", code="shape", remedy="pass integers (n,)"
        )
    if values.dtype == np.int64 and values.flags.c_contiguous:
        return values.view(np.uint64)
    wide = np.ascontiguousarray(values, np.uint64 if values.dtype.kind == "u" else np.int64)
    return wide.view(np.uint64)


@dataclass(frozen=True, slots=True)
class _Tables:
    blocks: Strips
    extents: Strips


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
    submitting : Submitting
        How long batches of plain copies are submitted; with several threads they may be sooner over than strided ones.

    Raises
    ------
    UsageError
        For addresses or regions that do not match the layout's chunks, or a region that joins a classic allocation.
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
        submitting: Submitting = _BY_ONE,
    ) -> None:
        regions = range(len(layout.chunks)) if regions is None else regions
        if 0 < block_nbytes < layout.page_nbytes:
            raise UsageError(f"blocks of {block_nbytes} bytes hold no page", code="block", remedy="pass 0 or more")
        self.layout = layout
        self.page_nbytes = layout.page_nbytes
        self.block_nbytes = block_nbytes or layout.page_nbytes
        self.cost = cost or CostModel()
        self._limits = limits or Limits()
        self._arena = arena
        self.groups = layer_groups(layout.layers, groups)
        layers, self._cells = cells_of(layout, addresses, regions)
        ends = np.array([group[-1] for group in self.groups])
        self._group_of = np.searchsorted(ends, layers)  # of each cell; layers ascend from group to group
        self._ranges: dict[tuple[int, int], tuple[_Tables, ...]] = {}  # strided where that is cheaper, and plain
        self._chosen: dict[tuple[Direction, int, int, bool, float, int], tuple[Part, ...]] = {}
        self._batches = submitting.threads > 1
        mean_nbytes = self.page_nbytes / len(self._cells)
        self._batch_cost = {
            direction: replace(self.cost, entry_s=entries.each_s(mean_nbytes))
            for direction, entries in (
                (Direction.RESTORE, submitting.to_device),
                (Direction.BACKUP, submitting.to_host),
            )
        }
        self._choose(Direction.RESTORE, 1, 1, by_layer_group=True, alone=True)  # makes the tables that most plans need

    def _tables(self, begin: int, end: int, *, plain: bool) -> _Tables:
        """Return the tables of layer groups ``begin .. end - 1``, made once."""
        found = self._ranges.get((begin, end))
        if found is None:
            cells = self._cells.at((self._group_of >= begin) & (self._group_of < end))
            blocks = compile_strips(cells, limits=self._limits, cost=self.cost, block_nbytes=self.block_nbytes)
            extents = compile_strips(cells, limits=self._limits, cost=self.cost)
            both = tuple(
                _Tables(Strips.of(blocks, plain=one), Strips.of(extents, plain=one))
                for one in (False, True)[: 1 + self._batches]
            )
            found = self._ranges[begin, end] = both
        return found[plain]

    def _choose(
        self,
        direction: Direction,
        page_count: int,
        run_count: int,
        *,
        by_layer_group: bool,
        alone: bool,
        lists: int = 1,
    ) -> tuple[Part, ...]:
        """Return how about so many pages in so many runs are copied, and which layer groups are submitted as one."""
        pages, length = (number.bit_length() - 1 for number in (page_count, page_count // run_count))
        batches = (1.0 if alone else _BESIDE) if self._batches else 0.0
        key = (direction, pages, length, by_layer_group, batches, 2 ** (lists - 1).bit_length())
        found = self._chosen.get(key)
        if found is None:

            def load(begin: int, end: int, *, plain: bool) -> Load:
                cost = self._batch_cost[direction] if plain else self.cost
                return Load.of(self._tables(begin, end, plain=plain).blocks, cost, 2**-length)

            found = self._chosen[key] = choose_parts(
                2**pages,
                [len(group) for group in self.groups],
                partial(load, plain=False),
                partial(load, plain=True),
                by_layer_group=by_layer_group,
                batches=batches,
                lists=key[-1],
            )
        return found

    def _list(self, part: Part, classes: Sequence[PageRuns], direction: Direction) -> CopyList:
        """Return the copies of these runs: of each class a share in batches, the others as is cheapest for one."""
        if not 0 < part.plain < 1 or self._all_plain(part):
            return self._copies(part, classes, direction, plain=part.plain > 0)
        counts = [round(part.plain * len(runs.page)) for runs in classes]
        strided = [runs.part(count, len(runs.page)) for runs, count in zip(classes, counts, strict=True)]
        plain = [runs.part(0, count) for runs, count in zip(classes, counts, strict=True)]
        return CopyList.of(
            [
                self._copies(part, strided, direction, plain=False),
                self._copies(part, plain, direction, plain=True),
            ]
        )

    def _all_plain(self, part: Part) -> bool:
        return not self._tables(part.begin, part.end, plain=False).blocks.table.strided.any()

    def _copies(self, part: Part, classes: Sequence[PageRuns], direction: Direction, *, plain: bool) -> CopyList:
        tables = self._tables(part.begin, part.end, plain=plain)
        cost = self._batch_cost[direction] if plain else self.cost
        assembly = Assembly(self._limits, cost, to_host=direction is Direction.BACKUP)
        for runs in classes:
            if len(runs.page):
                assembly.add(runs, tables.blocks if runs.span is None else tables.extents)
        return assembly.done()

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
            One list for each layer group, or for several where a list of their own would cost too much.

        Raises
        ------
        BoundsError
            Before anything is planned: a page outside the pool or reserved, a host place outside the arena, host
            places that overlap, or one page restored twice.
        UsageError
            For arrays of another shape or type.
        """
        made = list(self.copies(direction, pages, host, by_layer_group=by_layer_group))
        lists, ends = zip(*made, strict=True)
        return CopyPlan(lists, ends, len(pages), len(pages) * self.page_nbytes, self.cost)

    def copies(
        self,
        direction: Direction,
        pages: AnyIntegers,
        host: HostPages,
        *,
        by_layer_group: bool = False,
        alone: bool = True,
        first_runs: int = 0,
        part_runs: int = 0,
        apart_nbytes: int = 0,
    ) -> Iterator[tuple[CopyList, int]]:
        """Yield the lists of :meth:`plan` one by one, so that each can be submitted before the next is made.

        Parameters and errors as there; errors come before the first list.

        Parameters
        ----------
        alone : bool
            Whether the other direction has nothing to copy meanwhile; else half as many pages go in batches.
        first_runs, part_runs : int
            Most runs of pages in the very first list of many, and in any; 0: no limit.
        apart_nbytes : int
            From how many bytes on a quarter of few runs is a first list, too; 0: never.

        Yields
        ------
        copies : CopyList
            What to submit.
        end : int
            How many layer groups are complete behind it; 0 within one.
        """
        ids = _unsigned("pages", pages)
        if len(ids) != len(host.base):
            raise UsageError(f"{len(ids)} pages and {len(host.base)} host places", code="shape", remedy="pass pairs")
        count = len(self.groups)
        if not len(ids):
            yield CopyList.empty(), count
            return
        restore, layout = direction is Direction.RESTORE, self.layout
        check_pages(ids, first_page=layout.first_page, page_count=layout.page_count, distinct=restore)
        check_places(host.base, host.span, host.index, page_nbytes=self.page_nbytes, arena=self._arena, shared=restore)
        classes = PageRuns.classify(ids, host.base, host.span, host.index, self.block_nbytes)
        run_count = sum(len(runs.page) for runs in classes)
        parts = parts_of(classes, part_runs) if 0 < part_runs < run_count else [classes]
        if run_count < 2 * first_runs:  # few, which may be large
            first_runs = run_count // 4 if 0 < apart_nbytes <= len(ids) * self.page_nbytes else 0
        first = with_first(parts, first_runs) if first_runs else parts
        for one in self._choose(
            direction, len(ids), run_count, by_layer_group=by_layer_group, alone=alone, lists=len(parts)
        ):
            for number, some in enumerate(first, 1):
                yield self._list(one, some, direction), one.end if number == len(first) else 0
            first = parts
