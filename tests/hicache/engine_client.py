"""The client of an engine process, in a process of its own: a session, a pool, slots, fences; told what to do by lines.

Run as ``python -m tests.hicache.engine_client BACKEND SLOTS_FD CLIENT_HEX``. :class:`ClientProcess` is the test's end.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from devipc.errors import DevIPCError
from devipc.hicache.builders import TensorView, mla_token_pool
from devipc.hicache.layout import encode_layout
from devipc.hicache.wire.slots import Readiness, Slots
from devipc.memfd import round_up
from devipc.session import Importer
from tests.hicache.pools import TIMEOUT_S, Gate, PoolMemory, Staging

ROOT = Path(__file__).parents[2]


class _Session(Importer):
    client = ""

    def facts(self) -> dict[str, str]:
        return super().facts() | {"hicache_client": self.client}


class Scheduler:
    """Everything that a line can ask for is a method here; values are JSON's."""

    def __init__(self, backend: str, slots_fd: int, client: str) -> None:
        self.backend = backend
        self.slots = Slots.open(slots_fd)
        self.client = client
        self.fences: dict[str, Any] = {}
        self.ready: dict[int, Any] = {}
        self.streams: dict[int, Any] = {}

    def connect(self, path: str, strategy: str = "") -> str:
        _Session.client = self.client
        self.session = _Session(path, backend=self.backend, strategy=strategy or None, timeout_s=TIMEOUT_S)
        self.device: Any = self.session.device
        self.gate = Gate(self.device)
        self.staging = Staging(self.device)
        chosen = self.session.decision.strategy.value
        for direction in ("backup", "restore"):
            name = f"done/{self.client}/{direction}"
            self.fences[direction] = self.session.open_fence(name, wait_s=TIMEOUT_S)
        return str(chosen)

    def pool(self, number: int, generation: int, pages: int, layers: int) -> dict[str, Any]:
        rows, row = pages * 4, 24
        step = round_up(rows * row, 64)
        allocation = self.session.allocate(step * layers)
        kv = [TensorView.contiguous(allocation.ptr + index * step, (rows, row), 1) for index in range(layers)]
        built = mla_token_pool(kv, page_tokens=4, allocations=[self.device.memory.describe(allocation.ptr)])
        self.memory = PoolMemory(self.staging, built, [allocation])
        for chunk, (ptr, nbytes) in enumerate(built.exports):
            self.session.share(f"pool/{number}/{generation}/{chunk}", (ptr, nbytes))
        return {"layout": base64.b64encode(encode_layout(built.layout)).decode(), "page": built.layout.page_nbytes}

    def fill(self, pages: list[int], seed: int) -> None:
        self.memory.fill(pages, keys_of(len(pages), seed))

    def poison(self, pages: list[int]) -> None:
        self.memory.poison(pages)

    def check(self, pages: list[int], seed: int) -> None:
        self.memory.check(pages, keys_of(len(pages), seed))

    def is_poisoned(self, pages: list[int]) -> bool:
        return self.memory.is_poisoned(pages)

    def contents(self, count: int, seed: int) -> list[str]:
        return [base64.b64encode(self.memory.content(key).tobytes()).decode() for key in keys_of(count, seed)]

    def begin(self, slot: int, op: int) -> None:
        self.slots.begin(slot, op)

    def say_ready(self, slot: int, readiness: int) -> None:
        self.slots.say_ready(slot, Readiness(readiness))

    def base(self, slot: int) -> int:
        return self.slots.base(slot)

    def cancel(self, slot: int) -> None:
        self.slots.cancel(slot)

    def slots_end(self, slot: int) -> str:
        reason = self.slots.poisoned(slot)
        return reason.name.lower() if reason is not None else "settled" if self.slots.ended(slot) else "open"

    def leave(self) -> None:
        """End the session, so that another can begin."""
        self.gate.resume_all()
        for stream in self.streams.values():
            self.device.transfer.destroy_stream(stream)
        self.streams.clear()
        self.session.close()
        self.staging.close()

    def query(self, direction: str, n: int) -> bool:
        return bool(self.fences[direction].query(n))

    def wait(self, direction: str, n: int) -> None:
        self.fences[direction].synchronize(n, TIMEOUT_S)

    def ready_fence(self, number: int, stalled: bool) -> None:
        self.ready[number] = self.session.peer.create_fence(f"ready/{number}")
        self.streams[number] = self.device.transfer.create_stream()
        if stalled:
            self.gate.stall(self.streams[number])

    def signal(self, number: int, n: int) -> None:
        self.ready[number].signal(self.streams[number], n)

    def resume(self, number: int) -> None:
        self.gate.resume(self.streams[number])

    def poison_ready(self, number: int) -> None:
        from devipc.types import PoisonReason

        self.ready[number].poison(PoisonReason.CANCELLED)

    def unshare(self, number: int, generation: int, chunk: int, timeout_s: float) -> None:
        self.session.unshare(f"pool/{number}/{generation}/{chunk}", timeout_s=timeout_s)

    def state(self) -> str:
        return self.session.state.value

    def close(self) -> None:
        self.leave()
        self.slots.close()


def keys_of(count: int, seed: int) -> Any:
    """``count`` keys that no other seed has."""
    return np.random.default_rng(seed).integers(0, 256, (count, 16), np.uint8)


class ClientProcess:
    """A test's end: attributes are questions, as ``client.fill(pages=[1], seed=3)``."""

    def __init__(self, backend: str, slots_fd: int, client: str, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.hicache.engine_client", backend, str(slots_fd), client],
            cwd=ROOT,
            env={**os.environ, **environment},
            pass_fds=[slots_fd],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __getattr__(self, name: str) -> Any:
        def ask(**values: Any) -> Any:
            self.tell(name, **values)
            return self.hear()

        return ask

    def tell(self, name: str, **values: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, values]) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the client ended with {self.process.wait(TIMEOUT_S)}"
        answer = json.loads(line)
        if "error" in answer:
            raise ClientError(answer["error"])
        return answer["value"]

    def end(self) -> None:
        """Leave in good order."""
        if self.process.poll() is None:
            with contextlib.suppress(ClientError):
                self.close()
        self._reap()

    def kill(self) -> None:
        self.process.kill()
        self._reap()

    def _reap(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(TIMEOUT_S)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


class ClientError(AssertionError):
    """What the client raised."""


@contextlib.contextmanager
def client_process(*arguments: Any) -> Iterator[ClientProcess]:
    """A client for the length of a block; it never outlives it."""
    made = ClientProcess(*arguments)
    try:
        yield made
    except BaseException:
        made.kill()
        raise
    made.end()


def main() -> None:
    """Obey line by line."""
    scheduler = Scheduler(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    for line in sys.stdin:
        name, values = json.loads(line)
        try:
            answer = {"value": getattr(scheduler, name)(**values)}
        except (DevIPCError, AssertionError) as error:
            answer = {"error": f"{type(error).__name__} {getattr(error, 'code', '')}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
