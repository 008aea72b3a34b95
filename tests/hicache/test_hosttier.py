"""The host tier: who may find, hold, and take away a page. No byte is moved here."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devipc.errors import ResourceExhausted, UsageError
from devipc.hicache.results import PageResult
from devipc.hicache.tier.hosttier import HostTier
from devipc.hicache.tier.index import IndexReader, IndexWriter
from devipc.hicache.tier.records import I64, Holder, Places, Reservation

BLOCK = 1024
NAMESPACE, OTHER = b"n" * 16, b"o" * 16
A, B = b"a" * 16, b"b" * 16


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Tier(HostTier):
    """A tier of a few pages, mostly of one size, with a short hand for a backup."""

    def __init__(self, index: IndexWriter, *, pages: int = 8, extent_pages: int = 4, slab_pages: int = 0) -> None:
        self.clock = Clock()
        self.ops = iter(range(1, 10**9))
        chunks, slab = [(0, pages * BLOCK)], (slab_pages or pages) * BLOCK
        super().__init__(chunks, index, slab_nbytes=slab, extent_pages=extent_pages, clock=self.clock)

    def store(
        self, names: Sequence[bytes], *, runs: Sequence[int] = (), namespace: bytes = NAMESPACE, block: int = BLOCK
    ) -> list[PageResult]:
        reservation = self.reserve(
            (A, next(self.ops)), names, namespace=namespace, page_nbytes=block, runs=runs or [1] * len(names)
        )
        return [PageResult(result) for result in self.commit(reservation)]

    def present(self, names: Sequence[bytes], page_nbytes: int = BLOCK) -> npt.NDArray[np.bool_]:
        return super().present(names, page_nbytes)

    def hold(self, holder: Holder, names: Sequence[bytes], *, page_nbytes: int = BLOCK, **options: Any) -> Any:
        return super().hold(holder, names, page_nbytes=page_nbytes, **options)

    def holder(self, owner: bytes = A) -> Holder:
        return owner, next(self.ops)


def names(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in numbers]


def matrix(found: list[bytes]) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.frombuffer(b"".join(found), np.uint8).reshape(len(found), 16)


def spans_of(places: Places) -> tuple[I64, I64]:
    """Return span and index of each page, also of those in blocks."""
    if places.span is None or places.index is None:
        return np.ones_like(places.offset), np.zeros_like(places.offset)
    return places.span, places.index


@pytest.fixture
def tier(writer: IndexWriter) -> Iterator[Tier]:
    made = Tier(writer)
    yield made
    made.audit()


def test_a_page_is_found_once_it_is_committed(tier: Tier, reader: IndexReader) -> None:
    pages = names(1, 2, 3)
    reservation = tier.reserve((A, 1), pages, namespace=NAMESPACE, page_nbytes=BLOCK, runs=[3])
    assert not tier.present(pages).any()
    assert reader.match(matrix(pages)) == 0
    assert tier.commit(reservation).tolist() == [PageResult.STORED] * 3
    assert tier.present(pages).all()
    assert reader.match(matrix(pages)) == 3
    hit, places = tier.hold((A, 2), pages)
    assert hit.all()
    assert [column.tolist() for column in spans_of(places)] == [[3, 3, 3], [0, 1, 2]]
    assert len(set(places.offset.tolist())) == 1


def test_a_reservation_ends_once(tier: Tier) -> None:
    reservation = tier.reserve((A, 1), names(1), namespace=NAMESPACE, page_nbytes=BLOCK, runs=[1])
    tier.abort(reservation)
    for end in (tier.abort, tier.commit):
        with pytest.raises(UsageError) as caught:
            end(reservation)
        assert caught.value.code == "double_free"


def test_what_the_caller_gets_is_its_own(tier: Tier) -> None:
    reservation = tier.reserve((A, 1), names(1, 2), namespace=NAMESPACE, page_nbytes=BLOCK, runs=[2])
    reservation.places.offset[:] = 7 * BLOCK
    spans_of(reservation.places)[1][:] = 0
    tier.commit(reservation)
    _, places = tier.hold((A, 2), names(1, 2))
    assert places.offset.tolist() == [0, 0]
    assert spans_of(places)[1].tolist() == [0, 1]


def test_pages_by_themselves_have_blocks(tier: Tier) -> None:
    reservation = tier.reserve((A, 1), names(1, 2), namespace=NAMESPACE, page_nbytes=BLOCK, runs=[1, 1])
    assert reservation.places.span is None
    tier.commit(reservation)
    tier.store(names(3, 4), runs=[2])
    for pages, blocks in (((2, 1), True), ((2, 3), False), ((4, 1), False), ((3,), False)):
        holder = tier.holder()
        _, places = tier.hold(holder, names(*pages))
        assert (places.span is None) == (places.index is None) == blocks, pages
        tier.release(holder)


def test_the_least_recently_used_goes_first_and_leaves_the_index(tier: Tier, reader: IndexReader) -> None:
    tier.store(names(*range(8)))
    tier.present(names(0))
    tier.store(names(8))
    assert tier.present(names(0, 1, 2)).tolist() == [True, False, True]
    assert reader.find(matrix(names(0, 1, 2))).hit.tolist() == [True, False, True]


def test_nothing_is_evicted_when_it_would_not_be_enough(tier: Tier) -> None:
    tier.store(names(*range(8)))
    tier.hold((B, 1), names(0, 1, 2, 3, 4))
    with pytest.raises(ResourceExhausted) as caught:
        tier.reserve((A, 9), names(*range(20, 24)), namespace=NAMESPACE, page_nbytes=BLOCK, runs=[4])
    assert caught.value.code == "no_room"
    assert caught.value.retryable
    assert "5 extents held by operation 1 of 62626262" in caught.value.message
    assert tier.present(names(*range(8))).all()
    assert tier.store(names(20, 21, 22)) == [PageResult.STORED] * 3
    assert tier.present(names(0, 1, 2, 3, 4)).all()


def test_what_can_never_fit_is_refused_at_once(tier: Tier) -> None:
    tier.store(names(*range(8)))
    with pytest.raises(ResourceExhausted) as caught:
        tier.store(names(*range(20, 29)))
    assert caught.value.code == "too_large"
    assert not caught.value.retryable
    assert tier.present(names(*range(8))).all()


def test_the_message_says_what_is_being_filled_and_until_when_leases_last(tier: Tier) -> None:
    tier.store(names(0, 1))
    tier.hold((B, 7), names(0, 1), lease_s=12)
    tier.reserve((A, 8), names(*range(2, 8)), namespace=NAMESPACE, page_nbytes=BLOCK, runs=[6])
    with pytest.raises(ResourceExhausted) as caught:
        tier.store(names(9))
    assert "2 extents held by operation 7 of 62626262, for 12.0 s more unless it is released" in caught.value.message
    assert "2 extents being filled by operation 8 of 61616161" in caught.value.message


def test_two_backups_of_one_page_keep_one(tier: Tier) -> None:
    first = tier.reserve((A, 1), names(1, 2), namespace=NAMESPACE, page_nbytes=BLOCK, runs=[2])
    second = tier.reserve((B, 1), names(2, 3), namespace=NAMESPACE, page_nbytes=BLOCK, runs=[2])
    assert tier.commit(second).tolist() == [PageResult.STORED, PageResult.STORED]
    assert tier.commit(first).tolist() == [PageResult.STORED, PageResult.PRESENT]
    tier.audit()


def test_a_hold_ends_once_and_only_its_own(tier: Tier) -> None:
    tier.store(names(1))
    tier.hold((A, 1), names(1))
    tier.hold((B, 1), names(1))
    assert tier.release((A, 1))
    assert not tier.release((A, 1))
    tier.store(names(*range(10, 17)))
    with pytest.raises(ResourceExhausted):
        tier.store(names(*range(20, 28)))
    assert tier.present(names(1)).all()
    assert tier.release((B, 1))
    assert tier.store(names(*range(20, 28))) == [PageResult.STORED] * 8


def test_a_holder_cannot_hold_twice(tier: Tier) -> None:
    tier.store(names(1, 2))
    tier.hold((A, 1), names(1))
    with pytest.raises(UsageError) as caught:
        tier.hold((A, 1), names(2))
    assert caught.value.code == "duplicate"


def test_leases_end_by_themselves_and_the_pages_stay(tier: Tier) -> None:
    tier.store(names(1, 2))
    tier.hold((A, 1), names(1), lease_s=5)
    tier.hold((A, 2), names(2), lease_s=8)
    tier.hold((A, 3), names(2))
    assert tier.expire() == ([], 105.0)
    tier.clock.now = 106.0
    assert tier.expire() == ([(A, 1)], 108.0)
    assert not tier.release((A, 1))
    tier.clock.now = 200.0
    assert tier.expire() == ([(A, 2)], None)
    assert tier.present(names(1, 2)).all()
    assert tier.status()["holds"] == 1


def test_holding_all_or_nothing(tier: Tier) -> None:
    tier.store(names(1, 2))
    hit, _ = tier.hold((A, 1), names(1, 2, 3), partial=False)
    assert hit.tolist() == [True, True, False]
    assert tier.status()["holds"] == 0
    hit, places = tier.hold((A, 1), names(1, 2, 3))
    assert len(places.offset) == 2
    assert tier.status()["holds"] == 1


def test_an_invalidated_page_is_gone_at_once_and_its_memory_when_it_is_released(tier: Tier) -> None:
    tier.store(names(1))
    _, before = tier.hold((A, 1), names(1))
    assert tier.invalidate(names(1, 2)) == 1
    assert not tier.present(names(1)).any()
    tier.store(names(*range(10, 17)))
    tier.audit()
    _, places = tier.hold((B, 1), names(*range(10, 17)))
    assert before.offset[0] not in places.offset
    with pytest.raises(ResourceExhausted):
        tier.store(names(30))
    tier.release((A, 1))
    assert tier.store(names(30)) == [PageResult.STORED]


def test_a_page_that_is_being_written_can_be_invalidated(tier: Tier) -> None:
    reservation = tier.reserve((A, 1), names(1, 2), namespace=NAMESPACE, page_nbytes=BLOCK, runs=[2])
    tier.invalidate(names(1))
    later = tier.reserve((B, 1), names(1), namespace=NAMESPACE, page_nbytes=BLOCK, runs=[1])
    assert tier.commit(reservation).tolist() == [PageResult.DROPPED, PageResult.STORED]
    assert tier.commit(later).tolist() == [PageResult.STORED]
    assert tier.store(names(1)) == [PageResult.PRESENT]


def test_what_was_invalidated_is_forgotten_when_nothing_older_is_open(tier: Tier) -> None:
    """Also when there is always a reservation open."""
    reservations = [tier.reserve((A, n), names(n), namespace=NAMESPACE, page_nbytes=BLOCK, runs=[1]) for n in (1, 2)]
    for number in range(3, 2000):
        tier.invalidate(names(number))
        tier.commit(reservations.pop(0))
        assert len(tier._invalidated) <= 2
        following = tier.reserve((A, number), names(number), namespace=NAMESPACE, page_nbytes=BLOCK, runs=[1])
        reservations.append(following)
    for reservation in reservations:
        tier.commit(reservation)
    assert tier.present(names(1998, 1999)).all()


def test_a_flush_takes_one_namespace_and_what_is_on_its_way(tier: Tier) -> None:
    tier.store(names(1, 2), runs=[2])
    tier.store(names(3), namespace=OTHER)
    tier.hold((A, 50), names(1))
    mine = tier.reserve((A, 60), names(4), namespace=NAMESPACE, page_nbytes=BLOCK, runs=[1])
    others = tier.reserve((A, 61), names(5), namespace=OTHER, page_nbytes=BLOCK, runs=[1])
    assert tier.flush(NAMESPACE) == 2
    assert tier.commit(mine).tolist() == [PageResult.DROPPED]
    assert tier.commit(others).tolist() == [PageResult.STORED]
    assert tier.present(names(1, 2, 3, 4, 5)).tolist() == [False, False, True, False, True]
    assert tier.store(names(1)) == [PageResult.STORED]


def test_an_extent_goes_as_one_when_it_is_evicted(writer: IndexWriter) -> None:
    tier = Tier(writer, extent_pages=4)
    tier.store(names(*range(8)), runs=[8])
    tier.store(names(20))
    assert tier.present(names(*range(8))).sum() == 4
    assert tier.status()["evicted"] == 4
    tier.audit()


def test_a_new_page_size_gets_its_share(writer: IndexWriter) -> None:
    tier = Tier(writer, pages=8, slab_pages=2)
    tier.store(names(*range(8)))
    tier.present(names(0, 1, 2, 3, 6, 7))
    assert tier.store(names(50), block=2 * BLOCK) == [PageResult.STORED]
    assert tier.present(names(*range(8))).tolist() == [True] * 4 + [False] * 2 + [True] * 2
    tier.present(names(50), 2 * BLOCK)
    # Its own page was used last: the coldest slab of the other size goes, not it.
    assert tier.store(names(51), block=2 * BLOCK) == [PageResult.STORED]
    assert tier.present(names(50, 51), 2 * BLOCK).all()
    assert tier.present(names(*range(8))).sum() == 4
    tier.audit()


def test_a_slab_that_is_in_use_is_not_taken(writer: IndexWriter) -> None:
    tier = Tier(writer, pages=4, slab_pages=2)
    tier.store(names(*range(4)))
    tier.hold((A, 90), names(1))
    tier.hold((A, 91), names(2))
    with pytest.raises(ResourceExhausted) as caught:
        tier.store(names(50), block=2 * BLOCK)
    assert "2 idle extents of 1024-byte blocks share slabs with these" in caught.value.message
    tier.release((A, 91))
    assert tier.store(names(50), block=2 * BLOCK) == [PageResult.STORED]
    assert tier.present(names(*range(4))).tolist() == [True, True, False, False]
    tier.audit()


def test_the_tier_tells_when_there_may_be_room(tier: Tier) -> None:
    told = []
    tier.on_room = lambda: told.append(len(told))
    tier.store(names(1))
    tier.hold((A, 50), names(1))
    assert len(told) == 1
    tier.release((A, 50))
    tier.release((A, 50))
    assert len(told) == 2


def test_an_index_that_is_full_hides_pages_and_loses_none() -> None:
    with IndexWriter(max_entries=2) as writer:
        tier = Tier(writer)
        tier.store(names(1, 2, 3))
        assert tier.present(names(1, 2, 3)).all()
        assert tier.status()["unindexed"] == 1
        tier.invalidate(names(3, 1))
        tier.audit()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_any_order_of_calls_adds_up(seed: int) -> None:
    """Runs and single pages of two sizes and namespaces, also many at once; what is there is what the index finds."""
    choose = random.Random(seed)
    known = names(*range(1, 201))
    with IndexWriter(max_entries=512) as writer, IndexReader(writer.fileno(), epoch=writer.epoch) as reader:
        tier = Tier(writer, pages=64, slab_pages=8, extent_pages=4)
        reservations: list[Reservation] = []
        holders: list[Holder] = []

        def reserve() -> None:
            runs = [choose.choice((1, 1, 2, 3, 7)) for _ in range(choose.choice((1, 3, 12)))]
            namespace, block = choose.choice(((NAMESPACE, BLOCK), (OTHER, 2 * BLOCK)))
            chosen = choose.sample(known, sum(runs))
            reserved = tier.reserve(tier.holder(), chosen, namespace=namespace, page_nbytes=block, runs=runs)
            spans, indexes = spans_of(reserved.places)
            assert int(spans.max()) <= 4
            ends = reserved.places.offset + indexes * block
            assert len(np.unique(ends // BLOCK)) == len(chosen)
            reservations.append(reserved)

        def prepare() -> None:
            if reservations:
                tier.prepare(choose.choice(reservations))

        def hold() -> None:
            holders.append(tier.holder())
            tier.hold(holders[-1], choose.sample(known, 20), page_nbytes=choose.choice((BLOCK, 2 * BLOCK)))

        def end(finish: Callable[[Reservation], object]) -> None:
            if reservations:
                finish(reservations.pop(choose.randrange(len(reservations))))

        steps: list[Callable[[], object]] = [
            reserve,
            reserve,
            prepare,
            tier.tidy,
            lambda: end(tier.commit),
            lambda: end(tier.commit),
            lambda: end(tier.abort),
            hold,
            lambda: holders and tier.release(holders.pop(0)),
            lambda: tier.invalidate(choose.sample(known, 30)),
            lambda: tier.flush(choose.choice((NAMESPACE, OTHER))) if not choose.randrange(4) else None,
        ]
        for _ in range(60):
            with contextlib.suppress(ResourceExhausted):
                choose.choice(steps)()
            tier.audit()
            small, large = tier.present(known), tier.present(known, 2 * BLOCK)
            assert not (small & large).any()
            assert reader.find(matrix(known)).hit.tolist() == (small | large).tolist()
        while reservations:
            end(tier.abort)
        for holder in holders:
            tier.release(holder)
        tier.invalidate(known)
        tier.audit()
        assert tier._space.free_blocks(BLOCK) == 64
