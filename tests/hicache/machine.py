"""Any order of operations, against a model that fits on a page: a list of pages, the least recently used first.

A machine of Hypothesis has rules, which are operations on the client that it has. ``stateful.py`` lets Hypothesis run
it; ``driver.py`` runs its rules without.
"""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from devipc.hicache.api import UNFENCED
from devipc.hicache.client.ticket import Ticket
from devipc.hicache.operations import Event, Status
from devipc.hicache.results import PageResult
from tests.hicache.deployment import INPROC, InProcess, chosen
from tests.hicache.scenario import done
from tests.hicache.world import TIMEOUT_S, World, until

KEYS, TIER_PAGES, PAGE_NBYTES = 14, 8, 512
some = st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=5, unique=True)


class Model:
    """What is in the host tier, in the order in which it would be evicted, and what must stay."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.held: list[list[int]] = []

    @property
    def pinned(self) -> set[int]:
        return {key for hold in self.held for key in hold}

    @property
    def present(self) -> set[int]:
        return set(self.order)

    def use(self, keys: list[int]) -> None:
        for key in keys:
            if key in self.order:
                self.order.remove(key)
                self.order.append(key)

    def room_for(self, keys: list[int]) -> bool:
        return len(self.pinned) + len(set(keys) - self.pinned) <= TIER_PAGES

    def store(self, keys: list[int]) -> list[PageResult]:
        self.use(keys)
        missing = [key for key in keys if key not in self.order]
        results = [PageResult.STORED if key in missing else PageResult.PRESENT for key in keys]
        while len(self.order) + len(missing) > TIER_PAGES:
            self.order.remove(next(key for key in self.order if key not in self.pinned))
        self.order += missing
        return results

    def hold(self, keys: list[int]) -> list[int]:
        found = [key for key in keys if key in self.order]
        self.held.append(found)
        return found

    def release(self, found: list[int]) -> None:
        self.held.remove(found)
        # Whoever was held is used at the end of the last hold.
        self.use([key for key in found if key not in self.pinned])

    def take_away(self, keys: set[int]) -> int:
        gone = len(keys & self.present)
        self.order = [key for key in self.order if key not in keys]
        return gone


class Later:
    """A ready point that is reached when this test says so."""

    now = False

    def reached(self) -> bool:
        return self.now


class CacheMachine(RuleBasedStateMachine):
    """One client after another on one engine; destinations are poisoned before each restore."""

    operations = 0
    world: World | None = None
    """Lent by whoever drives: all examples have one engine, which is empty at the beginning of each."""

    def __init__(self) -> None:
        super().__init__()
        assert self.world is not None
        self.it = self.world
        self.model = Model()
        self.leases: list[tuple[Ticket, list[int]]] = []
        # No rule to begin with: Hypothesis would keep a strategy for it of each example, up to a thousand.
        pools = self.it.pools
        self.memory = pools[0] if pools else self.it.mla_pool(pages=2 * KEYS, page_tokens=4, layers=8, row=16)
        assert self.memory.layout.page_nbytes == PAGE_NBYTES
        self.join()
        self.keys = self.it.keys(self.handle, KEYS)
        self.memory.fill(range(1, KEYS + 1), self.keys)

    def join(self) -> None:
        self.client = self.it.client()
        self.handle = self.it.register(self.client, self.memory)

    def count(self) -> None:
        """Note that an operation is begun."""
        CacheMachine.operations += 1

    def chosen(self, keys: list[int]) -> Any:
        return self.keys[np.array(keys)]

    @rule(keys=some)
    def match(self, keys: list[int]) -> None:
        self.count()
        found = [key in self.model.present for key in keys]
        assert self.client.find(self.handle, self.chosen(keys)).tolist() == found
        assert self.client.match(self.handle, self.chosen(keys)) == [*found, False].index(False)

    @precondition(lambda self: len(self.model.pinned) < TIER_PAGES)
    @rule(keys=some)
    def backup(self, keys: list[int]) -> None:
        if not self.model.room_for(keys):
            return
        self.count()
        pages = [key + 1 for key in keys]
        ticket = self.client.backup(self.handle, pages, self.chosen(keys), ready=UNFENCED)
        assert done(ticket) == self.model.store(keys)

    @rule(keys=some, partial=st.booleans(), lease=st.booleans())
    def restore(self, keys: list[int], partial: bool, lease: bool) -> None:
        self.count()
        used = self.leases.pop() if lease and self.leases else None
        targets = [KEYS + 1 + number for number in range(len(keys))]
        self.memory.poison(targets)
        ready = UNFENCED if used is None else Later()
        ticket = self.client.restore(
            self.handle, self.chosen(keys), targets, ready=ready, partial=partial, lease=used and used[0]
        )
        if isinstance(ready, Later):
            self.client.ping()  # the lease has ended by then, before the restore: that is the order of the model
            ready.now = True
        outcome = ticket.wait(TIMEOUT_S)
        hit = [key in self.model.present for key in keys]
        admitted = all(hit) or (partial and any(hit))
        held = self.model.hold(keys if admitted else [])
        if used is not None:
            self.model.release(used[1])
        self.model.release(held)
        if admitted:
            assert outcome.status is Status.COMPLETED
            results = [PageResult.RESTORED if found else PageResult.MISSING for found in hit]
            assert outcome.results.tolist() == results
            restored = [number for number, found in enumerate(hit) if found]
            self.memory.check([targets[number] for number in restored], self.chosen([keys[n] for n in restored]))
        else:
            assert outcome.status is Status.REFUSED
            restored = []
        missed = [target for number, target in enumerate(targets) if number not in restored]
        assert not missed or self.memory.is_poisoned(missed)

    @precondition(lambda self: len(self.leases) < 3)
    @rule(keys=some)
    def lookup(self, keys: list[int]) -> None:
        self.count()
        ticket = self.client.lookup(self.handle, self.chosen(keys))
        ticket.reached(Event.LEASED, TIMEOUT_S)
        found = self.model.hold(keys)
        assert ticket.hit.tolist() == [key in found for key in keys]
        if found:
            assert ticket.reached(Event.LEASED, 0)
            self.leases.append((ticket, found))
        else:
            assert ticket.status is Status.COMPLETED
            self.model.held.remove(found)

    @precondition(lambda self: bool(self.leases))
    @rule(which=st.integers(0, 2))
    def release(self, which: int) -> None:
        self.count()
        ticket, found = self.leases.pop(which % len(self.leases))
        assert self.client.release(ticket)
        self.model.release(found)

    # What a lease holds is freed when it ends: the model would have to know how much memory that is.
    @precondition(lambda self: not self.leases)
    @rule(keys=some)
    def invalidate(self, keys: list[int]) -> None:
        self.count()
        assert self.client.invalidate(self.handle, self.chosen(keys)) == self.model.take_away(set(keys))

    @precondition(lambda self: not self.leases)
    @rule(really=st.integers(0, 5))
    def flush(self, really: int) -> None:
        if not really:
            self.count()
            assert self.client.flush(self.handle) == self.model.take_away(self.model.present)

    @rule(really=st.integers(0, 59))
    def crash(self, really: int) -> None:
        """The client is gone; its successor finds what it left."""
        if really >= (6 if chosen() == INPROC else 1):  # to attach to a daemon takes longer
            return
        self.count()
        self.client.ping()  # whatever it said before has been heard
        holders = list(self.it.tier._holds)
        crash(self.it, self.client)
        assert not self.it.tier._holds
        order = {lease.op: found for lease, found in self.leases}
        for _, op in holders:
            self.model.release(order[op])
        self.leases.clear()
        self.join()

    def teardown(self) -> None:
        self.it.tier.audit()
        self.client.flush(self.handle)
        for client in self.it.clients:
            client.close(timeout_s=TIMEOUT_S)
            client.check_ends(lookups=True)
        self.it.clients.clear()
        status: Any = self.it.tier.status()
        assert (status["pages"], status["holds"], status["reservations"]) == (0, 0, 0), status


def crash(it: World, client: Any) -> None:
    """Let a client be gone as one that was killed: its connections end, and it attaches to nobody again."""
    if isinstance(it.deployment, InProcess):
        client.session.dying()
        return
    link, supervisor = client.link, it.deployment.supervisor  # type: ignore[attr-defined]
    with link._changed:
        link._closing = True
    current = link._current
    for connection in (current.session.peer._link, current._link):
        connection._channel._sock.shutdown(socket.SHUT_RDWR)
    until(lambda: all(one.client != link._target.client for one in supervisor._clients.all()))
