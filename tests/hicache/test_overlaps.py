"""What a client holds several times counts once against its share, and costs the same however often it is held."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devipc.errors import ResourceExhausted
from devipc.hicache.engine.session import MAX_OPEN
from devipc.hicache.tier.index import IndexWriter
from devipc.hicache.tier.records import I64, Holder, Reservation
from tests.hicache.test_hosttier import BLOCK, NAMESPACE, A, B, Tier, names
from tests.hicache.test_planner import best_s

PAGES = 24


def pinned_once(tier: Tier, owner: bytes, more: I64) -> int:
    """The definition: the bytes of all extents that the owner holds, each once, and of all that it fills."""
    held = [more, *(hold.extents for holder, hold in tier._holds.items() if holder[0] == owner)]
    once = tier._slots.nbytes_of(np.unique(np.concatenate(held)))
    return once + sum(one.nbytes for one in tier._open if one.holder[0] == owner)


def extents_of(tier: Tier, found: list[bytes]) -> I64:
    slots = tier._residents.slots(found)
    return np.unique(tier._slots.head[slots[slots >= 0]])


@pytest.mark.once
@settings(max_examples=200)
@given(st.data())
def test_what_counts_is_what_all_holds_have_together(data: st.DataObject) -> None:
    """Whenever it is first asked for; extents of several sizes come and go meanwhile, and slots with them."""
    some = st.lists(st.integers(1, PAGES), min_size=1, max_size=6, unique=True).map(lambda numbers: names(*numbers))
    owners, ops = st.sampled_from([A, B]), itertools.count(10**6)
    with IndexWriter(max_entries=100) as writer:
        tier = Tier(writer, pages=PAGES, slab_pages=4)
        held: list[Holder] = []
        filling: list[Reservation] = []
        for _ in range(data.draw(st.integers(1, 25))):
            what = data.draw(
                st.sampled_from(["store", "fill", "hold", "hold", "hold", "release", "lose", "ask", "ask"])
            )
            holder, found = (data.draw(owners), next(ops)), data.draw(some)
            if what in ("store", "fill"):
                try:
                    runs = [len(found)] if data.draw(st.booleans()) else None
                    made = tier.reserve(
                        holder,
                        found,
                        namespace=NAMESPACE,
                        page_nbytes=data.draw(st.sampled_from([BLOCK, 64])),
                        runs=runs,
                    )
                except ResourceExhausted:
                    continue
                if what == "fill":
                    filling.append(made)
                else:
                    tier.commit(made)
            elif what == "hold":
                tier.hold(holder, found, page_nbytes=data.draw(st.sampled_from([BLOCK, BLOCK, 64])))
                held.append(holder)
            elif what == "release" and held:
                tier.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
            elif what == "lose":
                tier.invalidate(found)
                if filling:
                    tier.abort(filling.pop())
            elif what == "ask":
                more = extents_of(tier, found)
                counted = tier.shares.pinned().get(holder[0].hex(), 0) + tier._slots.nbytes_of(more)
                assert counted - tier._overlaps.nbytes(holder[0], more) == pinned_once(tier, holder[0], more)
        for owner in (A, B):
            nothing = np.zeros(0, np.int64)
            counted = tier.shares.pinned().get(owner.hex(), 0)
            assert counted - tier._overlaps.nbytes(owner) == pinned_once(tier, owner, nothing)
        for one in held:
            tier.release(one)
        assert not tier._overlaps._accounts
        tier.audit()


def test_a_page_that_is_held_many_times_counts_once(writer: IndexWriter) -> None:
    """Half of eight pages is kept, for one and one that may come: a client may have six, and none of them twice."""
    tier = Tier(writer, extent_pages=1)
    tier.shares.kept_percent = 50
    tier.shares.join(A)
    tier.store(names(*range(6)))
    for number in range(20):
        tier.hold((A, 100 + number), names(*range(6)))
    with pytest.raises(ResourceExhausted) as caught:
        tier.reserve((A, 50), names(6), namespace=NAMESPACE, page_nbytes=BLOCK)
    assert caught.value.code == "share"
    for number in range(20):
        tier.release((A, 100 + number))
    tier.hold((A, 200), names(*range(5)))
    tier.store(names(6))
    assert tier.hold((A, 201), names(0, 6))[0].all()
    with pytest.raises(ResourceExhausted):
        tier.hold((A, 202), names(5))


@pytest.mark.timing
def test_one_more_lease_costs_the_same_however_many_there_are(writer: IndexWriter) -> None:
    """Of as many as a client may have, each of pages that it has already."""
    tier, pages = Tier(writer, pages=64), names(*range(16))
    tier.shares.kept_percent = 50
    tier.store(pages)

    def lease() -> None:
        tier.hold((A, 1), pages, lease_s=60.0)
        tier.release((A, 1))

    for number in range(8):
        tier.hold((A, 100 + number), pages, lease_s=60.0)
    few_s = best_s(lease, 50)
    for number in range(8, MAX_OPEN):
        tier.hold((A, 100 + number), pages, lease_s=60.0)
    assert best_s(lease, 50) <= 8 * few_s
