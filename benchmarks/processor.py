"""How fast this machine runs the code that an operation of the cache is made of: at once, and after a pause.

One piece of work: frames are encoded and decoded, short lists become arrays, names are made and looked up. It waits for
nobody. What it takes says how much of a latency is the machine's: ``python -m benchmarks.processor [--out FILE]``.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from devipc.bench.facts import machine, spread, write

SAMPLES, WARM = 400, 20
PAUSES_S = (1e-4, 1e-3, 5e-3)


class Frame(msgspec.Struct):
    """Something like a request."""

    op: int
    keys: bytes
    pages: list[int]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Frame).decode


def work() -> None:
    """Do about as much as a supervisor does for half a request."""
    for op in range(3):
        frame = _decode(_encode(Frame(op, bytes(320), list(range(20)))))
        places = np.array(frame.pages, np.int64) * 64 + 5
        assert (np.diff(places) == 64).all()
        names = {page: str(page) for page in frame.pages}
        assert len("".join(sorted(names.values()))) == 30


def spin(seconds: float) -> None:
    """Keep the processor."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def measure(pause: Callable[[float], None], seconds: float) -> dict[str, float]:
    """Return the spread of the work behind a pause."""
    taken = []
    for number in range(WARM + SAMPLES):
        pause(seconds)
        begun = time.perf_counter()
        work()
        if number >= WARM:
            taken.append(time.perf_counter() - begun)
    return spread(taken)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    facts = machine()
    rows = {"at once": measure(lambda _: None, 0.0)}
    for seconds in PAUSES_S:
        rows[f"slept {seconds * 1e3:g} ms"] = measure(time.sleep, seconds)
        rows[f"kept the processor {seconds * 1e3:g} ms"] = measure(spin, seconds)
    for name, row in rows.items():
        print(f"{name:28} p50 {row['median_us']:6.1f} us  p99 {row['p99_us']:6.1f} us")
    if options.out:
        write(options.out, {"machine": facts, "processors": os.cpu_count(), "work": rows})


if __name__ == "__main__":
    main()
