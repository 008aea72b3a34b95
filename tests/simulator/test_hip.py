"""The HIP front under hip-python: its own switches, one by one, and what the bindings need of it."""

from __future__ import annotations

import ctypes
import os
import re
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.simulator import build, control
from tests.simulator.harness import Parent, Simulation

pytestmark = [pytest.mark.simulator, pytest.mark.long]
SWITCHES = re.findall(r"^SWITCH\((\w+),", (build.HERE / "hip" / "own_switches.def").read_text(), re.MULTILINE)
RUNTIME = 71_500_000
INTERPROCESS = 4 | 2
MIB = 1 << 20


@pytest.fixture(scope="module")
def library() -> Path:
    """Folder of the built library."""
    pytest.importorskip("rocm.bindings.hip", reason="hip-python is not installed")
    return build.build("hip")


@pytest.fixture
def start(library: Path) -> Callable[..., Any]:
    """Starts children on the HIP front, all in one room."""
    sim = Simulation(library)

    def start(function: Callable[..., object], *arguments: object, **switches: Any) -> Any:
        switches.setdefault("driver_version", RUNTIME)
        return sim.start(function, *arguments, variables={"ROCM_PATH": str(library)}, **switches)

    return start


def simulator() -> control.Simulator:
    return control.Simulator.loaded(f"{os.environ['ROCM_PATH']}/lib/libamdhip64.so")


def hip(name: str, *arguments: Any) -> Any:
    """Calls the real binding; gives status and value."""
    from rocm.bindings import hip as bindings

    status, *values = getattr(bindings, name)(*arguments)
    return (int(status), *values)


def need(name: str, *arguments: Any) -> Any:
    status, *values = hip(name, *arguments)
    assert status == 0, (name, status)
    return values[0] if len(values) == 1 else values


def member(kind: str, value: int) -> Any:
    from rocm.bindings import hip as bindings

    return getattr(bindings, kind)(value)


def both(
    start: Callable[..., Any], maker: Callable[..., object], user: Callable[..., object], **switches: object
) -> Any:
    """Runs a process that makes a handle and one, with the switches, that gets it; gives what the second returned."""
    with start(maker) as one, start(user, **switches) as two:
        two.send(one.receive())
        result = two.result()
        one.send("end")
        return result


# --- documents --------------------------------------------------------------------------------------------------------


def test_every_own_switch_is_listed_and_tested() -> None:
    readme = (build.HERE / "README.md").read_text()
    assert [name for name in SWITCHES if f"`{name}`" not in readme] == []
    test = Path(__file__).read_text()
    assert [name for name in SWITCHES if not re.search(rf"\b{name}=", test)] == []


# --- identity ---------------------------------------------------------------------------------------------------------


def identities(parent: Parent) -> object:
    return [bytes(need("hipDeviceGetUuid", i).bytes).hex() for i in range(need("hipGetDeviceCount"))]


def test_uuids_are_text_or_missing(start: Callable[..., Any]) -> None:
    with start(identities) as one, start(identities, no_uuid=1) as two:
        found = one.result()
        assert bytes.fromhex(found[0]) == b"d0e151700a5c0001"
        assert len(set(found)) == 2
        assert two.result() == ["00" * 16] * 2


# --- memory -----------------------------------------------------------------------------------------------------------


def hand_out_memory(parent: Parent) -> object:
    parent.send(bytes(need("hipIpcGetMemHandle", need("hipMalloc", 4 * MIB)).reserved).hex())
    return parent.receive()


def open_memory(parent: Parent) -> object:
    return hip("hipIpcOpenMemHandle", bytes.fromhex(parent.receive()), 1)[0]


def test_handles_open_elsewhere_only(start: Callable[..., Any]) -> None:
    assert both(start, hand_out_memory, open_memory) == 0
    assert both(start, hand_out_memory, open_memory, same_pid=1) == 201


def attributes(parent: Parent) -> object:
    ptr, found = need("hipMalloc", 4096), {}
    for which in (2, 7, 10, 14, 17):
        out = (ctypes.c_uint64 * 2)()
        found[which] = hip("hipPointerGetAttribute", out, member("hipPointer_attribute", which), ptr)[0]
    return list(found.values())


def test_attributes_of_older_runtimes(start: Callable[..., Any]) -> None:
    with start(attributes) as one, start(attributes, few_attributes=1) as two:
        assert one.result() == [0] * 5
        assert two.result() == [0, 0, 801, 801, 801]


def physical() -> tuple[int, Any]:
    prop = ctypes.create_string_buffer(32)
    for at, value in enumerate((1, 1, 1, 0)):  # pinned, descriptor, a device, which
        ctypes.c_int.from_buffer(prop, 4 * at).value = value
    handle = need("hipMemCreate", 2 * MIB, prop, 0)
    fd = (ctypes.c_int * 1)()
    need("hipMemExportToShareableHandle", fd, handle, member("hipMemAllocationHandleType", 1), 0)
    return fd[0], fd


