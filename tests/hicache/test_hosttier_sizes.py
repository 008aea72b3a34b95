"""The host tier: pages of several sizes under the same names. No byte is moved here."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from devipc.hicache.results import PageResult
from devipc.hicache.tier.index import IndexReader, IndexWriter
from devipc.hicache.tier.search import Search
from tests.hicache.test_hosttier import BLOCK, NAMESPACE, A, B, Tier, matrix, names

SIZES = pytest.mark.parametrize("other", [BLOCK - 1, 2 * BLOCK], ids=["same block", "another block"])


@pytest.fixture
def tier(writer: IndexWriter) -> Iterator[Tier]:
    made = Tier(writer, pages=16, slab_pages=4)
    yield made
    made.audit()


@SIZES
def test_a_page_of_another_size_is_not_here(tier: Tier, other: int) -> None:
    tier.store(names(1, 2), runs=[2])
    tier.store(names(3), block=other)
    for size, expected in ((BLOCK, [True, True, False, False]), (other, [False, False, True, False])):
        assert tier.present(names(1, 2, 3, 4), size).tolist() == expected
        hit, places = tier.hold((A, 50), names(1, 2, 3, 4), page_nbytes=size)
        assert hit.tolist() == expected
        assert len(places.offset) == sum(expected)
        assert tier.status()["held_extents"] == 1
        assert tier.release((A, 50))
        hit, _ = tier.hold((A, 51), names(1, 3), page_nbytes=size, partial=False)
        assert int(hit.sum()) == 1
        assert tier.status()["holds"] == 0


@SIZES
@pytest.mark.parametrize("count", [1, 4, 64], ids=["one by one", "prepared", "many at once"])
def test_a_page_of_another_size_is_not_found_in_the_index(writer: IndexWriter, other: int, count: int) -> None:
    tier = Tier(writer, pages=8 * count, slab_pages=2 * count)
    ours, theirs = names(*range(1, count + 1)), names(*range(1001, count + 1001))
    search = Search(IndexReader(writer.fileno(), epoch=writer.epoch))
    for size, stored in ((BLOCK, ours), (other, theirs)):
        reservation = tier.reserve(tier.holder(), stored, namespace=NAMESPACE, page_nbytes=size, runs=[1] * len(stored))
        if count == 4:
            tier.prepare(reservation)
        tier.commit(reservation)
    expected = np.repeat([True, False], count)
    assert np.array_equal(search.find(matrix(ours + theirs), BLOCK), expected)
    assert np.array_equal(search.find(matrix(ours + theirs), other), ~expected)
    assert not search.find(matrix(ours + theirs), BLOCK + 1).any()
    search.close()
    tier.audit()


@SIZES
def test_nothing_is_held_of_names_that_are_all_of_another_size(tier: Tier, other: int) -> None:
    hit, _ = tier.hold((A, 50), names(1), page_nbytes=other)
    assert not hit.any()
    tier.store(names(*range(1, 9)))
    hit, places = tier.hold((A, 51), names(*range(1, 9)), page_nbytes=other)
    assert not hit.any()
    assert not len(places.offset)
    assert not tier.release((A, 51))


@SIZES
@pytest.mark.parametrize("prepared", [False, True])
def test_a_page_whose_name_has_another_size_is_dropped(tier: Tier, other: int, *, prepared: bool) -> None:
    """Whether that was there before or came while the copies ran; what is there stays, until it is taken away."""
    tier.store(names(1))
    late = tier.reserve((B, 1), names(1, 2, 3, 4, 4), namespace=NAMESPACE, page_nbytes=other)
    if prepared:
        tier.prepare(late)
    tier.store(names(2))
    again = tier.reserve((B, 2), names(1, 2), namespace=NAMESPACE, page_nbytes=BLOCK)
    dropped, stored, present = PageResult.DROPPED, PageResult.STORED, PageResult.PRESENT
    assert tier.commit(late).tolist() == [dropped, dropped, stored, stored, present]
    assert tier.commit(again).tolist() == [present, present]
    assert tier.present(names(1, 2, 3, 4)).tolist() == [True, True, False, False]
    assert tier.present(names(1, 2, 3, 4), other).tolist() == [False, False, True, True]
    tier.invalidate(names(1, 3))
    assert tier.store(names(1), block=other) == [stored]
    assert tier.store(names(3)) == [stored]
