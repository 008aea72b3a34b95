"""Random kills and faults, see ``tests/hicache/chaos``; and those that must be seen each time, one by one.

``DEVIPC_CHAOS_SEED`` and ``DEVIPC_CHAOS_KILLS`` replay or prolong the random ones.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from devipc.errors import CompletionTimeout, DevIPCError, FencePoisoned
from devipc.hicache.api import UNFENCED
from devipc.hicache.operations import Status
from devipc.hicache.results import PageResult
from devipc.registry import load_backend
from tests.channel.processes import stop
from tests.hicache.chaos.__main__ import run
from tests.hicache.chaos.worker import WorkerProcess
from tests.hicache.daemon.daemons import daemon
from tests.hicache.daemon.scene import Scene
from tests.hicache.engine_with_faults import FOLDER, MODULE, Faults
from tests.hicache.pools import TIMEOUT_S, closed_behind, until

pytestmark = [pytest.mark.chaos, pytest.mark.long]

KILLS = int(os.environ.get("DEVIPC_CHAOS_KILLS", "300"))
SEED = int(os.environ.get("DEVIPC_CHAOS_SEED", "0")) or random.randrange(2**31)
HELD_S = 2.0


@pytest.mark.timeout(300 + 2 * KILLS)
def test_kills_at_random_bring_no_wrong_byte_nobody_hangs_and_nothing_leaks() -> None:
    found = run(KILLS, rigs=3, seed=SEED)
    rigs = found.pop("failed")
    print(found)
    assert not rigs, "\n\n".join(f"seed {rig['seed']}, {rig['failed']}" for rig in rigs)
    assert not found["rigs_that_ended_without_a_word"]
    assert found["kills"] >= KILLS
    assert 2 * found["kills_with_operations_under_way"] >= found["kills"]
    assert found["hung"] == 0


@contextmanager
def scene() -> Iterator[tuple[Scene, Callable[..., None]]]:
    """A client of a daemon whose copies take their time; and a way to bring another fault."""
    device = load_backend("host").open_device()
    with (
        closing(device),
        tempfile.TemporaryDirectory() as folder,
        daemon(options={"engine_module": MODULE}, environment={FOLDER: folder}) as running,
    ):
        made = Scene(device, running, folder)

        def bring(fault: str, *values: float) -> None:
            with Faults(folder, made.engine_pid) as faults:
                getattr(faults, fault)(*values)

        with closed_behind(made):
            bring("slow", 0.05)
            yield made, bring


@pytest.mark.parametrize("who", ["daemon", "engine"])
def test_who_gave_up_on_a_stopped_process_finds_nothing_of_it_when_that_wakes(who: str) -> None:
    with scene() as (it, _):
        client, handle = it.client, it.handle
        keys = it.it.keys(handle, 2, seed=80)
        it.memory.fill([15, 16], keys)
        pid = it.daemon.process.pid if who == "daemon" else it.engine_pid
        ticket = client.backup(handle, [15, 16], keys, ready=UNFENCED)
        stop(pid)
        try:
            with pytest.raises(CompletionTimeout):
                ticket.wait(0.5)
            assert ticket.cancel()
            assert ticket.status is Status.CANCELLED
            it.memory.poison([15, 16])  # the pages are the client's again
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda: not it.daemon.status()["operations"])
        client.ping()
        assert client.match(handle, keys) == 0
        assert client.find(handle, keys).tolist() == [False, False]
        it.check_serves(90)
        assert client.status()["losses"] == 0


def test_a_restore_from_a_stopped_engine_keeps_its_pages_until_that_is_over() -> None:
    """Its pages are given back when nothing writes to them any more, and not when somebody gave up."""
    with scene() as (it, _):
        it.memory.poison([20, 21])
        pid = it.engine_pid
        ticket = it.client.restore(it.handle, it.keys[:2], [20, 21], ready=UNFENCED)
        stop(pid)
        try:
            ticket.cancel()
            with pytest.raises(CompletionTimeout):
                ticket.wait(0.5)
            assert ticket.status is None
        finally:
            os.kill(pid, signal.SIGCONT)
        outcome = ticket.wait(TIMEOUT_S)
        assert outcome.status in (Status.CANCELLED, Status.COMPLETED)
        it.memory.poison([20, 21])
        it.check_serves(91)
        assert it.memory.is_poisoned([20, 21])


def test_a_batch_behind_a_fence_that_is_poisoned_publishes_nothing() -> None:
    """The restore is lost with its engine, or fails there; what was computed from it enters no tier, then or later."""
    with scene() as (it, bring):
        client, handle = it.client, it.handle
        keys = it.it.keys(handle, 6, seed=81)
        it.memory.fill(range(11, 17), keys)
        bring("refuse", 1)
        failed = client.restore(handle, it.keys[:2], [20, 21], ready=UNFENCED)
        batch = [client.backup(handle, [11, 12], keys[:2], ready=it.stream, after=[failed])]
        assert failed.wait(TIMEOUT_S).status is Status.FAILED
        assert batch[0].wait(TIMEOUT_S).status is Status.DISCARDED

        bring("slow", 0.0)
        lost = it.stalled_restore()
        assert lost.fence is not None
        batch.append(client.backup(handle, [13, 14], keys[2:4], ready=it.stream, after=[lost]))
        os.kill(it.engine_pid, signal.SIGKILL)
        with pytest.raises(FencePoisoned):
            lost.fence.synchronize(timeout_s=TIMEOUT_S)
        assert lost.wait(TIMEOUT_S).status in (Status.LOST, Status.FAILED)  # whoever notices first, as for the next
        assert batch[1].wait(TIMEOUT_S).status in (Status.LOST, Status.DISCARDED)
        it.wait_attached(losses=1)
        # The next engine takes the backup, and is told that what it depends on was lost.
        batch.append(client.backup(handle, [15, 16], keys[4:], ready=it.stream, after=[lost]))
        assert batch[2].wait(TIMEOUT_S).status is Status.DISCARDED
        until(lambda: not it.daemon.status()["operations"])
        assert not client.find(handle, keys).any()
        with pytest.raises(DevIPCError):
            batch[2].result(0.0)
        it.check_serves(92)


def test_a_main_thread_that_holds_the_interpreter_is_no_death() -> None:
    """For two seconds no thread of a scheduler runs, in mid-transfer: it stays attached, and others are served."""
    with scene() as (it, _), tempfile.TemporaryDirectory() as folder:
        worker: Any = WorkerProcess(folder, 1)
        try:
            worker.join(path=it.daemon.path)
            worker.begin(seed=1, first_seed=0, stored=[])
            assert worker.counts.open > 0
            worker.tell("hold_interpreter", delay_s=HELD_S)
            began, slowest, rounds = time.monotonic(), 0.0, 0
            while time.monotonic() < began + HELD_S - 0.5:
                at = time.monotonic()
                keys = it.it.keys(it.handle, 1, seed=1000 + rounds)
                it.memory.fill([11], keys)
                done = it.client.backup(it.handle, [11], keys, ready=it.stream).result(TIMEOUT_S)
                assert list(done) == [PageResult.STORED]
                slowest, rounds = max(slowest, time.monotonic() - at), rounds + 1
            print(f"{rounds} backups of another scheduler meanwhile, the slowest took {1e3 * slowest:.0f} ms")
            assert worker.hear() is None
            ended = worker.settle()
            assert not any("lost" in name for name in ended), ended
            assert worker.status()["losses"] == 0
            assert len(it.daemon.status()["clients"]) == 2
            assert it.client.status()["losses"] == 0
            worker.close()
        finally:
            worker.kill()
