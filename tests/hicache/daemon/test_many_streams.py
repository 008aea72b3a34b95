"""A client that uses more streams than it keeps fences for: no operation is refused for it, however many there were."""

from __future__ import annotations

import time

import pytest

from devipc.hicache.api import connect
from devipc.hicache.client import readypoints
from devipc.hicache.results import PageResult
from devipc.registry import load_backend
from tests.hicache.daemon.daemons import daemon
from tests.hicache.pools import TIMEOUT_S
from tests.hicache.world import World

ENOUGH = 1100  # fences, of which the engine keeps 1024 open


@pytest.mark.long
def test_any_number_of_fences_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readypoints, "_MAX_STREAMS", 2)
    device = load_backend("host").open_device()
    it = World(device)  # for its pools
    with daemon() as running:
        memory = it.attention_pool()
        client = connect("unix:" + running.path, device=device)
        handle = it.register(client, memory)
        keys = it.keys(handle, 1)
        streams = [it.stream() for _ in range(3)]
        for number in range(ENOUGH):
            stream = streams[number % 3]
            stream.call(lambda: time.sleep(0.001))  # else the point is reached when it is submitted
            done = client.backup(handle, [1], keys, ready=stream).result(TIMEOUT_S)
            assert done in ([PageResult.PRESENT], [PageResult.STORED])
        client.close(timeout_s=TIMEOUT_S)
    it.close()
    device.close()
