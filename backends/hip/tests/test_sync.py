"""Stream writes and waits on words, and interprocess events: what is offered, and what a runtime must show first."""

from __future__ import annotations

import importlib
import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from backends.testing.helpers import staging
from backends.testing.partners import Background, candidate, decision, followed, reached
from devipc.spi import CapabilityError, HandleError, Mechanism, ResourceExhausted, UsageError, Verdict

from .peers import Channel, Peer, peer, simulated

WORD = 4096
LAST = 2**62 - 1


def hip() -> Any:
    return importlib.import_module("rocm.bindings.hip")


def load(view: memoryview, offset: int = WORD) -> int:
    return int(struct.unpack_from("<Q", view, offset)[0])


# --- words ------------------------------------------------------------------------------------------------------------


@simulated()
def test_a_write_comes_behind_earlier_work(device: Any, sim: Any) -> None:
    block = device.memory.allocate(4096)
    with staging(device) as host:
        host.view[:8] = struct.pack("<Q", 7)
        sim.stall()
        host.transfer.copy(host.stream, block.ptr, host.device_ptr, 8)
        device.sync.word_writes.write(host.stream, host.device_ptr + WORD, LAST)
        assert load(host.view) == 0
        sim.stall(False)
        host.transfer.synchronize_stream(host.stream)
        assert load(host.view) == LAST
        assert host.read(block.ptr, 8) == struct.pack("<Q", 7)
    device.memory.free(block)


@pytest.mark.long
@simulated()
def test_each_write_is_behind_a_release_to_the_system(device: Any, sim: Any) -> None:
    """The store itself promises nothing about the visibility of the copies in front of it."""
    with staging(device) as host:
        records, made = sim.calls("hipEventRecord"), sim.calls("hipEventCreateWithFlags")
        for value in (1, 2, 3):
            device.sync.word_writes.write(host.stream, host.device_ptr + WORD, value)
        assert sim.calls("hipEventRecord") == records + 3
        assert sim.calls("hipEventCreateWithFlags") == made + 1
        host.transfer.synchronize_stream(host.stream)


@simulated()
def test_a_wait_is_released_by_the_host(device: Any, sim: Any) -> None:
    with staging(device) as host:
        marker = host.transfer.create_marker()
        device.sync.word_waits.wait(host.stream, host.device_ptr + WORD, 5)
        host.transfer.record(marker, host.stream)
        for value, done in ((4, False), (2**62 + 1, True)):
            struct.pack_into("<Q", host.view, WORD, value)
            time.sleep(0.05)
            if done:
                host.transfer.synchronize_stream(host.stream)
            assert host.transfer.query_marker(marker) is done
        host.transfer.destroy_marker(marker)


@pytest.mark.long
@simulated()
def test_words_and_values_are_checked(device: Any, sim: Any) -> None:
    with staging(device) as host:
        before = sim.report()
        for ptr, value in ((host.device_ptr + 4, 1), (0, 1), (host.device_ptr, -1), (host.device_ptr, 2**63)):
            with pytest.raises(UsageError):
                device.sync.word_writes.write(host.stream, ptr, value)
            with pytest.raises(UsageError):
                device.sync.word_waits.wait(host.stream, ptr, value)
        assert sim.report().calls == before.calls


@pytest.mark.long
@simulated()
def test_capturing_streams_are_refused(device: Any, sim: Any) -> None:
    event = device.sync.events.create()
    with staging(device) as host:
        assert not host.transfer.is_capturing(host.stream)
        mode = hip().hipStreamCaptureMode.hipStreamCaptureModeGlobal
        assert int(hip().hipStreamBeginCapture(host.stream.handle, mode)[0]) == 0
        assert host.transfer.is_capturing(host.stream)
        for refused, arguments in (
            (device.sync.word_writes.write, (host.stream, host.device_ptr, 1)),
            (device.sync.word_waits.wait, (host.stream, host.device_ptr, 1)),
            (device.sync.events.record, (event, host.stream)),
        ):
            with pytest.raises(UsageError, match="captures a graph"):
                refused(*arguments)
        # Calls of ours on other streams neither fail nor break the capture.
        other = device.transfer.create_stream()
        device.transfer.synchronize_stream(other)
        device.memory.free(device.memory.allocate(4096))
        device.transfer.destroy_stream(other)
        status, graph = hip().hipStreamEndCapture(host.stream.handle)
        assert int(status) == 0
        hip().hipGraphDestroy(graph)
        device.sync.word_writes.write(host.stream, host.device_ptr, 1)
        host.transfer.synchronize_stream(host.stream)
    device.sync.events.destroy(event)


@pytest.mark.long
@simulated(memops=0)
def test_without_value_operations_there_are_no_words(device: Any, sim: Any) -> None:
    assert (device.sync.word_writes, device.sync.word_waits) == (None, None)
    answer = device.sync.mechanisms()[Mechanism.STREAM_MEMOP]
    assert answer.verdict is Verdict.NO
    assert "host_flag" in answer.remedy
    found = decision(device)
    assert (found["strategy"], found["degraded"]) == ("host_flag", True)
    assert candidate(found, "stream_memop")[:2] == ("offer", "no")


