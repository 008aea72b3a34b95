"""Runs test functions in processes of their own, with the simulated driver as their driver.

Owns starting, talking to and ending those processes.  The process of the test run
itself never loads a driver.  A child's function gets a `Parent` first, then its
arguments, all of which travel as JSON; what it returns comes back the same way.
"""

from __future__ import annotations

import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tests import plain_pytest
from tests.simulator import control

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 20.0


class ChildFailed(AssertionError):
    """The child raised, died or stayed silent; the text holds its traceback."""


class Parent:
    """A child's end of the talk with the test."""

    def send(self, value: object) -> None:
        print(json.dumps({"send": value}), flush=True)

    def receive(self) -> Any:
        line = sys.stdin.readline()
        if not line:
            sys.exit(0)
        return json.loads(line)


class Child:
    """A started function; leaving the ``with`` block ends its process whatever happened."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.pid = process.pid
        self._buffer = b""

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def send(self, value: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value).encode() + b"\n")
        self.process.stdin.flush()

    def receive(self, timeout_s: float = DEADLINE_S) -> Any:
        """What the child sends next."""
        return self._next(timeout_s)["send"]

    def result(self, timeout_s: float = DEADLINE_S) -> Any:
        """What the child's function returned; its process has then exited cleanly."""
        value = self._next(timeout_s)["return"]
        if self.process.wait(timeout_s) != 0:
            raise ChildFailed(f"exit status {self.process.returncode}\n{self._errors()}")
        return value

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def status(self, timeout_s: float = DEADLINE_S) -> int:
        """The exit status, negative for a signal."""
        return self.process.wait(timeout_s)

    def _next(self, timeout_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise ChildFailed(f"silent for {timeout_s} s")
                data = os.read(self.process.stdout.fileno(), 1 << 16)
                if not data:
                    self.process.wait(timeout_s)
                    raise ChildFailed(f"ended with status {self.process.returncode}\n{self._errors()}")
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return dict(json.loads(line))

    def _errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read().decode(errors="replace")


class Simulation:
    """A room of simulated devices, and processes in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.room = control.new_room()

    def start(
        self,
        function: Callable[..., object],
        *arguments: object,
        fds: tuple[int, ...] = (),
        variables: dict[str, str] | None = None,
        **switches: object,
    ) -> Child:
        """Starts ``function`` in a new process with the given switches set."""
        environment = {**os.environ, **control.environment(self.folder, self.room, **switches), **(variables or {})}
        command = [sys.executable, "-m", "tests.simulator.harness", function.__module__, function.__qualname__]
        process = subprocess.Popen(
            [*command, json.dumps(arguments)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=fds,
        )
        return Child(process)

    def run(self, function: Callable[..., object], *arguments: object, **options: Any) -> Any:
        """What ``function`` returned in a process of its own."""
        with self.start(function, *arguments, **options) as child:
            return child.result()


def main() -> None:
    """Runs the function that the command line names, as a child."""
    module, name, arguments = sys.argv[1:4]
    plain_pytest.stand_in()
    function = getattr(importlib.import_module(module), name)
    value = function(Parent(), *json.loads(arguments))
    print(json.dumps({"return": value}), flush=True)


if __name__ == "__main__":
    main()