def import_both_ways(parent: Parent) -> object:
    fd, place = physical()
    kind = member("hipMemAllocationHandleType", 1)
    return [
        hip("hipMemImportFromShareableHandle", way, kind)[0] for way in ((place,) if parent.receive() else (place, fd))
    ]


def test_descriptors_are_taken_by_value_or_by_address(start: Callable[..., Any]) -> None:
    with start(import_both_ways) as one, start(import_both_ways, fd_by_pointer=1) as two:
        one.send(False)
        two.send(True)  # the number would be followed like an address
        by_address, by_value = one.result()
        assert (by_address != 0, by_value) == (True, 0)
        assert two.result() == [0]


def follow_a_number(parent: Parent) -> object:
    fd, _ = physical()
    return hip("hipMemImportFromShareableHandle", fd, member("hipMemAllocationHandleType", 1))[0]


def test_a_number_where_an_address_is_taken_crashes(start: Callable[..., Any]) -> None:
    with start(follow_a_number, fd_by_pointer=1) as one:
        assert one.status() == -11


def retain_plain(parent: Parent) -> object:
    ptr = need("hipMalloc", 4 * MIB)
    location = ctypes.create_string_buffer(struct.pack("=ii", 1, 0))
    parent.send(hip("hipMemGetAccess", location, ptr)[0])
    return hip("hipMemRetainAllocationHandle", ptr)[0]


def test_a_handle_of_what_is_no_mapping_crashes_older_runtimes(start: Callable[..., Any]) -> None:
    with start(retain_plain) as one, start(retain_plain, retains=0) as two:
        assert (one.receive(), two.receive()) == (1, 1)
        assert one.result() == 1
        assert two.status() == -11


def make_dmabuf(parent: Parent) -> object:
    ptr, fd = need("hipMalloc", 4 * MIB), (ctypes.c_int * 1)(-1)
    kind = member("hipMemRangeHandleType", 1)
    odd = hip("hipMemGetHandleForAddressRange", fd, ptr, 100, kind, 0)[0]
    status = hip("hipMemGetHandleForAddressRange", fd, ptr, 4 * MIB, kind, 0)[0]
    return [odd, status, fd[0] >= 0]


def test_dma_bufs(start: Callable[..., Any]) -> None:
    with start(make_dmabuf) as one, start(make_dmabuf, dmabuf=0) as two:
        assert one.result() == [1, 0, True]
        assert two.result() == [801, 801, False]


def keep_a_buffer(parent: Parent) -> object:
    """How many mappings there are when external memory is destroyed, and when what was mapped of it is freed."""
    ptr, fd = need("hipMalloc", 4 * MIB), (ctypes.c_int * 1)(-1)
    need("hipMemGetHandleForAddressRange", fd, ptr, 4 * MIB, member("hipMemRangeHandleType", 1), 0)
    handle = ctypes.create_string_buffer(struct.pack("=i4xi12xQI64x4x", 1, fd[0], 4 * MIB, 0))
    external = need("hipImportExternalMemory", handle)
    part = ctypes.create_string_buffer(struct.pack("=QQI64x4x", 0, 4 * MIB, 0))
    buffer = need("hipExternalMemoryGetMappedBuffer", external, part)
    found = []
    for name, what in (("hipDestroyExternalMemory", external), ("hipFree", buffer)):
        need(name, what)
        found.append(simulator().counter("live_mappings"))
    return [*found, hip("hipFree", buffer)[0]]


def test_a_mapped_buffer_keeps_external_memory(start: Callable[..., Any]) -> None:
    with start(keep_a_buffer) as one:
        assert one.result() == [1, 0, 1]


# --- events and waits -------------------------------------------------------------------------------------------------


def shared_event() -> Any:
    return need("hipEventCreateWithFlags", INTERPROCESS)


def hand_out_event(parent: Parent) -> object:
    """An event that is recorded behind work that never ends."""
    event, stream = shared_event(), need("hipStreamCreateWithFlags", 1)
    simulator().stall()
    need("hipEventRecord", event, stream)
    parent.send(bytes(need("hipIpcGetEventHandle", event).reserved).hex())
    return parent.receive()


def wait_for_event(parent: Parent) -> object:
    """Whether a stream's wait for an unfinished event of a peer holds its caller."""
    event = need("hipIpcOpenEventHandle", bytes.fromhex(parent.receive()))
    stream = need("hipStreamCreateWithFlags", 1)
    thread = threading.Thread(target=hip, args=("hipStreamWaitEvent", stream, event, 0), daemon=True)
    thread.start()
    thread.join(0.3)
    return thread.is_alive()


