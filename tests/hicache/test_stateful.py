"""Any order of operations, against a model that fits on a page: a list of pages, the least recently used first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from devipc.hicache.api import UNFENCED
from devipc.hicache.operations import Event, Status
from devipc.hicache.results import PageResult
from devipc.hicache.ticket import Ticket
from devipc.registry import load_backend
from tests.hicache.scenario import done
from tests.hicache.world import TIMEOUT_S, World

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


class CacheMachine(RuleBasedStateMachine):
    """One client after another on one engine; destinations are poisoned before each restore."""

    def __init__(self) -> None:
        super().__init__()
        self.device: Any = load_backend("host").open_device()
        self.it = World(
            self.device,
            tier_nbytes=TIER_PAGES * PAGE_NBYTES,
            slab_nbytes=TIER_PAGES * PAGE_NBYTES,
            extent_pages=1,
        )
        self.model = Model()
        self.leases: list[tuple[Ticket, list[int]]] = []

    @initialize()
    def begin(self) -> None:
        self.memory = self.it.mla_pool(pages=2 * KEYS, page_tokens=4, layers=8, row=16)
        assert self.memory.layout.page_nbytes == PAGE_NBYTES
        self.join()
        self.keys = self.it.keys(self.handle, KEYS)
        self.memory.fill(range(1, KEYS + 1), self.keys)

    def join(self) -> None:
        self.client = self.it.client()
        self.handle = self.it.register(self.client, self.memory)

    def chosen(self, keys: list[int]) -> Any:
        return self.keys[np.array(keys)]

    @rule(keys=some)
    def match(self, keys: list[int]) -> None:
        found = [key in self.model.present for key in keys]
        assert self.client.find(self.handle, self.chosen(keys)).tolist() == found
        assert self.client.match(self.handle, self.chosen(keys)) == [*found, False].index(False)

    @precondition(lambda self: len(self.model.pinned) < TIER_PAGES)
    @rule(keys=some)
    def backup(self, keys: list[int]) -> None:
        if not self.model.room_for(keys):
            return
        pages = [key + 1 for key in keys]
        ticket = self.client.backup(self.handle, pages, self.chosen(keys), ready=UNFENCED)
        assert done(ticket) == self.model.store(keys)

    @rule(keys=some, partial=st.booleans(), lease=st.booleans())
    def restore(self, keys: list[int], partial: bool, lease: bool) -> None:
        used = self.leases.pop() if lease and self.leases else None
        targets = [KEYS + 1 + number for number in range(len(keys))]
        self.memory.poison(targets)
        ticket = self.client.restore(
            self.handle, self.chosen(keys), targets, ready=UNFENCED, partial=partial, lease=used and used[0]
        )
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
        ticket = self.client.lookup(self.handle, self.chosen(keys))
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
        ticket, found = self.leases.pop(which % len(self.leases))
        assert self.client.release(ticket)
        self.model.release(found)

    # What a lease holds is freed when it ends: the model would have to know how much memory that is.
    @precondition(lambda self: not self.leases)
    @rule(keys=some)
    def invalidate(self, keys: list[int]) -> None:
        assert self.client.invalidate(self.handle, self.chosen(keys)) == self.model.take_away(set(keys))

    @precondition(lambda self: not self.leases)
    @rule(really=st.integers(0, 5))
    def flush(self, really: int) -> None:
        if not really:
            assert self.client.flush(self.handle) == self.model.take_away(self.model.present)

    @rule(really=st.integers(0, 9))
    def crash(self, really: int) -> None:
        """The client is gone; its successor finds what it left."""
        if really:
            return
        holders = list(self.it.tier._holds)
        self.client.session.dying()
        assert not self.it.tier._holds
        order = {lease.op: found for lease, found in self.leases}
        for _, op in holders:
            self.model.release(order[op])
        self.leases.clear()
        self.join()

    def teardown(self) -> None:
        self.it.tier.audit()
        self.it.close()
        self.device.close()


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(300)  # when it fails: shrinking takes longer than the run itself
def test_any_order_of_operations() -> None:
    """About 20,000 operations."""
    run(100, 200)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_any_order_of_many_operations() -> None:
    """About 200,000 operations."""
    run(1000, 200)
