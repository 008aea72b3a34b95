"""How long a hand-over by fence and an open+close take, beside a bare SEQPACKET round trip in the same run.

Two processes; every repetition times one bare round trip and one of each measured thing, in turn, so that a busy
machine slows all of them alike. A hand-over here is there *and* back: signal in this process, seen in the other,
signalled there, seen here. The other process is ``python -m devipc.bench.sync FD BACKEND``.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from devipc.bench.facts import quantile, ratio, spread
from devipc.errors import CapabilityError
from devipc.probe.stage import Stage
from devipc.session import Exporter, Importer

__all__ = ["measure_sync"]

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


def measure_sync(backend: str, *, repetitions: int, warm_up: int = 100) -> list[dict[str, Any]]:
    """Run both processes and return a row for each measured thing."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-m", "devipc.bench.sync", str(theirs.fileno()), backend],
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    ours.settimeout(TIMEOUT_S)
    samples: dict[str, list[float]] = {}
    try:
        with Importer(ours.recv(256).decode(), backend=backend) as importer, Stage(importer.device, 1) as stage:
            importer.peer.mappings.set_idle_limit(0)
            timed: dict[str, tuple[Step, Step]] = {
                "bare round trip": (_nothing, _bare(ours)),
                "open and close": (_nothing, lambda _number: importer.open("block").close()),
            }
            for name in STRATEGIES:
                try:
                    timed[f"hand-over there and back, {name}"] = _hand_over(importer, stage, ours, name)
                except CapabilityError:  # this device cannot signal so
                    continue
            for number in range(1, warm_up + repetitions + 1):
                for name, (prepare, action) in timed.items():
                    prepare(number)
                    start = time.perf_counter_ns()
                    action(number)
                    if number > warm_up:
                        samples.setdefault(name, []).append((time.perf_counter_ns() - start) / 1e9)
            ours.send(b"stop")
    finally:
        ours.close()
        try:
            process.wait(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    bare = samples["bare round trip"]
    return [
        {
            "what": name,
            **spread(times),
            "median_over_bare": ratio(quantile(times, 0.5), quantile(bare, 0.5)),
            "p99_over_bare": ratio(quantile(times, 0.99), quantile(bare, 0.99)),
        }
        for name, times in samples.items()
    ]


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


if __name__ == "__main__":
    child(sys.argv[2], int(sys.argv[1]))
