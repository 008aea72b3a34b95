"""Blocks: one holder each, whatever is allocated and freed in whatever order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devipc.errors import ResourceExhausted, UsageError
from devipc.hicache.tier.blocks import ALIGN_NBYTES, BlockSpace

K = 1024


class Extent(NamedTuple):
    head: int
    span: int
    offset: int
    size: int


def take(space: BlockSpace, size: int, runs: Sequence[int]) -> list[Extent]:
    heads, slots = space.allocate(size, len(runs) if set(runs) == {1} else runs)
    spans, offsets = space.slots.span[heads], space.slots.offset[heads]
    assert slots.tolist() == [head + at for head, span in zip(heads, spans, strict=True) for at in range(span)]
    rows = zip(heads.tolist(), spans.tolist(), offsets.tolist(), strict=True)
    return [Extent(head, span, offset, size) for head, span, offset in rows]


def give_back(space: BlockSpace, *extents: Extent) -> None:
    space.free(np.array([extent.head for extent in extents], np.int64))


def bytes_of(extent: Extent) -> range:
    return range(extent.offset, extent.offset + extent.span * extent.size)


def check_apart(extents: list[Extent]) -> None:
    ordered = sorted(map(bytes_of, extents), key=lambda place: place.start)
    for left, right in pairwise(ordered):
        assert left.stop <= right.start


def test_blocks_straddle_no_chunk_and_do_not_touch_the_next_one() -> None:
    space = BlockSpace([(0, 8 * K), (8 * K, 8 * K)], slab_nbytes=8 * K)
    assert space.capacity(K) == 7 + 8
    found = take(space, K, [15])
    assert sum(extent.span for extent in found) == 15
    ends = sorted((place.start, place.stop) for place in map(bytes_of, found))
    assert ends == [(0, 7 * K), (8 * K, 16 * K)]
    assert space.free_blocks(K) == 0


def test_all_or_nothing() -> None:
    space = BlockSpace([(0, 8 * K)], slab_nbytes=8 * K)
    take(space, K, [5])
    with pytest.raises(ResourceExhausted) as caught:
        take(space, K, [2, 2])
    assert caught.value.code == "no_room"
    assert space.free_blocks(K) == 3
    space.audit()


@pytest.mark.parametrize("runs", [0, []])
def test_nothing_is_had_of_a_size_that_has_no_slab_and_of_a_full_space(runs: int | list[int]) -> None:
    space = BlockSpace([(0, 8 * K)], slab_nbytes=8 * K)
    for full in (False, True):
        if full:
            take(space, 2 * K, [4])
        heads, slots = space.allocate(K, runs)
        assert heads.tolist() == slots.tolist() == []
        space.audit()
    assert space.sizes() == [2 * K]


def test_freeing_twice_is_refused_and_changes_nothing() -> None:
    space = BlockSpace([(0, 8 * K)], slab_nbytes=4 * K)
    first, second = take(space, K, [1, 1])
    give_back(space, first)
    with pytest.raises(UsageError) as caught:
        give_back(space, first)
    assert caught.value.code == "double_free"
    (again,) = take(space, K, [1])
    assert again.offset == first.offset
    with pytest.raises(UsageError):  # both at once
        give_back(space, second, second)
    space.audit()
    give_back(space, second)
    give_back(space, again)
    space.audit()
    assert space.free_blocks(K) == 8


def test_a_slab_changes_its_size_when_it_is_empty() -> None:
    space = BlockSpace([(0, 8 * K)], slab_nbytes=4 * K)
    small = take(space, K, [1] * 8)
    assert space.free_blocks(3 * K) == 0
    for extent in small[:4]:
        give_back(space, extent)
    assert space.free_blocks(3 * K) == 1
    (big,) = take(space, 3 * K, [1])
    check_apart([*small[4:], big])
    space.audit()


def test_whole_runs_come_before_pieces() -> None:
    space = BlockSpace([(0, 12 * K)], slab_nbytes=12 * K)
    held = take(space, K, [1] * 12)
    give_back(space, held[0], *held[2:5], *held[6:8])
    found = take(space, K, [1, 3, 2])
    assert [(extent.offset // K, extent.span) for extent in found] == [(0, 1), (2, 3), (6, 2)]
    give_back(space, *found)
    found = take(space, K, [4, 2])
    assert [(extent.offset // K, extent.span) for extent in found] == [(4, 1), (2, 2), (0, 1), (6, 2)] or sum(
        extent.span for extent in found[:-1]
    ) == 4
    check_apart([*found, held[1], held[5], *held[8:]])
    space.audit()


@given(st.integers(0, 2**32), st.lists(st.sampled_from([64, 100, 1000, 4096]), min_size=1, max_size=3, unique=True))
def test_any_order_of_allocating_and_freeing(seed: int, sizes: list[int]) -> None:
    choose = random.Random(seed)
    space = BlockSpace([(0, 20_000), (20_000, 12_000)], slab_nbytes=4096)
    sizes = [-(-size // ALIGN_NBYTES) * ALIGN_NBYTES for size in sizes]
    held: list[Extent] = []
    for _ in range(60):
        if held and choose.random() < 0.45:
            give_back(space, held.pop(choose.randrange(len(held))))
            continue
        try:
            held += take(space, choose.choice(sizes), [choose.randint(1, 9) for _ in range(choose.randint(1, 3))])
        except ResourceExhausted:
            continue
    check_apart(held)
    space.audit()
    assert set(space.slots.heads().tolist()) == {extent.head for extent in held}
    for extent in held:
        give_back(space, extent)
    space.audit()
    assert all(space.free_blocks(size) == space.capacity(size) for size in sizes)
