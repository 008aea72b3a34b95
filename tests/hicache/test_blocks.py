"""Blocks: one holder each, whatever is allocated and freed in whatever order."""

from __future__ import annotations

import random
from dataclasses import fields
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devipc.errors import ResourceExhausted, UsageError
from devipc.hicache.blocks import ALIGN_NBYTES, BlockSpace, Extent

K = 1024


def bytes_of(extent: Extent) -> range:
    size = extent.slab.block_nbytes
    return range(extent.offset, extent.offset + extent.span * size)


def check_apart(extents: list[Extent]) -> None:
    ordered = sorted(map(bytes_of, extents), key=lambda place: place.start)
    for left, right in pairwise(ordered):
        assert left.stop <= right.start


def test_blocks_straddle_no_chunk_and_do_not_touch_the_next_one() -> None:
    space = BlockSpace([(0, 8 * K), (8 * K, 8 * K)], slab_nbytes=8 * K)
    assert space.capacity(K) == 7 + 8
    found = space.allocate(K, [15])
    assert sum(extent.span for extent in found) == 15
    ends = sorted((place.start, place.stop) for place in map(bytes_of, found))
    assert ends == [(0, 7 * K), (8 * K, 16 * K)]
    assert space.free_blocks(K) == 0


def test_all_or_nothing() -> None:
    space = BlockSpace([(0, 8 * K)], slab_nbytes=8 * K)
    space.allocate(K, [5])
    with pytest.raises(ResourceExhausted) as caught:
        space.allocate(K, [2, 2])
    assert caught.value.code == "no_room"
    assert space.free_blocks(K) == 3
    space.audit()


def test_freeing_twice_is_refused_and_changes_nothing() -> None:
    space = BlockSpace([(0, 8 * K)], slab_nbytes=4 * K)
    first, second = space.allocate(K, [1, 1])
    space.free(first)
    with pytest.raises(UsageError) as caught:
        space.free(first)
    assert caught.value.code == "double_free"
    (again,) = space.allocate(K, [1])
    assert again.offset == first.offset
    with pytest.raises(UsageError):  # the same numbers, and not the same extent
        space.free(first)
    space.free(second)
    space.free(again)
    space.audit()
    assert space.free_blocks(K) == 8


def test_a_slab_changes_its_size_when_it_is_empty() -> None:
    space = BlockSpace([(0, 8 * K)], slab_nbytes=4 * K)
    small = space.allocate(K, [1] * 8)
    assert space.free_blocks(3 * K) == 0
    for extent in small[:4]:
        space.free(extent)
    assert space.free_blocks(3 * K) == 1
    (big,) = space.allocate(3 * K, [1])
    check_apart([*small[4:], big])
    space.audit()


def test_extents_do_not_share_state_with_the_space() -> None:
    space = BlockSpace([(0, 8 * K)], slab_nbytes=8 * K)
    (extent,) = space.allocate(K, [4])
    for field in fields(Extent):
        if field.name != "slab":
            setattr(extent, field.name, 99)
    extents = list(space.extents())
    assert extents == [extent]
    (other,) = space.allocate(K, [4])
    assert other.offset == 4 * K


@given(st.integers(0, 2**32), st.lists(st.sampled_from([64, 100, 1000, 4096]), min_size=1, max_size=3, unique=True))
def test_any_order_of_allocating_and_freeing(seed: int, sizes: list[int]) -> None:
    choose = random.Random(seed)
    space = BlockSpace([(0, 20_000), (20_000, 12_000)], slab_nbytes=4096)
    sizes = [-(-size // ALIGN_NBYTES) * ALIGN_NBYTES for size in sizes]
    held: list[Extent] = []
    for _ in range(60):
        if held and choose.random() < 0.45:
            space.free(held.pop(choose.randrange(len(held))))
            continue
        try:
            held += space.allocate(choose.choice(sizes), [choose.randint(1, 9) for _ in range(choose.randint(1, 3))])
        except ResourceExhausted:
            continue
    check_apart(held)
    space.audit()
    assert set(space.extents()) == set(held)
    for extent in held:
        space.free(extent)
    space.audit()
    assert all(space.free_blocks(size) == space.capacity(size) for size in sizes)
