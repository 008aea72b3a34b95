"""How long a search of the shared index takes while its writer works, beside as many look-ups in a Python dictionary.

Two processes: this one publishes and evicts as fast as it can, the other searches fresh random keys each time.
``python -m benchmarks.index [--repetitions 1000] [--out FILE]`` prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from devipc.bench.facts import machine, spread, write
from devipc.hicache.tier.index import IndexReader, IndexWriter

ENTRIES = 100_000
LIMITS_US = {256: 400.0, 2048: 2_000.0}


def keys(seed: int) -> npt.NDArray[np.uint8]:
    """Random keys, the same in both processes."""
    return np.random.default_rng(seed).integers(0, 256, (ENTRIES, 16), np.uint8)


def child(fd: int, epoch: int, repetitions: int) -> None:
    """Search, and print one JSON line."""
    there, absent = keys(0), keys(1)
    known = {key.tobytes(): 1 for key in there}
    rng = np.random.default_rng(2)
    rows = []
    with IndexReader(fd, epoch=epoch) as reader:
        for count in (16, 256, 2048):
            for kind, source in (("hits", there), ("misses", absent)):
                search_s, dictionary_s, hits = [], [], 0
                for _ in range(repetitions):
                    chosen = source[rng.integers(0, ENTRIES, count)]
                    start = time.perf_counter()
                    found = reader.find(chosen)
                    search_s.append(time.perf_counter() - start)
                    hits += int(found.hit.sum())
                    start = time.perf_counter()
                    raw = chosen.tobytes()
                    sum(raw[at : at + 16] in known for at in range(0, len(raw), 16))
                    dictionary_s.append(time.perf_counter() - start)
                row: dict[str, Any] = {"keys": count, "kind": kind, "hit_share": hits / (count * repetitions)}
                rows.append(row | {"search": spread(search_s), "dictionary": spread(dictionary_s)})
    print(json.dumps(rows), flush=True)


def measure(repetitions: int) -> tuple[list[dict[str, Any]], float]:
    """Return the child's rows, and publications and evictions a second meanwhile."""
    churned = [key.tobytes() for key in keys(3)[:20_000]]
    with IndexWriter(max_entries=2 * ENTRIES) as writer:
        for number, key in enumerate(keys(0)):
            assert writer.publish(key.tobytes(), number)
        command = [sys.executable, "-m", "benchmarks.index", "--child", str(writer.fileno()), str(writer.epoch)]
        process = subprocess.Popen(
            [*command, "--repetitions", str(repetitions)],
            pass_fds=[writer.fileno()],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).resolve().parents[1],
        )
        output: list[bytes] = []
        reader = threading.Thread(target=lambda: output.append(process.communicate()[0]))
        reader.start()
        writes, start = 0, time.perf_counter()
        while reader.is_alive():
            for number, key in enumerate(churned):
                writer.publish(key, number)
                writer.evict(churned[number - 10_000])
            writes += 2 * len(churned)
        rate = writes / (time.perf_counter() - start)
    return json.loads(output[0]), rate


def main() -> None:
    """Measure, or be the searching process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "index.json")
    parser.add_argument("--child", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        fd, epoch = options.child
        child(fd, epoch, options.repetitions)
        return
    rows, rate = measure(options.repetitions)
    for row in rows:
        limit = LIMITS_US.get(row["keys"])
        row |= {"limit_us": limit, "kept": None if limit is None else row["search"]["median_us"] <= limit}
        search, dictionary = row["search"], row["dictionary"]
        print(
            f"{row['keys']:5} {row['kind']:6}: {search['median_us']:7.1f} us (p99 {search['p99_us']:7.1f}),"
            f" dictionary {dictionary['median_us']:7.1f} us" + ("" if limit is None else f", limit {limit:.0f}")
        )
    print(f"writer meanwhile: {rate:.0f} publications and evictions a second")
    facts = {"entries": ENTRIES, "places": 4 * ENTRIES, "writes_per_s": round(rate)}
    write(options.out, {"machine": machine(), "index": facts, "results": rows})


if __name__ == "__main__":
    main()
