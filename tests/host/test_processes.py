"""Two real processes: bytes, chunks, copies, words and events across them, and the death of either."""

from __future__ import annotations

import base64
import ctypes
import os
import time
from functools import partial

import pytest

from devipc.host.backend import HostDevice
from devipc.host.events import HostEvents
from devipc.host.transfer import HostStream
from devipc.spi import PAGE_NBYTES, HandleError, close_fds
from tests.host.conftest import Words
from tests.host.helpers import passed, until, waits_of, writes_of
from tests.host.peer import Peer, from_json

OFFSETS = [0, 1, 100, PAGE_NBYTES - 1, PAGE_NBYTES, 3 * PAGE_NBYTES + 7]


@pytest.fixture
def stream(device: HostDevice) -> HostStream:
    return device.transfer.create_stream()


@pytest.fixture
def events(device: HostDevice) -> HostEvents:
    found = device.sync.events
    assert found is not None
    return found


def test_bytes_are_seen_both_ways_at_any_offset(device: HostDevice, peer: Peer) -> None:
    made = device.memory.allocate_grown([2 * PAGE_NBYTES] * 3)
    for offset in OFFSETS:
        nbytes = made.nbytes - offset - 5
        extent = device.memory.export(made.ptr + offset, nbytes)
        there, length = peer.open(extent)
        device.memory.release(extent)
        assert length == nbytes
        pattern = os.urandom(nbytes)
        ctypes.memmove(made.ptr + offset, pattern, nbytes)
        assert bytes.fromhex(peer.call("read", [there, 3000])) == pattern[:3000]
        assert bytes.fromhex(peer.call("read", [there + nbytes - 3000, 3000])) == pattern[-3000:]
        before, after = ctypes.string_at(made.ptr, offset), ctypes.string_at(made.ptr + offset + nbytes, 5)
        peer.call("fill", [there, 0xC3, nbytes])
        assert ctypes.string_at(made.ptr + offset, nbytes) == b"\xc3" * nbytes
        assert ctypes.string_at(made.ptr, offset) == before
        assert ctypes.string_at(made.ptr + offset + nbytes, 5) == after
        peer.call("close", there)
    device.memory.free(made)


def test_streams_of_the_importer_copy_in_shared_memory_within_exact_bounds(device: HostDevice, peer: Peer) -> None:
    made = device.memory.allocate(4 * PAGE_NBYTES)
    extent = device.memory.export(made.ptr + 10, 5000)
    there, _ = peer.open(extent)
    ctypes.memset(made.ptr + 10, 1, 2500)
    assert peer.call("copy", [there + 2500, there, 2500]) is None
    assert ctypes.string_at(made.ptr + 10, 5001) == b"\1" * 5000 + b"\0"
    for dst, src, nbytes in (
        (there - 1, there, 1),
        (there + 5000, there, 1),
        (there + 4999, there, 2),
        (there, there, 5001),
    ):
        assert peer.call("copy", [dst, src, nbytes])["type"] == "UsageError"
    device.memory.release(extent)


def test_what_a_peer_exported_outlives_the_peer(device: HostDevice, peer: Peer) -> None:
    (theirs, chunks), fds = peer.call_fds("share", [PAGE_NBYTES, PAGE_NBYTES])
    extent = from_json(chunks, fds)
    opened = device.memory.open(extent)
    close_fds(fds)
    peer.call("fill", [theirs, 77, 2 * PAGE_NBYTES])
    peer.kill()
    assert ctypes.string_at(opened.ptr, 2 * PAGE_NBYTES) == b"\x4d" * 2 * PAGE_NBYTES
    ctypes.memset(opened.ptr, 1, opened.nbytes)
    device.memory.close(opened)


def test_descriptors_in_the_wrong_order_are_refused(device: HostDevice, peer: Peer) -> None:
    (_, chunks), fds = peer.call_fds("share", [PAGE_NBYTES, PAGE_NBYTES])
    with pytest.raises(HandleError, match="not the one of this chunk"):
        device.memory.open(from_json(chunks, fds[::-1]))
    device.memory.close(device.memory.open(from_json(chunks, fds)))
    close_fds(fds)


