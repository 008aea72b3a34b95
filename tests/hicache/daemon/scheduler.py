"""A scheduler as a process of its own: two pools, one client of the daemon; obeys its test line by line.

Run as ``python -m tests.hicache.daemon.scheduler SOCKET [BACKEND]``. :class:`SchedulerProcess` is the test's end.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from devipc.errors import DevIPCError, PeerGone
from devipc.hicache.api import PoolHandle, connect
from devipc.hicache.builders import BuiltPool, TensorView, mla_token_pool, token_pool
from devipc.hicache.client.ticket import Ticket
from devipc.hicache.keys import Namespace, page_keys
from devipc.memfd import round_up
from devipc.registry import load_backend
from tests.hicache.pools import PoolMemory, Staging

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 30.0
PAGES, PAGE_TOKENS, LAYERS, ROW = 65, 4, 6, 64


class Scheduler:
    """See the module. Pool 0 has K and V, pool 1 one latent row a token."""

    def __init__(self, path: str, backend: str = "host", *, wait_s: float = 0.0) -> None:
        self.device = load_backend(backend).open_device()
        assert self.device.memory is not None
        assert self.device.transfer is not None
        self.memory, self.transfer = self.device.memory, self.device.transfer
        self.staging = Staging(self.device)
        self.stream = self.transfer.create_stream()
        self.client = connect(f"unix:{path}", device=self.device, wait_s=wait_s)
        self.pools = [self._attention(), self._mla()]
        self.handles: list[PoolHandle] = [
            self.client.register_pool(pool.built, namespace=self._namespace(pool)) for pool in self.pools
        ]
        self.tickets: list[Ticket] = []

    def _namespace(self, pool: PoolMemory) -> Namespace:
        return Namespace.of(pool.layout, model="model", revision="1", dtype="u8")

    def _attention(self) -> PoolMemory:
        rows = PAGES * PAGE_TOKENS
        half = round_up(rows * ROW, 64)
        kv = [self.memory.allocate(2 * half) for _ in range(LAYERS)]
        k = [TensorView.contiguous(one.ptr, (rows, ROW), 1) for one in kv]
        v = [TensorView.contiguous(one.ptr + half, (rows, ROW), 1) for one in kv]
        return self._pool(lambda infos: token_pool(k, v, page_tokens=PAGE_TOKENS, allocations=infos, first_page=1), kv)

    def _mla(self) -> PoolMemory:
        rows = PAGES * PAGE_TOKENS
        step = round_up(rows * ROW, 64)
        memory = self.memory.allocate(step * LAYERS)
        kv = [TensorView.contiguous(memory.ptr + at * step, (rows, ROW), 1) for at in range(LAYERS)]
        return self._pool(
            lambda infos: mla_token_pool(kv, page_tokens=PAGE_TOKENS, allocations=infos, first_page=1), [memory]
        )

    def _pool(self, build: Callable[[list[Any]], BuiltPool], allocations: list[Any]) -> PoolMemory:
        built = build([self.memory.describe(one.ptr) for one in allocations])
        return PoolMemory(self.staging, built, allocations)

    def _keys(self, pool: int, count: int, seed: int) -> Any:
        tokens = np.arange(count * PAGE_TOKENS) + seed * 1_000_003
        return page_keys(tokens, page_tokens=PAGE_TOKENS, parent=self.handles[pool].namespace)

    # --- what a test asks ---

    def backup(self, pool: int, pages: list[int], seed: int, wait: bool = True, timeout_s: float = TIMEOUT_S) -> str:
        keys = self._keys(pool, len(pages), seed)
        self.pools[pool].fill(pages, keys)
        ticket = self.client.backup(self.handles[pool], pages, keys, ready=self.stream, timeout_s=timeout_s)
        self.tickets.append(ticket)
        return ticket.wait(TIMEOUT_S).status.value if wait else ""

    def backup_again(self, pool: int, pages: list[int], seed: int) -> str:
        """Back up, and say so when the cache is away."""
        try:
            return self.backup(pool, pages, seed)
        except PeerGone as error:
            return error.code

    def begin_backup(self, pool: int, pages: list[int], seed: int) -> None:
        """Begin a backup that :meth:`statuses` waits for, unless the cache is away."""
        with contextlib.suppress(PeerGone):
            self.backup(pool, pages, seed, wait=False)

    def attached_again(self) -> None:
        """Wait until an engine serves this client."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.client.status().get("degraded"):
            assert time.monotonic() < deadline, "still degraded"
            time.sleep(0.02)

    def restore(self, pool: int, pages: list[int], seed: int) -> str:
        """Restore to poisoned pages, and look at every byte of them and around them."""
        keys = self._keys(pool, len(pages), seed)
        self.pools[pool].poison(pages)
        ticket = self.client.restore(self.handles[pool], keys, pages, ready=self.stream)
        assert ticket.fence is not None
        outcome = ticket.wait(TIMEOUT_S)
        if outcome.status.value == "completed":
            ticket.fence.synchronize(timeout_s=TIMEOUT_S)
            self.pools[pool].check(pages, keys)
            return "completed"
        return f"{outcome.status.value} {outcome.error.code if outcome.error else ''}"

    def match(self, pool: int, count: int, seed: int) -> int:
        return self.client.match(self.handles[pool], self._keys(pool, count, seed))

    def statuses(self) -> list[str]:
        """How the operations that were not waited for ended."""
        tickets, self.tickets = self.tickets, []
        return [ticket.wait(TIMEOUT_S).status.value for ticket in tickets]

    def restored_again(self, pool: int, pages: list[int], seed: int) -> float:
        """Try a restore until it is completed; return how many seconds that took."""
        began = time.monotonic()
        while (said := self._tried(pool, pages, seed)) != "completed":
            assert time.monotonic() < began + TIMEOUT_S, said
            time.sleep(0.02)
        return time.monotonic() - began

    def _tried(self, pool: int, pages: list[int], seed: int) -> str:
        try:
            return self.restore(pool, pages, seed)
        except PeerGone as error:
            if error.code != "degraded":
                raise
            return str(error)

    def status(self) -> dict[str, Any]:
        return self.client.status()

    def close(self) -> None:
        self.client.close()
        for pool in self.pools:
            for allocation in pool.allocations:
                self.memory.free(allocation)
        self.transfer.destroy_stream(self.stream)
        self.staging.close()
        self.device.close()


