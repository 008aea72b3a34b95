"""One hand-over from device to device, for each strategy, in one run.

Two processes play ping-pong over two fences. With ``stream_memop`` both hosts enqueue a whole chain ahead while the
first stream is held by a closed gate; when the gate opens, the devices alone play it. With the other strategies the
consumer's host has to look, so that every hand-over passes through both hosts. One figure is the time of a chain
divided by its hand-overs. Rounds of all strategies alternate. ``python -m benchmarks.device_handover --backend B``.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from devipc.bench.facts import machine
from devipc.errors import CapabilityError
from devipc.probe.stage import Stage
from devipc.registry import load_backend
from devipc.session import Exporter, Importer

STRATEGIES = ("stream_memop", "host_flag", "polling", "event")
TIMEOUT_S = 30.0
RING = 8


def child(backend: str, raw_fd: int) -> None:
    """Answer chains: for each value, wait for ``there`` and signal ``back``."""
    raw = socket.socket(fileno=raw_fd)
    with Exporter(backend=backend, timeout_s=TIMEOUT_S) as exporter, Stage(exporter.device, 1) as stage:
        raw.send(exporter.path.encode())
        fences: dict[str, tuple[Any, Any]] = {}
        while (message := raw.recv(256)) != b"stop":
            command, *arguments = message.decode().split()
            if command == "open":
                (name,) = arguments
                there = exporter.wait_peer().open_fence(f"there.{name}")
                fences[name] = (there, exporter.create_fence(f"back.{name}", strategy=name))
                raw.send(b"ready")
                continue
            name, first, last = arguments[0], int(arguments[1]), int(arguments[2])
            there, back = fences[name]
            raw.send(b"armed")
            for n in range(first, last + 1):
                there.wait(stage.stream, n, timeout_s=TIMEOUT_S)
                back.signal(stage.stream, n, timeout_s=TIMEOUT_S)
            stage.synchronize()
    raw.close()


class Player:
    """This side of all chains."""

    def __init__(self, importer: Importer, stage: Stage, raw: socket.socket) -> None:
        self._importer = importer
        self._stage = stage
        self._raw = raw
        self._fences: dict[str, tuple[Any, Any]] = {}
        self._next: dict[str, int] = {}

    def open(self, name: str) -> None:
        """Make the two fences of one strategy."""
        there = self._importer.create_fence(f"there.{name}", strategy=name)
        self._raw.send(f"open {name}".encode())
        assert self._raw.recv(256) == b"ready"
        self._fences[name] = (there, self._importer.open_fence(f"back.{name}"))
        self._next[name] = 1

    def chain(self, name: str, length: int) -> float:
        """Play one chain; return microseconds for each hand-over."""
        there, back = self._fences[name]
        first = self._next[name]
        self._next[name] = first + length
        self._raw.send(f"chain {name} {first} {first + length - 1}".encode())
        assert self._raw.recv(256) == b"armed"
        time.sleep(1e-3)
        play = self._enqueued if name == "stream_memop" else self._by_host
        return play(there, back, first, length) / (2 * length) / 1e3

    def _enqueued(self, there: Any, back: Any, first: int, length: int) -> int:
        stage, sync = self._stage, self._importer.device.sync
        assert sync is not None
        assert sync.word_waits is not None
        gate = stage.view[:8].cast("Q")
        gate[0] = 0
        sync.word_waits.wait(stage.stream, stage.ptr, 1)
        for n in range(first, first + length):
            there.signal(stage.stream, n)
            back.wait(stage.stream, n, timeout_s=TIMEOUT_S)  # waits until the other host has enqueued its answer
        start = time.perf_counter_ns()
        gate[0] = 1
        stage.synchronize()
        return time.perf_counter_ns() - start

    def _by_host(self, there: Any, back: Any, first: int, length: int) -> int:
        start = time.perf_counter_ns()
        for n in range(first, first + length):
            there.signal(self._stage.stream, n, timeout_s=TIMEOUT_S)
            back.wait(self._stage.stream, n, timeout_s=TIMEOUT_S)
        self._stage.synchronize()
        return time.perf_counter_ns() - start


def measure(backend: str, rounds: int, length: int) -> dict[str, Any]:
    """Run both processes; return the distribution over rounds for each strategy."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.device_handover", "--child", str(theirs.fileno()), "--backend", backend],
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    ours.settimeout(2 * TIMEOUT_S)
    samples: dict[str, list[float]] = {}
    try:
        path = ours.recv(256).decode()
        with Importer(path, backend=backend, timeout_s=TIMEOUT_S) as importer, Stage(importer.device, 1) as stage:
            player = Player(importer, stage, ours)
            for name in STRATEGIES:
                try:
                    player.open(name)
                except CapabilityError as error:
                    print(f"{name}: {error}", file=sys.stderr)
                    continue
                player.chain(name, min(length, RING))
                samples[name] = []
            for _ in range(rounds):
                for name, values in samples.items():
                    values.append(player.chain(name, length))
            ours.send(b"stop")
    finally:
        ours.close()
        process.wait(timeout=TIMEOUT_S)
    return {name: _summary(values) for name, values in samples.items()}


def _summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50_us": round(ordered[len(ordered) // 2], 2),
        "p99_us": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 2),
    }


def main() -> None:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="host")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--length", type=int, default=32, help="hand-overs there and back in one chain")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child >= 0:
        child(options.backend, options.child)
        return
    backend = load_backend(options.backend)
    rows = measure(options.backend, options.rounds, options.length)
    fastest = rows["stream_memop"]["p50_us"] if "stream_memop" in rows else None
    for name, row in rows.items():
        if fastest:
            row["p50_over_stream_memop"] = round(row["p50_us"] / fastest, 1)
        print(f"{name:14} p50 {row['p50_us']:9.2f} us  p99 {row['p99_us']:9.2f} us  a hand-over", row)
    if options.out:
        result = {
            "benchmark": "device_handover",
            "backend": options.backend,
            "facts": dict(backend.facts()),
            "machine": machine(),
            "rounds": options.rounds,
            "chain": options.length,
            "results": rows,
        }
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
