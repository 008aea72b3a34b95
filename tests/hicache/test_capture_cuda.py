"""Streams that are captured into a graph: nothing of the cache may become a part of one."""

from __future__ import annotations

import ctypes

import pytest

from devipc.errors import UsageError
from devipc.hicache.api import UNFENCED
from devipc.registry import load_backend
from tests.hicache.scenario import done, refused
from tests.hicache.world import world
from tests.simulator import build
from tests.simulator.harness import Parent, Simulation


@pytest.mark.simulator
def test_a_capturing_stream_is_no_ready_point() -> None:
    assert Simulation(build.build("cuda")).run(capture) == "refused"


def capture(_parent: Parent) -> str:
    device = load_backend("cuda").open_device()
    driver = ctypes.CDLL("libcuda.so.1")
    with world(device) as it:
        memory, client, stream = it.attention_pool(), it.client(), it.stream()
        handle, graph = it.register(client, memory), ctypes.c_void_p()
        keys = it.keys(handle, 1)
        assert driver.cuStreamBeginCapture_v2(ctypes.c_void_p(stream.handle), 1) == 0
        for call in (
            lambda: client.ready(stream),
            lambda: client.backup(handle, [1], keys, ready=stream),
            lambda: client.restore(handle, keys, [1], ready=stream),
        ):
            refused(call, UsageError, "capturing")
        assert driver.cuStreamEndCapture(ctypes.c_void_p(stream.handle), ctypes.byref(graph)) == 0
        assert client.match(handle, keys) == 0
        done(client.backup(handle, [1], keys, ready=stream))
        restore = client.restore(handle, keys, [2], ready=UNFENCED)
        done(restore)
    device.close()
    return "refused"
