"""The host tier: what is made of entries before their pages' bytes are in place. No byte is moved here."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from devipc.hicache.results import PageResult
from devipc.hicache.tier.index import IndexReader, IndexWriter
from devipc.hicache.tier.records import Reservation
from tests.hicache.test_hosttier import BLOCK, NAMESPACE, B, Tier, matrix, names


def prepared(tier: Tier, pages: Sequence[bytes]) -> Reservation:
    """Return a reservation whose entries are made already."""
    reservation = tier.reserve(tier.holder(), pages, namespace=NAMESPACE, page_nbytes=BLOCK, runs=[1] * len(pages))
    tier.prepare(reservation)
    tier.prepare(reservation)  # again does nothing
    return reservation


@pytest.mark.parametrize("tidied", [False, True])
def test_what_is_prepared_is_found_when_it_is_committed_and_not_before(
    writer: IndexWriter, reader: IndexReader, *, tidied: bool
) -> None:
    tier, pages = Tier(writer, pages=64), names(*range(1, 31))
    tier.tidy()  # nothing to do
    reservation = prepared(tier, pages)
    assert not tier.present(pages).any()
    assert not reader.find(matrix(pages)).hit.any()
    tier.audit()
    assert tier.commit(reservation).tolist() == [PageResult.STORED] * 30
    if tidied:
        tier.tidy()
    assert len(tier._residents._slot_of) == (30 if tidied else 0)
    assert reader.find(matrix(pages)).hit.all()
    assert tier.status()["pages"] == 30
    assert tier.present(pages).all()
    assert set(reader.find(matrix(pages)).value.tolist()) == {BLOCK}, "what the index says is their size"
    assert tier.invalidate(pages) == 30
    assert not reader.find(matrix(pages)).hit.any()
    tier.audit()


def test_what_was_prepared_and_aborted_leaves_nothing(writer: IndexWriter, reader: IndexReader) -> None:
    tier, pages = Tier(writer, pages=64), names(*range(1, 31))
    for _ in range(3 * writer.max_entries // len(pages)):  # the index has its room back each time
        tier.abort(prepared(tier, pages))
        tier.audit()
    assert not reader.find(matrix(pages)).hit.any()
    assert tier.commit(prepared(tier, pages)).tolist() == [PageResult.STORED] * 30
    assert reader.find(matrix(pages)).hit.all()


@pytest.mark.parametrize("happens", ["flush", "invalidate", "stored", "committed", "other"])
def test_what_happens_behind_the_preparation_counts(writer: IndexWriter, reader: IndexReader, happens: str) -> None:
    tier, pages = Tier(writer, pages=64), names(*range(1, 9))
    reservation = prepared(tier, pages)
    twin = prepared(tier, pages[::-1])
    expected = [PageResult.STORED] * 8
    if happens == "flush":
        tier.flush(NAMESPACE)
        expected = [PageResult.DROPPED] * 8
    elif happens == "invalidate":
        tier.invalidate(pages[:3])
        expected = [PageResult.DROPPED] * 3 + [PageResult.STORED] * 5
    elif happens == "stored":
        assert tier.store(pages[:5]) == [PageResult.STORED] * 5
        expected = [PageResult.PRESENT] * 5 + [PageResult.STORED] * 3
    elif happens == "committed":
        assert tier.commit(twin).tolist() == [PageResult.STORED] * 8
        expected = [PageResult.PRESENT] * 8
    else:
        assert tier.store(names(*range(20, 26))) == [PageResult.STORED] * 6
    assert tier.commit(reservation).tolist() == expected
    there = [result is not PageResult.DROPPED for result in expected]
    assert tier.present(pages).tolist() == there
    assert reader.find(matrix(pages)).hit.tolist() == there
    if happens != "committed":
        tier.abort(twin)
    tier.audit()
    assert tier.invalidate(pages) == sum(there)
    assert not reader.find(matrix(pages)).hit.any()


def test_a_preparation_takes_what_room_the_index_has() -> None:
    with IndexWriter(max_entries=6) as writer, IndexReader(writer.fileno(), epoch=writer.epoch) as reader:
        tier, pages = Tier(writer, pages=64), names(*range(1, 9))
        reservation = prepared(tier, pages)
        assert tier.store(names(20)) == [PageResult.STORED]  # beside six that are on their way
        assert tier.commit(reservation).tolist() == [PageResult.STORED] * 8
        assert int(reader.find(matrix(pages)).hit.sum()) == 6
        assert tier.status()["unindexed"] == 3
        assert tier.present(pages).all()
        assert tier.invalidate([*pages, *names(20)]) == 9
        assert tier.commit(prepared(tier, pages)).tolist() == [PageResult.STORED] * 8
        tier.audit()


@pytest.mark.parametrize("runs", [None, []])
def test_no_pages_are_reserved_of_an_empty_tier(writer: IndexWriter, runs: list[int] | None) -> None:
    """Also by a client whose share has become less than what it has."""
    tier = Tier(writer)
    for crowded in (False, True):
        if crowded:
            tier.store(names(*range(8)))
            tier.hold(tier.holder(), names(*range(8)))
            tier.shares.kept_percent = 90
            tier.shares.join(B)
        for end in (tier.commit, tier.abort):
            reservation = tier.reserve(tier.holder(), [], namespace=NAMESPACE, page_nbytes=BLOCK, runs=runs)
            tier.prepare(reservation)
            end(reservation)
            tier.audit()
    assert tier.status()["reservations"] == 0
