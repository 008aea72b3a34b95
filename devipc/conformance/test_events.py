"""Events and words once more: limits, several importers, ends in either order, and graphs that are recorded."""
# ruff: noqa: D103 - the demand of a case is its documentation

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from devipc.completion import create_fence
from devipc.conformance.catalogue import case
from devipc.conformance.fixtures import NewPeer
from devipc.conformance.peers import Peer
from devipc.conformance.profile import BackendProfile
from devipc.conformance.rig import Latch, Rig
from devipc.conformance.roles_events import ask_event, destroy_event, make_event, make_many_events, record_event
from devipc.conformance.roles_sync import open_event
from devipc.conformance.staging import Unavailable, given_back, until
from devipc.errors import DevIPCError, UsageError
from devipc.interfaces.transfer import Stream
from devipc.memfd import SharedMap, create_memfd
from devipc.spi import close_fds
from devipc.types import POISON_BASE, PoisonReason, Strategy

KIB = 1 << 10
MOST_EVENTS = 2048


@case(
    "SYNC-116",
    "Events are made up to 2048 or to a limit that is named by type, and made again after they were destroyed.",
    clause="interfaces/sync.py: InterprocessEvents.create",
)
def test_many_events(rig: Rig, bare_peer: Peer) -> None:
    assert rig.events is not None
    body = bare_peer.call(make_many_events, limit=MOST_EVENTS).body
    assert body["made"] >= 32, f"only {body['made']} events could be made"
    assert body["again"], "an event that was made after many is never done"


@case(
    "SYNC-216",
    "Several processes that open one event are told the same, also by a handle that is exported again.",
    clause="interfaces/sync.py: InterprocessEvents.export",
)
def test_several_importers(rig: Rig, new_peer: NewPeer) -> None:
    events = rig.events
    one, other = new_peer(), new_peer()
    event = events.create()
    try:
        events.record(event, rig.stream)
        rig.finish(rig.stream, "an event")
        keys = [(one, one.call(open_event, payload=events.export(event).hex()).body["key"])]
        keys += [(other, other.call(open_event, payload=events.export(event).hex()).body["key"])]
        with rig.latch(rig.stream) as latch:
            events.record(event, rig.stream)
            for peer, key in keys:
                seen = peer.call(ask_event, key=key).body
                if not latch.held:
                    pytest.skip("the device was faster than its queue of copies; nothing was observed")
                assert seen == {"done": False, "refused": ""}
        for peer, key in keys:
            assert until(lambda peer=peer, key=key: bool(peer.call(ask_event, key=key).body["done"]), rig.deadline_s)  # type: ignore[misc]
            peer.call(destroy_event, key=key)
    finally:
        events.destroy(event)


@case(
    "SYNC-218",
    "An importer that gives an event back takes it from nobody else.",
    clause="interfaces/sync.py: InterprocessEvents.destroy",
)
def test_importer_destroys_first(rig: Rig, new_peer: NewPeer) -> None:
    maker = new_peer()
    made = maker.call(make_event).body
    if not made["payload"]:
        raise Unavailable("the peer makes no events")
    payload = bytes.fromhex(made["payload"])
    first = rig.events.open(payload)
    with given_back(lambda: rig.events.destroy(first)):
        second = rig.events.open(payload)
    with given_back(lambda: rig.events.destroy(second)):
        maker.call(record_event, key=made["key"])
        assert until(lambda: rig.events.query(second), rig.deadline_s)
        assert maker.call(ask_event, key=made["key"]).body["refused"] == ""


@case(
    "SYNC-214",
    "Every value of a word arrives whole: of 1, 32, 33, 62 and 63 bits, and the values of poison.",
    clause="interfaces/sync.py: WordWrites.write",
)
def test_word_values(rig: Rig) -> None:
    values = [1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**62 - 1, POISON_BASE + PoisonReason.PEER_DIED, 2**63 - 1, 0]
    writes = rig.word_writes
    with rig.new_staging(4 * KIB) as words:
        for index, value in enumerate(values):
            words.set_word(index, 0x5A)
            writes.write(rig.stream, words.ptr + 8 * index, value)
        rig.finish(rig.stream, "word writes")
        assert [words.word(index) for index in range(len(values))] == values


@case(
    "SYNC-215",
    "A wait for a word off its alignment is refused, and the stream works on.",
    clause="interfaces/sync.py: WordWaits.wait",
)
def test_wait_address(rig: Rig) -> None:
    waits = rig.word_waits
    with rig.new_staging(4 * KIB) as words:
        with pytest.raises(UsageError):
            waits.wait(rig.stream, words.ptr + 4, 1)
        rig.finish(rig.stream, "a stream after a refused wait", timeout_s=2.0)


