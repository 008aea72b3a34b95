"""A small world for the cache: a device, pools with known content, clients of one engine, and what they did.

Knows the contracts only, so that the same scenarios run on every backend. What is special about one (holding a stream
back) is in :class:`Gate`.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from devipc.hicache.api import HiCacheClient, PoolHandle
from devipc.hicache.builders import BuiltPool, TensorView, mla_token_pool, plain_pool, token_pool
from devipc.hicache.client.ticket import Ticket
from devipc.hicache.engine import Engine
from devipc.hicache.engine.engineop import EngineOp
from devipc.hicache.engine.lane import Lane
from devipc.hicache.keys import Namespace, page_keys
from devipc.hicache.local import LocalEngine
from devipc.hicache.operations import Event, Side, table_of
from devipc.hicache.requests import Answers
from devipc.hicache.results import Answer
from devipc.interfaces.backend import Device
from devipc.interfaces.memory import Allocation
from devipc.memfd import round_up
from tests.hicache.deployment import Deployment, InProcess, deploy
from tests.hicache.pools import POISON as POISON
from tests.hicache.pools import SENTINEL as SENTINEL
from tests.hicache.pools import TIMEOUT_S as TIMEOUT_S
from tests.hicache.pools import Bytes as Bytes
from tests.hicache.pools import Gate as Gate
from tests.hicache.pools import Keys as Keys
from tests.hicache.pools import PoolMemory as PoolMemory
from tests.hicache.pools import Staging as Staging
from tests.hicache.pools import closed_behind
from tests.hicache.pools import until as until


class Record(Answers):
    """What the engine told one client, on its way to it; counts statuses on the engine's side and on the client's."""

    def __init__(self, inner: Answers) -> None:
        self._inner = inner
        self.told: dict[int, list[Event]] = {}
        self.engine_ends: Counter[int] = Counter()
        self.client_ends: Counter[int] = Counter()

    def answer(self, op: int, event: Event, answer: Answer, passed: tuple[Event, ...] = ()) -> None:
        self.told.setdefault(op, []).extend((*passed, event))
        self._inner.answer(op, event, answer, passed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def engine_dying(self) -> None:
        self._inner.engine_dying()

    def engine_gone(self) -> None:
        self._inner.engine_gone()


class Client(HiCacheClient):
    """A client whose operations are counted, on both sides."""

    def __init__(self, deployment: Deployment) -> None:
        self.link = deployment.link()
        self.tickets: list[Ticket] = []
        attach = self.link.attach

        def recorded(answers: Answers) -> None:
            self.record = Record(answers)
            attach(self.record)

        self.link.attach = recorded
        super().__init__(self.link)
        submit = self._desk.submit

        def counted(*arguments: Any, **options: Any) -> Ticket:
            ticket = submit(*arguments, **options)
            self.tickets.append(ticket)
            ticket.add_hook(lambda: self.record.client_ends.update([ticket.op]))
            return ticket

        self._desk.submit = counted  # type: ignore[method-assign]
        deployment.check_decision(self.link)
        self.session: Any = deployment.session(self.link)
        ended = self.session._ended

        def count(operation: EngineOp) -> None:
            assert operation.state in table_of(operation.kind, Side.ENGINE).terminal
            self.record.engine_ends[operation.op] += 1
            ended(operation)

        self.session._ended = count

    def check_ends(self, *, lookups: bool = False) -> None:
        """Every operation has exactly one status on either side; leases may be open unless ``lookups``."""
        for ticket in self.tickets:
            if lookups or ticket.kind.value != "lookup":
                assert self.record.client_ends[ticket.op] == 1, ticket
        assert all(count == 1 for count in self.record.engine_ends.values())

    def forget(self) -> None:
        """Check the ends so far as :meth:`check_ends`, and keep nothing of them: for a client that has many operations.

        Nothing is under way, leases may be open.
        """
        self.check_ends()
        assert all(self.record.client_ends[one.op] == 1 for one in self.tickets if one.status is not None)
        self.tickets[:] = [ticket for ticket in self.tickets if ticket.status is None]
        kept = {ticket.op for ticket in self.tickets}
        for told in (self.record.told, self.record.engine_ends, self.record.client_ends):
            for op in told.keys() - kept:
                del told[op]


class World:
    """See the module.

    Parameters
    ----------
    device : Device
        Open; stays the caller's.
    config
        Of the engine, small sizes by default; and ``pin_nbytes``, how much of the tier can be pinned.
    """

    def __init__(self, device: Device, **config: Any) -> None:
        assert device.memory is not None
        assert device.transfer is not None
        self.device = device
        self.memory = device.memory
        self.transfer = device.transfer
        self.gate = Gate(device)
        self.staging = Staging(device)
        settings: dict[str, Any] = {"tier_nbytes": 4 * 2**20, "slab_nbytes": 2**18, **config}
        try:
            self.deployment = deploy(device, self.gate, **settings)
        except BaseException:
            self.staging.close()
            raise
        self.tier = self.deployment.tier
        self.clients: list[Client] = []
        self.pools: list[PoolMemory] = []
        self.streams: list[Any] = []

    @property
    def engine(self) -> Engine:
        """The tables of the engine that serves."""
        return self.deployment.engine

    @property
    def local(self) -> LocalEngine:
        """The engine in this process."""
        assert isinstance(self.deployment, InProcess)
        return self.deployment.local

    def client(self) -> Client:
        made = Client(self.deployment)
        self.clients.append(made)
        return made

    def stall(self, lane: Lane) -> None:
        """Hold the copies of one direction back."""
        self.deployment.stall(self._direction(lane))

    def resume(self, lane: Lane) -> None:
        self.deployment.resume(self._direction(lane))

    def _direction(self, lane: Lane) -> str:
        return "backup" if lane is self.engine.backups else "restore"

    def stream(self) -> Any:
        made = self.transfer.create_stream()
        self.streams.append(made)
        return made

    # --- pools ---

    def attention_pool(self, *, pages: int = 33, page_tokens: int = 4, layers: int = 6, row: int = 24) -> PoolMemory:
        """K and V of a layer in one allocation, an allocation a layer."""
        rows = pages * page_tokens
        half = round_up(rows * row, 64)
        allocations = [self.memory.allocate(2 * half) for _ in range(layers)]
        k = [TensorView.contiguous(one.ptr, (rows, row), 1) for one in allocations]
        v = [TensorView.contiguous(one.ptr + half, (rows, row), 1) for one in allocations]
        return self._pool(
            lambda infos: token_pool(k, v, page_tokens=page_tokens, allocations=infos, first_page=1), allocations
        )

    def mla_pool(self, *, pages: int = 40, page_tokens: int = 4, layers: int = 17, row: int = 18) -> PoolMemory:
        """One latent row a token and layer, all layers in one allocation."""
        rows = pages * page_tokens
        step = round_up(rows * row, 32)
        allocation = self.memory.allocate(step * layers)
        kv = [TensorView.contiguous(allocation.ptr + index * step, (rows, row), 1) for index in range(layers)]
        return self._pool(lambda infos: mla_token_pool(kv, page_tokens=page_tokens, allocations=infos), [allocation])

    def padded_pool(self, *, pages: int = 20, layers: int = 3) -> PoolMemory:
        """Rows with gaps, pages with gaps, planes woven into each other."""
        allocation = self.memory.allocate(layers * pages * 256)
        tensors = [
            (layer, TensorView(allocation.ptr + layer * 64, (pages, 2, 20), (layers * 64, 28, 1), 1))
            for layer in range(layers)
        ]
        return self._pool(lambda infos: plain_pool(tensors, page_tokens=2, allocations=infos), [allocation])

    def _pool(self, build: Callable[[list[Any]], BuiltPool], allocations: list[Allocation]) -> PoolMemory:
        made = PoolMemory(self.staging, build([self.memory.describe(one.ptr) for one in allocations]), allocations)
        self.pools.append(made)
        return made

    def namespace(self, pool: PoolMemory, name: str = "model") -> Namespace:
        return Namespace.of(pool.layout, model=name, revision="1", dtype="u8")

    def register(self, client: HiCacheClient, pool: PoolMemory, name: str = "model") -> PoolHandle:
        return client.register_pool(pool.built, namespace=self.namespace(pool, name))

    def keys(self, handle: PoolHandle, count: int, *, seed: int = 0) -> Keys:
        """A chain of ``count`` keys; another ``seed`` is another prompt."""
        tokens = np.arange(count * handle.layout.page_tokens) + seed * 1_000_003
        return page_keys(tokens, page_tokens=handle.layout.page_tokens, parent=handle.namespace)

    # --- the end ---

    def close(self) -> None:
        """Let everything go; look whether every operation ended once, and nothing is held."""
        self.gate.resume_all()
        self.deployment.resume_all()
        for client in self.clients:
            client.close(timeout_s=TIMEOUT_S)
            client.check_ends(lookups=True)
        self.tier.audit()
        status: Any = self.tier.status()
        assert status["holds"] == status["reservations"] == 0
        self.deployment.close(TIMEOUT_S)
        for pool in self.pools:
            for allocation in pool.allocations:
                self.memory.free(allocation)
        for stream in self.streams:
            self.transfer.destroy_stream(stream)
        self.staging.close()


@contextlib.contextmanager
def world(device: Device, **config: Any) -> Iterator[World]:
    made = World(device, **config)
    with closed_behind(made):
        yield made


def run_threads(*targets: Callable[[], None]) -> None:
    """Run all at once; raise what any of them raised."""
    failures: list[BaseException] = []

    def guarded(target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S * 2)
    if failures:
        raise failures[0]
