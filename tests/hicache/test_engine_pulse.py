"""What a session of the engine process asks the driver shows in the pulse: a driver that hangs there is seen."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from devipc.completion.trial import TrialResponder
from devipc.hicache.planning.planner import Direction
from devipc.hicache.wire.pulse import PulseReader
from devipc.host.backend import HostBackend
from devipc.host.transfer import HostTransfer
from devipc.wire import Writer
from tests.hicache.pools import TIMEOUT_S, until
from tests.hicache.test_engine_clients import World


class Hanging:
    """A call of the driver that does not return, once it is told to hang, until it is let go."""

    def __init__(self, owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hangs, self.hanging, self.let_go = False, threading.Event(), threading.Event()
        call = getattr(owner, name)

        def hang(*args: Any, **options: Any) -> Any:
            if self.hangs:
                self.hanging.set()
                assert self.let_go.wait(TIMEOUT_S)
            return call(*args, **options)

        monkeypatch.setattr(owner, name, hang)

    @contextlib.contextmanager
    def seen_in(
        self,
        reader: PulseReader,
        action: Callable[[], object] = lambda: None,
        *,
        release: Callable[[], object] = lambda: None,
    ) -> Iterator[None]:
        """Hang in the block, and in ``action`` beside it, which goes on behind ``release``; the pulse shows it."""
        self.hangs = True
        acting = threading.Thread(target=action)
        acting.start()
        try:
            yield
            assert self.hanging.wait(TIMEOUT_S)
            assert "beside" in reader.stuck()
        finally:
            self.hangs = False
            self.let_go.set()
            release()
            acting.join()
        until(lambda: "beside" not in reader.stuck())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Hanging:
    """Asking a marker."""
    return Hanging(HostTransfer, "query_marker", monkeypatch)


@pytest.fixture
def world(tmp_path: Path, asked: Hanging) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


@pytest.fixture
def reader(world: World) -> Iterator[PulseReader]:
    made = PulseReader(os.dup(world.pulse.fileno()))
    yield made
    made.close()


def signal(world: World) -> Any:
    """Leave a signal of the engine pending, and return the stream that it is behind."""
    stream: Any = world.carrier.copies(Direction.BACKUP).stream
    stream.stall()
    stream.call(lambda: None)  # or nothing would be held up
    world.client.timelines[Direction.BACKUP].signal(stream, 1)
    return stream


def test_a_driver_that_hangs_when_it_is_asked_while_a_fence_drains(
    world: World, reader: PulseReader, asked: Hanging
) -> None:
    with world.session():
        stream = signal(world)
        fence = world.client.timelines[Direction.BACKUP]._fence
        fence._base._ticker.remove(fence._base._tick)  # type: ignore[attr-defined]
        with asked.seen_in(reader, lambda: world.client.close(timeout_s=TIMEOUT_S), release=stream.resume):
            pass


def test_a_driver_that_hangs_when_a_thread_looks_at_signals(world: World, reader: PulseReader, asked: Hanging) -> None:
    with world.session():
        with asked.seen_in(reader):
            stream = signal(world)
        stream.resume()


def test_a_driver_that_hangs_in_a_trial(world: World, reader: PulseReader, monkeypatch: pytest.MonkeyPatch) -> None:
    making = Hanging(HostTransfer, "create_stream", monkeypatch)
    with world.session() as peer:
        trials: TrialResponder = peer._trials
        body = Writer().u8(2).text("polling", limit=32).done()
        with making.seen_in(reader, lambda: trials.answer(body, ())):
            pass
        trials.close()


def test_a_driver_that_hangs_while_a_client_is_greeted(
    world: World, reader: PulseReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is opened for it."""
    opening = Hanging(HostBackend, "open_device", monkeypatch)
    found: list[BaseException] = []

    def greet() -> None:
        try:
            world.new_client().close(timeout_s=TIMEOUT_S)
        except BaseException as error:
            found.append(error)

    with opening.seen_in(reader, greet):
        pass
    assert not found
