"""A daemon that stands still for a moment, over messages: what finds no room is refused as busy, and nobody is lost."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from devipc.hicache.api import UNFENCED, connect
from devipc.hicache.operations import Status
from devipc.registry import load_backend
from devipc.wire import MAX_BODY_NBYTES
from tests.hicache.daemon.daemons import daemon
from tests.hicache.pools import TIMEOUT_S
from tests.hicache.world import World

KEYS = 3 * MAX_BODY_NBYTES // 16  # a request of several datagrams


@pytest.mark.chaos
def test_a_stopped_daemon_ends_no_connection() -> None:
    device = load_backend("host").open_device()
    it = World(device)  # for its pools
    with daemon(options={"messages": "true"}) as running:
        memory = it.attention_pool()
        client = connect("unix:" + running.path, device=device)
        handle = it.register(client, memory)
        keys = it.keys(handle, 1)
        client.backup(handle, [1], keys, ready=UNFENCED).result(TIMEOUT_S)
        many = np.concatenate((keys, np.zeros((KEYS - 1, 16), np.uint8)))
        os.kill(running.process.pid, signal.SIGSTOP)
        tickets = []
        try:
            for _ in range(40):
                tickets.append(client.lookup(handle, many))
                if tickets[-1].status is Status.REFUSED:
                    break
            refused = tickets.pop().wait(0.0)
            assert refused.error is not None
            assert (refused.error.code, refused.error.retryable) == ("busy", True)
            assert tickets
            assert client.match(handle, keys) == 1
        finally:
            os.kill(running.process.pid, signal.SIGCONT)
        for ticket in tickets:
            assert client.release(ticket) or ticket.status is Status.COMPLETED
            assert ticket.wait(TIMEOUT_S).status is Status.COMPLETED
        assert set(client.restore(handle, keys, [5], ready=UNFENCED).result(TIMEOUT_S)) == {3}
        status = client.status()
        assert (status["losses"], status["degraded"]) == (0, "")
        client.close(timeout_s=TIMEOUT_S)
    it.close()
    device.close()
