"""What an engine process holds for one client, in this process: no memory that stays mapped goes unsaid."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devipc.deadline import deadline_after
from devipc.errors import CompletionTimeout, DevIPCError, DriverError
from devipc.hicache.engine.localcopies import LocalCarrier
from devipc.hicache.engineproc.clients import EngineClient
from devipc.hicache.moving.arena import HostArena
from devipc.hicache.planning.planner import Direction
from devipc.hicache.wire.pulse import Pulse, PulseReader
from devipc.hicache.wire.slots import Slots
from devipc.registry import load_backend
from devipc.session import Importer
from devipc.session.peer import Peer
from devipc.types import ExportedExtent, OpenedExtent
from tests.hicache.pools import TIMEOUT_S

NAMES = ["pool/1/1/0", "pool/1/1/1"]


class Memory:
    """The engine's memory interface: opens wait to be let go, and what is unmapped is said not to be."""

    def __init__(self, real: Any) -> None:
        self.opening, self.let_go = threading.Event(), threading.Event()
        self._real = real

    def open(self, extent: ExportedExtent) -> OpenedExtent:
        self.opening.set()
        assert self.let_go.wait(TIMEOUT_S)
        opened: OpenedExtent = self._real.open(extent)
        return opened

    def close(self, opened: OpenedExtent) -> None:
        self._real.close(opened)
        raise DriverError("unmap failed")


class World:
    """An engine's client, and what it told of an engine that must end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.backend = load_backend("host")
        self.device = self.backend.open_device()
        self.arena, self.pulse, self.lost = HostArena(2**20), Pulse(), list[DevIPCError]()
        self.carrier = LocalCarrier(self.device, self.arena)
        self.carrier.lose = self.lost.append
        self.client = self.new_client()

    def new_client(self) -> EngineClient:
        return EngineClient(
            os.urandom(16),
            Slots.create(8),
            self.carrier,
            self.pulse,
            since=0,
            backend=self.backend,
            device_uuid=self.device.info.uuid,
            strategy="polling",
            folder=str(self.folder),
            uid=os.geteuid(),
        )

    @contextlib.contextmanager
    def session(self) -> Iterator[Peer]:
        """Connect the client, which shares two chunks; what is opened of them comes to the driver, as between two."""
        facts = {"hicache_client": self.client.id.hex()}

        class Session(Importer):
            def facts(self) -> dict[str, str]:
                return super().facts() | facts

        with Session(self.client.path, backend="host", strategy="polling", timeout_s=TIMEOUT_S) as session:
            self.theirs = session
            for name in NAMES:
                session.share(name, session.allocate(4096))
            peer = self.client._arrived(deadline_after(TIMEOUT_S))
            peer.mappings._instance = bytes(16)
            self.memory = Memory(peer.mappings._memory)
            peer.mappings._memory = self.memory  # type: ignore[assignment]
            yield peer
            self.client.close(timeout_s=TIMEOUT_S)

    def close(self) -> None:
        self.client.close(timeout_s=TIMEOUT_S)
        for direction in Direction:
            self.carrier.copies(direction).close()
        self.carrier.close()
        self.device.close()
        self.pulse.close()
        self.arena.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_open_that_was_given_up_and_is_not_undone_ends_the_engine(world: World) -> None:
    with world.session() as peer:
        with pytest.raises(CompletionTimeout):
            peer.open_all(NAMES, timeout_s=0.5)
        assert world.memory.opening.is_set()
        world.client.close_pools()
        assert not world.client.wait_unmapped(0.0)
        assert not world.lost
        world.memory.let_go.set()
        assert world.client.wait_unmapped(TIMEOUT_S)
        assert [error.message for error in world.lost[:1]] == ["unmap failed"]


def test_a_client_closes_also_when_the_driver_does_not_unmap_what_it_keeps(world: World) -> None:
    with world.session() as peer:
        peer.mappings.set_idle_limit(8)
        world.memory.let_go.set()
        for memory in peer.open_all(NAMES):
            memory.close()
        assert peer.mappings.stats()["idle"] == len(NAMES)
        assert not world.lost
        world.client.close_pools()
        assert world.client.wait_unmapped(TIMEOUT_S)
        assert [error.message for error in world.lost[:1]] == ["unmap failed"]


@pytest.mark.parametrize("whose", ["engine", "client"])
def test_a_driver_that_hangs_while_a_fence_is_closed_shows_in_the_pulse(world: World, whose: str) -> None:
    reader = PulseReader(os.dup(world.pulse.fileno()))
    with world.session():
        world.theirs.create_fence("ready/1")
        fence = world.client.timelines[Direction.BACKUP]._fence if whose == "engine" else world.client.ready_fence(1)
        half: Any = fence._base
        close, hanging, let_go = half.close, threading.Event(), threading.Event()

        def hang() -> None:
            hanging.set()
            assert let_go.wait(TIMEOUT_S)
            close()

        half.close = hang
        closing = threading.Thread(target=lambda: world.client.close(timeout_s=TIMEOUT_S))
        closing.start()
        try:
            assert hanging.wait(TIMEOUT_S)
            assert "beside" in reader.stuck()
        finally:
            let_go.set()
            closing.join()
        assert "beside" not in reader.stuck()
    reader.close()
