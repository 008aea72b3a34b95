"""What a client refuses before anything is submitted, and what it must not refuse."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from devipc.errors import ClosedError, StaleError, UsageError
from devipc.hicache.api import UNFENCED
from devipc.hicache.client import registry
from devipc.hicache.operations import Status
from devipc.interfaces.backend import Device
from devipc.registry import load_backend
from tests.hicache.scenario import done, filled
from tests.hicache.world import TIMEOUT_S, World, run_threads, world


@pytest.fixture
def device() -> Iterator[Device]:
    opened = load_backend("host").open_device()
    yield opened
    opened.close()


@pytest.fixture
def it(device: Device) -> Iterator[World]:
    with world(device) as made:
        yield made


@pytest.fixture
def eager() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_a_pool_of_another_client_is_none_of_this_one(it: World) -> None:
    first, second, mine, theirs = it.client(), it.client(), it.attention_pool(), it.attention_pool()
    handle, other = it.register(first, mine), it.register(second, theirs)
    keys = filled(it, first, mine, handle, 2)
    theirs.poison([1, 2])
    for ticket in (
        second.restore(handle, keys, [1, 2], ready=UNFENCED),
        second.backup(handle, [1, 2], it.keys(handle, 2, seed=5), ready=UNFENCED),
    ):
        outcome = ticket.wait(TIMEOUT_S)
        assert outcome.status is Status.REFUSED
        assert isinstance(outcome.error, StaleError)
    assert theirs.is_poisoned([1, 2])
    done(second.restore(other, keys, [1, 2], ready=UNFENCED))


@pytest.mark.parametrize("wrong", [None, [None], 3, ["restore"]])
def test_an_operation_is_not_begun_with_what_is_no_ticket(it: World, wrong: Any) -> None:
    memory, client = it.attention_pool(), it.client()
    handle = it.register(client, memory)
    keys = filled(it, client, memory, handle, 1)
    before = len(client.tickets)
    with pytest.raises(UsageError) as caught:
        client.backup(handle, [2], it.keys(handle, 1, seed=2), ready=UNFENCED, after=wrong)
    assert caught.value.code == "ticket"
    with pytest.raises(UsageError):
        client.restore(handle, keys, [2], ready=UNFENCED, lease="lease")  # type: ignore[arg-type]
    with pytest.raises(UsageError) as caught:
        client.restore(handle, keys, [2], ready=wrong)
    assert caught.value.code == "ready_point"
    with pytest.raises(UsageError):
        client.restore(handle, keys, [[1], [2, 3]], ready=UNFENCED)
    assert len(client.tickets) == before


def test_dependencies_may_come_from_a_generator(it: World) -> None:
    memory, client = it.attention_pool(), it.client()
    handle = it.register(client, memory)
    keys = filled(it, client, memory, handle, 2)
    restores = [client.restore(handle, keys[n : n + 1], [10 + n], ready=UNFENCED) for n in range(2)]
    after: Any = (one for one in restores)
    done(client.backup(handle, [5], it.keys(handle, 1, seed=2), ready=UNFENCED, after=after))


@pytest.mark.once
@pytest.mark.usefixtures("eager")
def test_the_last_transfer_that_was_agreed_may_follow_at_once(device: Device) -> None:
    with world(device, max_ops=1) as it:
        memory, client = it.attention_pool(), it.client()
        handle = it.register(client, memory)
        key = filled(it, client, memory, handle, 1)
        statuses = {client.backup(handle, [1], key, ready=UNFENCED).wait(TIMEOUT_S).status for _ in range(8000)}
        assert statuses == {Status.COMPLETED}


def test_what_an_interrupt_leaves_without_a_ticket_is_given_up(it: World) -> None:
    memory, client, stream = it.attention_pool(), it.client(), it.stream()
    handle = it.register(client, memory)
    keys = filled(it, client, memory, handle, 4)
    it.gate.stall(stream)
    it.transfer.copy(stream, memory.built.exports[0][0], memory.built.exports[0][0], 1)
    link: Any = client.link
    submit = link.submit

    def interrupted(request: Any) -> None:
        submit(request)
        raise KeyboardInterrupt

    link.submit = interrupted
    calls: list[Callable[[], object]] = [
        lambda: client.restore(handle, keys, [10, 11, 12, 13], ready=stream),
        lambda: client.backup(handle, [10], it.keys(handle, 1, seed=2), ready=stream),
        lambda: client.lookup(handle, keys),
    ]
    for call in calls:
        with pytest.raises(KeyboardInterrupt):
            call()
    link.submit = submit
    done(client.restore(handle, keys, [20, 21, 22, 23], ready=UNFENCED))
    client.unregister(handle, timeout_s=TIMEOUT_S)
    assert it.tier.status()["holds"] == 0
    assert client._desk.open_tickets() == []


@pytest.mark.usefixtures("eager")
def test_a_pool_may_be_left_by_several_threads(it: World) -> None:
    client, memory = it.client(), it.attention_pool()
    for _ in range(60):
        handle = it.register(client, memory)
        run_threads(*[lambda handle=handle: client.unregister(handle)] * 4)


def test_pools_that_were_left_cost_nothing(it: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REMEMBERED", 4)
    client, memory = it.client(), it.attention_pool()
    foreign = it.register(it.client(), memory)
    with pytest.raises(StaleError):
        client.unregister(foreign)
    for _ in range(20):
        client.unregister(handle := it.register(client, memory))
    client.unregister(handle)  # again changes nothing
    assert not client._registry._leaving
    assert len(client._registry._left) == 4


def test_a_closed_client_makes_no_ready_point(it: World) -> None:
    client, memory, stream = it.client(), it.attention_pool(), it.stream()
    handle = it.register(client, memory)
    client.close(timeout_s=TIMEOUT_S)
    markers = len(it.local.markers._all)
    for call in (
        lambda: client.ready(stream),
        lambda: client.backup(handle, [1], it.keys(handle, 1), ready=stream),
    ):
        with pytest.raises(ClosedError):
            call()
    assert len(it.local.markers._all) == markers


def test_a_child_leaves_its_parents_client_alone() -> None:
    """Forked while another thread is in the engine: no lock of it is ever waited for, and nothing is given back."""
    code = """
import os, sys, threading
from devipc.errors import ForkError
from devipc.hicache.api import UNFENCED
from devipc.registry import load_backend
from tests.hicache.world import TIMEOUT_S, World

it = World(load_backend("host").open_device())
memory, client = it.attention_pool(), it.client()
handle = it.register(client, memory)
keys = it.keys(handle, 2)
locks = (client._desk._numbers, client._search._lock, it.tier._lock, it.engine._lock, client.session._lock)
for lock in locks:
    lock.acquire()
child = os.fork()
if not child:
    calls = (
        lambda: client.backup(handle, [1, 2], keys, ready=UNFENCED),
        lambda: client.match(handle, keys),
        lambda: client.unregister(handle),
        client.status,
    )
    refused = 0
    for call in calls:
        try:
            call()
        except ForkError:
            refused += 1
    threading.Timer(TIMEOUT_S, os._exit, (9,)).start()
    client.close()
    it.local.close()
    os._exit(refused)
for lock in reversed(locks):
    lock.release()
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
client.backup(handle, [1, 2], keys, ready=UNFENCED).result(TIMEOUT_S)
it.close()
sys.exit(code)
"""
    ended = subprocess.run([sys.executable, "-c", code], timeout=4 * TIMEOUT_S, check=False)
    assert ended.returncode == 4
