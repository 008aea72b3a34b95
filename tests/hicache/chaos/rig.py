"""One rig: a daemon, its engine process and two schedulers, of which one after the other is killed in mid-operation.

Run as ``python -m tests.hicache.chaos.rig SEED KILLS``; prints a line of JSON a round, and one at the end. Each round
begins operations, applies a fault, kills, lets everything come back, and looks at what must hold then.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from typing import Any

from tests.hicache.chaos.engine import PIN_FILE
from tests.hicache.chaos.holdings import holds, listing
from tests.hicache.chaos.ledger import LedgerReader
from tests.hicache.chaos.patience import Patience
from tests.hicache.chaos.worker import WorkerProcess
from tests.hicache.daemon.daemons import Daemon, has_ended, until
from tests.hicache.engine_with_faults import FOLDER, Faults
from tests.hicache.enough import Enough

SLOW_S = 0.02
ROUND_S = 60.0
START_S = 45.0  # a process that starts beside many others takes its time, which is no hang
PIN_NBYTES = 2**20
WARM = 12
SLACK = 2  # what completion needs depends on how it was decided, which differs between two lives
VICTIMS = {"scheduler": 9, "engine": 7, "daemon": 3, "scheduler and engine": 2, "scheduler and daemon": 1}
FAULTS = {
    "nothing": 8,
    "engine stopped": 2,
    "daemon stopped": 2,
    "scheduler stopped": 2,
    "stalled stream": 2,
    "supervisor's socket dropped": 1,
    "engine's socket dropped": 1,
    "device lost": 1,
    "copies refused": 1,
    "pinning fails": 1,
    "pool registered anew": 1,
    "daemon drained": 1,
}


class Rig:
    """See the module."""

    def __init__(self, folder: str, seed: int) -> None:
        self.folder = folder
        self.rng = random.Random(seed)
        self.kills = self.made = self.name = self.begun_ops = 0
        self.stored: list[list[int]] = []  # pool, name and pages of each backup that may be found
        self.faults: Faults | None = None
        self.ledger: LedgerReader | None = None
        self.most: dict[str, tuple[int, ...]] = {}
        self.seen: Counter[str] = Counter()
        self.rounds = 0
        self.workers: list[WorkerProcess] = []
        self._serve()
        self.spare = self._worker()
        try:
            for _ in range(2):
                self.workers.append(self.spare)  # whether it gets there or not
                self._join()
        except BaseException:
            self._disband()
            raise

    # --- processes ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        if self.ledger is not None:
            self.ledger.close()
        path = os.path.join(self.folder, "ledger")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        made = Daemon(
            self.folder,
            options={"engine_module": "tests.hicache.chaos.engine", "reap_s": "5"},
            environment={FOLDER: self.folder, "DEVIPC_TRIAL_CACHE": self.folder},
            ledger=path,
        )
        self.daemon = made
        self.ledger = LedgerReader(path)
        assert made.ready["engine_pid"], "the engine ended by itself before the daemon was ready"
        self._engine_is(int(made.ready["engine_pid"]), 1)
        self.stored.clear()

    def _engine_is(self, pid: int, starts: int) -> None:
        self.engine_pid, self.starts = pid, starts
        self.engine_fd = os.pidfd_open(pid)

    def _worker(self) -> WorkerProcess:
        self.made += 1
        return WorkerProcess(self.folder, self.made)

    def _join(self) -> WorkerProcess:
        """Let the spare take part; another is started, so that the next one does not wait for its imports."""
        joined, self.spare = self.spare, self._worker()
        joined.join(path=self.daemon.path)
        return joined

    def _slow(self, delay_s: float) -> None:
        if self.faults is None:
            self.faults = Faults(self.folder, self.engine_pid)
        self.faults.slow(delay_s)

    def _engine_is_gone(self) -> None:
        os.close(self.engine_fd)
        if self.faults is not None:
            self.faults.close()
            self.faults = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.folder, f"{self.engine_pid}.faults"))

    # --- one round ---------------------------------------------------------------------------------------------------

    def round(self) -> dict[str, Any]:
        """Do everything once, and return what there is to tell."""
        rng = self.rng
        fault, victim = (rng.choices(list(table), list(table.values()))[0] for table in (FAULTS, VICTIMS))
        which, pause_s, sleep_s = rng.randrange(2), rng.random() * 0.03, rng.random() * 0.3
        told: dict[str, Any] = {"round": self.rounds, "fault": fault, "victim": victim}
        self._slow(SLOW_S)
        for worker in self.workers:
            self.stored += worker.begin(seed=rng.randrange(2**31), first_seed=self.name, stored=self.stored[-20:])
            self.name += 6
        time.sleep(pause_s)
        undo = self._apply(fault, which, sleep_s)
        open_ops = [worker.counts.open for worker in self.workers]
        told["killed"] = killed = self._kill(victim, which)
        if victim == "scheduler":
            open_ops = [self.workers[which].counts.open] * 2  # as it was when it was killed
        # A scheduler's kill counts by its own operations, that of engine or daemon by those of both.
        told["under_way"] = [open_ops[which] if one == "scheduler" else sum(open_ops) for one in killed]
        undo()
        began = time.monotonic()
        self._come_back(victim, which, fault, told)
        told["back_s"] = time.monotonic() - began
        self._settle(told)
        self.rounds += 1
        return told

    def _apply(self, fault: str, which: int, sleep_s: float) -> Any:
        """Bring a fault; return how it is undone, if it is, after the kill."""
        pids = {"daemon": self.daemon.process.pid, "scheduler": self.workers[1 - which].pid}
        who, _, how = fault.partition(" ")
        assert self.faults is not None
        if how == "stopped":
            target = self.engine_fd if who == "engine" else os.pidfd_open(pids[who])
            signal.pidfd_send_signal(target, signal.SIGSTOP)

            def go_on() -> None:
                time.sleep(sleep_s)
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(target, signal.SIGCONT)
                if who != "engine":
                    os.close(target)

            return go_on
        direction = ("backup", "restore")[which]
        match fault:
            case "stalled stream":
                self.faults.stall(direction)

                def resume() -> None:
                    time.sleep(sleep_s)
                    with contextlib.suppress(OSError, ValueError):  # its engine was killed
                        assert self.faults is not None
                        self.faults.resume(direction)

                return resume
            case "supervisor's socket dropped" | "engine's socket dropped":
                self.workers[1 - which].drop(which=fault.partition("'")[0])
            case "device lost":
                self.faults.lose()
            case "copies refused":
                self.faults.refuse(3)
            case "pinning fails":
                with open(os.path.join(self.folder, PIN_FILE), "w") as file:
                    file.write(str(PIN_NBYTES))
                return lambda: None
            case "pool registered anew":
                self.workers[1 - which].tell("bump", pool=which)
            case "daemon drained":
                self.daemon.process.send_signal(signal.SIGTERM)
        return lambda: None

    def _kill(self, victim: str, which: int) -> list[str]:
        killed = []
        for one in victim.split(" and "):
            if one == "scheduler":
                self.workers[which].process.kill()
            elif one == "daemon":
                self.daemon.process.kill()
            else:
                try:  # it may have ended by itself: of a device that was lost, of a daemon that drains
                    signal.pidfd_send_signal(self.engine_fd, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            killed.append(one)
        self.kills += len(killed)
        return killed

    # --- and back ----------------------------------------------------------------------------------------------------

    def _come_back(self, victim: str, which: int, fault: str, told: dict[str, Any]) -> None:
        if "daemon" in victim or fault == "daemon drained":
            self.daemon.wait()
            began = time.monotonic()
            until(lambda: has_ended(self.engine_fd), 5.0)
            told["engine_outlived_s"] = time.monotonic() - began
            self._engine_is_gone()
            self._account(settled=False)
            self._no_defect()
            self.daemon.close()
            os.unlink(self.daemon.log)
            self._serve()
        else:
            self._engine_comes_back("engine" in victim or fault == "device lost")
        returned = time.monotonic()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.folder, PIN_FILE))
        if "scheduler" in victim:
            self.workers[which].kill()
            self.workers[which] = self._join()
        if fault == "pool registered anew":
            self.workers[1 - which].hear()
        for worker in self.workers:
            worker.attached()
        told["attached_s"] = time.monotonic() - returned

    def _engine_comes_back(self, ended: bool) -> None:
        def serves() -> dict[str, Any] | None:
            found = self.daemon.status()
            same = found["engine"]["starts"] == self.starts
            return found if found["state"] == "running" and not (ended and same) else None

        status = until(serves, START_S)["engine"]
        if status["starts"] != self.starts:
            assert has_ended(self.engine_fd)
            self._engine_is_gone()
            assert ended, f"the engine ended by itself: {status['last_end']}"
            assert int(status["starts"]) == self.starts + 1, status["last_end"]
            self._engine_is(int(status["pid"]), int(status["starts"]))
        self._slow(0.0)
        assert self.faults is not None
        self.faults.refuse(0)  # those whose copies were to be refused may have died before

    # --- what must hold then -----------------------------------------------------------------------------------------

    def _settle(self, told: dict[str, Any]) -> None:
        said: dict[str, int] = {}
        for worker in self.workers:
            worker.tell("settle")
        for worker in self.workers:
            for name, count in worker.hear().items():
                said[name] = said.get(name, 0) + count
        reader = self.workers[self.rng.randrange(2)]
        self.stored = reader.present(stored=self.stored[-30:])
        read = reader.read_back(stored=self.rng.sample(self.stored, min(4, len(self.stored))))
        told["ended"] = said
        told["read"] = read
        assert all(worker.counts.open == 0 for worker in self.workers)
        self._quiet()
        self._account(settled=True)
        self._no_leak()
        self._no_defect()

    def _quiet(self) -> None:
        """Nothing is under way, nothing is held, and nobody is attached who is not there."""

        def quiet() -> bool:
            found = self.daemon.status()
            self.pinned = bool(found["engine"]["pinned"])
            tier = found["tier"]
            return not found["operations"] and len(found["clients"]) == 2 and not tier["holds"] + tier["reservations"]

        until(quiet)

    def _account(self, *, settled: bool) -> None:
        assert self.ledger is not None
        before = self.ledger.began
        self.ledger.read()
        self.begun_ops += self.ledger.began - before
        assert not self.ledger.wrong, self.ledger.wrong
        if settled:
            until(self._all_ended)

    def _all_ended(self) -> bool:
        assert self.ledger is not None
        self.ledger.read()
        return not self.ledger.open

    def _no_defect(self) -> None:
        said = self.daemon.said()
        said += "".join(worker.said() for worker in self.workers)
        assert not any(word in said for word in ("defect", "could not be given back", "Exception in thread")), said

    def _no_leak(self) -> None:
        """No role holds more than it held the first times, in the same state: descriptors, threads, mappings."""
        pids = {"daemon": self.daemon.process.pid, "engine": self.engine_pid, "rig": os.getpid()}
        pids |= {f"scheduler {number}": worker.pid for number, worker in enumerate(self.workers)}
        deadline = time.monotonic() + 10
        for name, pid in pids.items():
            role = f"{name.partition(' ')[0]}{'' if self.pinned else ' unpinned'}"
            self.seen[role] += 1
            while True:
                held = holds(pid)
                most = self.most.get(role, (0, 0, 0))
                if self.seen[role] <= WARM:
                    self.most[role] = tuple(map(max, held, most))
                elif any(now > before + SLACK for now, before in zip(held, most, strict=True)):
                    assert time.monotonic() < deadline, f"{name} holds {held}, it held {most} at most: {listing(pid)}"
                    time.sleep(0.02)
                    continue
                break
        files = [name for name in os.listdir(self.folder) if name.endswith(".sock")]
        assert len(files) == 3, files  # the daemon's, and the engine's for each scheduler

    # --- the end -----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Let everybody leave in good order: nothing may be left in the folder."""
        for worker in self.workers:
            worker.close()
        assert self.daemon.end() == 0
        self._engine_is_gone()
        self._account(settled=True)
        self._no_defect()
        for worker in self.workers:
            worker.kill()
        self.spare.kill()
        left = [name for name in os.listdir(self.folder) if "sock" in name or "counts" in name]
        assert not left, left

    def kill_all(self) -> None:
        """End every process of this rig."""
        for worker in [*self.workers, self.spare]:
            worker.process.kill()
        self.daemon.process.kill()

    def _disband(self) -> None:
        """End a rig that never got together."""
        self.close()
        self._engine_is_gone()
        assert self.ledger is not None
        self.ledger.close()

    def close(self) -> None:
        self.kill_all()
        self.daemon.close()
        for worker in [*self.workers, self.spare]:
            with contextlib.suppress(FileNotFoundError, ValueError):
                worker.kill()


