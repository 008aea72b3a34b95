"""Two clients of one engine: what one of them waits for, or holds for long, is not in the other's way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from devipc.channel.liveness import own_life
from devipc.errors import ResourceExhausted
from devipc.hicache.api import UNFENCED
from devipc.hicache.engine import session
from devipc.hicache.engine.turns import in_turn
from devipc.hicache.operations import Event, Status
from devipc.hicache.results import PageResult
from devipc.hicache.tier.shares import Shares
from devipc.interfaces.backend import Device
from devipc.registry import load_backend
from tests.hicache.deployment import DAEMON, INPROC, deployed
from tests.hicache.scenario import done, filled
from tests.hicache.scenarios_room import SHAPE, tier_of
from tests.hicache.world import TIMEOUT_S, until, world

STORED = {PageResult.STORED}
LONG_S = 600.0


@pytest.fixture(scope="module", autouse=True)
def _lasting() -> None:
    own_life()  # this process's sign of life, which peers get, outlasts a test


@pytest.fixture(params=[INPROC, pytest.param(DAEMON, marks=pytest.mark.long)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = load_backend("host").open_device()
    with deployed(request.param):
        yield opened
    opened.close()


class Never:
    """A ready point that never comes."""

    def reached(self) -> bool:
        return False


class Two:
    """A greedy client and a modest one, of one model, each with a pool."""

    def __init__(self, it: Any) -> None:
        self.it = it
        self.greedy, self.modest = it.client(), it.client()
        self.pools = [it.attention_pool(**SHAPE), it.attention_pool(**SHAPE)]
        self.mine, self.its = it.register(self.greedy, self.pools[0]), it.register(self.modest, self.pools[1])

    def keys(self, count: int, seed: int) -> Any:
        return self.it.keys(self.its, count, seed=seed)

    def check_serves_modest(self, seed: int = 900) -> None:
        """A page goes and comes back, at once."""
        keys = filled(self.it, self.modest, self.pools[1], self.its, 1, seed=seed)
        assert set(done(self.modest.restore(self.its, keys, [20], ready=UNFENCED))) == {PageResult.RESTORED}
        self.pools[1].check([20], keys)


def test_an_operation_that_waits_for_room_is_not_in_front_of_others(device: Device) -> None:
    """Nor are those in front of which it is, of its own client, in the way; and it is not forgotten."""
    with world(device, **tier_of(8, 0)) as it:
        two = Two(it)
        keys = filled(it, two.greedy, two.pools[0], two.mine, 6)
        lease = two.greedy.lookup(two.mine, keys, lease_s=LONG_S)
        assert lease.reached(Event.LEASED, TIMEOUT_S)
        large = two.greedy.backup(two.mine, range(10, 14), two.keys(4, 1), ready=UNFENCED, timeout_s=LONG_S)
        small = two.greedy.backup(two.mine, [14], two.keys(1, 2), ready=UNFENCED, timeout_s=LONG_S)
        two.check_serves_modest()
        assert large.status is small.status is None
        two.greedy.release(lease)
        assert set(done(large) + done(small)) == STORED


def test_a_ready_point_that_never_comes_is_not_in_front_of_others(device: Device) -> None:
    with world(device, **tier_of(16, 50), max_flying=2) as it:
        two = Two(it)
        keys = filled(it, two.greedy, two.pools[0], two.mine, 4)
        pages = [[page] for page in range(5, 25)]
        waiting = [two.greedy.restore(two.mine, keys[:1], page, ready=Never(), timeout_s=LONG_S) for page in pages] + [
            two.greedy.backup(two.mine, page, two.keys(1, page[0]), ready=Never(), timeout_s=LONG_S) for page in pages
        ]
        two.check_serves_modest()
        assert not any(ticket.status for ticket in waiting)


@pytest.mark.parametrize("device", [INPROC], indirect=True)
def test_leases_of_one_client_are_bounded_in_number(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of pages that are held anyway keep nothing more from being evicted, but have to be remembered, too."""
    monkeypatch.setattr(session, "MAX_OPEN", 3)
    with world(device, **tier_of(8, 50)) as it:
        two = Two(it)
        keys = filled(it, two.greedy, two.pools[0], two.mine, 1)
        leases = [two.greedy.lookup(two.mine, keys, lease_s=LONG_S) for _ in range(3)]
        assert all(lease.reached(Event.LEASED, TIMEOUT_S) for lease in leases)
        refused = two.greedy.lookup(two.mine, keys, lease_s=LONG_S).wait(TIMEOUT_S)
        assert isinstance(refused.error, ResourceExhausted)
        assert (refused.status, refused.error.code, refused.error.retryable) == (Status.REFUSED, "busy", True)
        two.check_serves_modest()
        two.greedy.release(leases[0])
        assert two.greedy.lookup(two.mine, keys, lease_s=LONG_S).reached(Event.LEASED, TIMEOUT_S)