@pytest.mark.long
@simulated(attributes="10013=0")
def test_an_attribute_alone_is_no_verdict(device: Any, sim: Any) -> None:
    assert device.sync.word_writes is not None
    assert "says no" in device.sync.mechanisms()[Mechanism.STREAM_MEMOP].reason
    assert decision(device)["strategy"] == "stream_memop"


@pytest.mark.long
@pytest.mark.timeout(180)
@simulated(memops_progress=0)
def test_waits_that_are_never_satisfied_are_found_out(device: Any, sim: Any) -> None:
    """The attribute says yes, and no wait ends (ROCm/rocm-systems 11605)."""
    found = decision(device)
    assert (found["strategy"], found["degraded"]) == ("host_flag", True)
    phase, verdict, reason = candidate(found, "stream_memop")
    assert (phase, verdict) == ("child", "broken")
    assert "not released" in reason


@pytest.mark.long
@simulated(launch_blocks=1)
def test_a_copy_that_stands_behind_a_wait_is_freed_by_poison(device: Any, sim: Any) -> None:
    """Streams share few hardware queues: one that waits may hold up a copy on another, and the host must end that."""
    block = device.memory.allocate(4096)
    with staging(device) as host:
        waiting = device.transfer.create_stream()
        device.sync.word_waits.wait(waiting, host.device_ptr + WORD, 5)
        time.sleep(0.05)
        copy = Background(lambda: host.transfer.copy(host.stream, block.ptr, host.device_ptr, 8))
        assert copy.blocks()
        struct.pack_into("<Q", host.view, WORD, 2**62 + 1)
        copy.done()
        host.transfer.synchronize_stream(host.stream)
        device.transfer.destroy_stream(waiting)
    device.memory.free(block)


# --- events -----------------------------------------------------------------------------------------------------------


def refusal(device: Any, timeout_s: float | None = None) -> str:
    """Use events for the first time; return why they are refused."""
    if timeout_s is not None:
        proof: Any = importlib.import_module("devipc_hip.event_proof")
        proof.PROOF_TIMEOUT_S = timeout_s
    with pytest.raises(CapabilityError) as caught:
        device.sync.events.create()
    error = caught.value
    assert error.code == "events_unproven"
    assert "polling" in error.remedy
    assert device.sync.events is None
    answer = device.sync.mechanisms()[Mechanism.EVENT]
    assert (answer.verdict, answer.reason) == (Verdict.NO, error.message)
    return error.message


@simulated()
def test_events_that_prove_themselves(device: Any, sim: Any) -> None:
    assert device.sync.mechanisms()[Mechanism.EVENT].verdict is Verdict.UNTESTED
    device.sync.events.destroy(device.sync.events.create())
    assert "child processes saw them work" in device.sync.mechanisms()[Mechanism.EVENT].reason
    event = device.sync.events.create()
    payload = device.sync.events.export(event)
    for wrong in (b"", payload[:-1], b"\2" + payload[1:], payload + b"\0"):
        with pytest.raises(HandleError):
            device.sync.events.open(wrong)
    with staging(device) as host:
        sim.stall()
        device.sync.events.record(event, host.stream)
        assert not device.sync.events.query(event)
        sim.stall(False)
        host.transfer.synchronize_stream(host.stream)
        assert device.sync.events.query(event)
    device.sync.events.destroy(event)
    with pytest.raises(UsageError):
        device.sync.events.destroy(event)


LIES = {
    "event_ready": "was done while the work in front of it ran",
    "event_stale_opens": "whose process has ended opened all the same",
    "same_pid": "hipIpcOpenEventHandle",
}


@pytest.mark.long
@pytest.mark.parametrize("switch", LIES)
@simulated()
def test_events_that_lie_are_refused(switch: str, device: Any, sim: Any) -> None:
    os.environ[f"DEVSIM_{switch.upper()}"] = "1"
    reason = refusal(device)
    if switch == "same_pid":
        assert "opening an event of another process failed" in reason
    else:
        assert LIES[switch] in reason


@pytest.mark.long
@simulated()
def test_a_ring_of_records_is_too_small(device: Any, sim: Any) -> None:
    os.environ["DEVSIM_EVENT_RING"] = "32"
    assert "recording 40 times did not return" in refusal(device, 6.0)


@pytest.mark.long
@simulated()
def test_an_event_that_never_opens_costs_a_deadline(device: Any, sim: Any) -> None:
    """LMCache 4419: the open blocks for ever; only a child stands in it."""
    os.environ["DEVSIM_FAULT"] = "hipIpcOpenEventHandle@*=hang"
    started = time.monotonic()
    assert "opening an event of another process did not return" in refusal(device, 4.0)
    assert time.monotonic() - started < 20.0


def prove_and_stand(device: Any, sim: Any, channel: Channel) -> None:
    os.environ["DEVSIM_FAULT"] = "hipIpcOpenEventHandle@*=hang"
    channel.send("on its way")
    device.sync.events.create()


