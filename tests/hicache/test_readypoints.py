"""Points behind the work of a stream, as a client of a daemon makes them: what fails leaves no fence behind."""

from __future__ import annotations

import threading

import pytest

from devipc.completion import ProducerFence, create_fence
from devipc.errors import ClosedError, DevIPCError, DriverError, UsageError
from devipc.hicache.client import readypoints
from devipc.hicache.client.readypoints import Forwarder, MarkerPoint, StreamPoint, StreamPoints
from devipc.hicache.moving.mover import MarkerPool
from devipc.hicache.wire.slots import Readiness, Slots
from devipc.interfaces.transfer import Marker, Stream
from devipc.registry import load_backend
from devipc.types import Strategy
from tests.hicache.pools import until


def test_a_stream_that_fails_has_its_own_error_and_leaves_no_fence() -> None:
    device = load_backend("host").open_device()
    transfer, forwarder = device.transfer, Forwarder()
    assert transfer is not None
    made: list[ProducerFence] = []

    def create(name: str) -> ProducerFence:
        made.append(create_fence(device, Strategy.HOST_FLAG))
        return made[-1]

    points = StreamPoints(create, lambda stream: forwarder.point(transfer, stream))
    gone: Stream = transfer.create_stream()
    transfer.destroy_stream(gone)
    with pytest.raises(ClosedError) as closed:
        points.mark(gone)
    assert closed.value.code == "closed"
    stream = transfer.create_stream()
    stream.begin_capture()  # type: ignore[attr-defined]
    with pytest.raises(UsageError) as capturing:
        points.mark(stream)
    assert capturing.value.code == "capturing"
    stream.end_capture()  # type: ignore[attr-defined]
    for fence in made:
        with pytest.raises(ClosedError):
            fence.query(1)
    point = points.mark(stream)
    assert isinstance(point, StreamPoint)
    assert point.n == 1
    transfer.synchronize_stream(stream)
    assert point.reached()
    made[-1].close(1.0)
    forwarder.close()
    transfer.destroy_stream(stream)
    device.close()


def test_a_stream_with_a_point_that_is_not_reached_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other streams come meanwhile; one whose points are reached is, with its fence."""
    monkeypatch.setattr(readypoints, "_MAX_STREAMS", 1)
    device = load_backend("host").open_device()
    transfer, forwarder = device.transfer, Forwarder()
    assert transfer is not None
    made: list[ProducerFence] = []

    def create(name: str) -> ProducerFence:
        made.append(create_fence(device, Strategy.HOST_FLAG))
        return made[-1]

    points = StreamPoints(create, lambda stream: forwarder.point(transfer, stream))
    slow, quick = transfer.create_stream(), transfer.create_stream()
    slow.stall()  # type: ignore[attr-defined]
    first = points.mark(slow)
    second = points.mark(quick)
    assert not first.reached()
    slow.resume()  # type: ignore[attr-defined]
    for stream in (slow, quick):
        transfer.synchronize_stream(stream)
    assert first.reached()
    assert second.reached()
    third = transfer.create_stream()
    points.mark(third)
    assert [fence.closed for fence in made] == [True, True, False]
    assert first.reached()  # whoever still has it
    transfer.synchronize_stream(third)
    made[-1].close(1.0)
    forwarder.close()
    for stream in (slow, quick, third):
        transfer.destroy_stream(stream)
    device.close()


def test_a_point_that_would_end_the_thread_is_never_reached_and_others_are_looked_at() -> None:
    class Point:
        asked = 0

        def __init__(self, error: BaseException | None) -> None:
            self.error = error

        def reached(self) -> bool:
            self.asked += 1
            if self.error is not None and self.asked > 1:
                raise self.error
            return self.asked > 20

    slots, forwarder = Slots.create(2), Forwarder()
    told: list[DevIPCError] = []
    for slot, error in enumerate((SystemExit("a caller's"), None)):
        forwarder.watch(slots, slot, Point(error), told.append)
        until(lambda slot=slot: slots.readiness(slot) is not Readiness.NOT_YET)  # type: ignore[misc]
    assert [slots.readiness(slot) for slot in range(2)] == [Readiness.NEVER, Readiness.REACHED]
    assert [error.code for error in told] == ["ready_point"]
    forwarder.close()
    slots.close()


def test_a_slot_is_not_another_operations_while_its_word_is_written() -> None:
    slots, forwarder = Slots.create(1), Forwarder()
    say_ready, waits, threads = slots.say_ready, list[bool](), list[threading.Thread]()

    class Later:
        asked = 0

        def reached(self) -> bool:
            self.asked += 1
            return self.asked > 1

    def written(slot: int, readiness: Readiness) -> None:
        threads.append(
            threading.Thread(target=forwarder.forget, args=(slots, slot))
        )  # its operation has ended meanwhile
        threads[-1].start()
        threads[-1].join(0.1)
        waits.append(threads[-1].is_alive())
        say_ready(slot, readiness)

    slots.say_ready = written  # type: ignore[method-assign]
    forwarder.watch(slots, 0, Later(), lambda _error: None)
    until(lambda: slots.readiness(0) is Readiness.REACHED)
    assert waits == [True]
    threads[0].join(5.0)
    forwarder.close()
    slots.close()


def test_a_point_that_an_interrupt_finds_reached_does_not_ask_the_marker_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = load_backend("host").open_device()
    transfer = device.transfer
    assert transfer is not None
    markers, stream, give_back = MarkerPool(transfer), transfer.create_stream(), MarkerPool.give_back
    first = MarkerPoint(markers, transfer, stream)
    transfer.synchronize_stream(stream)

    def interrupted(pool: MarkerPool, marker: Marker) -> None:
        give_back(pool, marker)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MarkerPool, "give_back", interrupted)
        with pytest.raises(KeyboardInterrupt):
            first.reached()
    second = MarkerPoint(markers, transfer, stream)
    transfer.synchronize_stream(stream)
    assert first.reached()
    third = MarkerPoint(markers, transfer, stream)
    assert second._marker is not third._marker
    transfer.synchronize_stream(stream)
    assert second.reached()
    assert third.reached()
    markers.close()
    transfer.destroy_stream(stream)
    device.close()


@pytest.mark.parametrize("strategy", [Strategy.HOST_FLAG, Strategy.STREAM_MEMOP])
def test_a_value_whose_signal_failed_never_stands_for_later_work(
    monkeypatch: pytest.MonkeyPatch, strategy: Strategy
) -> None:
    """The driver may have stored it all the same: pages would be backed up before they are written."""
    device = load_backend("host").open_device()
    transfer, forwarder = device.transfer, Forwarder()
    assert transfer is not None
    made: list[ProducerFence] = []

    def create(name: str) -> ProducerFence:
        made.append(create_fence(device, strategy))
        return made[-1]

    def refused(*_: object) -> None:
        raise DriverError("the driver refused a marker", remedy="none: it was asked to")

    points = StreamPoints(create, lambda stream: forwarder.point(transfer, stream))
    stream = transfer.create_stream()
    points.mark(stream)
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(type(transfer), "record", refused)  # the fence's, behind its store
            with pytest.raises(DriverError):
                points.mark(stream)
    transfer.synchronize_stream(stream)
    stream.stall()  # type: ignore[attr-defined]
    later = points.mark(stream)
    assert not later.reached()
    stream.resume()  # type: ignore[attr-defined]
    transfer.synchronize_stream(stream)
    assert later.reached()
    made[-1].close(1.0)
    forwarder.close()
    transfer.destroy_stream(stream)
    device.close()