def test_waits_for_a_peers_event(start: Callable[..., Any]) -> None:
    assert both(start, hand_out_event, wait_for_event) is False
    assert both(start, hand_out_event, wait_for_event, event_wait_blocks=1) is True


def record_often(parent: Parent) -> object:
    """How many records of a shared event return while work stands in front of them, of forty."""
    event, stream = shared_event(), need("hipStreamCreateWithFlags", 1)
    simulator().stall()
    done: list[int] = []

    def work() -> None:
        for _ in range(40):
            need("hipEventRecord", event, stream)
            done.append(1)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(0.5)
    held = len(done)
    simulator().stall(False)
    thread.join(10)
    return [held, len(done)]


def test_a_ring_holds_up_records(start: Callable[..., Any]) -> None:
    with start(record_often) as one, start(record_often, event_ring=32) as two:
        assert one.result() == [40, 40]
        assert two.result() == [32, 40]


def hand_out_and_end(parent: Parent) -> object:
    return bytes(need("hipIpcGetEventHandle", shared_event()).reserved).hex()


def open_stale(parent: Parent) -> object:
    status, *event = hip("hipIpcOpenEventHandle", bytes.fromhex(parent.receive()))
    return [status, hip("hipEventQuery", event[0])[0] if status == 0 else None]


def test_handles_of_events_that_are_gone(start: Callable[..., Any]) -> None:
    with start(hand_out_and_end) as one:
        handle = one.result()
    for switches, expected in (({}, [205, None]), ({"event_stale_opens": 1}, [0, 0])):
        with start(open_stale, **switches) as two:
            two.send(handle)
            assert two.result() == expected


def test_stale_opens_by_keyword(start: Callable[..., Any]) -> None:
    with start(hand_out_and_end) as one, start(open_stale, event_stale_opens=1) as two:
        two.send(one.result())
        assert two.result() == [0, 0]


def copy_beside_a_wait(parent: Parent) -> object:
    """Whether a copy on one stream is held up by a wait on another, and is freed by the host's store."""
    word = need("hipHostMalloc", 4096, 0)
    ptr = need("hipMalloc", 4096)
    waiting, other = (need("hipStreamCreateWithFlags", 1) for _ in range(2))
    need("hipStreamWaitValue64", waiting, word, 1, 0, 2**64 - 1)
    time.sleep(0.1)
    kind = member("hipMemcpyKind", 4)
    thread = threading.Thread(target=hip, args=("hipMemcpyAsync", ptr, int(word) + 8, 8, kind, other), daemon=True)
    thread.start()
    thread.join(0.3)
    held = thread.is_alive()
    ctypes.c_uint64.from_address(int(word)).value = 1
    thread.join(10)
    return [held, thread.is_alive()]


def test_a_wait_may_hold_up_other_streams(start: Callable[..., Any]) -> None:
    with start(copy_beside_a_wait) as one, start(copy_beside_a_wait, launch_blocks=1) as two:
        assert one.result() == [False, False]
        assert two.result() == [True, False]


# --- the library ------------------------------------------------------------------------------------------------------


def symbols(parent: Parent) -> object:
    from rocm.bindings import hip as bindings

    return [bindings.has_symbol(name) for name in ("hipMemcpyBatchAsync", "hipMemcpyAsync", "hipMalloc")]


def test_entry_points_can_be_taken_away(library: Path) -> None:
    lacking = build.without("hip", ["hipMemcpyBatchAsync"])
    sim = Simulation(library)
    options: dict[str, Any] = {"variables": {"ROCM_PATH": str(lacking)}, "driver_version": RUNTIME}
    assert sim.run(symbols, **options) == [False, True, True]
    with pytest.raises(build.BuildError, match="no entry point hipNothing"):
        build.without("hip", ["hipNothing"])


def last_errors(parent: Parent) -> object:
    simulator()
    codes = [
        hip("hipFree", 4096)[0],
        hip("hipPeekAtLastError")[0],
        hip("hipGetLastError")[0],
        hip("hipGetLastError")[0],
    ]
    return [*codes, hip("hipSetDevice", 7)[0], hip("hipGetDevice")[1]]


def test_failures_are_remembered_by_the_thread(start: Callable[..., Any]) -> None:
    with start(last_errors) as one:
        assert one.result() == [1, 1, 1, 0, 101, 0]


def hidden(parent: Parent) -> object:
    return [need("hipGetDeviceCount"), need("hipDeviceGetPCIBusId", 16, 0).decode()]


def test_devices_can_be_hidden(library: Path) -> None:
    options: dict[str, Any] = {"variables": {"ROCM_PATH": str(library), "HIP_VISIBLE_DEVICES": "1"}}
    count, bus = Simulation(library).run(hidden, driver_version=RUNTIME, **options)
    assert (count, bus[:12]) == (1, "0000:41:00.0")