def test_words_order_copies_between_processes(device: HostDevice, peer: Peer, words: Words, stream: HostStream) -> None:
    """The peer copies each turn's bytes only after our word, and we read its copy only after its word."""
    nbytes, turns = 8 * PAGE_NBYTES, 200
    made = device.memory.allocate(2 * nbytes)
    extent = device.memory.export(made.ptr, made.nbytes)
    there, _ = peer.open(extent)
    device.memory.release(extent)
    peer.call("map_words", None, fds=[words.fd])
    peer.call("hand_over", [there + nbytes, there, nbytes, turns])
    pattern = device.memory.allocate(nbytes)
    stale: list[int] = []

    def check(turn: int) -> None:
        if ctypes.string_at(made.ptr + nbytes, nbytes) != bytes([turn % 251]) * nbytes:
            stale.append(turn)

    for turn in range(1, turns + 1):
        stream.call(partial(ctypes.memset, pattern.ptr, turn % 251, nbytes))
        device.transfer.copy(stream, made.ptr, pattern.ptr, nbytes)
        writes_of(device).write(stream, words.at(0), turn)
        waits_of(device).wait(stream, words.at(1), turn)
        stream.call(partial(check, turn))
    device.transfer.synchronize_stream(stream)
    assert words.words[1] == turns
    assert not stale


def test_a_stalled_writer_holds_the_other_process_back(
    device: HostDevice, peer: Peer, words: Words, stream: HostStream
) -> None:
    peer.call("map_words", None, fds=[words.fd])
    peer.call("stall", True)
    peer.call("write_word", [0, 3])
    waits_of(device).wait(stream, words.at(0), 3)
    done = passed(device.transfer, stream)
    time.sleep(0.05)
    assert not done()
    peer.call("stall", False)
    assert until(done)


def test_a_wait_on_a_dead_peers_word_is_released_by_the_host(
    device: HostDevice, peer: Peer, words: Words, stream: HostStream
) -> None:
    peer.call("map_words", None, fds=[words.fd])
    peer.call("stall", True)
    peer.call("write_word", [0, 3])
    waits_of(device).wait(stream, words.at(0), 3)
    done = passed(device.transfer, stream)
    peer.kill()
    time.sleep(0.02)
    assert not done()
    words.words[0] = 2**62 + 1
    assert until(done)


def test_events_are_queried_from_the_other_process(
    device: HostDevice, peer: Peer, stream: HostStream, events: HostEvents
) -> None:
    event = events.create()
    peer.call("event", base64.b64encode(events.export(event)).decode())
    assert peer.call("event", "query") is True
    stream.stall()
    events.record(event, stream)
    assert peer.call("event", "query") is False
    stream.resume()
    device.transfer.synchronize_stream(stream)
    assert peer.call("event", "query") is True
    stream.stall()
    events.record(event, stream)
    assert peer.call("event", "query") is False
    stream.resume()
    assert peer.call("event", "record")["type"] == "UsageError"
    events.destroy(event)
    assert peer.call("event", "query")["code"] == "stale_event"
    peer.call("event", "destroy")


def test_events_of_a_peer_that_dies(device: HostDevice, peer: Peer, events: HostEvents) -> None:
    """An opened event never becomes done; a handle no longer resolves."""
    payload = base64.b64decode(peer.call("event", "create"))
    opened = events.open(payload)
    peer.call("stall", True)
    peer.call("event", "record")
    assert not events.query(opened)
    peer.kill()
    assert not events.query(opened)
    with pytest.raises(HandleError) as caught:
        events.open(payload)
    assert caught.value.code == "exporter_gone"
    events.destroy(opened)


def test_an_event_whose_device_was_closed_no_longer_resolves(peer: Peer, device: HostDevice) -> None:
    events = device.sync.events
    assert events is not None
    payload = base64.b64encode(events.export(events.create())).decode()
    device.close()
    assert peer.call("event", payload)["code"] == "exporter_gone"
