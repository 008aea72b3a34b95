"""Primitives: words, markers and events, as a backend supplies them, before any fence is made of them."""
# ruff: noqa: D103 - the demand of a case is its documentation

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from devipc.conformance.catalogue import case
from devipc.conformance.peers import Peer
from devipc.conformance.rig import Latch, Rig
from devipc.conformance.roles_sync import bogus_events, drop, open_event, query_event
from devipc.conformance.sharing import allocated
from devipc.conformance.staging import Staging, content, until
from devipc.errors import DevIPCError, HandleError, UsageError
from devipc.interfaces.sync import InterprocessEvent, InterprocessEvents
from devipc.types import POISON_BASE, HandleKind, PoisonReason

KIB, MIB = 1 << 10, 1 << 20
PATTERN = 0x0123_4567_89AB_CDEF
UNTOUCHED = 0x5A5A_5A5A_5A5A_5A5A
WATCHED_S = 0.05


def stays_away(latch: Latch, happened: Callable[[], bool]) -> None:
    """Watch for a while that nothing happens which a latch holds back; skip when the latch is over before."""
    deadline = time.monotonic() + WATCHED_S
    while time.monotonic() < deadline:
        seen = happened()
        if not latch.held:
            pytest.skip("the device was faster than its queue of copies; nothing was observed")
        assert not seen, "work that is held back has run"
        time.sleep(0.001)


@case(
    "SYNC-201",
    "A word is stored whole, where it was asked for and nowhere else, behind all earlier work and not before.",
    clause="interfaces/sync.py: WordWrites.write",
)
def test_word_write(rig: Rig) -> None:
    writes = rig.word_writes
    with rig.new_staging(4 * KIB) as words:
        for index in range(8):
            words.set_word(index, UNTOUCHED)
        with rig.latch(rig.stream) as latch:
            writes.write(rig.stream, words.ptr + 8 * 3, PATTERN)
            stays_away(latch, lambda: words.word(3) != UNTOUCHED)
        assert until(lambda: words.word(3) != UNTOUCHED, rig.deadline_s), "the word was never stored"
        rig.finish(rig.stream, "a word write")
        assert [words.word(index) for index in range(8)] == [PATTERN if i == 3 else UNTOUCHED for i in range(8)]


@case(
    "SYNC-208",
    "When a word is seen, everything that the stream wrote before it is seen too.",
    clause="interfaces/sync.py: WordWrites.write",
)
def test_word_write_comes_last(rig: Rig, any_kind: object) -> None:
    writes = rig.word_writes
    nbytes = 256 * KIB
    source = rig.memory.allocate(nbytes)
    try:
        rig.fill(source.ptr, nbytes, 1)
        expected = content(1, nbytes)
        with rig.new_staging(nbytes) as target, rig.new_staging(4 * KIB) as words:
            for value in range(1, 101):
                target.view[:] = bytes(nbytes)
                rig.transfer.copy(rig.stream, target.ptr, source.ptr, nbytes)
                writes.write(rig.stream, words.ptr, value)
                assert until(lambda value=value: words.word(0) >= value, rig.deadline_s, pause_s=0), "not stored"  # type: ignore[misc]
                assert words.word(0) == value
                assert target.view == expected, "the word was seen before the data"
            rig.finish(rig.stream, "a word write")
    finally:
        rig.memory.free(source)


@case(
    "SYNC-209",
    "A word outside registered memory, or off its alignment, is refused.",
    clause="interfaces/sync.py: WordWrites.write",
)
def test_word_address(rig: Rig) -> None:
    writes = rig.word_writes
    with rig.new_staging(4 * KIB) as words:
        with pytest.raises(UsageError):
            writes.write(rig.stream, words.ptr + 4, 1)
        rig.finish(rig.stream, "a refused word write")
        assert not any(words.view)


