"""A daemon as a process of its own, as an administrator starts it; and a client made of raw frames, to misbehave with.

Knows the command line and the protocol.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from devipc.channel.link import Link
from devipc.hicache.daemon.admin import ask_status
from devipc.hicache.wire import protocol as p
from devipc.hicache.wire.greeting import hello
from devipc.hicache.wire.slots import Slots
from devipc.hicache.wire.transport import LinkKind, Offer, Transport, Way

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = str(Path(sys.executable).with_name("devipc"))
TIMEOUT_S = 20.0


def until(condition: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> Any:
    """Wait until ``condition`` returns something true, and return that."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)
    return found


class Daemon:
    """``devipc hicache serve`` with small sizes; ended by :meth:`close`."""

    def __init__(
        self,
        folder: str,
        *,
        options: dict[str, object] | None = None,
        environment: dict[str, str] | None = None,
        wait: bool = True,
        limit_fds: int = 0,
        ledger: str = "",
        **popen: Any,
    ) -> None:
        self.path = os.path.join(folder, "h.sock")
        self.log = os.path.join(folder, f"log-{secrets.token_hex(4)}")
        given = {"socket": self.path, "tier_nbytes": "8MiB", "slab_nbytes": "256KiB", **(options or {})}
        flags = [text for name, value in given.items() for text in ("--" + name.replace("_", "-"), str(value))]
        command = [SCRIPT, "hicache", "serve", "--json", *flags]
        if ledger:  # the same daemon, which writes down its operations there
            command = [sys.executable, "-m", "tests.hicache.chaos.ledger", ledger]
            command += [f"{name}={value}" for name, value in given.items()]
        if limit_fds:
            command = ["/bin/sh", "-c", f'ulimit -n {limit_fds}; exec "$0" "$@"', *command]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                **popen,
            )
        self.ready: dict[str, Any] = {}
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.said()
        self.ready = json.loads(line)

    def said(self) -> str:
        """What it logged so far."""
        return Path(self.log).read_text()

    def status(self) -> dict[str, Any]:
        return ask_status(self.path, timeout_s=TIMEOUT_S)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(TIMEOUT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()


@contextmanager
def daemon(**options: Any) -> Iterator[Daemon]:
    """Run a daemon in a private folder, and end it."""
    with tempfile.TemporaryDirectory() as folder:
        made = Daemon(folder, **options)
        try:
            yield made
        except BaseException:
            print(made.said())
            raise
        finally:
            made.close()


def run(*arguments: str, expect: int | None = 0) -> subprocess.CompletedProcess[str]:
    """Run ``devipc hicache`` with these arguments."""
    done = subprocess.run(
        [SCRIPT, "hicache", *arguments], capture_output=True, text=True, timeout=TIMEOUT_S * 2, check=False
    )
    assert expect is None or done.returncode == expect, done.stdout + done.stderr
    return done


def alive(pid: int) -> bool:
    """Return True while there is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def has_ended(pidfd: int) -> bool:
    """Return True once its process ended: where many are started, another one may have the number by then."""
    asked = select.poll()
    asked.register(pidfd, select.POLLIN)
    return bool(asked.poll(0))


class RawClient:
    """A client that says what it wants: greeted as the protocol demands, then nothing is checked."""

    def __init__(self, path: str, *, way: Way = Way.RINGS, client: bytes | None = None) -> None:
        self.client = client or secrets.token_bytes(16)
        self.link = Link.connect(path, facts={}, timeout_s=TIMEOUT_S)
        self.slots = Slots.create(64)
        self.transport: Transport | None = None
        offer = Offer(way)
        try:
            self.link.start()
            greeting = p.encode(hello(features=0, client=self.client, way=way.value))
            answer = self.link.call(
                LinkKind.HELLO, greeting, fds=[self.slots.fileno(), *offer.fds], timeout_s=TIMEOUT_S
            )
            self.welcome = p.decode_welcome(answer.body)
            index, *fds = answer.take_fds()
            os.close(index)
            self.transport = offer.complete(fds)
        except BaseException:
            offer.close()
            self.close()
            raise

    def push(self, frame: p.RequestFrame | bytes) -> None:
        assert self.transport is not None
        self.transport.push(frame if isinstance(frame, bytes) else p.encode(frame), timeout_s=TIMEOUT_S)

    def take(self) -> p.AnswerFrame:
        assert self.transport is not None
        return p.decode_answer(self.transport.take(timeout_s=TIMEOUT_S))

    def ask(self, frame: p.RequestFrame) -> p.AnswerFrame:
        self.push(frame)
        return self.take()

    def close(self) -> None:
        self.link.close()
        if self.transport is not None:
            self.transport.close()
        self.slots.close()
