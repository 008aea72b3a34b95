"""``python -m tests.hicache.chaos --kills 5000 --rigs 14 --seed 1 --json FILE``: rigs side by side, one account.

Needs numpy and msgspec, no device and no torch. The same seed, kills and rigs bring the same faults in the same order;
what they meet is up to the scheduler of the machine. Interrupted, by SIGINT, SIGTERM or ``--time-limit``, each rig ends
its round and looks at everything once more; then there is an account of what was done, marked as incomplete.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.hicache.chaos.rig import ROUND_S
from tests.hicache.enough import Enough, start, wait_for

_SAY_S = 30.0
_RIGS_A_SHARE = 3


class Summary:
    """What all rigs said."""

    def __init__(self) -> None:
        self.rounds = 0
        self.kills: Counter[str] = Counter()
        self.under_way: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.read: Counter[str] = Counter()
        self.times: dict[str, list[float]] = {"back_s": [], "attached_s": [], "engine_outlived_s": []}
        self.rigs: list[dict[str, Any]] = []

    def take(self, told: dict[str, Any]) -> None:
        if "round" not in told:
            self.rigs.append(told)
            return
        self.rounds += 1
        self.faults[told["fault"]] += 1
        self.kills.update(told["killed"])
        self.under_way.update(one for one, count in zip(told["killed"], told["under_way"], strict=True) if count)
        self.ended.update(told["ended"])
        self.read.update(told["read"])
        for name, values in self.times.items():
            if name in told:
                values.append(told[name])

    def progress(self) -> str:
        """Say how far it is, in a line."""
        failed = sum(rig["failed"] != "" for rig in self.rigs)
        return f"{self.kills.total()} kills, {self.under_way.total()} under way, {self.rounds} rounds, {failed} failed"

    def to_json(self) -> dict[str, Any]:
        kills, under_way = self.kills.total(), self.under_way.total()
        failed = [rig for rig in self.rigs if rig["failed"]]
        return {
            "kills": kills,
            "kills_with_operations_under_way": under_way,
            "rounds": self.rounds,
            "kills_by_process": dict(self.kills),
            "under_way_by_process": dict(self.under_way),
            "faults": dict(self.faults.most_common()),
            "operations": sum(rig["begun"] for rig in self.rigs),
            "client_statuses": dict(sorted(self.ended.items())),
            "read_back": dict(self.read),
            "times": {name: _quantiles(values) for name, values in self.times.items() if values},
            "hung": sum(rig["hung"] for rig in self.rigs),
            "failed": failed,
        }


def _quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{100 * q:g}": round(ordered[int(q * (len(ordered) - 1))], 3) for q in (0.5, 0.99, 1.0)}


def run(kills: int, rigs: int, seed: int, enough: Enough | None = None) -> dict[str, Any]:
    """Run all rigs to their end, or until it is enough; return the summary.

    What a rig that failed has not done, another one does, up to three; the failure stays one.
    """
    summary, lock, began = Summary(), threading.Lock(), time.monotonic()
    seeds = random.Random(seed)
    shares = [kills // rigs + (number < kills % rigs) for number in range(rigs)]
    seeds_of = [[seeds.randrange(2**31)] for _ in shares]
    for more in seeds_of:
        more += [seeds.randrange(2**31) for _ in range(_RIGS_A_SHARE - 1)]
    processes: list[subprocess.Popen[str]] = []
    said = began

    def take(told: dict[str, Any]) -> None:
        nonlocal said
        with lock:
            summary.take(told)
            if time.monotonic() > said + _SAY_S:
                said = time.monotonic()
                print(f"{said - began:.0f} s: {summary.progress()}", file=sys.stderr, flush=True)

    def work(share: int, own_seeds: list[int], folder: str) -> None:
        for one in own_seeds:
            process = start(["tests.hicache.chaos.rig", str(one), str(share)], stdout=subprocess.PIPE, folder=folder)
            processes.append(process)
            assert process.stdout is not None
            told: dict[str, Any] = {}
            for line in process.stdout:
                if line.endswith("\n"):  # else it was killed while it said so
                    told = json.loads(line)
                    take(told)
            process.wait()
            process.stdout.close()
            share -= told.get("kills", share)
            if share <= 0 or not told["failed"] or enough:
                return

    with tempfile.TemporaryDirectory() as folder:
        threads = [
            threading.Thread(target=work, args=(share, own_seeds, folder))
            for share, own_seeds in zip(shares, seeds_of, strict=True)
        ]
        for thread in threads:
            thread.start()
        why = wait_for(processes, lambda: any(thread.is_alive() for thread in threads), enough, 2 * ROUND_S)
    lost = [process.returncode for process in processes if process.returncode not in (0, 1)]
    found = summary.to_json()
    return {
        "command": f"python -m tests.hicache.chaos --kills {kills} --rigs {rigs} --seed {seed}",
        "incomplete": f"{why}: {found['kills']} of {kills} kills" if why else "",
        "machine": {"processors": os.cpu_count(), "python": platform.python_version(), "linux": platform.release()},
        "wall_s": round(time.monotonic() - began, 1),
        **found,
        "rigs_that_ended_without_a_word": lost,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hicache.chaos")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--rigs", type=int, default=max(2, (os.cpu_count() or 2) - 2))
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--time-limit", type=float, default=0.0, metavar="S", help="end early, after S seconds")
    parser.add_argument("--json", default="", help="also write the summary there")
    chosen = parser.parse_args()
    enough = Enough(chosen.time_limit)
    found = run(chosen.kills, chosen.rigs, chosen.seed, enough)
    text = json.dumps(found, indent=2)
    print(text)
    if chosen.json:
        Path(chosen.json).write_text(text + "\n")
    return 1 if found["failed"] or found["rigs_that_ended_without_a_word"] else enough.exit_code


if __name__ == "__main__":
    sys.exit(main())