def test_leases_and_backups_of_one_client_leave_the_others_their_share(device: Device) -> None:
    """Half of 24 pages is kept: 4 for each of two clients and one that may come, 16 at most for one of them."""
    with world(device, **tier_of(24, 50)) as it:
        two = Two(it)
        keys = filled(it, two.greedy, two.pools[0], two.mine, 16)
        refused = two.greedy.backup(two.mine, range(1, 18), two.keys(17, 5), ready=UNFENCED).wait(TIMEOUT_S)
        assert (refused.status, getattr(refused.error, "code", "")) == (Status.REFUSED, "too_large")
        lease = two.greedy.lookup(two.mine, keys[:12], lease_s=LONG_S)
        assert lease.reached(Event.LEASED, TIMEOUT_S)
        again = two.greedy.lookup(two.mine, keys[:12], lease_s=LONG_S)  # what is held twice is held once
        assert again.reached(Event.LEASED, TIMEOUT_S)
        unconfirmed = two.greedy.backup(
            two.mine, range(20, 24), two.keys(4, 1), ready=UNFENCED, confirm=False, timeout_s=LONG_S
        )
        assert unconfirmed.reached(Event.SOURCE_RELEASED, TIMEOUT_S)
        more = two.greedy.lookup(two.mine, keys[12:], lease_s=LONG_S).wait(TIMEOUT_S)
        assert more.status is Status.REFUSED
        assert isinstance(more.error, ResourceExhausted)
        assert (more.error.code, more.error.retryable) == ("share", True)
        assert "kept_percent" in more.error.remedy
        beyond = two.greedy.backup(two.mine, [25], two.keys(1, 2), ready=UNFENCED, timeout_s=0.1).wait(TIMEOUT_S)
        assert beyond.status is Status.TIMED_OUT
        two.check_serves_modest()
        for seed in range(3):
            chosen = two.keys(4, 100 + seed)
            assert set(done(two.modest.backup(two.its, range(1, 5), chosen, ready=UNFENCED))) == STORED
        newcomer = it.client()
        pool = it.attention_pool(**SHAPE)
        handle = it.register(newcomer, pool)
        filled(it, newcomer, pool, handle, 3, seed=300)  # of 12 that are kept for three and one more
        unconfirmed.confirm()
        assert set(done(unconfirmed)) == STORED
        for one in (lease, again):
            two.greedy.release(one)
        assert set(done(two.greedy.backup(two.mine, [25], two.keys(1, 3), ready=UNFENCED))) == STORED


@pytest.mark.parametrize("direction", ["backup", "restore"])
def test_whoever_has_few_operations_is_not_behind_all_of_another(device: Device, direction: str) -> None:
    with world(device, max_flying=4) as it:
        two = Two(it)
        keys = filled(it, two.greedy, two.pools[0], two.mine, 1)
        lane = it.engine.backups if direction == "backup" else it.engine.restores
        it.stall(lane)
        ended: list[str] = []

        def begin(client: Any, handle: Any, name: str, page: int) -> Any:
            if direction == "backup":
                ticket = client.backup(handle, [page], two.keys(1, page), ready=UNFENCED)
            else:
                ticket = client.restore(handle, keys, [page], ready=UNFENCED)
            ticket.add_hook(lambda: ended.append(name))
            return ticket

        tickets = [begin(two.modest, two.its, "modest", 1)]
        until(lambda: lane.flying == 1)
        tickets += [begin(two.greedy, two.mine, "greedy", page) for page in range(2, 32)]
        until(lambda: lane.flying == 3)  # it has half of the places, and no more
        tickets += [begin(two.modest, two.its, "modest", page) for page in (2, 3, 4)]
        until(lambda: lane.flying == 4)
        it.resume(lane)
        for ticket in tickets:
            done(ticket)
        last = max(number for number, name in enumerate(ended) if name == "modest")
        assert last < 28, ended  # of 34, and behind all of them 33; what two clients hear is not quite in order


