"""Random kills and stops of engine, schedulers and daemon while transfers are under way: no wrong byte, nobody hangs.

Seeded: a run prints its seed, and ``DEVIPC_CHAOS_SEED`` and ``DEVIPC_CHAOS_ROUNDS`` replay or prolong it. Copies are
slowed down so that kills meet operations that were submitted and have no status.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from typing import Any

import pytest

from tests.hicache.daemon.daemons import Daemon, until
from tests.hicache.daemon.scheduler import SchedulerProcess
from tests.hicache.engine_with_faults import FOLDER, MODULE, Faults

ROUNDS = int(os.environ.get("DEVIPC_CHAOS_ROUNDS", "12"))
SEED = int(os.environ.get("DEVIPC_CHAOS_SEED", "0")) or random.randrange(2**31)
SLOW_S = 0.02


class Chaos:
    """A daemon and two schedulers, any of which may be killed at any time."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.rng = random.Random(SEED)
        self.kills = self.under_way = 0
        self.daemon = self._serve()
        self.schedulers = [self._schedule(), self._schedule()]
        self.seed = 0
        self.stored: dict[tuple[int, int], int] = {}  # pool and seed: pages

    def _serve(self) -> Daemon:
        made = Daemon(self.folder, options={"engine_module": MODULE}, environment={FOLDER: self.folder})
        self._slow(made)
        return made

    def _slow(self, one: Daemon) -> None:
        faults = Faults(self.folder, one.status()["engine"]["pid"])
        faults.slow(SLOW_S)
        faults.close()

    def _schedule(self) -> SchedulerProcess:
        made = SchedulerProcess(self.daemon.path)
        made.match(pool=0, count=1, seed=0)
        return made

    def submit(self) -> None:
        """Let both schedulers begin backups that nobody waits for."""
        for scheduler in self.schedulers:
            for pool in (0, 1):
                self.seed += 1
                pages = self.rng.sample(range(1, 33), self.rng.randint(1, 6))
                scheduler.begin_backup(pool=pool, pages=pages, seed=self.seed)
                self.stored[pool, self.seed] = len(pages)

    def strike(self) -> str:
        what = self.rng.choice(["engine", "engine", "scheduler", "scheduler", "stop engine", "stop daemon", "daemon"])
        time.sleep(self.rng.random() * 0.05)
        status = self.daemon.status()
        self.under_way += bool(status["operations"])
        if what == "engine":
            starts = status["engine"]["starts"]
            self._kill(status["engine"]["pid"])
            until(lambda: (found := self.daemon.status())["state"] == "running" and found["engine"]["starts"] > starts)
            self._slow(self.daemon)
        elif what == "scheduler":
            number = self.rng.randrange(2)
            self.schedulers[number].kill()
            self.kills += 1
            self.schedulers[number] = self._schedule()
        elif what == "daemon":
            self.daemon.close()
            self.kills += 1
            self.daemon = self._serve()
            self.stored.clear()
        else:
            pid = status["engine"]["pid"] if what == "stop engine" else self.daemon.process.pid
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self.rng.random() * 0.3)
            os.kill(pid, signal.SIGCONT)
        return what

    def _kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self.kills += 1

    def settle(self) -> dict[str, int]:
        """Wait for every status, then read some of what was stored: what is found must be right."""
        said: dict[str, int] = {}
        for scheduler in self.schedulers:
            for status in scheduler.statuses():
                said[status] = said.get(status, 0) + 1
            scheduler.attached_again()
        for (pool, seed), count in self.rng.sample(sorted(self.stored.items()), min(6, len(self.stored))):
            scheduler = self.rng.choice(self.schedulers)
            outcome = scheduler.restore(pool=pool, pages=list(range(33, 33 + count)), seed=seed)
            assert outcome in ("completed", "refused missing"), outcome
            said[f"restore {outcome}"] = said.get(f"restore {outcome}", 0) + 1
        return said

    def end(self) -> None:
        for scheduler in self.schedulers:
            scheduler.end()
        status: dict[str, Any] = until(lambda: not (found := self.daemon.status())["clients"] and found)
        assert status["operations"] == {}
        assert status["tier"]["holds"] == status["tier"]["reservations"] == 0
        assert self.daemon.end() == 0
        assert "defect" not in self.daemon.said()

    def close(self) -> None:
        for scheduler in self.schedulers:
            scheduler.kill()
        self.daemon.close()


@pytest.mark.long
@pytest.mark.chaos
@pytest.mark.timeout(60 + 10 * ROUNDS)
def test_kills_at_random_bring_no_wrong_byte_and_nobody_hangs() -> None:
    print(f"DEVIPC_CHAOS_SEED={SEED}")
    with tempfile.TemporaryDirectory() as folder:
        chaos = Chaos(folder)
        try:
            for number in range(ROUNDS):
                chaos.submit()
                what = chaos.strike()
                print(f"{number}: {what}, then {chaos.settle()}")
            chaos.end()
        except BaseException:
            print(chaos.daemon.said())
            raise
        finally:
            chaos.close()
        print(f"{chaos.kills} kills, operations under way at {chaos.under_way} of {ROUNDS} strikes")
