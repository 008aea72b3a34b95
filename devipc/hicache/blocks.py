"""Blocks of host memory: which are free, and who holds which. Numbers only, no memory is touched.

Owns the cutting of an arena into slabs and of slabs into blocks of one size, and the rule that a block has one holder
at a time. A slab belongs to one size while any of its blocks is held, so that pools of different page sizes share an
arena without fragments between them. It knows no page, no key and no address. Not thread-safe: the tier's lock is.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from devipc.errors import ResourceExhausted, UsageError

__all__ = ["ALIGN_NBYTES", "BlockSpace", "Extent", "Slab"]

ALIGN_NBYTES = 64
"""Blocks start at multiples of this: a cache line."""


@dataclass(slots=True, eq=False)
class Slab:
    """A part of the arena whose blocks have one size; 0 while it belongs to nobody.

    Parameters
    ----------
    offset, nbytes : int
        Bytes from the start of the arena, and its length.
    """

    offset: int
    nbytes: int
    block_nbytes: int = 0
    free: list[tuple[int, int]] = field(default_factory=list)  # (first block, blocks), sorted, never adjacent
    held: set[Extent] = field(default_factory=set)
    busy: int = 0  # kept by the tier: extents that must not be evicted now
    last_use: int = 0  # kept by the tier


@dataclass(slots=True, eq=False)
class Extent:
    """Neighbouring blocks with one holder. Its numbers are its own copy; it is identified by itself, not by them.

    Parameters
    ----------
    slab : Slab
        Where it lies.
    first, span : int
        First block in the slab, and how many.
    offset : int
        Bytes from the start of the arena.
    """

    slab: Slab
    first: int
    span: int
    offset: int


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
        self._empty = dict.fromkeys(self.slabs)
        self._sizes = Counter(slab.nbytes for slab in self.slabs)
        self._empty_sizes = self._sizes.copy()
        self._partial: dict[int, dict[Slab, None]] = {}
        self._free: dict[int, int] = {}

    def capacity(self, block_nbytes: int) -> int:
        """Return how many blocks of this size there are when nobody else has any."""
        return sum(count * (nbytes // block_nbytes) for nbytes, count in self._sizes.items())

    def free_blocks(self, block_nbytes: int) -> int:
        """Return how many blocks of this size can be allocated without anything being freed."""
        empty = sum(count * (nbytes // block_nbytes) for nbytes, count in self._empty_sizes.items())
        return self._free.get(block_nbytes, 0) + empty

    def allocate(self, block_nbytes: int, runs: Iterable[int]) -> list[Extent]:
        """Take blocks for runs of the given lengths: all or nothing. A run may come in several extents.

        Raises
        ------
        ResourceExhausted
            When there are not enough.
        """
        lengths = list(runs)
        if sum(lengths) > self.free_blocks(block_nbytes):
            raise ResourceExhausted(
                f"{sum(lengths)} blocks of {block_nbytes} bytes asked, {self.free_blocks(block_nbytes)} are free",
                code="no_room",
                remedy="evict first, or give the host tier more memory",
            )
        found = []
        for length in lengths:
            while length:
                extent = self._take(block_nbytes, length)
                found.append(extent)
                length -= extent.span
        return found

    def _take(self, block_nbytes: int, most: int) -> Extent:
        partial = self._partial.setdefault(block_nbytes, {})
        if not partial:
            self._assign(block_nbytes, partial)
        slab = next(iter(partial))
        at = 0
        if slab.free[0][1] < most:
            at = next((n for n, (_, blocks) in enumerate(slab.free) if blocks >= most), len(slab.free) - 1)
        first, blocks = slab.free[at]
        span = min(most, blocks)
        if span == blocks:
            del slab.free[at]
        else:
            slab.free[at] = (first + span, blocks - span)
        if not slab.free:
            del partial[slab]
        self._free[block_nbytes] -= span
        extent = Extent(slab, first, span, slab.offset + first * block_nbytes)
        slab.held.add(extent)
        return extent

    def _assign(self, block_nbytes: int, partial: dict[Slab, None]) -> None:
        slab = next(slab for slab in self._empty if slab.nbytes >= block_nbytes)
        del self._empty[slab]
        self._empty_sizes[slab.nbytes] -= 1
        blocks = slab.nbytes // block_nbytes
        slab.block_nbytes, slab.free = block_nbytes, [(0, blocks)]
        self._free[block_nbytes] = self._free.get(block_nbytes, 0) + blocks
        partial[slab] = None

    def free(self, extent: Extent) -> None:
        """Give an extent back.

        Raises
        ------
        UsageError
            With code ``double_free`` when it is not held: nothing is changed.
        """
        slab = extent.slab
        if extent not in slab.held:
            raise UsageError(
                f"blocks at {extent.offset} are freed a second time",
                code="double_free",
                remedy="a defect: two owners of one extent; report it with the host tier's audit",
            )
        slab.held.remove(extent)
        self._free[slab.block_nbytes] += extent.span
        if not slab.held:
            self._unassign(slab)
            return
        insort(slab.free, (extent.first, extent.span))
        at = bisect_left(slab.free, (extent.first, extent.span))
        for left in (at, at - 1):  # with what follows, then with what precedes
            if 0 <= left < len(slab.free) - 1:
                (first, blocks), (after, more) = slab.free[left : left + 2]
                if first + blocks == after:
                    slab.free[left : left + 2] = [(first, blocks + more)]
        self._partial[slab.block_nbytes][slab] = None

    def _unassign(self, slab: Slab) -> None:
        self._free[slab.block_nbytes] -= slab.nbytes // slab.block_nbytes
        self._partial[slab.block_nbytes].pop(slab, None)
        slab.block_nbytes, slab.free = 0, []
        self._empty[slab] = None
        self._empty_sizes[slab.nbytes] += 1

    def extents(self) -> Iterator[Extent]:
        """Yield every extent that is held."""
        for slab in self.slabs:
            yield from slab.held

    def audit(self) -> None:
        """Compare counters with lists.

        Raises
        ------
        UsageError
            With code ``audit``, when they differ or two holders have one block.
        """
        free: dict[int, int] = {}
        for slab in self.slabs:
            total = slab.nbytes // slab.block_nbytes if slab.block_nbytes else 0
            pieces = sorted([*slab.free, *((extent.first, extent.span) for extent in slab.held)])
            end = 0
            for first, blocks in pieces:
                _expect(first == end and blocks > 0, f"slab at {slab.offset}: blocks {first} follow {end}")
                end = first + blocks
            _expect(end == total, f"slab at {slab.offset}: {end} of {total} blocks are accounted for")
            _expect(bool(slab.held) == bool(slab.block_nbytes), f"slab at {slab.offset} belongs to nobody's size")
            _expect((slab in self._empty) == (not slab.held), f"slab at {slab.offset}: in the wrong list")
            free[slab.block_nbytes] = free.get(slab.block_nbytes, 0) + sum(blocks for _, blocks in slab.free)
        for size, blocks in self._free.items():
            _expect(
                free.get(size, 0) == blocks, f"{blocks} free blocks of {size} bytes counted, {free.get(size)} found"
            )


def _expect(holds: bool, message: str) -> None:  # noqa: FBT001 - an assertion
    if not holds:
        raise UsageError(message, code="audit", remedy="a defect: report it")
