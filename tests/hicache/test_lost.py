"""A device that is lost: every operation ends, new ones are refused by type, and the engine closes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from devipc.errors import CompletionTimeout, DeviceLostError, DevIPCError
from devipc.hicache.api import UNFENCED
from devipc.hicache.operations import Event, Status
from devipc.interfaces.backend import Device
from devipc.registry import load_backend
from tests.hicache.scenario import done, filled
from tests.hicache.world import TIMEOUT_S, World, until
from tests.simulator import build
from tests.simulator.harness import Parent, Simulation


def lose_with_work_everywhere(device: Device, lose: Callable[[], None]) -> World:
    """Operations that wait, copy, wait to be confirmed, and hold a lease; then the device is lost."""
    it = World(device)
    memory, client = it.attention_pool(), it.client()
    handle, stream = it.register(client, memory), it.stream()
    keys = filled(it, client, memory, handle, 4)
    unconfirmed = client.backup(handle, [5], it.keys(handle, 1, seed=5), ready=UNFENCED, confirm=False)
    assert unconfirmed.reached(Event.SOURCE_RELEASED, TIMEOUT_S)
    it.gate.stall(stream)
    it.transfer.copy(stream, memory.built.exports[0][0], memory.built.exports[0][0], 1)
    lanes: Any = (it.engine.backups, it.engine.restores)
    for lane in lanes:
        it.stall(lane)
    tickets = [
        client.backup(handle, [6], it.keys(handle, 1, seed=6), ready=UNFENCED),
        client.restore(handle, keys[:2], [10, 11], ready=UNFENCED),
        client.backup(handle, [7], it.keys(handle, 1, seed=7), ready=stream),
        client.restore(handle, keys[2:], [12, 13], ready=stream),
    ]
    given_up = client.restore(handle, keys[:1], [20], ready=UNFENCED)
    until(lambda: lanes[0].flying == 1 and lanes[1].flying == 2)
    given_up.cancel()
    until(lambda: "cancelling" in {op.state for op in lanes[1]._work})  # it is told, and a loss overtakes what is told
    lease = client.lookup(handle, keys)
    lose()
    outcomes = [ticket.wait(TIMEOUT_S) for ticket in tickets]
    assert [outcome.status for outcome in outcomes] == [
        Status.FAILED,
        Status.FAILED,
        Status.DISCARDED,
        Status.DISCARDED,
    ]
    assert all(isinstance(outcome.error, DeviceLostError) for outcome in outcomes)
    assert given_up.wait(TIMEOUT_S).status is Status.CANCELLED
    with pytest.raises(DeviceLostError):
        tickets[0].result(0)
    # What was copied before is in host memory, and may still be published.
    unconfirmed.confirm()
    assert done(unconfirmed)
    assert client.match(handle, it.keys(handle, 1, seed=5)) == 1
    for ticket in (
        client.backup(handle, [1], it.keys(handle, 1, seed=9), ready=UNFENCED),
        client.restore(handle, keys, [1, 2, 3, 4], ready=UNFENCED),
        client.lookup(handle, keys),
    ):
        outcome = ticket.wait(TIMEOUT_S)
        assert outcome.status is Status.REFUSED
        assert isinstance(outcome.error, DeviceLostError)
    assert client.status()["lost"]
    assert client.flush(handle) == 5
    client.unregister(handle)
    assert lease.status is None
    client.close(timeout_s=TIMEOUT_S)
    client.check_ends(lookups=True)
    it.tier.audit()
    status: Any = it.tier.status()
    assert status["holds"] == status["reservations"] == 0
    it.local.close(TIMEOUT_S)
    return it


def test_on_the_host() -> None:
    device: Any = load_backend("host").open_device()
    it = lose_with_work_everywhere(device, device.lose)
    device.close()
    it.staging.unmap()


def test_a_device_that_is_lost_after_a_defect() -> None:
    """Copies that outlive the engine's end are waited for only as long as there is a device."""
    device: Any = load_backend("host").open_device()
    it = World(device)
    memory, client = it.attention_pool(), it.client()
    handle = it.register(client, memory)
    keys = filled(it, client, memory, handle, 2)
    lane: Any = it.engine.restores
    it.stall(lane)
    running = client.restore(handle, keys, [10, 11], ready=UNFENCED)
    until(lambda: lane.flying == 1)
    it.engine.lose(DevIPCError("a defect", code="defect", remedy="report it"))
    with pytest.raises(CompletionTimeout):
        running.wait(0.05)
    device.lose()
    outcome = running.wait(TIMEOUT_S)
    assert outcome.status is Status.FAILED
    assert isinstance(outcome.error, DeviceLostError)
    client.close(timeout_s=TIMEOUT_S)
    it.local.close(TIMEOUT_S)
    device.close()
    it.staging.unmap()


@pytest.mark.simulator
def test_on_simulated_cuda() -> None:
    assert Simulation(build.build("cuda")).run(on_cuda) == "ended"


def on_cuda(_parent: Parent) -> str:
    from tests.simulator.control import Simulator

    lose_with_work_everywhere(load_backend("cuda").open_device(), Simulator.loaded().lose)
    return "ended"
