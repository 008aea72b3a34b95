"""How long others are held up by a SIGKILL: of a scheduler in mid-transfer, of an engine or daemon that is waited for.

The bounds are those of an idle machine; what is measured is printed.
"""

from __future__ import annotations

import os
import select
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from devipc.registry import load_backend
from tests.hicache.daemon.daemons import Daemon, daemon, until
from tests.hicache.daemon.scene import Scene
from tests.hicache.daemon.scheduler import schedulers
from tests.hicache.engine_with_faults import FOLDER, MODULE, Faults
from tests.hicache.pools import TIMEOUT_S
from tests.simulator import build
from tests.simulator.harness import Parent, Simulation

pytestmark = [pytest.mark.long, pytest.mark.chaos]

LET_GO_S, RELEASED_S, ATTACHED_S = 1.0, 0.1, 2.0


def mapped(pid: int) -> int:
    """How many mappings of memory files a process has: device memory of the host backend, rings, slots, fences."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:")


def killed_in_mid_transfer(parent: Parent | None, backend: str) -> dict[str, float]:
    """Kill one of two schedulers; return how long after its pidfd was readable its memory was let go."""
    used = _used_bytes if backend == "cuda" else lambda: 0
    options: dict[str, object] = {"engine_module": MODULE, "backend": backend}
    with (
        tempfile.TemporaryDirectory() as folder,
        daemon(options=options, environment={FOLDER: folder}) as one,
        schedulers(one.path, 1, backend) as (other,),
    ):
        engine = int(one.status()["engine"]["pid"])
        assert other.backup(pool=0, pages=[1, 2], seed=5) == "completed"
        assert other.restore(pool=0, pages=[3, 4], seed=5) == "completed"
        alone = mapped(engine), mapped(one.process.pid)
        used_alone = used()
        with schedulers(one.path, 1, backend) as (victim,), Faults(folder, engine) as faults:
            assert used() > used_alone or backend == "host"
            faults.slow(0.02)
            for number in range(6):
                victim.backup(pool=0, pages=[4 * number + 1, 4 * number + 2], seed=number, wait=False)
            until(lambda: one.status()["lanes"]["backup"]["flying"])
            pidfd = os.pidfd_open(victim.process.pid)
            try:
                victim.process.kill()
                killed = time.monotonic()
                assert select.select([pidfd], [], [], TIMEOUT_S)[0]
            finally:
                os.close(pidfd)
            began = time.monotonic()
            until(lambda: (mapped(engine), mapped(one.process.pid)) <= alone and used() <= used_alone)
            let_go_s = time.monotonic() - began
        status = one.status()
        assert len(status["clients"]) == 1
        assert status["tier"]["holds"] == status["tier"]["reservations"] == 0
        assert status["engine"]["starts"] == 1
        assert other.restore(pool=0, pages=[3, 4], seed=5) == "completed"
        return {"pidfd_s": began - killed, "let_go_s": let_go_s}


def _used_bytes() -> int:
    from tests.simulator.control import Simulator

    return Simulator.loaded().used_bytes()


def test_a_schedulers_memory_is_let_go_on_the_host() -> None:
    found = killed_in_mid_transfer(None, "host")
    print(found)
    assert found["let_go_s"] < LET_GO_S


@pytest.mark.simulator
def test_a_schedulers_memory_is_let_go_on_simulated_cuda() -> None:
    found = Simulation(build.build("cuda")).run(killed_in_mid_transfer, "cuda")
    print(found)
    assert found["let_go_s"] < LET_GO_S


def killed_while_a_stream_waits(_parent: Parent, who: str) -> dict[str, float]:
    """Let a stream wait for a restore that stands still, and kill; return when it ran on, and what followed when."""
    device: Any = load_backend("cuda").open_device()
    options: dict[str, object] = {"engine_module": MODULE, "backend": "cuda"}
    with tempfile.TemporaryDirectory() as folder, daemon(options=options, environment={FOLDER: folder}) as running:
        scene = Scene(device, running, folder)
        scene.stalled_restore().fence.wait(scene.stream, timeout_s=TIMEOUT_S)
        marker = device.transfer.create_marker()
        device.transfer.record(marker, scene.stream)
        time.sleep(0.2)
        assert not device.transfer.query_marker(marker)
        starts = running.status()["engine"]["starts"]
        pid = scene.engine_pid if who == "engine" else running.process.pid
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        device.transfer.synchronize_stream(scene.stream)
        released_s = time.monotonic() - began
        assert device.transfer.query_marker(marker)
        if who == "engine":
            again = running
            until(lambda: (found := running.status()["engine"])["starts"] > starts and found["pid"])
        else:
            running.wait()
            again = Daemon(os.path.dirname(running.path), options=options, environment={FOLDER: folder})
        try:
            returned = time.monotonic()
            scene.wait_attached(losses=1)
            attached_s = time.monotonic() - returned
            scene.check_serves(60)
            device.transfer.destroy_marker(marker)
            scene.close()
        finally:
            if again is not running:
                again.close()
    device.close()
    return {"released_s": released_s, "attached_s": attached_s}


@pytest.mark.simulator
@pytest.mark.parametrize("who", ["engine", "daemon"])
def test_a_stream_that_waits_is_released_and_the_client_comes_back(who: str) -> None:
    found = Simulation(build.build("cuda")).run(killed_while_a_stream_waits, who)
    print(found)
    assert found["released_s"] < RELEASED_S
    assert found["attached_s"] < ATTACHED_S
