"""A status is of one moment, whatever ends or begins while it is made."""

from __future__ import annotations

import time
from typing import Any

from devipc.hicache.api import UNFENCED
from devipc.registry import load_backend
from tests.hicache.daemon.daemons import until
from tests.hicache.deployment import DAEMON, deployed
from tests.hicache.scenario import done
from tests.hicache.world import World, world


def test_a_status_is_of_one_life_and_counts_each_client_once() -> None:
    device = load_backend("host").open_device()
    with deployed(DAEMON), world(device) as it:
        first = _look(it, it.deployment.supervisor)  # type: ignore[attr-defined]
        # Nor is an engine killed for what the one before it did.
        keeper: Any = it.deployment.supervisor._keeper  # type: ignore[attr-defined]
        second = keeper.life
        keeper.kill(first, "it stood still")
        assert not second.process.wait_ended(timeout_s=0.1)
        assert keeper.life is second
    device.close()


def _look(it: World, supervisor: Any) -> Any:
    """Ask for the status while the only engine ends and its client goes, and while the next one begins."""
    keeper, tier, clients = supervisor._keeper, supervisor._tier, supervisor._clients
    client = it.client()
    memory = it.mla_pool(pages=4, page_tokens=4, layers=8, row=16)
    handle = it.register(client, memory)
    done(client.backup(handle, [1, 2], it.keys(handle, 2), ready=UNFENCED))
    moved = 2 * memory.layout.page_nbytes
    look_at_tier, all_clients, first = tier.status, clients.all, keeper.life

    def gone() -> Any:
        until(lambda: keeper.current is None)
        return look_at_tier()

    def followed() -> Any:
        until(lambda: keeper.life is not None)
        return look_at_tier()

    def left() -> Any:
        found = all_clients()
        deadline = time.monotonic() + 0.3  # it may have to wait for the status
        while found and not found[0].over and time.monotonic() < deadline:
            time.sleep(0.001)
        return found

    first.process.kill()
    for tier.status, clients.all in ((gone, left), (followed, all_clients), (look_at_tier, all_clients)):
        status = supervisor.status()
        engine = status["engine"]
        assert (engine["pid"] > 0) == bool(status["device"])
        assert (engine["pid"] > 0) >= (status["state"] == "running")
        assert status["lanes"]["backup"]["moved_nbytes"] == moved
        assert status["submitted"]["backup"] == 1
    assert engine["starts"] == 2
    assert "signal 9" in engine["last_end"]
    return first
