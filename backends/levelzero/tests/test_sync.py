"""Shared event pools: rules, two processes, deaths, what a peer may not do, and fences over them."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import pytest

from backends.testing.helpers import few_descriptors, staging
from devipc.spi import CapabilityError, DevIPCError, HandleError, Mechanism, ResourceExhausted, UsageError, Verdict

from .peers import Channel, open_device, peer, simulated


@simulated()
def test_mechanisms(device: Any, sim: Any) -> None:
    found = device.sync.mechanisms()
    assert set(found) == set(Mechanism)
    assert found[Mechanism.STREAM_MEMOP].verdict is Verdict.NO
    assert "host_flag" in found[Mechanism.STREAM_MEMOP].remedy
    assert found[Mechanism.EVENT].verdict is Verdict.UNTESTED
    assert "right to trace" in found[Mechanism.EVENT].evidence
    assert device.sync.word_writes is None
    assert device.sync.word_waits is None


@simulated()
def test_event_rules(device: Any, sim: Any) -> None:
    events = device.sync.events
    event = events.create()
    assert not events.query(event)  # never recorded is not done
    with staging(device) as host:
        sim.stall()
        host.transfer.copy(host.stream, host.device_ptr, host.device_ptr + 4096, 8)
        events.record(event, host.stream)
        assert not events.query(event)
        sim.stall(False)
        host.transfer.synchronize_stream(host.stream)
        assert events.query(event)
        sim.stall()
        events.record(event, host.stream)
        assert not events.query(event)
        sim.stall(False)
        host.transfer.synchronize_stream(host.stream)
    events.destroy(event)
    with pytest.raises(UsageError):
        events.query(event)
    with pytest.raises(UsageError):
        events.destroy(event)


@simulated()
def test_a_record_that_fails_is_not_waited_for(device: Any, sim: Any) -> None:
    """Nothing will ever set the event, which was set back already."""
    events = device.sync.events
    event = events.create()
    with staging(device) as host:
        events.record(event, host.stream)
        host.transfer.synchronize_stream(host.stream)
        sim.inject(f"zeCommandListAppendBarrier@1={0x70000002}")
        with pytest.raises(ResourceExhausted):
            events.record(event, host.stream)
        assert not events.query(event)
        events.record(event, host.stream)
        host.transfer.synchronize_stream(host.stream)
        assert events.query(event)
        sim.inject(f"zeCommandListAppendBarrier@1={0x70000002}")
        with pytest.raises(ResourceExhausted):
            events.record(event, host.stream)
    pools = sim.counter("live_pools")
    events.destroy(event)
    assert sim.counter("live_pools") == pools - 1


@simulated()
def test_a_pending_record_holds_the_next_one_back(device: Any, sim: Any) -> None:
    """Its signal would be taken for the next one's, so a second record waits for it, and says so in the end."""
    from devipc_levelzero import sync

    sync._RECORD_TIMEOUT_S = 0.2
    event = device.sync.events.create()
    with staging(device) as host:
        sim.stall()
        device.sync.events.record(event, host.stream)
        with pytest.raises(ResourceExhausted, match="still waits for its last record"):
            device.sync.events.record(event, host.stream)
        sim.stall(False)
        device.sync.events.record(event, host.stream)
        host.transfer.synchronize_stream(host.stream)
    device.sync.events.destroy(event)


@simulated()
def test_a_destroyed_event_is_not_used_again_before_its_signal(device: Any, sim: Any) -> None:
    events = device.sync.events
    kept = events.create()
    with staging(device) as host:
        sim.stall()
        first = events.create()
        events.record(first, host.stream)
        index = first.index
        events.destroy(first)
        others = [events.create() for _ in range(40)]
        assert index not in [each.index for each in others if each.pool is first.pool]
        assert not any(events.query(each) for each in others)
        sim.stall(False)
        host.transfer.synchronize_stream(host.stream)
        assert not any(events.query(each) for each in others)
    for each in (*others, kept):
        events.destroy(each)


def ask(device: Any, sim: Any, channel: Channel) -> None:
    """Open an event; answer questions about it, and refuse what only its maker may do."""
    events = device.sync.events
    event = events.open(bytes.fromhex(channel.receive()))
    with pytest.raises(UsageError):
        events.export(event)
    with staging(device) as host, pytest.raises(UsageError):
        events.record(event, host.stream)
    channel.send("open")
    while channel.receive() == "ask":
        channel.send(events.query(event))
    events.destroy(event)


def asked(other: Any) -> bool:
    other.channel.send("ask")
    return bool(other.channel.receive())