class SchedulerProcess:
    """A test's end: attributes are questions, as ``scheduler.match(pool=0, count=3, seed=1)``."""

    def __init__(self, *arguments: str, module: str = "tests.hicache.daemon.scheduler", stderr: Any = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
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
        assert line, f"the scheduler ended with {self.process.wait(TIMEOUT_S)}"
        answer = json.loads(line)
        assert "error" not in answer, answer
        return answer["value"]

    def end(self) -> None:
        if self.process.poll() is None:
            self.close()
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()


@contextlib.contextmanager
def schedulers(path: str, count: int, backend: str = "host") -> Iterator[list[SchedulerProcess]]:
    """So many schedulers for the length of a block; none outlives it."""
    made = [SchedulerProcess(path, backend) for _ in range(count)]
    try:
        for one in made:
            one.match(pool=0, count=1, seed=0)  # it has attached
        yield made
        for one in made:
            one.end()
    finally:
        for one in made:
            one.kill()


def main() -> None:
    obey(Scheduler(*sys.argv[1:]))


def obey(scheduler: Any) -> None:
    """Call what each line names, and answer with a line."""
    for line in sys.stdin:
        name, values = json.loads(line)
        try:
            answer = {"value": getattr(scheduler, name)(**values)}
        except (DevIPCError, AssertionError) as error:
            answer = {"error": f"{type(error).__name__} {getattr(error, 'code', '')}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
