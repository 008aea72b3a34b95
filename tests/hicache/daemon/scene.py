"""A daemon with an engine that tests can hold back, and one client of it."""

from __future__ import annotations

from typing import Any

from devipc.hicache.api import UNFENCED, HiCacheClient, connect
from devipc.hicache.operations import Event
from devipc.hicache.results import PageResult
from devipc.interfaces.backend import Device
from tests.hicache.daemon.daemons import Daemon
from tests.hicache.engine_with_faults import Faults
from tests.hicache.pools import TIMEOUT_S, PoolMemory, until
from tests.hicache.world import World

__all__ = ["Scene"]


class Scene:
    """A daemon whose engine can be held back, one client, and a pool of it with eight pages in the host tier."""

    def __init__(self, device: Device, running: Daemon, folder: str) -> None:
        self.daemon = running
        self.folder = folder
        self.it = World(device)  # for its pools
        self.stream = self.it.stream()
        self.memory: PoolMemory = self.it.attention_pool()
        self.client: HiCacheClient = connect("unix:" + running.path, device=device)
        self.handle = self.it.register(self.client, self.memory)
        self.keys = self.it.keys(self.handle, 8)
        self.memory.fill(range(1, 9), self.keys)
        ticket = self.client.backup(self.handle, range(1, 9), self.keys, ready=UNFENCED)
        assert set(ticket.result(TIMEOUT_S)) == {PageResult.STORED}

    def stalled_restore(self) -> Any:
        """Begin a restore whose copies do not end."""
        with Faults(self.folder, self.engine_pid) as faults:
            faults.stall("restore")
        self.memory.poison([20, 21])
        ticket = self.client.restore(self.handle, self.keys[:2], [20, 21], ready=UNFENCED)
        assert ticket.reached(Event.ADMITTED, TIMEOUT_S)
        until(lambda: int(self.status["lanes"]["restore"]["flying"]) == 1)
        return ticket

    @property
    def status(self) -> Any:
        return self.client.status()

    @property
    def engine_pid(self) -> int:
        return int(self.status["engine"]["pid"])

    def wait_attached(self, *, losses: int = 0) -> None:
        """Wait until it is attached, after so many losses: others may hear of a death before the client does."""
        until(lambda: (now := self.status)["losses"] >= losses and not now["degraded"])

    def check_serves(self, seed: int) -> None:
        """Another page goes there and comes back."""
        keys = self.it.keys(self.handle, 2, seed=seed)
        self.memory.fill([11, 12], keys)
        assert set(self.client.backup(self.handle, [11, 12], keys, ready=self.stream).result(TIMEOUT_S)) == {1}
        self.memory.poison([13, 14])
        done = self.client.restore(self.handle, keys, [13, 14], ready=UNFENCED)
        assert set(done.result(TIMEOUT_S)) == {PageResult.RESTORED}
        self.memory.check([13, 14], keys)
        assert self.client.match(self.handle, keys) == 2

    def close(self) -> None:
        self.client.close(timeout_s=TIMEOUT_S)
        self.it.close()
