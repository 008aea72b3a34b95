"""Starting the worker, talking to it, and comparing what this process holds before and after."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 20.0


class Worker:
    """One worker process."""

    def __init__(self, role: str, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.session.worker", role, json.dumps({"strategy": "stream_memop"} | options)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.said: list[dict[str, Any]] = []

    def hear(self, key: str) -> Any:
        """Return the next answer that has ``key``; None when the worker ended before."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            answer = json.loads(line)
            self.said.append(answer)
            if key in answer:
                return answer[key]
        return None

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass

    def kill(self) -> float:
        """SIGKILL it and return when."""
        now = time.monotonic()
        self.process.send_signal(signal.SIGKILL)
        return now

    def close(self) -> int:
        """End its input, wait for it, and return its exit code."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            code = self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self.process.stdout.close()
        return code


@contextmanager
def worker(role: str, **options: Any) -> Iterator[Worker]:
    """Run a worker for the length of a block; it never outlives it."""
    started = Worker(role, **options)
    try:
        yield started
    finally:
        if started.process.poll() is None and started.process.stdin and started.process.stdin.closed:
            started.kill()
        started.close()


def holdings() -> dict[str, int]:
    """Return how many descriptors, threads and shared mappings this process has."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "shared_maps": maps.count("/memfd:devipc"),
    }


def grown(before: dict[str, int], now: dict[str, int]) -> list[str]:
    """Return of which there are more; fewer are what an earlier test has just let go."""
    return [name for name, count in now.items() if count > before[name]]


def eventually(condition: Callable[[], bool], *, within_s: float = 20.0) -> bool:
    """Wait until ``condition()``; return whether it came true."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True