@simulated()
def test_a_peer_sees_what_was_recorded(device: Any, sim: Any) -> None:
    events = device.sync.events
    made = [events.create() for _ in range(3)]
    event = made[1]
    with staging(device) as host, peer(ask) as other:
        other.channel.send(events.export(event).hex())
        assert other.channel.receive() == "open"
        assert not asked(other)
        sim.stall()
        events.record(event, host.stream)
        assert not asked(other)
        sim.stall(False)
        host.transfer.synchronize_stream(host.stream)
        assert asked(other)
        events.record(made[0], host.stream)
        other.channel.send("end")
    for each in made:
        events.destroy(each)
    assert sim.calls("zeCommandListAppendWaitOnEvents") == 0


def make_and_wait(device: Any, sim: Any, channel: Channel) -> None:
    events = device.sync.events
    event = events.create()
    channel.send(events.export(event).hex())
    with staging(device) as host:
        while channel.receive() == "record":
            sim.stall()
            events.record(event, host.stream)
            channel.send("recorded")


@simulated()
def test_a_dead_makers_event_never_comes_and_nothing_waits_for_it(device: Any, sim: Any) -> None:
    events = device.sync.events
    with peer(make_and_wait) as other:
        payload = bytes.fromhex(other.channel.receive())
        event = events.open(payload)
        other.channel.send("record")
        assert other.channel.receive() == "recorded"
        other.kill()
        assert not events.query(event)
        with staging(device) as host:
            host.transfer.synchronize_stream(host.stream)  # no stream of ours has it in its way
        with pytest.raises(HandleError, match="is gone"):
            device.sync.events._open_pool(b"x" * 16, *parts(payload))
        events.destroy(event)
        with pytest.raises(HandleError, match="is gone"):
            events.open(payload)
        other.finish = lambda: None  # type: ignore[method-assign]


def parts(payload: bytes) -> tuple[Any, ...]:
    """Return handle, process, its start and the descriptor's file of a payload."""
    from devipc_levelzero.sync import _PAYLOAD

    _, _, _, pid, start, device, inode, _, _, raw = _PAYLOAD.unpack(payload)
    return raw, pid, start, (device, inode)


@simulated()
def test_made_up_handles_are_refused(device: Any, sim: Any) -> None:
    from devipc_levelzero.sync import _PAYLOAD

    events = device.sync.events
    event = events.create()
    payload = events.export(event)
    fields = list(_PAYLOAD.unpack(payload))
    opens = sim.calls("zeEventPoolOpenIpcHandle")

    def changed(place: int, value: Any) -> bytes:
        other = list(fields)
        other[place] = value
        return _PAYLOAD.pack(*other)

    wrong = [b"", payload[:-1], payload + b"\0", bytes(len(payload))]
    wrong += [changed(0, 9), changed(2, 1), changed(3, 0), changed(3, 2**31), changed(6, 1), changed(8, 32)]
    wrong += [changed(7, 64), changed(9, b"\xff" * 64), changed(9, bytes(64)), changed(3, 1)]
    for each in wrong:
        with pytest.raises((HandleError, CapabilityError)) as caught:
            events.open(each)
        assert caught.value.remedy
    assert sim.calls("zeEventPoolOpenIpcHandle") == opens
    assert sim.counter("live_pools") == 2
    events.destroy(event)


@simulated()
def test_an_open_without_descriptors_says_so(device: Any, sim: Any) -> None:
    """The driver calls it an invalid argument, while those that it takes are the last."""
    events = device.sync.events
    event = events.create()
    payload = events.export(event)
    sim.inject(f"zeEventPoolOpenIpcHandle@1={0x78000004}")
    with few_descriptors(2), pytest.raises(ResourceExhausted) as caught:
        events.open(payload)
    assert caught.value.code == "fds"
    events.destroy(events.open(payload))
    events.destroy(event)


@simulated()
def test_pools_go_with_their_last_event(device: Any, sim: Any) -> None:
    events = device.sync.events
    before = (sim.counter("live_pools"), sim.counter("fds"))
    made = [events.create() for _ in range(100)]
    assert sim.counter("live_pools") == before[0] + 4
    for event in made:
        events.destroy(event)
    assert (sim.counter("live_pools"), sim.counter("fds")) == before
    assert sim.counter("unreturned_handles") == 0


@pytest.mark.parametrize("what", ["shared", "closed", "marker"])
@simulated(bare=True)
def test_a_device_that_is_closed_keeps_what_a_list_will_set(what: str, sim: Any) -> None:
    """A stream outlives what it was to tell: a borrowed one, or that of somebody who gave up."""
    device = open_device()
    stream, events = device.transfer.create_stream(), device.sync.events
    sim.stall()
    if what == "marker":
        device.transfer.record(device.transfer.create_marker(), stream)
    else:
        events.record(event := events.create(), stream)
        if what == "closed":
            events.destroy(event)
    device.close()
    assert sim.counter("live_pools") == 1, "what will be set is gone"
    assert sim.calls("zeContextDestroy") == 0
    sim.stall(False)


