"""Tables in one process and copies in another: operations end as they do in one, also when the engine dies."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from devipc.errors import DeviceLostError, StaleError
from devipc.hicache.engine import Engine, EngineConfig
from devipc.hicache.operations import Event
from devipc.hicache.requests import Answers, Backup, RegisterPool, Restore, UnregisterPool
from devipc.hicache.results import Answer, PageResult
from devipc.hicache.tier.hosttier import HostTier
from devipc.hicache.tier.index import IndexWriter
from devipc.hicache.wire.protocol import Point
from devipc.hicache.wire.slots import Readiness
from tests.channel.processes import stop
from tests.hicache.engine_client import ClientProcess, keys_of
from tests.hicache.engine_world import PAGES, EngineWorld, engine_world
from tests.hicache.pools import TIMEOUT_S, closed_behind, until

ENDS = {"completed", "failed", "cancelled", "refused", "timed_out", "discarded", "lost"}


class Heard(Answers):
    """What a client would be told."""

    def __init__(self) -> None:
        self.events: dict[int, list[tuple[Event, Answer]]] = {}

    def answer(self, op: int, event: Event, answer: Answer, passed: tuple[Event, ...] = ()) -> None:
        self.events.setdefault(op, []).extend((one, answer) for one in (*passed, event))

    def engine_dying(self) -> None:
        pass

    def engine_gone(self) -> None:
        pass

    def end(self, op: int) -> tuple[str, Answer]:
        until(lambda: bool(self.events.get(op)) and self.events[op][-1][0].value in ENDS)
        event, answer = self.events[op][-1]
        return event.value, answer


class Brain:
    """An engine's tables over the carrier of an :class:`EngineWorld`."""

    def __init__(self, it: EngineWorld, client: ClientProcess) -> None:
        self.it, self.client = it, client
        self.index = IndexWriter(max_entries=1024)
        self.tier = HostTier(it.arena.chunks(), self.index, slab_nbytes=2**18)
        self.heard = Heard()
        self.connect()

    def connect(self) -> None:
        self.engine = Engine(self.it.process.carrier, self.tier, EngineConfig())
        self.it.process.on_end(self.engine.lose)
        self.session = self.engine.attach(self.it.client_id, self.heard)

    def register(self, op: int) -> None:
        request = RegisterPool(
            op=op, pool=1, generation=1, layout=self.it.layout, addresses=(), namespace=bytes(range(16))
        )
        self.session.submit(request)
        assert self.heard.end(op)[0] == "completed", self.heard.end(op)

    def _common(self, op: int, pages: list[int], keys: Any, ready: Any, timeout_s: float) -> dict[str, Any]:
        self.client.begin(slot=op, op=op)
        return {
            "op": op,
            "pool": 1,
            "generation": 1,
            "pages": np.array(pages, np.int64),
            "keys": keys,
            "ready": ready or self.it.remote.ready(None),
            "fence": self.it.remote.fence(op, op),
            "timeout_s": timeout_s,
            "partial": False,
        }

    def backup(self, op: int, pages: list[int], keys: Any, *, ready: Any = None, timeout_s: float = TIMEOUT_S) -> None:
        common = self._common(op, pages, keys, ready, timeout_s)
        self.session.submit(Backup(**common, cancel=self.it.remote.cancel(op), confirmed=True))

    def restore(self, op: int, pages: list[int], keys: Any, *, ready: Any = None, timeout_s: float = TIMEOUT_S) -> None:
        self.session.submit(Restore(**self._common(op, pages, keys, ready, timeout_s)))

    def close(self) -> None:
        self.session.dying()
        assert self.session.wait_idle(timeout_s=TIMEOUT_S)
        self.engine.detach(self.session)
        if not self.it.process.ended:
            self.it.process.close_client(self.it.remote)
        self.engine.close(TIMEOUT_S)
        self.tier.audit()
        status: Any = self.tier.status()
        assert status["holds"] == status["reservations"] == 0
        self.index.close()


@contextlib.contextmanager
def brain() -> Iterator[Brain]:
    with engine_world("host") as it:
        it.start()
        with it.client() as client:
            it.attach(client)
            it.close_pool()
            made = Brain(it, client)
            with closed_behind(made):
                made.register(1)
                yield made


def test_a_pool_that_is_being_opened_is_left_by_its_generation_alone() -> None:
    with brain() as it:
        request = RegisterPool(
            op=2, pool=2, generation=5, layout=it.it.layout, addresses=(), namespace=bytes(range(16))
        )
        stop(it.client.process.pid)
        try:
            it.session.submit(request)
            for op, generation in ((3, 4), (4, 5), (5, 5)):
                it.session.submit(UnregisterPool(op=op, pool=2, generation=generation))
            ends = {op: it.heard.end(op) for op in (3, 5)}
            assert [event for event, _ in ends.values()] == ["refused", "refused"]
            assert all(isinstance(answer.error, StaleError) for _, answer in ends.values())
            assert not it.heard.events.get(4)
        finally:
            it.client.process.send_signal(signal.SIGCONT)
        assert it.heard.end(2)[0] == "refused"
        assert it.heard.end(4)[0] == "completed"


