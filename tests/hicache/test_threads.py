"""Threads that meet in the client and the engine: who holds up whom, and what happens when there is none to be had."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from devipc import turns
from devipc.errors import CompletionTimeout, ResourceExhausted
from devipc.hicache import local as local_module
from devipc.hicache.api import UNFENCED, connect
from devipc.hicache.daemon.watchdog import Watchdog
from devipc.hicache.engine import EngineConfig
from devipc.hicache.engineproc.joblane import JobLane
from devipc.hicache.engineproc.watch import Watcher
from devipc.hicache.local import LocalEngine
from devipc.hicache.moving import arena
from devipc.hicache.moving.arena import HostArena
from devipc.hicache.operations import Status
from devipc.hicache.planning.planner import Direction
from devipc.hicache.requests import StatusRequest
from devipc.hicache.wire.pulse import Pulse
from devipc.interfaces.backend import Device
from devipc.registry import load_backend
from tests.hicache.faulty import FaultyDevice
from tests.hicache.scenario import done
from tests.hicache.world import TIMEOUT_S, run_threads, until, world
from tests.host.test_interrupts import interrupt_at

SMALL = EngineConfig(tier_nbytes=2**20, slab_nbytes=2**18, chunk_nbytes=2**14)


@pytest.fixture
def device() -> Iterator[Device]:
    opened = load_backend("host").open_device()
    yield opened
    opened.close()


@pytest.fixture
def eager() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager")
def test_clients_that_ask_for_the_status_at_once_do_not_wait_for_each_other(device: Device) -> None:
    with world(device) as it:
        first, second = it.client(), it.client()
        asked = []

        def ask(client: object) -> None:
            for _ in range(1500):
                asked.append(client.status()["clients"])  # type: ignore[attr-defined]

        run_threads(lambda: ask(first), lambda: ask(second))
        assert asked == [2] * 3000


@contextlib.contextmanager
def no_thread_to_be_had() -> Iterator[None]:
    """Let every thread that is started need more address space than there is."""
    before = threading.stack_size(2**46)
    try:
        yield
    finally:
        threading.stack_size(before)


@pytest.mark.usefixtures("eager")
def test_threads_that_close_at_once(device: Device) -> None:
    for _ in range(15):
        client = connect("inproc:", device=device, config=SMALL)
        together = threading.Barrier(4)

        def close(client: Any = client, together: threading.Barrier = together) -> None:
            together.wait(TIMEOUT_S)
            client.close(timeout_s=TIMEOUT_S)

        run_threads(close, close, close, close)


def test_closing_an_engine_that_another_thread_closes_is_over_in_time(device: Device) -> None:
    local = LocalEngine(device, SMALL)
    local.carrier.pinned.close, close = lambda: time.sleep(0.3), local.carrier.pinned.close  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: local.close(TIMEOUT_S))
    thread.start()
    until(lambda: local.engine.restores._stopped and local.engine.backups._stopped)
    with pytest.raises(CompletionTimeout):
        local.close(0.01)
    thread.join(TIMEOUT_S)
    close()


def test_a_close_that_is_interrupted_holds_no_other_thread(device: Device) -> None:
    local = LocalEngine(device, SMALL)
    point, hit = 0, True
    while hit:
        point += 1
        hit = interrupt_at(point, lambda: local.close(TIMEOUT_S), (str(local_module.__file__), str(turns.__file__)))
        run_threads(lambda: local.close(TIMEOUT_S))  # again does nothing, where it is given back
    assert point > 5


def test_a_callback_needs_a_thread_before_the_operation_ends(device: Device) -> None:
    with world(device) as it:
        memory, client = it.attention_pool(), it.client()
        handle = it.register(client, memory)
        client.backup(handle, [1], it.keys(handle, 1), ready=UNFENCED).wait(TIMEOUT_S)
        lane: Any = it.engine.backups
        it.stall(lane)
        ticket = client.backup(handle, [2], it.keys(handle, 1, seed=2), ready=UNFENCED)
        with no_thread_to_be_had():
            with pytest.raises(ResourceExhausted) as caught:
                ticket.add_callback(lambda _ticket: None)
            assert caught.value.code == "threads"
            it.gate.resume_all()
            assert ticket.wait(TIMEOUT_S).status is Status.COMPLETED
        assert it.engine.lost is None


def test_what_a_callback_or_a_hook_raises_is_its_own_trouble(device: Device) -> None:
    with world(device) as it:
        memory, client = it.attention_pool(), it.client()
        handle = it.register(client, memory)
        seen: list[Any] = []

        def leave(*_ticket: object) -> None:
            raise SystemExit

        lane: Any = it.engine.backups
        it.stall(lane)
        ticket = client.backup(handle, [1], it.keys(handle, 1), ready=UNFENCED)
        ticket.add_hook(leave)
        ticket.add_hook(lambda: seen.append("hook"))
        for callback in (leave, seen.append):
            ticket.add_callback(callback)
        it.gate.resume_all()
        until(lambda: len(seen) == 2)
        assert seen == ["hook", ticket]
        assert it.engine.lost is None
        done(client.backup(handle, [2], it.keys(handle, 1, seed=2), ready=UNFENCED))


def test_a_callback_that_does_not_return_does_not_keep_a_client_from_closing(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    client, go = connect("inproc:", device=device, config=SMALL), threading.Event()
    ticket = client._desk.submit(lambda op: StatusRequest(op=op))
    ticket.add_callback(lambda _ticket: until(go.is_set))
    began = time.monotonic()
    client.close(timeout_s=0.2)
    assert time.monotonic() - began < TIMEOUT_S / 2
    assert "has not returned" in caplog.text
    go.set()


def test_who_stops_awaiting_leaves_nothing_behind(device: Device) -> None:
    with world(device) as it:
        memory, client = it.attention_pool(), it.client()
        handle = it.register(client, memory)
        ticket = client.backup(handle, [1], it.keys(handle, 1), ready=UNFENCED, confirm=False)
        hooks = len(ticket._hooks)

        async def impatient() -> None:
            for _ in range(20):
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(ticket, 0.001)

        asyncio.run(impatient())
        assert len(ticket._hooks) == hooks
        ticket.confirm()
        done(ticket)


def test_an_engine_without_threads_keeps_nothing(device: Device) -> None:
    faulty: Any = FaultyDevice(device)
    made: list[Any] = []
    create, destroy = device.transfer.create_stream, device.transfer.destroy_stream  # type: ignore[union-attr]

    def created(**options: Any) -> Any:
        made.append(create(**options))
        return made[-1]

    def destroyed(stream: Any) -> None:
        destroy(stream)
        made.remove(stream)

    faulty.transfer.create_stream, faulty.transfer.destroy_stream = created, destroyed
    with no_thread_to_be_had(), pytest.raises(ResourceExhausted) as caught:
        LocalEngine(faulty, SMALL)
    assert caught.value.code == "threads"
    assert made == []
    assert faulty.transfer.pinned == 0


def a_watchdog() -> None:
    nothing: Any = None
    Watchdog(nothing, nothing, list, lambda _life: [], stall_s=1.0, stuck_s=1.0, reap_s=1.0).start()


def a_watcher() -> None:
    nothing: Any = None
    Watcher(nothing, nothing, nothing, report=lambda _report: None, lose=lambda _error: None).start()


def a_lane() -> None:
    nothing: Any = None
    copies: Any = SimpleNamespace(fan=SimpleNamespace())
    told: dict[str, Any] = {"report": lambda _report: None, "lose": lambda _error: None, "announce": lambda: None}
    JobLane(Direction.BACKUP, copies, nothing, nothing, nothing, **told).start()


@pytest.mark.parametrize("begin", [Pulse, a_watchdog, a_watcher, a_lane])
def test_what_cannot_begin_for_want_of_a_thread_says_what_to_do(begin: Callable[[], object]) -> None:
    with no_thread_to_be_had(), pytest.raises(ResourceExhausted, match="no thread to be had to") as caught:
        begin()
    assert caught.value.code == "threads"
    assert "ulimit -u" in caught.value.remedy


def test_the_first_touch_needs_no_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_STEP_NBYTES", 2**16)
    with no_thread_to_be_had():
        made = HostArena(2**20, threads=4)
    made.close()


def test_an_interrupted_first_touch_waits_for_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is unmapped next: nobody may still be filling it."""
    monkeypatch.setattr(arena, "_STEP_NBYTES", 2**16)
    touching = threading.Event()

    class Kernel:
        def madvise(self, *_arguments: object) -> int:
            if threading.current_thread() is threading.main_thread():
                assert touching.wait(TIMEOUT_S)
                raise KeyboardInterrupt
            touching.set()
            time.sleep(0.05)
            return 0

    monkeypatch.setattr(arena, "_libc", Kernel())
    with pytest.raises(KeyboardInterrupt):
        HostArena(2**22, threads=2)
    assert not [one for one in threading.enumerate() if one.name == "devipc-touch"]
