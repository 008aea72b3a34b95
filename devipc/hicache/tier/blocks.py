"""Blocks of host memory: which are free, and which are held together. Numbers only, no memory is touched.

Owns the cutting of an arena into slabs and of slabs into blocks of one size, and the rule that a block has one holder
at a time. A slab belongs to one size while any of its blocks is held, so that pools of different page sizes share an
arena without fragments between them. It knows no page, no key and no address. Not thread-safe: the tier's lock is.

Every block of a slab that belongs to a size has a number, its *slot*; what is known of blocks is kept in columns by
slot, so that an operation over thousands of blocks makes no object for any of them. Neighbouring blocks that are held
together are an *extent*, which is named by its first slot, its *head*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from devipc.errors import ResourceExhausted, UsageError
from devipc.hicache.few import FEW, smallest, total
from devipc.hicache.tier.blockruns import fit, slots_of

__all__ = ["ALIGN_NBYTES", "BlockSpace", "Slab", "Slots"]

ALIGN_NBYTES = 64
"""Blocks start at multiples of this: a cache line."""

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(slots=True, eq=False)
class Slab:
    """A part of the arena whose blocks have one size; 0 while it belongs to nobody.

    Parameters
    ----------
    offset, nbytes : int
        Bytes from the start of the arena, and its length.
    block_nbytes : int
        Size of its blocks.
    base, last_nbytes : int
        Slot of its first block, and the size of blocks that it was numbered for; kept when it belongs to nobody, since
        it will mostly have the same size again.
    """

    offset: int
    nbytes: int
    block_nbytes: int = 0
    base: int = 0
    last_nbytes: int = 0

    @property
    def blocks(self) -> int:
        """How many blocks it has."""
        return self.nbytes // self.block_nbytes if self.block_nbytes else 0


class Slots:
    """What is known of each block and extent, as columns by slot; those of an extent are valid at its head only.

    Attributes
    ----------
    count : int
        Slots so far; columns may be longer. A slot between two slabs is never used: no extent spans slabs.
    offset, slab, size : numpy.ndarray
        int64: bytes from the start of the arena, number of the slab, bytes of a block.
    free : numpy.ndarray
        bool: in a slab of a size, and nobody's.
    head : numpy.ndarray
        int64: first slot of the extent that holds the block.
    span : numpy.ndarray
        int64, of an extent: its blocks; 0 where no extent begins.
    holds, filling, live, used, space : numpy.ndarray
        Of an extent, kept by the tier: holders, whether it is being filled, pages that can be found, when it was used
        last, and the number of its namespace.
    visible, name, page_nbytes : numpy.ndarray
        Of a page, kept by the tier: whether it can be found, as what, and how many bytes of its block it has.
    """

    def __init__(self) -> None:
        self.count = 0
        self.offset, self.slab, self.size, self.head, self.span = (np.zeros(0, np.int64) for _ in range(5))
        self.holds, self.live, self.used, self.space, self.page_nbytes = (np.zeros(0, np.int64) for _ in range(5))
        self.free, self.filling, self.visible = (np.zeros(0, np.bool_) for _ in range(3))
        self.name: npt.NDArray[np.object_] = np.zeros(0, np.object_)

    def grow(self, count: int) -> int:
        """Add ``count`` slots; return the first."""
        first, self.count = self.count, self.count + count
        more = max(self.count - len(self.offset), 0)
        if more:
            more = max(more, len(self.offset) // 2)
            for column, values in vars(self).items():
                if column != "count":
                    setattr(self, column, np.concatenate((values, np.zeros(more, values.dtype))))
        return first

    def nbytes_of(self, heads: I64) -> int:
        """Return how many bytes extents have together."""
        return int((self.span[heads] * self.size[heads]).sum())

    def heads(self) -> I64:
        """Return all extents that are held."""
        return np.flatnonzero(self.span[: self.count])


class BlockSpace:
    """All blocks of one arena.

    Parameters
    ----------
    chunks : sequence of (int, int)
        Offset and length of each separately registered part of the arena: no block straddles two, and the last block
        of one never touches the first of the next, so that no copy over neighbours does either.
    slab_nbytes : int
        Size of a slab; the last one of a chunk may be smaller.
    """

    def __init__(self, chunks: Sequence[tuple[int, int]], *, slab_nbytes: int) -> None:
        if slab_nbytes < ALIGN_NBYTES or slab_nbytes % ALIGN_NBYTES:
            raise UsageError(f"slabs of {slab_nbytes} bytes", remedy=f"use a multiple of {ALIGN_NBYTES}")
        ends = [offset + nbytes - ALIGN_NBYTES for offset, nbytes in chunks[:-1]] + [sum(chunks[-1])]
        self.slabs = [
            Slab(start, min(slab_nbytes, end - start))
            for (offset, _), end in zip(chunks, ends, strict=True)
            for start in range(offset, end, slab_nbytes)
        ]
        self.slots = Slots()
        self._held = np.zeros(len(self.slabs), np.int64)  # blocks of each slab
        self._empty = dict.fromkeys(range(len(self.slabs)))
        self._sizes = Counter(slab.nbytes for slab in self.slabs)
        self._empty_sizes = self._sizes.copy()
        self._free: dict[int, int] = {}
        self._low = 0  # no slot before it is free
        self._capacities: dict[int, int] = {}  # that were asked for
        self._unused: dict[int, list[int]] = {}  # by blocks: first slots of ranges that no slab has

    def capacity(self, block_nbytes: int) -> int:
        """Return how many blocks of this size there are when nobody else has any."""
        found = self._capacities.get(block_nbytes)
        if found is None:
            found = sum(count * (nbytes // block_nbytes) for nbytes, count in self._sizes.items())
            self._capacities[block_nbytes] = found
        return found

    def free_blocks(self, block_nbytes: int) -> int:
        """Return how many blocks of this size can be allocated without anything being freed."""
        empty = sum(count * (nbytes // block_nbytes) for nbytes, count in self._empty_sizes.items())
        return self._free.get(block_nbytes, 0) + empty

    def lacks(self, block_nbytes: int, count: int) -> int:
        """Return how many of so many blocks have to be freed first."""
        return count - self.free_blocks(block_nbytes) if count > self._free.get(block_nbytes, 0) else 0

    def sizes(self) -> list[int]:
        """Return the sizes to which slabs belong."""
        return [size for size in self._free if size]

    def allocate(self, block_nbytes: int, runs: Sequence[int] | I64 | int) -> tuple[I64, I64]:
        """Take blocks for runs of the given lengths, or for so many single pages: all or nothing.

        A run may come in several extents.

        Returns
        -------
        heads, slots : numpy.ndarray
            int64: the extents, in the order of the runs, and all of their blocks; the same where each has one.

        Raises
        ------
        ResourceExhausted
            When there are not enough.
        """
        lengths = None if isinstance(runs, int) else np.asarray(runs, np.int64)
        needed = runs if isinstance(runs, int) else total(np.asarray(runs))
        if not needed:
            none = np.zeros(0, np.int64)
            return none, none
        if self.lacks(block_nbytes, needed) > 0:
            raise ResourceExhausted(
                f"{needed} blocks of {block_nbytes} bytes asked, {self.free_blocks(block_nbytes)} are free",
                code="no_room",
                remedy="evict first, or give the host tier more memory",
            )
        assigned = []
        while self._free.get(block_nbytes, 0) < needed:
            assigned.append(self._assign(block_nbytes))
        columns = self.slots
        heads, spans = self._choose(block_nbytes, lengths, needed)
        slots = heads if spans is None else slots_of(heads, spans)
        columns.free[slots] = False
        columns.head[slots] = heads if spans is None or slots is heads else np.repeat(heads, spans)
        columns.span[heads] = 1 if spans is None else spans
        self._free[block_nbytes] -= needed
        self._count(slots, 1)
        for number in assigned:
            if not self._held[number]:  # a short one, made up for by a longer one behind it
                self._unassign(number)
        return heads, slots

    def _choose(self, block_nbytes: int, lengths: I64 | None, needed: int) -> tuple[I64, I64 | None]:
        """Return heads and spans of extents among the free blocks, of which there are enough; None: spans of one."""
        columns = self.slots
        if self._low < columns.count:
            self._low += int(columns.free[self._low : columns.count].argmax())
        if lengths is not None and needed == len(lengths):
            lengths = None
        if len(self._free) == 1 and (lengths is None or len(lengths) == 1):
            following = columns.free[self._low : self._low + needed]
            if len(following) == needed and following.all():  # the first ones lie side by side
                at = np.arange(self._low, self._low + needed)
                return (at, None) if lengths is None else (at[:1], lengths)
        free = np.flatnonzero(columns.free[self._low : columns.count]) + self._low
        if len(self._free) > 1:
            free = free[columns.size[free] == block_nbytes]
        return (free[:needed], None) if lengths is None else fit(free, lengths)

    def _count(self, slots: I64, each: int) -> list[int]:
        """Count blocks as held (1) or not (-1) at their slabs; return the slabs of which nothing is held any more."""
        if len(slots) > FEW:
            found = np.bincount(self.slots.slab[slots], minlength=len(self.slabs))
            if each > 0:
                self._held += found
                return []
            self._held -= found
            return np.flatnonzero((found > 0) & (self._held == 0)).tolist()
        numbers = self.slots.slab[slots].tolist()
        for number in numbers:
            self._held[number] += each
        return [number for number in sorted(set(numbers)) if not self._held[number]]

    def _assign(self, block_nbytes: int) -> int:
        """Give an empty slab to a size; return its number."""
        number = next(number for number in self._empty if self.slabs[number].nbytes >= block_nbytes)
        slab, columns = self.slabs[number], self.slots
        del self._empty[number]
        self._empty_sizes[slab.nbytes] -= 1
        slab.block_nbytes = block_nbytes
        blocks = slab.blocks
        if slab.last_nbytes != block_nbytes:
            self._number(number)
        columns.free[slab.base : slab.base + blocks] = True
        self._low = min(self._low, slab.base)
        self._free[block_nbytes] = self._free.get(block_nbytes, 0) + blocks
        return number

    def _number(self, number: int) -> None:
        """Give the blocks of a slab slots."""
        slab, columns = self.slabs[number], self.slots
        if slab.last_nbytes:
            self._unused.setdefault(slab.nbytes // slab.last_nbytes, []).append(slab.base)
        size, blocks = slab.block_nbytes, slab.blocks
        unused = self._unused.get(blocks)
        slab.base, slab.last_nbytes = unused.pop() if unused else columns.grow(blocks + 1), size
        own = slice(slab.base, slab.base + blocks)
        columns.offset[own] = np.arange(slab.offset, slab.offset + blocks * size, size)
        columns.slab[own], columns.size[own] = number, size

    def free(self, heads: I64) -> None:
        """Give extents back.

        Raises
        ------
        UsageError
            With code ``double_free`` when one is not held, or named twice: nothing is changed.
        """
        columns = self.slots
        spans = columns.span[heads]
        if self._twice(heads, spans):
            raise UsageError(
                f"blocks at {columns.offset[heads].tolist()[:4]} are freed a second time",
                code="double_free",
                remedy="a defect: two owners of one extent; report it with the host tier's audit",
            )
        slots = slots_of(heads, spans)
        columns.free[slots] = True
        self._low = min(self._low, smallest(slots, self._low))
        columns.span[heads] = 0
        columns.name[slots] = None
        for size in self._free:
            self._free[size] += len(slots) if len(self._free) == 1 else int((columns.size[slots] == size).sum())
        for number in self._count(slots, -1):
            self._unassign(number)

    def _twice(self, heads: I64, spans: I64) -> bool:
        """Return True when an extent is not held, or named twice."""
        if len(heads) <= FEW:
            return 0 in spans.tolist() or len(set(heads.tolist())) < len(heads)
        columns, numbers = self.slots, np.arange(len(heads))
        columns.head[heads] = numbers
        again = bool((columns.head[heads] != numbers).any())
        columns.head[heads] = heads
        return again or not spans.all()

    def _unassign(self, number: int) -> None:
        slab, columns = self.slabs[number], self.slots
        left = self._free[slab.block_nbytes] - slab.blocks
        self._free[slab.block_nbytes] = left
        if not left and not self._belongs(slab.block_nbytes, but=number):
            del self._free[slab.block_nbytes]
        columns.free[slab.base : slab.base + slab.blocks] = False
        slab.block_nbytes = 0
        self._empty[number] = None
        self._empty_sizes[slab.nbytes] += 1

    def _belongs(self, block_nbytes: int, *, but: int) -> bool:
        """Return True when another slab than number ``but`` belongs to a size."""
        return any(slab.block_nbytes == block_nbytes for number, slab in enumerate(self.slabs) if number != but)

    def audit(self) -> None:
        """Compare counters with columns.

        Raises
        ------
        UsageError
            With code ``audit``, when they differ or two holders have one block.
        """
        columns, free = self.slots, Counter[int]()
        heads = columns.heads()
        slots = slots_of(heads, columns.span[heads])
        _expect(len(np.unique(slots)) == len(slots), "two extents have one block")
        _expect(bool((columns.head[slots] == np.repeat(heads, columns.span[heads])).all()), "blocks of another extent")
        taken = np.zeros(columns.count, np.int64)
        taken[slots] = 1
        known = 0
        for number, slab in enumerate(self.slabs):
            own = slice(slab.base, slab.base + slab.blocks)
            held = int(taken[own].sum())
            known += held
            message = f"slab at {slab.offset}"
            _expect(bool((taken[own] + columns.free[own] == 1).all()), f"{message}: blocks neither free nor held")
            _expect(held == self._held[number], f"{message}: {held} blocks are held, {self._held[number]} counted")
            _expect(bool(held) == bool(slab.block_nbytes), f"{message} belongs to nobody's size")
            _expect((number in self._empty) == (not held), f"{message}: in the wrong list")
            free[slab.block_nbytes] += slab.blocks - held
        _expect(known == len(slots), "extents outside of slabs")
        _expect(int(columns.free[: columns.count].sum()) == sum(free.values()), "free blocks outside of slabs")
        _expect(not columns.free[: self._low].any(), f"a free block before slot {self._low}")
        for size, blocks in self._free.items():
            _expect(free[size] == blocks, f"{blocks} free blocks of {size} bytes counted, {free[size]} found")


def _expect(holds: bool, message: str) -> None:  # noqa: FBT001 - an assertion
    if not holds:
        raise UsageError(message, code="audit", remedy="a defect: report it")
