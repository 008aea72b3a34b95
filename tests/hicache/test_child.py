"""An engine process and the thread that asked for it: the kernel would end it with the thread that started it."""

from __future__ import annotations

import tempfile
import threading

from devipc.hicache.daemon.remote import EngineProcess, EngineSpawn
from devipc.hicache.moving.arena import HostArena
from tests.hicache.pools import TIMEOUT_S


def test_it_outlives_the_thread_that_asked_for_it() -> None:
    made: list[EngineProcess] = []
    with tempfile.TemporaryDirectory() as folder:
        arena = HostArena(2**20)
        asking = threading.Thread(
            target=lambda: made.append(EngineProcess(EngineSpawn(folder=folder), arena.fileno(), arena.nbytes))
        )
        asking.start()
        asking.join(TIMEOUT_S)
        [process] = made
        assert not process.wait_ended(timeout_s=0.1)
        assert "lanes" in process.status()
        assert process.close()
        arena.close()
