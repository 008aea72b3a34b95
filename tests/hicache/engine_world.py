"""An engine process alone: orders by hand instead of a supervisor's tables, an arena, and one client process."""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from devipc.errors import DevIPCError
from devipc.hicache.daemon.remote import EngineProcess, EngineSpawn
from devipc.hicache.daemon.remotecopies import RemoteClient
from devipc.hicache.engine.pools import Pool
from devipc.hicache.layout import decode_layout
from devipc.hicache.moving.arena import HostArena
from devipc.hicache.planning.planner import Direction
from devipc.hicache.requests import RegisterPool
from devipc.hicache.tier.records import Places
from devipc.hicache.wire.protocol import Point
from devipc.hicache.wire.slots import Slots
from devipc.memfd import round_up
from devipc.wire import Reader
from tests.hicache.engine_client import ClientProcess, client_process
from tests.hicache.engine_with_faults import FOLDER, LEFT, MODULE, Faults
from tests.hicache.pools import TIMEOUT_S, until
from tests.simulator import build, control

PAGES, LAYERS = 40, 17


class EngineWorld:
    """See the module."""

    def __init__(
        self,
        backend: str,
        *,
        strategy: str = "",
        arena_nbytes: int = 2**22,
        variables: dict[str, str] | None = None,
        **switches: object,
    ) -> None:
        self.backend = backend
        self.strategy = strategy
        self.environment: dict[str, str] = {}
        if backend == "cuda":
            self.environment = {"DEVIPC_TRIAL_CACHE": ""} | control.environment(
                build.build("cuda"), control.new_room(), **switches
            )
        self._variables = variables or {}
        self.folder = tempfile.mkdtemp(prefix="e", dir="/tmp")  # short: sockets lie there
        self.arena = HostArena(arena_nbytes)
        self.slots = Slots.create(64)
        self.ends: list[DevIPCError] = []
        self.client_id = secrets.token_bytes(16)
        self.told: list[Any] = []
        self._kept = {name: os.environ.get(name) for name in (*self.environment, *self._variables, FOLDER)}

    def start(self, **options: Any) -> EngineProcess:
        """Spawn the engine; the client comes with :meth:`attach`."""
        spawn = EngineSpawn(folder=self.folder, backend=self.backend, module=MODULE, **options)
        os.environ.update({**self.environment, **self._variables, FOLDER: self.folder})
        try:
            self.process = EngineProcess(spawn, self.arena.fileno(), self.arena.nbytes)
        finally:
            for name, value in self._kept.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
        self.carrier = self.process.carrier
        self.process.on_end(self.ends.append)
        self.lanes = {direction: self.carrier.copies(direction) for direction in Direction}
        return self.process

    @contextlib.contextmanager
    def faults(self) -> Iterator[Faults]:
        with Faults(self.folder, self.process.pid) as made:
            yield made

    @contextlib.contextmanager
    def client(self) -> Iterator[ClientProcess]:
        fd = os.dup(self.slots.fileno())
        os.set_inheritable(fd, True)
        try:
            with client_process(self.backend, fd, self.client_id.hex(), self.environment) as made:
                yield made
        finally:
            os.close(fd)

    def attach(self, client: ClientProcess, *, pools: int = 1) -> str:
        """Open the client on both sides, and its pool; return the strategy."""
        self.remote: RemoteClient = self.process.open_client(
            self.client_id, os.dup(self.slots.fileno()), uid=os.getuid()
        )
        chosen = str(client.connect(path=self.remote.path, strategy=self.strategy))
        told = client.pool(number=1, generation=1, pages=PAGES, layers=LAYERS)
        self.page_nbytes: int = told["page"]
        self.layout_bytes = base64.b64decode(told["layout"])
        self.layout = decode_layout(Reader(self.layout_bytes))
        found = self.open_pool(1, 1)
        assert not isinstance(found, DevIPCError), found
        self.pool = Pool(1, 1, self.layout, found, bytes(16))
        return chosen

    def open_pool(self, number: int, generation: int) -> Any:
        answers: list[Any] = []
        request = RegisterPool(
            op=1, pool=number, generation=generation, layout=self.layout, addresses=(), namespace=bytes(16)
        )
        self.carrier.open_pool(self.client_id, request, answers.append)
        until(lambda: bool(answers))
        return answers[0]

    def close_pool(self) -> None:
        """Have the pool unmapped."""
        closed: list[bool] = []
        self.carrier.close_pool(self.pool.opened, lambda: closed.append(True))
        until(lambda: bool(closed))

    def places(self, count: int, first: int = 0) -> Places:
        """A block each, one behind the other."""
        step = round_up(self.page_nbytes, 64)
        offset = (np.arange(count, dtype=np.int64) + first) * step
        return Places(offset, np.ones(count, np.int64), np.zeros(count, np.int64))

    def host(self, places: Places) -> list[bytes]:
        return [bytes(self.arena.view[at : at + self.page_nbytes]) for at in places.offset.tolist()]

    def write(self, places: Places, contents: list[bytes]) -> None:
        for at, content in zip(places.offset.tolist(), contents, strict=True):
            self.arena.view[at : at + self.page_nbytes] = content

    def start_job(
        self, client: ClientProcess, direction: Direction, pages: list[int], places: Places, *, slot: int, op: int
    ) -> Any:
        client.begin(slot=slot, op=op)
        ids = np.array(pages, np.int64)
        return self.lanes[direction].start(self.pool, direction, ids, places, self.remote.fence(slot, op))

    def move(
        self, client: ClientProcess, direction: Direction, pages: list[int], places: Places, *, slot: int, op: int
    ) -> Any:
        job = self.start_job(client, direction, pages, places, slot=slot, op=op)
        until(job.poll)
        return job

    def ready(self, point: Point | None, slot: int | None = None) -> Any:
        return self.remote.ready(point, slot)

    def close(self) -> None:
        if hasattr(self, "process"):
            assert self.process.close(TIMEOUT_S)
        self.slots.close()
        self.arena.close()
        for name in os.listdir(self.folder):
            assert name.endswith((".faults", LEFT)), name
            os.unlink(os.path.join(self.folder, name))
        os.rmdir(self.folder)


@contextlib.contextmanager
def engine_world(backend: str, **options: Any) -> Iterator[EngineWorld]:
    made = EngineWorld(backend, **options)
    try:
        yield made
    finally:
        made.close()


def contents(client: ClientProcess, count: int, seed: int) -> list[bytes]:
    return [base64.b64decode(one) for one in client.contents(count=count, seed=seed)]


def soon(condition: Callable[[], bool], timeout_s: float) -> float:
    """Wait for something; return after how many seconds it was seen."""
    began = time.monotonic()
    until(condition, timeout_s)
    return time.monotonic() - began
