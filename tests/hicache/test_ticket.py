"""Waiting for an operation: host waits, callbacks, asyncio; and what the URL of a client may be."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from devipc.errors import ClosedError, CompletionTimeout, DevIPCError, DriverError, PeerGone, UsageError
from devipc.hicache.api import UNFENCED, FencePoint, connect
from devipc.hicache.client.ticket import CancelFlag, Ticket
from devipc.hicache.engine import EngineConfig
from devipc.hicache.local import LocalEngine
from devipc.hicache.operations import Event, Kind, Status
from devipc.hicache.results import Answer, Outcome, PageResult, fresh
from devipc.interfaces.backend import Device
from devipc.registry import load_backend
from devipc.types import Strategy
from tests.completion.rig import pair
from tests.hicache.scenario import done, filled
from tests.hicache.world import TIMEOUT_S, World, until, world

SMALL = EngineConfig(tier_nbytes=2**20, slab_nbytes=2**18)


@pytest.fixture
def device() -> Iterator[Device]:
    opened = load_backend("host").open_device()
    yield opened
    opened.close()


@pytest.fixture
def it(device: Device) -> Iterator[World]:
    with world(device) as made:
        yield made


class Setting:
    """A pool with stored pages, and a restore that is held back until :meth:`go`."""

    def __init__(self, it: World) -> None:
        self.it = it
        self.memory, self.client = it.attention_pool(), it.client()
        self.handle = it.register(self.client, self.memory)
        self.keys = filled(it, self.client, self.memory, self.handle, 4)

    def held(self) -> Ticket:
        lane: Any = self.it.engine.restores
        self.it.stall(lane)
        ticket = self.client.restore(self.handle, self.keys, [10, 11, 12, 13], ready=UNFENCED)
        until(lambda: lane.flying == 1)
        return ticket

    def go(self) -> None:
        self.it.gate.resume_all()


@pytest.fixture
def setting(it: World) -> Setting:
    return Setting(it)


def test_a_wait_that_is_over_ends_nothing(setting: Setting) -> None:
    ticket = setting.held()
    with pytest.raises(CompletionTimeout) as caught:
        ticket.wait(0.02)
    assert "is admitted after 0.02 s" in caught.value.message
    with pytest.raises(CompletionTimeout):
        ticket.result(0.0)
    with pytest.raises(CompletionTimeout):
        ticket.reached(Event.COMPLETED, 0.0)
    assert ticket.fence is not None
    with pytest.raises(CompletionTimeout):
        ticket.fence.synchronize(timeout_s=0.01)
    setting.go()
    assert ticket.wait(TIMEOUT_S).status is Status.COMPLETED
    assert ticket.reached(Event.ADMITTED, 0.0)
    assert not ticket.reached(Event.VISIBLE, 0.0)


def test_callbacks_run_on_their_own_thread_and_may_fail(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    ticket = setting.held()
    seen: list[tuple[str, Status | None]] = []

    def note(ended: Ticket) -> None:
        seen.append((threading.current_thread().name, ended.status))
        if len(seen) == 2:
            raise ValueError("a callback's own trouble")

    for _ in range(3):
        ticket.add_callback(note)
    assert seen == []
    setting.go()
    until(lambda: len(seen) == 3)
    ticket.add_callback(note)
    until(lambda: len(seen) == 4)
    assert set(seen) == {("devipc-hicache-callbacks", Status.COMPLETED)}
    assert "a callback's own trouble" in caplog.text


def test_a_slow_callback_holds_nobody_up(setting: Setting) -> None:
    blocked = threading.Event()
    first = setting.held()

    def slow(_ticket: Ticket) -> None:
        blocked.wait(TIMEOUT_S)

    first.add_callback(slow)
    setting.go()
    first.wait(TIMEOUT_S)
    done(setting.client.restore(setting.handle, setting.keys, [1, 2, 3, 4], ready=UNFENCED))
    blocked.set()


def test_awaiting(setting: Setting) -> None:
    async def main() -> list[Outcome]:
        ticket = setting.held()
        impatient = asyncio.create_task(_outcome(ticket))
        await asyncio.sleep(0.01)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        assert ticket.status is None
        setting.go()
        return [*await asyncio.gather(_outcome(ticket), _outcome(ticket)), await ticket]

    assert [outcome.status for outcome in asyncio.run(main())] == [Status.COMPLETED] * 3


async def _outcome(ticket: Ticket) -> Outcome:
    return await ticket


def test_a_closed_loop_does_not_hurt_the_engine(setting: Setting) -> None:
    ticket = setting.held()

    async def leave() -> None:
        waiting = asyncio.create_task(_outcome(ticket))
        await asyncio.sleep(0.01)
        waiting.cancel()

    asyncio.run(leave())
    setting.go()
    assert ticket.wait(TIMEOUT_S).status is Status.COMPLETED
    done(setting.client.restore(setting.handle, setting.keys, [1, 2, 3, 4], ready=UNFENCED))


def test_a_fence_is_a_ready_point(it: World, setting: Setting) -> None:
    stream = it.stream()
    with pair(it.device, Strategy.HOST_FLAG) as (producer, consumer):
        for fence in (producer, consumer):
            wanted = fence.value + 1
            ticket = setting.client.restore(setting.handle, setting.keys, [1, 2, 3, 4], ready=FencePoint(fence, wanted))
            with pytest.raises(CompletionTimeout):
                ticket.wait(0.02)
            producer.signal(stream, wanted)
            done(ticket)
        late = setting.client.restore(
            setting.handle, setting.keys, [1, 2, 3, 4], ready=FencePoint(consumer, wanted + 1)
        )
    outcome = late.wait(TIMEOUT_S)  # the fence was closed: it will never be reached
    assert outcome.status is Status.DISCARDED
    assert isinstance(outcome.error, DevIPCError)


def test_a_ready_point_that_would_end_its_thread_ends_one_operation(setting: Setting) -> None:
    class Gone:
        def reached(self) -> bool:
            raise asyncio.CancelledError

    for _ in range(2):
        lost = setting.client.backup(setting.handle, [7], setting.keys[:1], ready=Gone())
        assert lost.wait(TIMEOUT_S).status is Status.DISCARDED
    assert done(setting.client.restore(setting.handle, setting.keys[:1], [7], ready=UNFENCED))


def test_one_ready_point_serves_many(it: World, setting: Setting) -> None:
    stream = it.stream()
    point = setting.client.ready(stream)
    for page in range(5, 9):
        done(setting.client.backup(setting.handle, [page], it.keys(setting.handle, 1, seed=page), ready=point))


def test_what_a_caller_changes_later_does_not_matter(it: World, setting: Setting) -> None:
    lane: Any = it.engine.backups
    it.stall(lane)
    blocker = setting.client.backup(setting.handle, [20], it.keys(setting.handle, 1, seed=9), ready=UNFENCED)
    pages, keys = np.array([5, 6]), it.keys(setting.handle, 2, seed=3).copy()
    wanted = keys.copy()
    setting.memory.fill(pages, keys)
    ticket = setting.client.backup(setting.handle, pages, keys, ready=UNFENCED)
    pages[:], keys[:] = 30, 0
    setting.go()
    assert set(done(ticket) + done(blocker)) == {PageResult.STORED}
    done(setting.client.restore(setting.handle, wanted, [25, 26], ready=UNFENCED))
    setting.memory.check([25, 26], wanted)


@pytest.mark.parametrize("pages", [[[1]], [1.5], ["1"]])
def test_pages_are_integers(setting: Setting, pages: Any) -> None:
    with pytest.raises(UsageError):
        setting.client.backup(setting.handle, pages, setting.keys[:1], ready=UNFENCED)
    with pytest.raises(UsageError):
        setting.client.backup(setting.handle, [1], setting.keys[:1, :8], ready=UNFENCED)
    outcome = setting.client.backup(setting.handle, [1, 2], setting.keys[:1], ready=UNFENCED).wait(TIMEOUT_S)
    assert outcome.status is Status.REFUSED


def test_late_answers_change_nothing() -> None:
    told: list[tuple[int, Event]] = []
    ticket = Ticket(
        7,
        Kind.BACKUP,
        page_count=1,
        tell=lambda op, event: told.append((op, event)),
        defer=lambda call: call,
        cancel=CancelFlag(),
    )
    assert ticket.cancel()  # while it is on its way: told once it was submitted
    assert told == []
    ticket.submitted()
    assert told == [(7, Event.CANCEL)]
    ticket.take(Event.SOURCE_RELEASED, Answer())
    assert ticket.status is Status.CANCELLED
    assert not ticket.cancel()
    assert not ticket.confirm()
    assert told == [(7, Event.CANCEL)]


def test_a_client_with_an_engine_of_its_own(device: Device) -> None:
    with connect("inproc:", device=device, config=SMALL) as client:
        assert client.status()["clients"] == 1
        with pytest.raises(PeerGone, match="hicache serve") as caught:
            connect("unix:/nowhere/cache.sock")
        assert caught.value.code == "no_listener"
        with pytest.raises(UsageError):
            connect("unix:/nowhere/cache.sock", config=SMALL)
    client.close()
    with pytest.raises(ClosedError):
        client.status()


@pytest.mark.parametrize("url", ["", "tcp://host:1", "inproc", "inproc:x", "inproc:"])
def test_urls_that_lead_nowhere(url: str) -> None:
    with pytest.raises(UsageError):
        connect(url)


def test_one_engine_or_one_device(device: Device) -> None:
    with LocalEngine(device, SMALL) as engine:
        with pytest.raises(UsageError):
            connect("inproc:", device=device, engine=engine)
        first, second = (connect("inproc:", engine=engine) for _ in range(2))
        assert first.status()["clients"] == 2
        first.close()
        assert second.status()["clients"] == 1
        second.close()


def test_an_engine_that_goes_ends_what_its_clients_have(device: Device) -> None:
    with world(device) as it:
        setting = Setting(it)
        lease = setting.client.lookup(setting.handle, setting.keys)
        ticket = setting.held()
        thread = threading.Thread(target=lambda: it.local.close(TIMEOUT_S))
        thread.start()
        until(lambda: ticket.state == "quarantined")
        assert ticket.status is None  # its pages may still be written to
        assert lease.status is Status.LOST
        assert setting.client.match(setting.handle, setting.keys) == 0
        with pytest.raises(ClosedError):
            setting.client.lookup(setting.handle, setting.keys)
        setting.go()
        assert ticket.wait(TIMEOUT_S).status is Status.LOST
        thread.join(TIMEOUT_S)


def test_an_error_that_is_raised_anew_says_what_was_not_undone() -> None:
    error = DriverError("map failed")
    error.left = (DriverError("unmap failed"),)
    assert fresh(error) is not error
    assert fresh(error).left == error.left
    assert str(fresh(error)) == str(error)