@contextlib.contextmanager
def capturing(rig: Rig, profile: BackendProfile, stream: Stream) -> Iterator[None]:
    """Let ``stream`` record a graph, in the profile's way or the stream's own."""
    if profile.capture is not None:
        with profile.capture(rig.device, stream):
            yield
        return
    begin, end = getattr(stream, "begin_capture", None), getattr(stream, "end_capture", None)
    if begin is None or end is None:
        raise Unavailable("neither the profile nor the stream records graphs")
    begin()
    try:
        yield
    finally:
        end()


@case(
    "SYNC-088",
    "A stream that records a graph says so; signals, word writes and word waits on it are refused.",
    clause="interfaces/transfer.py: DeviceTransfer.is_capturing",
)
def test_capture(rig: Rig, profile: BackendProfile, strategy: Strategy) -> None:
    transfer = rig.transfer
    with create_fence(rig.device, strategy) as fence, rig.new_stream() as stream, rig.new_staging(4 * KIB) as words:
        assert not transfer.is_capturing(stream)
        with capturing(rig, profile, stream):
            assert transfer.is_capturing(stream), "the stream records, and says that it does not"
            with pytest.raises(UsageError):
                fence.signal(stream, 1)
            if strategy is Strategy.STREAM_MEMOP:
                with pytest.raises(UsageError):
                    rig.word_writes.write(stream, words.ptr, 1)
                with pytest.raises(UsageError):
                    rig.word_waits.wait(stream, words.ptr, 1)
        assert not transfer.is_capturing(stream)
        assert fence.issued == 0
    with create_fence(rig.device, strategy) as fence, rig.new_stream() as stream:
        fence.signal(stream, 1)
        fence.synchronize(1, rig.deadline_s)


@case(
    "SYNC-080",
    "A stream that waits for a marker waits for the point recorded then; recording again changes nothing.",
    clause="interfaces/transfer.py: DeviceTransfer.wait_marker",
)
def test_wait_is_for_that_record(rig: Rig) -> None:
    if not rig.has_latches:
        pytest.skip("without word waits no stream can be held back for certain")
    transfer = rig.transfer
    marker = transfer.create_marker()
    try:
        with rig.new_stream() as source, rig.new_stream() as waiting:
            transfer.record(marker, source)
            holds_waiting = Latch(rig, waiting)
            transfer.wait_marker(waiting, marker)
            holds_source = Latch(rig, source)
            try:
                transfer.record(marker, source)
                holds_waiting.close()
                assert not transfer.query_marker(marker)
                rig.finish(waiting, "a stream whose marker was recorded anew", timeout_s=rig.deadline_s / 2)
            finally:
                holds_waiting.close()
                holds_source.close()
    finally:
        transfer.destroy_marker(marker)


@case(
    "SYNC-096",
    "Host memory that is not mapped cannot be registered: refused by type, and the next registration works.",
    clause="interfaces/transfer.py: DeviceTransfer.register_host",
)
def test_unmapped_memory(rig: Rig) -> None:
    fd = create_memfd("devipc-gone", 64 * KIB)
    try:
        gone = SharedMap(fd, 64 * KIB)
    finally:
        close_fds([fd])
    address = gone.address
    gone.close()
    with pytest.raises(DevIPCError):
        rig.transfer.unregister_host(rig.transfer.register_host(address, 64 * KIB))
    with rig.new_staging(64 * KIB) as area:
        rig.carry(rig.stream, area.ptr, area.ptr + 4 * KIB, 4 * KIB)
        rig.finish(rig.stream, "a copy after a refused registration")


@case(
    "SYNC-112",
    "While a thread waits for a stream, other threads of the process go on, and it is told when the work is done.",
    clause="interfaces/transfer.py: DeviceTransfer.synchronize_stream",
)
def test_waiting_releases_the_interpreter(rig: Rig) -> None:
    if not rig.has_latches:
        pytest.skip("without word waits no stream can be held back for certain")
    failures: list[BaseException] = []
    with rig.new_stream() as stream:
        latch = Latch(rig, stream)
        opener = threading.Timer(2.0, latch.open)  # a call that holds the interpreter is over then, and seen below

        def wait() -> None:
            try:
                rig.transfer.synchronize_stream(stream)
            except BaseException as error:
                failures.append(error)

        waiter = threading.Thread(target=wait, daemon=True)
        try:
            opener.start()
            longest_s = longest_pause_s(0.3, begin=waiter.start)
            early = not waiter.is_alive()
        finally:
            latch.close()
            opener.cancel()
            opener.join()
        waiter.join(rig.deadline_s)
        assert not waiter.is_alive(), "the wait went on after the work was done"
        if failures:
            raise failures[0]
        assert not early, "the wait ended while the work was held back"
        assert longest_s < 1.0, f"no other thread ran for {longest_s:.1f} s"


def longest_pause_s(watched_s: float, *, begin: Callable[[], object]) -> float:
    """Return for how long this thread was kept from running, at most, from ``begin()`` on."""
    longest, last = 0.0, time.monotonic()
    end = last + watched_s
    begin()
    while last < end:
        time.sleep(0.002)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return longest