def run(seed: int, kills: int, enough: Enough) -> dict[str, Any]:
    """Kill so often, unless it is enough before; return how it ended."""
    began = time.monotonic()
    ended: dict[str, Any] = {"seed": seed, "failed": "", "kills": 0, "hung": False, "begun": 0}
    with tempfile.TemporaryDirectory(prefix="chaos") as folder, contextlib.ExitStack() as stack:
        rig: Rig | None = None
        try:
            rig = Rig(folder, seed)
            stack.callback(rig.close)
            patience = Patience(ROUND_S, rig.kill_all)
            stack.callback(patience.end)
            while rig.kills < kills and not enough:
                print(json.dumps(rig.round()), flush=True)
                patience.again()
            rig.end()
        except BaseException:
            ended["failed"] = traceback.format_exc()
            if rig is not None:
                ended["failed"] = f"round {rig.rounds}: {ended['failed']}\n{rig.daemon.said()[-4000:]}"
                for worker in [*rig.workers, rig.spare]:
                    with contextlib.suppress(OSError):
                        ended["failed"] += f"\n{worker.said()[-2000:]}"
        if rig is not None:
            ended |= {"kills": rig.kills, "hung": patience.hung, "begun": rig.begun_ops}
    return {**ended, "s": time.monotonic() - began}


def main() -> int:
    ended = run(int(sys.argv[1]), int(sys.argv[2]), Enough())
    print(json.dumps(ended), flush=True)
    return 1 if ended["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
