"""A device whose calls are made inside something: which, for how long, and that nothing else of it is different."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from devipc.deadline import call_with_deadline
from devipc.errors import CompletionTimeout, UsageError
from devipc.host.backend import HostBackend, HostDevice
from devipc.session.inside import SUBMISSIONS, inside

TIMEOUT_S = 10.0
BEGUN_S = 0.5  # within this a thread has begun, also where both processors are busy


class Around:
    """What calls are made in."""

    def __init__(self) -> None:
        self.inside = self.entered = 0

    def __call__(self) -> Around:
        return self

    def __enter__(self) -> None:
        self.inside += 1
        self.entered += 1

    def __exit__(self, *error: object) -> None:
        self.inside -= 1


@pytest.fixture
def device() -> Any:
    opened = HostBackend().open_device()
    yield opened
    opened.close()


def test_calls_of_every_part_are_made_inside_and_submissions_as_they_are(device: HostDevice) -> None:
    around = Around()
    seen = inside(device, around, direct=SUBMISSIONS)
    assert (seen.info, around.entered) == (device.info, 0)
    assert seen.transfer is not None
    assert seen.memory is not None
    assert seen.sync is not None
    assert seen.sync.events is not None
    stream, marker = seen.transfer.create_stream(), seen.transfer.create_marker()
    block = seen.memory.allocate(4096)
    event = seen.sync.events.create()
    assert around.entered == 4
    seen.sync.events.record(event, stream)
    seen.transfer.record(marker, stream)
    seen.transfer.copy(stream, block.ptr, block.ptr + 64, 64)
    assert not seen.transfer.is_capturing(stream)
    assert around.entered == 4
    device.transfer.synchronize_stream(stream)
    assert seen.transfer.query_marker(marker)
    assert seen.sync.events.query(event)
    assert (around.entered, around.inside) == (6, 0)
    with pytest.raises(UsageError):
        inside(device, around).transfer.copy(stream, 0, 0, 64)  # type: ignore[union-attr]
    assert (around.entered, around.inside) == (7, 0)
    seen.sync.events.destroy(event)
    seen.memory.free(block)


def test_what_a_device_lacks_is_lacking() -> None:
    class Bare:
        memory = sync = transfer = None

    seen = inside(Bare(), Around())  # type: ignore[arg-type]
    assert (seen.memory, seen.sync, seen.transfer) == (None, None, None)
    with pytest.raises(AttributeError):
        seen.info  # noqa: B018


def test_a_call_that_a_backend_gives_up_stays_inside(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    around, let_go, over = Around(), threading.Event(), threading.Event()

    def slow() -> None:
        assert let_go.wait(TIMEOUT_S)

    def impatient(self: object) -> None:
        undo: Callable[[None], None] = lambda _: over.set()  # noqa: E731
        call_with_deadline(slow, timeout_s=BEGUN_S, what="open", undo=undo)

    monkeypatch.setattr(type(device.transfer), "memory_info", impatient)
    seen = inside(device, around)
    with pytest.raises(CompletionTimeout):
        seen.transfer.memory_info()  # type: ignore[union-attr]
    assert around.inside == 1, "the thread that was given up"
    let_go.set()
    assert over.wait(TIMEOUT_S)
    for thread in threading.enumerate():
        if thread.name == "devipc-open":
            thread.join()
    assert around.inside == 0