def test_operations_end_as_in_one_process() -> None:
    with brain() as it:
        client, keys = it.client, keys_of(4, 7)
        client.fill(pages=[1, 2, 3, 4], seed=7)
        it.backup(2, [1, 2, 3, 4], keys)
        event, answer = it.heard.end(2)
        assert event == "completed"
        assert answer.results is not None
        assert (answer.results == PageResult.STORED).all()
        assert client.slots_end(slot=2) == "settled"
        assert [event.value for event, _ in it.heard.events[2]] == ["source_released", "visible", "completed"]
        # A backup of what is there moves nothing, and ends all the same.
        it.backup(3, [1, 2], keys[:2])
        assert it.heard.end(3)[0] == "completed"
        # Ready points: a word of the client's, and a fence on a stream that is held back.
        client.poison(pages=[10, 11, 12, 13, 14, 15, 16, 17])
        it.restore(4, [10, 11, 12, 13], keys, ready=it.it.remote.ready(None, 4))
        client.ready_fence(number=1, stalled=True)
        client.signal(number=1, n=1)
        it.restore(5, [14, 15, 16, 17], keys, ready=it.it.remote.ready(Point(fence=1, n=1)))
        time.sleep(0.05)
        assert [event.value for event, _ in it.heard.events[4]] == ["admitted"]
        assert client.is_poisoned(pages=[10, 11, 12, 13, 14, 15, 16, 17])
        client.say_ready(slot=4, readiness=Readiness.REACHED)
        assert it.heard.end(4)[0] == "completed"
        client.resume(number=1)
        assert it.heard.end(5)[0] == "completed"
        client.check(pages=[10, 11, 12, 13], seed=7)
        client.check(pages=[14, 15, 16, 17], seed=7)
        # Deadlines, cancel words, bad ready points.
        it.restore(6, [20], keys[:1], ready=it.it.remote.ready(None, 6), timeout_s=0.05)
        assert it.heard.end(6)[0] == "timed_out"
        assert client.slots_end(slot=6) == "timeout"
        it.restore(7, [20], keys[:1], ready=it.it.remote.ready(None, 7))
        client.say_ready(slot=7, readiness=Readiness.NEVER)
        assert it.heard.end(7)[0] == "discarded"
        with it.it.faults() as faults:
            faults.stall("backup")
            it.backup(8, [21], keys_of(1, 8))
            until(lambda: client.base(slot=8) > 0)
            client.cancel(slot=8)
            faults.resume("backup")
        until(lambda: not [op for op in it.session.open_ops() if op.op == 8])
        assert [event.value for event, _ in it.heard.events[8]] == ["source_released"]
        assert client.slots_end(slot=8) == "settled"
        assert it.tier.status()["pages"] == 4
        it.session.submit(UnregisterPool(op=9, pool=1, generation=1))
        assert it.heard.end(9)[0] == "completed"
        client.unshare(number=1, generation=1, chunk=0, timeout_s=10)


def test_what_a_commit_puts_off_is_done_once_its_client_has_been_told() -> None:
    with brain() as it:
        it.backup(2, [1, 2, 3, 4], keys_of(4, 7))
        assert it.heard.end(2)[0] == "completed"
        until(lambda: not it.tier._residents.untidy)
        assert len(it.tier._residents._slot_of) == 4


@pytest.mark.chaos
def test_an_engine_that_dies_fails_what_moves_when_it_is_gone_and_another_goes_on_with_the_tier() -> None:
    with brain() as it:
        client, keys = it.client, keys_of(4, 7)
        client.fill(pages=[1, 2, 3, 4], seed=7)
        it.backup(2, [1, 2, 3, 4], keys)
        assert it.heard.end(2)[0] == "completed"
        with it.it.faults() as faults:
            faults.stall("restore")
        it.restore(3, [10, 11], keys[:2])
        it.restore(4, [12], keys[2:3], ready=it.it.remote.ready(None, 4))
        it.backup(5, [5], keys_of(1, 9), ready=it.it.remote.ready(None, 5))
        until(lambda: client.base(slot=3) > 0)
        it.it.process.kill()
        event, answer = it.heard.end(3)
        assert event == "failed"
        assert isinstance(answer.error, DeviceLostError)
        assert it.it.process.ended
        for op in (4, 5):
            assert it.heard.end(op)[0] == "discarded"
        it.restore(6, [10], keys[:1])
        assert it.heard.end(6)[0] == "refused"
        assert client.slots_end(slot=3) == "device_lost"
        it.session.dying()
        assert it.session.wait_idle(timeout_s=TIMEOUT_S)
        it.engine.close(TIMEOUT_S)
        old = it.it.process
        it.it.process.close_client(it.it.remote)
        # The tier is kept: another process, and a new session of the same client.
        it.it.start()
        assert old.close(TIMEOUT_S)
        client.leave()
        it.it.attach(client)
        it.it.close_pool()
        it.connect()
        it.register(10)
        client.poison(pages=list(range(1, PAGES)))
        it.restore(11, [20, 21, 22, 23], keys)
        assert it.heard.end(11)[0] == "completed"
        client.check(pages=[20, 21, 22, 23], seed=7)
