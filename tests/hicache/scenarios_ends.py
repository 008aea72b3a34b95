"""The engine's process ends in the middle: who waits is released, nothing wrong is found, another engine serves."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from devipc.errors import FencePoisoned
from devipc.hicache.api import UNFENCED
from devipc.hicache.operations import Event, Status
from devipc.hicache.results import PageResult
from devipc.interfaces.backend import Device
from tests.hicache.deployment import DAEMON
from tests.hicache.scenario import done, filled, scenario
from tests.hicache.world import TIMEOUT_S, until, world


@scenario(only=DAEMON)
def an_engine_that_is_killed_poisons_its_fences_and_another_one_serves(device: Device) -> None:
    """A stream, or the thread that feeds it, waits for a restore that stands still; then there is no engine."""
    with world(device) as it:
        memory, client = it.attention_pool(), it.client()
        handle, stream = it.register(client, memory), it.stream()
        keys = filled(it, client, memory, handle, 4)
        lanes: Any = (it.engine.backups, it.engine.restores)
        for lane in lanes:
            it.stall(lane)
        memory.poison([20, 21])
        restore = client.restore(handle, keys[:2], [20, 21], ready=stream)
        lost = it.keys(handle, 1, seed=1)
        backup = client.backup(handle, [5], lost, ready=UNFENCED)
        assert restore.reached(Event.ADMITTED, TIMEOUT_S)
        until(lambda: all(lane.flying == 1 for lane in lanes))
        fence, seen = restore.fence, []
        assert fence is not None

        def follow() -> None:
            try:
                fence.wait(stream, timeout_s=TIMEOUT_S)
            except FencePoisoned:
                seen.append("poisoned")
            it.transfer.synchronize_stream(stream)
            seen.append("released")

        follower = threading.Thread(target=follow)
        follower.start()
        until(lambda: not fence.query())
        assert not seen
        it.deployment.kill_engine()
        follower.join(TIMEOUT_S)
        assert seen[-1:] == ["released"]
        with pytest.raises(FencePoisoned):
            fence.synchronize(timeout_s=TIMEOUT_S)
        # Whoever is first: the client, which hears of the death itself, or the supervisor, when nothing is left of it.
        for ticket in (restore, backup):
            assert ticket.wait(TIMEOUT_S).status in (Status.LOST, Status.FAILED)
        until(lambda: (now := client.link.status())["losses"] and not now["degraded"])
        it.deployment.check_decision(client.link)
        assert (client.match(handle, lost), client.match(handle, keys)) == (0, 4)
        memory.poison([20, 21])
        again = client.restore(handle, keys[:2], [20, 21], ready=it.stream())
        assert set(done(again)) == {PageResult.RESTORED}
        memory.check([20, 21], keys[:2])
        memory.fill([6], lost)
        assert done(client.backup(handle, [6], lost, ready=it.stream())) == [PageResult.STORED]