def test_a_backup_that_waits_ends_when_so_much_is_not_its_clients_any_more(device: Device) -> None:
    """Half of 24 pages is kept: 18 at most for one client alone, 16 for one of two."""
    with world(device, **tier_of(24, 50)) as it:
        greedy, pool = it.client(), it.attention_pool(**SHAPE)
        handle = it.register(greedy, pool)
        keys = filled(it, greedy, pool, handle, 8)
        lease = greedy.lookup(handle, keys, lease_s=LONG_S)
        assert lease.reached(Event.LEASED, TIMEOUT_S)
        new = [it.keys(handle, 18, seed=seed) for seed in (5, 6)]
        whole, cut = (
            greedy.backup(handle, range(1, 19), chosen, ready=UNFENCED, partial=partial, timeout_s=LONG_S)
            for chosen, partial in zip(new, (False, True), strict=True)
        )
        waiting: Any = greedy.status()["operations"]
        assert waiting["backup:waiting_confirmed"] == 2
        newcomer = it.client()
        refused = whole.wait(TIMEOUT_S)
        assert (refused.status, getattr(refused.error, "code", "")) == (Status.REFUSED, "too_large")
        assert cut.status is None
        greedy.release(lease)
        results = list(done(cut))
        assert results == [PageResult.STORED] * 16 + [PageResult.NO_ROOM] * 2
        newcomer.close(timeout_s=TIMEOUT_S)


def test_a_backup_of_which_nothing_fits_any_more_ends_with_that(device: Device) -> None:
    """Nine tenths of four pages are kept, so that one of eight clients may fill none; nothing was stored before."""
    with world(device, **tier_of(4, 90)) as it:
        client, pool = it.client(), it.attention_pool(**SHAPE)
        handle = it.register(client, pool)
        others = [it.client() for _ in range(7)]
        for number in range(2):
            keys = it.keys(handle, 2, seed=number)
            some = client.backup(handle, range(1, 3), keys, ready=UNFENCED, partial=True)
            assert list(done(some)) == [PageResult.NO_ROOM] * 2
        for other in others:
            other.close(timeout_s=TIMEOUT_S)
        filled(it, client, pool, handle, 1, seed=3)


def test_what_a_client_may_have_pinned() -> None:
    """Half of 240 bytes is kept: 40 for each of two and one that may come."""
    shares = Shares(240)
    shares.kept_percent = 50
    for owner in (b"a", b"b"):
        shares.join(owner)
    assert (shares.kept_nbytes, shares.ceiling(b"a"), shares.most(b"a")) == (40, 160, 160)

    def refused(nbytes: int, *, twice: int = 0) -> bool:
        with pytest.raises(ResourceExhausted) as caught:
            shares.check(b"a", nbytes, lambda: twice)
        assert caught.value.code == "share"
        return caught.value.retryable

    assert not refused(161)  # whatever it gives back
    shares.take(b"a", 100)
    assert refused(100)
    assert refused(100, twice=39)
    shares.check(b"a", 100, lambda: 50)  # half of that is held already
    shares.take(b"b", 120)
    assert refused(10)
    shares.give_back(b"a", 100)
    shares.check(b"a", 40, lambda: 0)  # its share, whatever others have
    assert shares.pinned() == {b"b".hex(): 120}
    shares.leave(b"b")
    assert (shares.kept_nbytes, shares.most(b"a")) == (60, 60)
    shares.give_back(b"b", 120)
    assert (shares.ceiling(b"a"), shares.most(b"a")) == (180, 180)


def test_turns() -> None:
    class Work:
        def __init__(self, name: str) -> None:
            self.owner, self.name = name[0].encode(), name

    works = [Work(name) for name in ("a1", "a2", "a3", "b1", "b2", "c1")]
    flying = {b"a": 5, b"c": 9}
    seen = []
    for work in in_turn(works, flying):
        seen.append(work.name)
        flying[work.owner] = flying.get(work.owner, 0) + 4
    assert seen == ["b1", "b2", "a1", "c1", "a2", "a3"]
    # What is over as soon as it was begun counts for nothing, and takes its turn all the same.
    assert [work.name for work in in_turn(works, {})] == ["a1", "b1", "c1", "a2", "b2", "a3"]