def children_of(pid: int) -> list[int]:
    """Return processes of a trial that ``pid`` started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if b"devipc_hip.event_proof" in words and parent == pid:
            found.append(int(path.parent.name))
    return found


def runs(pid: int) -> bool:
    """Return False for a process that is gone, or that only waits to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.long
@pytest.mark.chaos
@simulated()
def test_a_trial_ends_with_who_asked_for_it(device: Any, sim: Any) -> None:
    """Killed while a child of the trial stands in the runtime for ever: no child stays."""
    other = Peer(prove_and_stand)
    assert other.channel.receive() == "on its way"
    deadline = time.monotonic() + 20.0
    while len(children := children_of(other.process.pid)) < 2:  # the maker, and who looks
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1.0)
    other.kill()
    other.channel.close()
    while any(runs(pid) for pid in children):
        assert time.monotonic() < deadline + 10.0
        time.sleep(0.05)


def test_a_child_that_says_no_more_and_stays_is_not_waited_for() -> None:
    """Its pipe is closed before what it holds of the device, where the kernel may stand still."""
    proof: Any = importlib.import_module("devipc_hip.event_proof")
    program = "import os, time; os.close(1); time.sleep(40)"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    started = time.monotonic()
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            proof._line(child, started + 10.0)
        assert time.monotonic() - started < 12.0
    finally:
        proof._end(child)


@simulated()
def test_events_that_no_thread_can_be_had_to_try_are_tried_later(device: Any, sim: Any) -> None:
    before = threading.stack_size(2**46)
    try:
        with pytest.raises(ResourceExhausted, match="no thread") as caught:
            device.sync.events.create()
    finally:
        threading.stack_size(before)
    assert caught.value.code == "threads"
    device.sync.events.destroy(device.sync.events.create())


@pytest.mark.long
@simulated()
def test_a_runtime_that_crashes_at_an_event_takes_a_child(device: Any, sim: Any) -> None:
    os.environ["DEVSIM_FAULT"] = "hipIpcOpenEventHandle@*=segv"
    assert "opening an event of another process failed" in refusal(device)


@pytest.mark.long
@simulated(DEVSIM_DRIVER_VERSION=70_200_001)
def test_older_runtimes_are_not_even_tried(device: Any, sim: Any) -> None:
    assert device.sync.events is None
    answer = device.sync.mechanisms()[Mechanism.EVENT]
    assert answer.verdict is Verdict.NO
    assert "events of HIP runtime 7.2 are known to say done before they are" in answer.reason
    assert decision(device)["strategy"] == "stream_memop"
    refused = decision(device, "event")
    assert refused["error"] == "CapabilityError"
    assert "known to say done" in refused["text"]
    assert sim.calls("hipIpcOpenEventHandle") == 0


@pytest.mark.long
@simulated(ipc_events=0)
def test_without_events_others_take_over_and_say_why(device: Any, sim: Any) -> None:
    assert "failed" in refusal(device)
    assert decision(device)["strategy"] == "stream_memop"
    assert decision(device, "event")["error"] == "CapabilityError"


def open_hanging(device: Any, sim: Any, channel: Channel) -> None:
    opening: Any = importlib.import_module("devipc_hip.opening")
    opening.OPEN_TIMEOUT_S = 1.0
    payload = bytes.fromhex(channel.receive())
    device.sync.events.destroy(device.sync.events.open(payload))
    sim.inject("hipIpcOpenEventHandle@1=hang")
    with pytest.raises(Exception, match="did not return within 1 s"):
        device.sync.events.open(payload)
    channel.send("given up")
    channel.receive()
    os._exit(0)


@pytest.mark.long
@simulated()
def test_an_open_of_an_event_is_given_up(device: Any, sim: Any) -> None:
    event = device.sync.events.create()
    with peer(open_hanging) as other:
        other.channel.send(device.sync.events.export(event).hex())
        assert other.channel.receive() == "given up"
        other.channel.send()
    device.sync.events.destroy(event)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["stream_memop", "host_flag", "polling", "event"])
@simulated(event_wait_blocks=1, lazy_writes=1)
def test_fences_between_two_processes(strategy: str, device: Any, sim: Any) -> None:
    """With events whose device-side wait would block its caller: no strategy makes one."""
    stream = device.transfer.create_stream()
    with followed(device, strategy) as (fence, other):
        for last in (4, 8, 12):  # a fence of events holds eight signals that nobody has looked at
            for value in range(last - 3, last + 1):
                fence.signal(stream, value)
            assert reached(other, last) == "reached"
    device.transfer.destroy_stream(stream)


@pytest.mark.long
@simulated(memops=0, ipc_events=0, host_register=0)
def test_polling_takes_over_and_the_decision_says_why(device: Any, sim: Any) -> None:
    found = decision(device)
    assert (found["strategy"], found["degraded"]) == ("polling", True)
    assert candidate(found, "stream_memop")[:2] == ("offer", "no")
    phase, verdict, reason = candidate(found, "host_flag")
    assert (phase, verdict) == ("child", "no"), reason
    assert "register" in reason
