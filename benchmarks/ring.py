"""How long a no-op takes over two rings, beside a bare SEQPACKET round trip, in the same interleaved run.

Two processes: this one asks and waits itself, the other echoes 64 bytes. Rings and socket take turns, one block each.
``python -m benchmarks.ring [--blocks 100] [--out FILE]`` prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from devipc.bench.facts import machine, spread, write
from devipc.channel import Channel
from devipc.errors import PeerGone
from devipc.hicache.wire.ring import DEFAULT_SPIN_S, Consumer, Producer

BLOCK = 100
NBYTES = 64
LIMIT = 2.0
RING_KIND = 64


def child(control_fd: int, bare_fd: int, spin_s: float) -> None:
    """Echo both ways until the parent leaves."""
    bare = socket.socket(fileno=bare_fd)
    with Channel.adopt(control_fd) as control, bare:
        there = Consumer(control.receive(10).take_fds(), limit_nbytes=4096, spin_s=spin_s)
        back = Producer()
        control.send(RING_KIND, fds=back.fds(), timeout_s=10)

        def echo() -> None:
            while data := bare.recv(4096):
                bare.send(data)

        thread = threading.Thread(target=echo)
        thread.start()
        try:
            while True:
                back.push(there.take(timeout_s=60), timeout_s=60)
        except PeerGone:
            pass
        thread.join(10)
        back.close()
        there.close()


def measure(blocks: int, spin_s: float) -> tuple[list[float], list[float]]:
    """Return seconds of every round trip: rings, bare socket."""
    control_mine, control_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bare, bare_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fds = (control_theirs.fileno(), bare_theirs.fileno())
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.ring", "--child", *map(str, (*fds, spin_s))],
        pass_fds=fds,
        cwd=Path(__file__).resolve().parents[1],
    )
    control_theirs.close()
    bare_theirs.close()
    rings_s: list[float] = []
    bare_s: list[float] = []
    payload, clock = bytes(NBYTES), time.perf_counter
    with Channel(control_mine) as control, bare:
        there = Producer()
        control.send(RING_KIND, fds=there.fds(), timeout_s=10)
        back = Consumer(control.receive(30).take_fds(), limit_nbytes=4096, spin_s=spin_s)
        for block in range(blocks + 5):
            for _ in range(BLOCK):
                begun = clock()
                there.push(payload, timeout_s=10)
                back.take(timeout_s=10)
                rings_s.append(clock() - begun)
            for _ in range(BLOCK):
                begun = clock()
                bare.send(payload)
                bare.recv(4096)
                bare_s.append(clock() - begun)
            if block == 4:  # warmed up
                rings_s.clear()
                bare_s.clear()
        there.close()
        back.close()
    process.wait(20)
    return rings_s, bare_s


def main() -> None:
    """Measure, or be the echoing process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "ring.json")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        control_fd, bare_fd, spin_s = options.child
        child(int(control_fd), int(bare_fd), float(spin_s))
        return
    facts = machine()  # the load before this run
    results = []
    for spin_s in (DEFAULT_SPIN_S, 0.0):
        rings, bare = map(spread, measure(options.blocks, spin_s))
        ratio = round(rings["median_us"] / bare["median_us"], 2)
        print(
            f"spin {spin_s * 1e6:2.0f} us: rings p50 {rings['median_us']:.1f} us, p99 {rings['p99_us']:.1f} us;"
            f" bare SEQPACKET p50 {bare['median_us']:.1f} us, p99 {bare['p99_us']:.1f} us; ratio of medians {ratio}"
        )
        limit = LIMIT if spin_s else None  # without a spin, the kernel's wake-up of an idle core is what is measured
        row = {"spin_us": spin_s * 1e6, "rings": rings, "bare_seqpacket": bare, "ratio": ratio, "limit": limit}
        results.append(row | {"kept": None if limit is None else ratio <= limit})
    print(f"limit {LIMIT} with a spin; load before {facts['load_1min']} on {facts['cores']} cores")
    write(options.out, {"machine": facts, "payload_nbytes": NBYTES, "results": results})


if __name__ == "__main__":
    main()
