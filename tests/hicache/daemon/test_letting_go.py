"""Memory of a client is its own again when the engine has unmapped it, or is gone: never before anybody says so."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devipc.errors import CompletionTimeout, DevIPCError
from devipc.hicache.api import UNFENCED, HiCacheClient, PoolHandle, connect
from devipc.hicache.client import desk, registry
from devipc.hicache.requests import UnregisterPool
from devipc.interfaces.backend import Device
from devipc.registry import load_backend
from tests.hicache.daemon.daemons import Daemon, alive, daemon
from tests.hicache.daemon.engine_that_holds_memory import FOLDER, MODULE
from tests.hicache.daemon.test_schedulers import memory_files
from tests.hicache.pools import TIMEOUT_S, PoolMemory, until
from tests.hicache.world import World


class Scene:
    """A daemon whose engine may be kept from unmapping, and one client with one pool, of which a page was moved."""

    def __init__(self, device: Device, running: Daemon, folder: Path) -> None:
        self.daemon, self._folder = running, folder
        self.it = World(device)  # for its pools
        self.memory: PoolMemory = self.it.attention_pool()
        self.client: HiCacheClient = connect("unix:" + running.path, device=device, wait_s=TIMEOUT_S)

    def register(self) -> PoolHandle:
        handle: PoolHandle = self.it.register(self.client, self.memory)
        self.client.backup(handle, [1], self.it.keys(handle, 1), ready=UNFENCED).result(TIMEOUT_S)
        assert self.mapped
        return handle

    def hold(self, what: str) -> None:
        (self._folder / what).touch()

    def let_go(self, what: str) -> None:
        (self._folder / what).unlink()

    @property
    def engine_pid(self) -> int:
        return int(self.daemon.status()["engine"]["pid"])

    @property
    def mapped(self) -> bool:
        """Whether the engine process has any file of the client's memory mapped."""
        return memory_files(self.engine_pid) > 0

    def close(self) -> None:
        for file in self._folder.iterdir():
            file.unlink()
        self.client.close(timeout_s=TIMEOUT_S)
        self.it.close()


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Daemon, Path]]:
    with (
        tempfile.TemporaryDirectory() as folder,
        daemon(options={"engine_module": MODULE}, environment={FOLDER: folder}) as one,
    ):
        yield one, Path(folder)


@pytest.fixture
def scene(running: tuple[Daemon, Path]) -> Iterator[Scene]:
    device = load_backend("host").open_device()
    made = Scene(device, *running)
    yield made
    made.close()
    device.close()


def refused(call: Any, code: str) -> None:
    with pytest.raises(CompletionTimeout) as caught:
        call()
    assert caught.value.code == code
    assert caught.value.retryable
    assert caught.value.remedy


def test_nothing_is_mapped_when_a_pool_is_unregistered(scene: Scene) -> None:
    handle = scene.register()
    scene.client.unregister(handle)
    assert not scene.mapped


def test_nothing_is_mapped_when_a_client_has_left(scene: Scene) -> None:
    scene.register()
    scene.client.close(timeout_s=TIMEOUT_S)
    assert not scene.mapped


def test_an_unregistered_pool_that_is_still_mapped_is_not_the_clients_yet(scene: Scene) -> None:
    handle = scene.register()
    scene.hold("close")
    asked = scene.client._desk.submit(
        lambda op: UnregisterPool(op=op, pool=handle.number, generation=handle.generation)
    )
    time.sleep(0.3)
    assert asked.status is None
    assert scene.mapped
    scene.client._registry._leaving[handle.number] = asked
    refused(lambda: scene.client.unregister(handle, timeout_s=0.1), "timeout")
    scene.let_go("close")
    scene.client.unregister(handle, timeout_s=TIMEOUT_S)
    assert not scene.mapped


def test_a_client_does_not_leave_before_its_memory_is_unmapped(scene: Scene) -> None:
    scene.register()
    scene.hold("close")
    refused(lambda: scene.client.close(timeout_s=0.3), "stalled_stream")
    assert scene.mapped
    refused(lambda: scene.client.close(timeout_s=0.0), "stalled_stream")
    scene.let_go("close")
    scene.client.close(timeout_s=TIMEOUT_S)
    assert not scene.mapped


def test_a_registration_that_took_too_long_is_taken_back(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine opens the pool all the same, later; then it is unmapped again, and its client can leave."""
    monkeypatch.setattr(desk, "CALL_TIMEOUT_S", 0.2)
    monkeypatch.setattr(registry, "_TAKE_BACK_S", 0.1)
    scene.hold("open")
    refused(scene.register, "still_mapped")
    scene.hold("close")
    scene.let_go("open")
    until(lambda: scene.mapped)
    refused(lambda: scene.client.close(timeout_s=0.1), "stalled_stream")
    scene.let_go("close")
    scene.client.close(timeout_s=TIMEOUT_S)
    assert not scene.mapped


@pytest.mark.chaos
@pytest.mark.parametrize("what", ["open", "close"])
def test_an_engine_whose_driver_does_not_return_is_killed(what: str) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        daemon(options={"engine_module": MODULE, "stuck_s": 1}, environment={FOLDER: folder}) as one,
    ):
        device = load_backend("host").open_device()
        scene = Scene(device, one, Path(folder))
        try:
            pid = scene.engine_pid
            scene.hold(what)
            with pytest.raises(DevIPCError) if what == "open" else contextlib.nullcontext():
                scene.client.unregister(scene.register(), timeout_s=TIMEOUT_S)
            until(lambda: not alive(pid))
            assert "'beside' is in the driver" in one.said()
        finally:
            scene.close()
            device.close()


@pytest.mark.chaos
def test_the_end_of_the_engine_unmaps_too(scene: Scene) -> None:
    scene.register()
    pid = scene.engine_pid
    scene.hold("close")
    refused(lambda: scene.client.close(timeout_s=0.1), "stalled_stream")
    os.kill(pid, signal.SIGKILL)
    scene.client.close(timeout_s=TIMEOUT_S)
    assert not Path(f"/proc/{pid}/maps").exists() or not Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.chaos
def test_a_client_without_a_thread_to_poison_with_hears_of_the_end_all_the_same(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.register()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("devipc-poison"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    os.kill(scene.engine_pid, signal.SIGKILL)
    until(lambda: (now := scene.client.status()).get("losses") == 1 and not now["degraded"])
    scene.client.close(timeout_s=TIMEOUT_S)
    until(lambda: not scene.daemon.status()["clients"])


@pytest.mark.chaos
@pytest.mark.parametrize("what", ["refuse", pytest.param("break", marks=pytest.mark.long)])
def test_an_engine_whose_driver_does_not_unmap_ends(scene: Scene, what: str) -> None:
    """Nothing else unmaps then; another one serves."""
    handle = scene.register()
    pid = scene.engine_pid
    scene.hold(what)
    scene.client.unregister(handle, timeout_s=TIMEOUT_S)
    assert not alive(pid)
    scene.let_go(what)
    until(lambda: bool((now := scene.client.status())["losses"]) and not now["degraded"])
    assert scene.engine_pid != pid
    scene.memory = scene.it.attention_pool()
    scene.register()