@simulated()
def test_markers_take_fresh_events(device: Any, sim: Any) -> None:
    """Recording again moves a marker at once, though the signal of the earlier record is still to come."""
    transfer = device.transfer
    marker = transfer.create_marker()
    assert not transfer.query_marker(marker)
    with staging(device) as host:
        with pytest.raises(UsageError, match="never recorded"):
            transfer.wait_marker(host.stream, marker)
        other = transfer.create_stream()
        transfer.record(marker, host.stream)
        transfer.synchronize_stream(host.stream)
        assert transfer.query_marker(marker)
        sim.stall(stream=other.handle)
        for _ in range(300):
            transfer.record(marker, other)
            transfer.record(marker, host.stream)
            transfer.record(marker, other)
            assert not transfer.query_marker(marker)
        transfer.wait_marker(host.stream, marker)
        last = transfer.create_marker()
        transfer.record(last, host.stream)
        time.sleep(0.02)
        assert not transfer.query_marker(last)
        sim.stall(False, stream=other.handle)
        transfer.synchronize_stream(other)
        assert transfer.query_marker(marker)
        transfer.synchronize_stream(host.stream)
        assert transfer.query_marker(last)
        transfer.destroy_stream(other)
    for each in (marker, last):
        transfer.destroy_marker(each)
        with pytest.raises(UsageError):
            transfer.query_marker(each)
    assert sim.counter("live_pools") == 1


@pytest.mark.chaos
@pytest.mark.parametrize("strategy", ["host_flag", "polling", "event"])
@simulated()
def test_a_killed_producer_poisons_its_followers_by_the_host(strategy: str, device: Any, sim: Any) -> None:
    """Whoever notices the death signals poison from the host; the value that was pending never counts."""
    import importlib

    from devipc.types import PoisonReason

    completion = importlib.import_module("devipc.completion")
    reader = importlib.import_module("devipc.wire").Reader
    with peer(signal_and_stall) as other:
        other.channel.send(strategy)
        text, fds = other.channel.receive_fds()
        fence = completion.open_fence(device, completion.decode_fence_handle(reader(bytes.fromhex(text)), fds))
        for fd in fds:
            os.close(fd)
        other.channel.send("go")
        assert other.channel.receive() == "signalled"
        fence.synchronize(1, 10.0)
        assert not fence.query(2)
        other.kill()
        fence.poison(PoisonReason.PEER_DIED)
        with pytest.raises(DevIPCError) as caught:
            fence.synchronize(2, 5.0)
        assert caught.value.code == "peer_died"
        fence.close()
        other.finish = lambda: None  # type: ignore[method-assign]


def signal_and_stall(device: Any, sim: Any, channel: Channel) -> None:
    import importlib

    completion = importlib.import_module("devipc.completion")
    with staging(device) as host:
        fence = completion.create_fence(device, channel.receive())
        handle = fence.export()
        channel.send(completion.encode_fence_handle(handle).hex(), handle.fds)
        assert channel.receive() == "go"
        fence.signal(host.stream, 1)
        fence.synchronize(1, 10.0)
        sim.stall()
        fence.signal(host.stream, 2)
        channel.send("signalled")
        channel.receive()


def open_without_rights(device: Any, sim: Any, channel: Channel) -> None:
    """Open an event, without the rights of root if we have them."""
    payload = bytes.fromhex(channel.receive())
    own = device.sync.events.create()
    device.sync.events.export(own)  # all that is loaded late is there
    device.sync.events.destroy(own)
    before = os.geteuid()
    if not before:
        os.seteuid(65534)
    try:
        device.sync.events.open(payload)
    except CapabilityError as error:
        found = [error.code, error.remedy]
    else:
        found = ["opened", ""]
    finally:
        os.seteuid(before)
    channel.send(found)


@simulated()
def test_an_exporter_that_may_not_be_traced(device: Any, sim: Any) -> None:
    """As under a restricted ptrace: events cannot be opened, and the error names the right and a way without it."""
    libc = ctypes.CDLL(None)
    event = device.sync.events.create()
    with peer(open_without_rights) as other:
        libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
        other.channel.send(device.sync.events.export(event).hex())
        code, remedy = other.channel.receive()
        libc.prctl(4, 1, 0, 0, 0)
    assert code == "ptrace"
    assert "ptrace_scope" in remedy
    assert "polling" in remedy
    device.sync.events.destroy(event)