@case(
    "SYNC-202",
    "A wait for a word holds later work until the word is equal or larger, and a host store ends it.",
    clause="interfaces/sync.py: WordWaits.wait",
)
@pytest.mark.parametrize("release", [1000, 1001, 2**62 - 1, POISON_BASE + PoisonReason.PEER_DIED])
def test_word_wait(rig: Rig, release: int) -> None:
    waits = rig.word_waits
    with rig.new_staging(4 * KIB) as words, rig.new_stream() as stream:
        marker = rig.transfer.create_marker()
        words.set_word(0, 0)
        try:
            waits.wait(stream, words.ptr, 1000)
            rig.carry(stream, words.ptr + 1 * KIB, words.ptr + 2 * KIB, 8)
            words.set_word(256, PATTERN)
            rig.transfer.record(marker, stream)
            for smaller in (0, 1, 999):
                words.set_word(0, smaller)
                ran = until(lambda: rig.transfer.query_marker(marker), 0.05)
                assert not ran, f"a wait for 1000 ended at {smaller}"
                assert words.word(128) == 0, "work behind a pending wait has run"
        finally:
            words.set_word(0, release)
        try:
            rig.finish(stream, "work behind a wait whose word was stored")
            assert words.word(128) == PATTERN
        finally:
            rig.transfer.destroy_marker(marker)


@case(
    "SYNC-210", "A wait for a word that is reached already does not hold.", clause="interfaces/sync.py: WordWaits.wait"
)
def test_word_wait_over(rig: Rig) -> None:
    waits = rig.word_waits
    with rig.new_staging(4 * KIB) as words:
        words.set_word(0, 7)
        waits.wait(rig.stream, words.ptr, 7)
        waits.wait(rig.stream, words.ptr, 1)
        rig.finish(rig.stream, "a wait for a word that is reached")


@case(
    "SYNC-211",
    "A word that one stream stores ends the wait of another stream.",
    clause="interfaces/sync.py: WordWaits.wait",
)
def test_word_between_streams(rig: Rig) -> None:
    writes, waits = rig.word_writes, rig.word_waits
    with rig.new_staging(4 * KIB) as words, rig.new_stream() as one, rig.new_stream() as other:
        for value in range(1, 21):
            waits.wait(other, words.ptr, value)
            writes.write(one, words.ptr, value)
        rig.finish(one, "word writes")
        rig.finish(other, "waits for words that another stream stores")
        assert words.word(0) == 20


@case(
    "SYNC-203",
    "A marker is done when the work before its last record is done; one that was never recorded is not.",
    clause="interfaces/transfer.py: DeviceTransfer.query_marker",
)
def test_marker(rig: Rig) -> None:
    transfer = rig.transfer
    marker = transfer.create_marker()
    try:
        assert not transfer.query_marker(marker), "a marker that was never recorded is done"
        with rig.latch(rig.stream) as latch:
            transfer.record(marker, rig.stream)
            stays_away(latch, lambda: transfer.query_marker(marker))
        assert until(lambda: transfer.query_marker(marker), rig.deadline_s)
        with rig.latch(rig.stream) as latch:
            transfer.record(marker, rig.stream)
            stays_away(latch, lambda: transfer.query_marker(marker))
        assert until(lambda: transfer.query_marker(marker), rig.deadline_s)
    finally:
        transfer.destroy_marker(marker)


@case(
    "SYNC-204",
    "A stream that waits for a marker runs after the recorded point.",
    clause="interfaces/transfer.py: DeviceTransfer.wait_marker",
)
def test_wait_marker(rig: Rig) -> None:
    transfer = rig.transfer
    first, second = transfer.create_marker(), transfer.create_marker()
    try:
        with rig.new_staging(4 * KIB) as words, rig.new_stream() as other:
            words.set_word(1, PATTERN)
            with rig.latch(rig.stream) as latch:
                transfer.record(first, rig.stream)
                transfer.wait_marker(other, first)
                rig.carry(other, words.ptr, words.ptr + 8, 8)
                transfer.record(second, other)
                stays_away(latch, lambda: transfer.query_marker(second) or words.word(0) != 0)
            rig.finish(other, "work behind a marker")
            assert words.word(0) == PATTERN
    finally:
        transfer.destroy_marker(first)
        transfer.destroy_marker(second)


@case("SYNC-212", "Work of one stream runs in order.", clause="interfaces/transfer.py: Stream")
def test_stream_order(rig: Rig, any_kind: HandleKind) -> None:
    step = 64 * KIB
    with (
        allocated(rig, 8 * step, any_kind) as area,
        rig.new_staging(step) as source,
        rig.new_staging(step) as target,
    ):
        source.view[:] = content(212, step)
        rig.transfer.copy(rig.stream, area.ptr, source.ptr, step)
        for index in range(1, 8):
            rig.transfer.copy(rig.stream, area.ptr + index * step, area.ptr + (index - 1) * step, step)
        rig.transfer.copy(rig.stream, target.ptr, area.ptr + 7 * step, step)
        rig.finish(rig.stream, "a chain of copies")
        assert target.view == content(212, step), "a copy ran before the one that it depends on"


