"""Starts real child processes, talks to them by lines, counts what this process holds, and waits with a deadline."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Child:
    """A process that runs one role of ``tests.channel.child``; it is ended by its id, whatever it does."""

    def __init__(self, role: str, *arguments: object, pass_fds: tuple[int, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.channel.child", role, *map(str, arguments)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=pass_fds,
        )
        self.pid = self.process.pid
        self._text = b""

    def line(self, timeout_s: float = 20.0) -> str:
        """Return the next line that the child prints."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._text:
            left = deadline - time.monotonic()
            assert left > 0, f"child said nothing, so far {self._text!r}"
            if select.select([self.process.stdout], [], [], left)[0]:
                more = os.read(self.process.stdout.fileno(), 4096)
                assert more, f"child ended ({self.process.wait(5)}) without a line, so far {self._text!r}"
                self._text += more
        line, _, self._text = self._text.partition(b"\n")
        return line.decode()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def kill(self) -> float:
        """Send SIGKILL and return the moment just before."""
        moment = time.monotonic()
        os.kill(self.pid, signal.SIGKILL)
        return moment

    def code(self, timeout_s: float = 20.0) -> int:
        return self.process.wait(timeout_s)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass


def stop(pid: int) -> None:
    """Send SIGSTOP and wait until it has taken hold of every thread."""
    os.kill(pid, signal.SIGSTOP)

    def stopped() -> bool:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    assert eventually(stopped)


def holdings() -> tuple[int, int]:
    """Return the numbers of open descriptors and of threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    """Return whether ``condition`` became true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True
