"""How long a hand-over by fence and an open+close take, beside a bare SEQPACKET round trip in the same run.

Two processes; every repetition times one bare round trip and one of each measured thing, in turn, so that a busy
machine slows all of them alike. Prints a table and writes JSON: ``python -m benchmarks.sessions [--backend host]
[--repetitions 2000] [--out FILE]``. A hand-over here is there *and* back: signal in this process, seen in the other,
signalled there, seen here.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from devipc.bench.facts import machine
from devipc.probe.stage import Stage
from devipc.session import Exporter, Importer

STRATEGIES = ("stream_memop", "host_flag", "polling", "event")
TIMEOUT_S = 30.0
SETTLE_S = 5e-4
Step = Callable[[int], None]


def child(backend: str, raw_fd: int) -> None:
    """Export memory and one fence per strategy; answer bare round trips and hand-overs until told to stop."""
    raw = socket.socket(fileno=raw_fd)
    with Exporter(backend=backend) as exporter:
        exporter.share("block", exporter.allocate(1 << 20))
        raw.send(exporter.path.encode())
        stage = Stage(exporter.device, 1)
        fences: dict[str, tuple[Any, Any]] = {}
        while (message := raw.recv(256)) != b"stop":
            command, _, argument = message.decode().partition(" ")
            if command == "bare":
                raw.send(message)
            elif command == "fences":
                peer = exporter.wait_peer()
                there = peer.open_fence(f"there.{argument}")
                back = exporter.create_fence(f"back.{argument}", strategy=argument)
                fences[argument] = (there, back)
                raw.send(b"ready")
            else:
                there, back = fences[command]
                number = int(argument)
                raw.send(b"armed")
                there.synchronize(number, TIMEOUT_S)
                back.signal(stage.stream, number)
        stage.close()
    raw.close()


def measure(backend: str, repetitions: int, warm_up: int) -> dict[str, Any]:
    """Run both processes and return the distribution of every measured thing in microseconds."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.sessions", "--child", str(theirs.fileno()), "--backend", backend],
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    ours.settimeout(TIMEOUT_S)
    samples: dict[str, list[float]] = {}
    try:
        with Importer(ours.recv(256).decode(), backend=backend) as importer, Stage(importer.device, 1) as stage:
            importer.peer.mappings.set_idle_limit(0)
            timed: dict[str, tuple[Step, Step]] = {
                "bare_round_trip": (_nothing, _bare(ours)),
                "open_close": (_nothing, lambda _number: importer.open("block").close()),
            }
            timed |= {f"hand_over.{name}": _hand_over(importer, stage, ours, name) for name in STRATEGIES}
            for number in range(1, warm_up + repetitions + 1):
                for name, (prepare, action) in timed.items():
                    prepare(number)
                    start = time.perf_counter_ns()
                    action(number)
                    if number > warm_up:
                        samples.setdefault(name, []).append((time.perf_counter_ns() - start) / 1e3)
            ours.send(b"stop")
    finally:
        ours.close()
        process.wait(timeout=TIMEOUT_S)
    return {name: _summary(values, samples["bare_round_trip"]) for name, values in samples.items()}


def _bare(sock: socket.socket) -> Step:
    def action(_number: int) -> None:
        sock.send(b"bare")
        sock.recv(256)

    return action


def _nothing(_number: int) -> None:
    return


def _hand_over(importer: Importer, stage: Stage, sock: socket.socket, strategy: str) -> tuple[Step, Step]:
    there = importer.create_fence(f"there.{strategy}", strategy=strategy)
    sock.send(f"fences {strategy}".encode())
    assert sock.recv(256) == b"ready"
    back = importer.open_fence(f"back.{strategy}")
    stream = stage.stream

    def prepare(number: int) -> None:
        sock.send(f"{strategy} {number}".encode())
        assert sock.recv(256) == b"armed"
        time.sleep(SETTLE_S)  # the other process sleeps in its wait by now, as it would in use

    def action(number: int) -> None:
        there.signal(stream, number)
        back.synchronize(number, TIMEOUT_S)

    return prepare, action


def _summary(values: list[float], bare: list[float]) -> dict[str, float]:
    def quantile(data: list[float], share: float) -> float:
        return sorted(data)[min(len(data) - 1, int(share * len(data)))]

    return {
        "p50_us": round(quantile(values, 0.5), 1),
        "p99_us": round(quantile(values, 0.99), 1),
        "p50_over_bare": round(quantile(values, 0.5) / quantile(bare, 0.5), 2),
    }


def main() -> None:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="host")
    parser.add_argument("--repetitions", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child >= 0:
        child(options.backend, options.child)
        return
    result = {
        "benchmark": "sessions",
        "backend": options.backend,
        "repetitions": options.repetitions,
        "machine": machine(),
        "results": measure(options.backend, options.repetitions, warm_up=100),
    }
    for name, row in result["results"].items():
        print(f"{name:26} p50 {row['p50_us']:9.1f} us  p99 {row['p99_us']:9.1f} us  {row['p50_over_bare']:7.2f} x bare")
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