@case(
    "SYNC-110",
    "Calls work from a thread that has never used the device.",
    clause="interfaces/transfer.py: DeviceTransfer",
)
def test_fresh_thread(rig: Rig, any_kind: object) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            allocation = rig.memory.allocate(64 * KIB)
            try:
                with rig.new_stream() as stream:
                    rig.write(allocation.ptr, content(110, 64 * KIB), stream=stream)
                    assert rig.read(allocation.ptr, 64 * KIB, stream=stream) == content(110, 64 * KIB)
                rig.memory.release(rig.memory.export(allocation.ptr, 64 * KIB))
            finally:
                rig.memory.free(allocation)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


@contextmanager
def event(rig: Rig) -> Iterator[tuple[InterprocessEvents, InterprocessEvent]]:
    events = rig.events
    made = events.create()
    try:
        yield events, made
    finally:
        events.destroy(made)


def open_in(peer: Peer, payload: bytes) -> int:
    try:
        return int(peer.call(open_event, payload=payload.hex()).body["key"])
    except AssertionError as error:
        raise AssertionError(f"a peer could not open an event: {error}") from error


@case(
    "SYNC-205",
    "An event is not done, in any process, while the work before its record is pending, and done afterwards.",
    clause="interfaces/sync.py: InterprocessEvents",
)
def test_event(rig: Rig, peer: Peer) -> None:
    with event(rig) as (events, made):
        events.record(made, rig.stream)
        rig.finish(rig.stream, "an event")
        key = open_in(peer, events.export(made))
        with rig.latch(rig.stream) as latch:
            events.record(made, rig.stream)
            stays_away(latch, lambda: bool(peer.call(query_event, key=key).body["done"]) or events.query(made))
        assert until(lambda: events.query(made), rig.deadline_s)
        assert until(lambda: bool(peer.call(query_event, key=key).body["done"]), rig.deadline_s)
        peer.call(drop, key=key)


@case(
    "SYNC-087",
    "An event that is recorded more than 32 times speaks of its latest record.",
    clause="interfaces/sync.py: InterprocessEvents.record",
)
def test_event_recorded_often(rig: Rig, peer: Peer) -> None:
    with event(rig) as (events, made):
        key = open_in(peer, events.export(made))
        for _ in range(70):
            events.record(made, rig.stream)
        rig.finish(rig.stream, "many records")
        assert until(lambda: bool(peer.call(query_event, key=key).body["done"]), rig.deadline_s)
        with rig.latch(rig.stream) as latch:
            events.record(made, rig.stream)
            stays_away(latch, lambda: bool(peer.call(query_event, key=key).body["done"]))
        assert until(lambda: bool(peer.call(query_event, key=key).body["done"]), rig.deadline_s)
        peer.call(drop, key=key)


@case(
    "SYNC-071",
    "Event handles that are made up are refused by type, and never taken for a finished event.",
    clause="interfaces/sync.py: InterprocessEvents.open",
)
def test_bogus_events(rig: Rig, peer: Peer) -> None:
    with event(rig) as (events, made):
        payload = events.export(made)
        for wrong in (b"", payload[:-1], payload + b"\0"):
            with pytest.raises(HandleError):
                events.open(wrong)
        bogus = [random.Random(seed).randbytes(len(payload)).hex() for seed in range(8)]
        bogus.append(bytes(len(payload)).hex())
        accepted = peer.call(bogus_events, payloads=bogus).body["accepted"]
        assert not accepted, f"{len(accepted)} made-up handles were opened"


@case(
    "SYNC-213",
    "Registered host memory is refused when it is misaligned, empty or registered twice, and free again afterwards.",
    clause="interfaces/transfer.py: DeviceTransfer.register_host",
)
def test_registration(rig: Rig) -> None:
    with rig.new_staging(64 * KIB) as area:
        for address, nbytes in ((area.address + 1, 4 * KIB), (area.address, 0)):
            with pytest.raises(UsageError):
                rig.transfer.unregister_host(rig.transfer.register_host(address, nbytes))
        with pytest.raises(DevIPCError):
            rig.transfer.unregister_host(rig.transfer.register_host(area.address, 64 * KIB))
    again = Staging(rig.transfer, 64 * KIB)
    again.close()
