"""The ends of an engine process: its own, its client's and its supervisor's, each in the middle of copies."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from devipc.errors import CompletionTimeout, DeviceLostError, DevIPCError, PeerGone, ResourceExhausted, StaleError
from devipc.hicache.daemon.remote import EngineProcess, EngineSpawn
from devipc.hicache.daemon.remotecopies import RemotePool
from devipc.hicache.planning.planner import Direction
from devipc.hicache.wire import jobs as j
from devipc.hicache.wire.protocol import Point
from tests.channel.processes import stop
from tests.hicache.engine_client import ClientError
from tests.hicache.engine_with_faults import PIN_NBYTES
from tests.hicache.engine_world import PAGES, EngineWorld, engine_world, soon
from tests.hicache.pools import TIMEOUT_S, until

PAGE = np.array([PAGES - 1])
ROOT = Path(__file__).parents[2]
BACKENDS = ["host", pytest.param("cuda", marks=[pytest.mark.simulator, pytest.mark.long])]


def ended(it: EngineWorld) -> None:
    """It was told twice, in this order, and nothing of it is left."""
    until(lambda: len(it.ends) == 2)
    dying, gone = it.ends
    assert not isinstance(dying, DeviceLostError)
    assert isinstance(gone, DeviceLostError)
    assert it.process.ended
    assert not [name for name in os.listdir(it.folder) if ".sock" in name]


@pytest.mark.chaos
@pytest.mark.parametrize("backend", BACKENDS)
def test_killed_while_it_copies(backend: str) -> None:
    """Waiters of the client are released at once; jobs end when nothing of the process is left, not before."""
    with engine_world(backend) as it:
        it.start()
        with it.client() as client, it.faults() as faults:
            it.attach(client)
            faults.stall("backup")
            job = it.start_job(client, Direction.BACKUP, [1, 2], it.places(2), slot=1, op=1)
            until(lambda: client.base(slot=1) > 0)
            waiting = it.ready(Point(fence=9, n=1))
            assert not waiting.reached()
            client.tell("wait", direction="backup", n=1)
            time.sleep(0.05)
            began = time.monotonic()
            it.process.kill()
            with pytest.raises(ClientError, match="FencePoisoned peer_died"):
                client.hear()
            released_s = time.monotonic() - began
            print(f"released after {1e3 * released_s:.1f} ms")
            assert released_s < 2.0
            with pytest.raises(DevIPCError):
                until(waiting.reached)
            ended(it)
            with pytest.raises(DeviceLostError):
                job.poll()
            late = it.start_job(client, Direction.BACKUP, [1], it.places(1), slot=2, op=2)
            with pytest.raises(DeviceLostError):
                late.poll()
            assert isinstance(it.open_pool(2, 1), DeviceLostError)
            with pytest.raises(PeerGone):
                it.process.status()
            it.process.close_client(it.remote)


@pytest.mark.long
@pytest.mark.chaos
@pytest.mark.parametrize("call", [1, 2, 3, 5, 9, 14, 20])
@pytest.mark.parametrize("backend", ["host", pytest.param("cuda", marks=pytest.mark.simulator)])
def test_killed_at_any_call(backend: str, call: int) -> None:
    with engine_world(backend) as it:
        it.start()
        with it.client() as client, it.faults() as faults:
            it.attach(client)
            faults.kill_at(call)
            jobs = [
                it.start_job(client, direction, [number + 1], it.places(1, number), slot=number, op=number + 1)
                for number, direction in enumerate([Direction.BACKUP, Direction.RESTORE] * 4)
            ]
            until(lambda: it.process.ended)
            ended(it)
            finished = 0
            for job in jobs:
                try:
                    finished += job.poll()
                except DeviceLostError:
                    continue
            assert finished < len(jobs)
            it.process.close_client(it.remote)


@pytest.mark.long
@pytest.mark.chaos
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_lost_device_ends_it(backend: str) -> None:
    with engine_world(backend) as it:
        it.start()
        with it.client() as client, it.faults() as faults:
            it.attach(client)
            faults.stall("restore")
            job = it.start_job(client, Direction.RESTORE, [1], it.places(1), slot=1, op=1)
            until(lambda: client.base(slot=1) > 0)
            faults.lose()
            ended(it)
            assert "lost" in str(it.ends[0]).lower() or "device" in str(it.ends[0]).lower()
            with pytest.raises(DeviceLostError):
                job.poll()


@pytest.mark.long
@pytest.mark.chaos
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_device_that_is_lost_while_nobody_copies_ends_it(backend: str) -> None:
    """Nobody could attach to it any more, so that nobody would ever begin a copy that finds out."""
    with engine_world(backend) as it:
        it.start()
        with it.faults() as faults:
            faults.lose()
        ended(it)
        assert "lost" in it.ends[0].message


def test_nonsense_among_the_orders_ends_it_with_a_reason() -> None:
    for ring in (Direction.BACKUP, None):
        with engine_world("host") as it:
            it.start()
            outlet: Any = it.carrier._orders if ring is None else it.carrier.copies(ring)._outlet
            outlet.send(b"\x93\xa4Move\x01")
            ended(it)
            assert it.ends[0].code == "frame"


@pytest.mark.long
@pytest.mark.chaos
def test_a_client_that_dies_while_its_pages_move() -> None:
    with engine_world("host") as it:
        it.start()
        with it.client() as client, it.faults() as faults:
            it.attach(client)
            faults.stall("restore")
            job = it.start_job(client, Direction.RESTORE, [1], it.places(1), slot=1, op=1)
            until(lambda: client.base(slot=1) > 0)
            client.kill()
            time.sleep(0.1)
            assert not job.poll()
            closed: list[bool] = []
            it.carrier.close_pool(it.pool.opened, lambda: closed.append(True))
            with pytest.raises(CompletionTimeout) as caught:  # the copy is under way
                it.process.close_client(it.remote, timeout_s=0.2)
            assert caught.value.code == "still_mapped"
            assert not closed
            status: Any = it.process.status()
            assert status["lanes"]["restore"]["flying"] == 1
            faults.resume("restore")
            until(job.poll)
            assert job.error is None
        it.process.close_client(it.remote)
        until(lambda: closed == [True])
        assert it.process.status()["clients"] == {}
        assert not it.ends


def test_a_client_that_nobody_closes_again_is_forgotten_when_its_memory_is_unmapped() -> None:
    """As one that could not attach after all while the engine stood still: it may come again."""
    with engine_world("host") as it:
        it.start()
        with it.client() as client, it.faults() as faults:
            it.attach(client)
            faults.stall("restore")
            job = it.start_job(client, Direction.RESTORE, [1], it.places(1), slot=1, op=1)
            until(lambda: client.base(slot=1) > 0)
            with pytest.raises(CompletionTimeout):
                it.process.close_client(it.remote, timeout_s=0.1)
            faults.resume("restore")
            until(job.poll)
            until(lambda: it.process.status()["clients"] == {})
            client.leave()
            it.attach(client)
            it.close_pool()
            it.process.close_client(it.remote)
        assert not it.ends


def test_late_orders_for_an_older_attachment_of_a_client_touch_nothing_of_the_next() -> None:
    with engine_world("host") as it:
        it.start()
        with it.client() as client:
            it.attach(client)
            older, late, found = it.pool.opened, it.carrier.next_number(), []  # type: ignore[var-annotated]
            it.process.close_client(it.remote)
            client.leave()
            it.attach(client)
            closed: list[int] = []
            it.carrier.close_pool(older, lambda: closed.append(1))
            until(lambda: bool(closed))
            it.carrier._open[late] = RemotePool(it.client_id, (1, 1), late), found.append
            it.carrier.order(j.OpenPool(late, it.client_id, 1, 1, it.layout_bytes))
            until(lambda: bool(found))
            assert isinstance(found[0], StaleError)
            assert it.move(client, Direction.RESTORE, [1], it.places(1), slot=1, op=1).error is None
            it.close_pool()
            client.unshare(number=1, generation=1, chunk=0, timeout_s=10)
            it.process.close_client(it.remote)


@pytest.mark.long
@pytest.mark.chaos
@pytest.mark.parametrize("strategy", ["event", "polling"])
def test_a_client_that_stands_still_delays_nobody(strategy: str) -> None:
    """Its ring of signals is full; its jobs end all the same, and what it waits for is reached when it goes on."""
    with engine_world("host", strategy=strategy) as it:
        it.start()
        with it.client() as client:
            it.attach(client)
            it.move(client, Direction.RESTORE, [1], it.places(1), slot=1, op=1)
            base = client.base(slot=1)
            stop(client.process.pid)
            try:
                for number in range(60):
                    places, fence = it.places(1), it.remote.fence(2, number + 1)
                    job = it.lanes[Direction.RESTORE].start(it.pool, Direction.RESTORE, PAGE, places, fence)
                    assert soon(job.poll, 5.0) < 4.0
            finally:
                client.process.send_signal(signal.SIGCONT)
            client.wait(direction="restore", n=base + 5 * 61 - 1)
            it.process.close_client(it.remote)


def test_what_keeps_it_from_starting_is_raised_here() -> None:
    with engine_world("host", variables={PIN_NBYTES: str(2**20)}) as it:
        with pytest.raises(ResourceExhausted, match="cannot be pinned"):
            it.start(pin_required=True)
    with engine_world("nothing") as it:
        with pytest.raises(DevIPCError, match="nothing"):
            it.start()


def test_a_module_that_ends_at_once_is_noticed_at_once() -> None:
    with engine_world("host") as it:
        began = time.monotonic()
        with pytest.raises((PeerGone, CompletionTimeout)):
            EngineProcess(EngineSpawn(folder=it.folder, module="tests.hicache.faulty"), it.arena.fileno(), 2**20)
        assert time.monotonic() - began < 15


SUPERVISOR = """
import sys, time, numpy as np
from devipc.hicache.moving.arena import HostArena
from devipc.hicache.daemon.remote import EngineProcess, EngineSpawn
arena = HostArena(2**20)
process = EngineProcess(EngineSpawn(folder=sys.argv[1], module=sys.argv[2]), arena.fileno(), arena.nbytes)
print(process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.chaos
@pytest.mark.parametrize("stopped", [pytest.param(False, marks=pytest.mark.long), True])
def test_it_ends_with_its_supervisor(tmp_path: Path, *, stopped: bool) -> None:
    """Also one that cannot run a line of Python."""
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    command = [sys.executable, "-c", SUPERVISOR, str(folder), "devipc.hicache.engineproc"]
    supervisor = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    try:
        pid = int(supervisor.stdout.readline())
        engine = os.pidfd_open(pid)
        try:
            if stopped:
                stop(pid)
            supervisor.kill()
            assert select.select([engine], [], [], 5.0)[0], "the engine outlives its supervisor"
        finally:
            os.close(engine)
    finally:
        supervisor.kill()
        supervisor.wait()
        supervisor.stdout.close()


@pytest.mark.long
def test_it_closes_in_good_order_with_a_client_and_again() -> None:
    with engine_world("host") as it:
        it.start()
        with it.client() as client:
            it.attach(client)
            it.move(client, Direction.BACKUP, [1], it.places(1), slot=1, op=1)
            assert it.process.close(TIMEOUT_S)
            assert it.process.close(TIMEOUT_S)
            until(lambda: client.state() == "closed")
        assert not it.ends
