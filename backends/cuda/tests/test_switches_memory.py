"""What a user sees when a driver exports, opens, maps and frees memory in its own way: simulator switches of memory."""

from __future__ import annotations

import ast
import importlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.testing.ends import exporter, importer
from backends.testing.helpers import pattern, staging
from backends.testing.partners import WORD, Background, asked, hold
from devipc.spi import CapabilityError, ClosedError, DevIPCError, DriverError, HandleKind, MemoryKind, UsageError
from tests.hicache.matrix import NO_EVENTS, NO_WORDS

from .peers import ROOT, Channel, environment, peer, simulated
from .test_memory_peers import mirror, reflect

KINDS = ["legacy", "vmm_fd", "pool"]
MIB = 2**20
SIMULATORS_OWN = {"seed": "which calls a random fault rule hits: no test of a backend uses random rules"}


def switches_in(path: Path) -> Iterator[str]:
    """Yield the names that a file sets: by keyword, at run time, by environment, or as a parameter ``switch``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.removeprefix("DEVSIM_").lower() if node.value.startswith("DEVSIM_") else ""
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("simulated", "environment", "run_suite"):
            yield from (str(keyword.arg) for keyword in node.keywords)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "sim.set":
            yield str(getattr(node.args[0], "value", ""))
        elif isinstance(node, ast.Call) and "parametrize" in ast.unparse(node.func) and "'switch'" in ast.unparse(node):
            yield from (str(each.value) for each in ast.walk(node) if isinstance(each, ast.Constant))


def test_every_switch_is_set_in_a_test_of_this_backend() -> None:
    definitions = (ROOT / "tests/simulator/core/switches.def").read_text()
    switches = set(re.findall(r"^SWITCH\((\w+),", definitions, re.MULTILINE))
    found = {name for path in Path(__file__).parent.glob("test_*.py") for name in switches_in(path)}
    found |= {*NO_EVENTS, *NO_WORDS}  # of test_hicache.py
    assert len(switches) > 50
    assert switches - found == set(SIMULATORS_OWN)


def cuda() -> Any:
    return importlib.import_module("devipc_cuda.driver")


# --- what is exported -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@simulated(handle_interior=0)
def test_the_driver_is_given_the_base(kind: str, device: Any, sim: Any) -> None:
    """A driver that refuses interior pointers is none the wiser."""
    block = device.memory.allocate(4 * MIB, kind=HandleKind(kind))
    with staging(device) as host, peer(mirror) as other:
        for seed, offset in enumerate((1, 4096, 2 * MIB + 8)):
            reflect(device, other, host, block.ptr + offset, 1000, seed)
        other.channel.send("end")
    device.memory.free(block)


@simulated(legacy_any_kind=1)
def test_no_kind_is_exported_as_another(device: Any, sim: Any) -> None:
    """A driver that makes such handles makes some that do not open: it is never asked."""
    for kind in (HandleKind.VMM_FD, HandleKind.POOL):
        block = device.memory.allocate(2 * MIB, kind=kind)
        extent = device.memory.export(block.ptr, 8)
        assert extent.kind is kind
        device.memory.release(extent)
        with pytest.raises(CapabilityError, match=f"exported as {kind.value}, not as legacy") as caught:
            device.memory.export(block.ptr, 8, kind=HandleKind.LEGACY)
        assert caught.value.code == "not_exportable"
        device.memory.free(block)
    assert sim.counter("legacy_exports_of_other_kinds") == 0


def allocate_and_export(device: Any, kind: HandleKind) -> None:
    block = device.memory.allocate(MIB, kind=kind)
    try:
        device.memory.export(block.ptr, 8)
    finally:
        device.memory.free(block)


@pytest.mark.parametrize(
    ("switch", "kind"), [("ipc", "legacy"), ("pools", "pool"), ("fd_handles", "vmm_fd"), ("vmm", "vmm_fd")]
)
@simulated()
def test_a_kind_that_the_platform_lacks(switch: str, kind: str, device: Any, sim: Any) -> None:
    sim.set(switch, 0)
    with pytest.raises(CapabilityError) as caught:
        allocate_and_export(device, HandleKind(kind))
    assert ("-> 801" in str(caught.value)) is (kind != "legacy")  # that one is asked of the pointer, not tried
    assert caught.value.remedy
    assert sim.counter("exports") == 0


@pytest.mark.parametrize("fabric", [0, 1, 2, 3])
@simulated()
def test_fabric_changes_nothing(fabric: int, device: Any, sim: Any) -> None:
    """Handles are descriptors, whatever a driver claims or half permits; foreign fabric memory is refused by name."""
    sim.set("fabric", fabric)
    with staging(device) as host, peer(mirror, {**os.environ, "DEVSIM_FABRIC": str(fabric)}) as other:
        block = device.memory.allocate(2 * MIB)
        assert block.kind is HandleKind.VMM_FD
        reflect(device, other, host, block.ptr, MIB, 1)
        other.channel.send("end")
        device.memory.free(block)
    foreign = fabric_block(device)
    assert (foreign is None) is (fabric in (0, 2))
    if foreign is not None:
        with pytest.raises(CapabilityError, match="without the file-descriptor handle type"):
            device.memory.export(foreign.base, 8)
        with device.context:
            foreign.release()


def fabric_block(device: Any) -> Any:
    """Memory with a fabric handle type alone, mapped as another library would."""
    vmm = importlib.import_module("devipc_cuda.memory_vmm")
    prop = cuda().allocation_prop(0)
    prop.requestedHandleTypes = cuda().make("CUmemAllocationHandleType", 8)
    with device.context:
        status, handle = cuda().attempt("cuMemCreate", 2 * MIB, prop, 0)
        if status:
            return None
        reservation = vmm.map_side_by_side([(handle, 2 * MIB)], ordinal=0)
        cuda().call("cuMemRelease", handle)
    return reservation


# --- what is opened ---------------------------------------------------------------------------------------------------


@simulated(self_open=1)
def test_a_driver_that_opens_its_own_handle(device: Any, sim: Any) -> None:
    block = device.memory.allocate(2 * MIB, kind=HandleKind.LEGACY)
    opened = device.memory.open(device.memory.export(block.ptr, 8))
    assert device.memory.describe(opened.ptr).kind is MemoryKind.IMPORTED
    device.memory.close(opened)
    sim.set("self_open", 0)
    with pytest.raises(DriverError, match="a handle that this same process made") as caught:
        device.memory.open(device.memory.export(block.ptr, 8))
    assert (caught.value.code, "by its pointer" in caught.value.remedy) == ("invalid_context", True)
    device.memory.free(block)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("peer_", "claim"), [(0, 1), (1, 0)])
@simulated()
def test_the_peer_query_is_not_believed(kind: str, peer_: int, claim: int, device: Any, sim: Any) -> None:
    """Memory of another device: refused by type where it cannot be reached, whatever the query says."""
    backend = importlib.import_module("devipc_cuda.backend").CudaBackend()
    second = backend.open_device(backend.devices()[1].uuid)
    switches = {**os.environ, "DEVSIM_PEER": str(peer_), "DEVSIM_PEER_CLAIM": str(claim)}
    block = second.memory.allocate(2 * MIB, kind=HandleKind(kind))
    extent = second.memory.export(block.ptr, 64)
    with peer(hold, switches) as other:
        name, code, text = asked(other, "open", extent)
        if kind != "vmm_fd" and peer_:
            assert name == "opened"
        else:
            assert name in ("CapabilityError", "DriverError", "HandleError")
            assert code in ("no_peer_access", "invalid_device", "wrong_device")
            assert "remedy: " in text
        assert (asked(other, "live_mappings") + asked(other, "live_pool_pointers") > 0) is (name == "opened")
        other.channel.send("end")
    second.memory.release(extent)
    second.memory.free(block)
    second.close()
    assert sim.calls("cuDeviceCanAccessPeer") == 0


@simulated()
def test_wrong_memory_is_not_to_be_seen_by_a_mapping(device: Any, sim: Any) -> None:
    """What a racing driver once did: right size, other bytes. Only content tells, which is what the suite compares."""
    block = device.memory.allocate(2 * MIB, kind=HandleKind.LEGACY)
    extent = device.memory.export(block.ptr, 64)
    with staging(device) as host, peer(hold, {**os.environ, "DEVSIM_WRONG_ATTACH": "2"}) as other:
        host.write(block.ptr, b"12345678")
        contents = []
        for _ in range(4):
            assert asked(other, "open", extent)[0] == "opened"
            contents.append(bytes.fromhex(asked(other, "read")))
            asked(other, "close")
        assert contents == [b"12345678", b"\xee" * 8] * 2
        assert (asked(other, "wrong_attaches"), asked(other, "live_mappings")) == (2, 0)
        other.channel.send("end")
    device.memory.free(block)


def close_in_turn(device: Any, sim: Any, channel: Channel) -> None:
    """Eight threads open one extent at once, and close it in turn; each mapping is closed a second time."""
    extent = channel.receive_extent()
    opened: list[Any] = []
    for each in [Background(lambda: opened.append(device.memory.open(extent))) for _ in range(8)]:
        each.done()
    for each in opened:
        device.memory.close(each)
        with pytest.raises(ClosedError, match="closed before"):
            device.memory.close(each)
    for fd in extent.fds:
        os.close(fd)
    channel.send([sim.counter("double_closes"), sim.counter("live_mappings"), len(opened)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("second_open", [0, 1, 2])
@simulated()
def test_no_mapping_is_closed_twice(kind: str, second_open: int, device: Any, sim: Any) -> None:
    """A driver that aborts the process on that is never given the chance."""
    slow = "cuIpcOpenMemHandle_v2@*=sleep:20,cuIpcCloseMemHandle@*=sleep:5"
    switches = {"DEVSIM_DOUBLE_CLOSE_ABORT": "1", "DEVSIM_SECOND_OPEN": str(second_open), "DEVSIM_FAULT": slow}
    block = device.memory.allocate(2 * MIB, kind=HandleKind(kind))
    extent = device.memory.export(block.ptr, 64)
    with peer(close_in_turn, {**os.environ, **switches}) as other:
        other.channel.send_extent(extent)
        assert other.channel.receive() == [0, 0, 8]
    device.memory.release(extent)
    device.memory.free(block)


# --- what is mapped and freed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("live", [0, 1])
@simulated()
def test_nothing_is_mapped_over_something(live: int, device: Any, sim: Any) -> None:
    """A driver that replaces what is mapped would take the first block away without a word."""
    sim.set("map_live", live)
    with staging(device) as host, peer(mirror, {**os.environ, "DEVSIM_MAP_LIVE": str(live)}) as other:
        blocks = [device.memory.allocate(2 * MIB) for _ in range(4)] + [device.memory.allocate_grown([2 * MIB] * 3)]
        assert sim.counter("live_maps") == 7
        for seed, block in enumerate(blocks):
            host.write(block.ptr, pattern(seed, 64))
        for seed, block in enumerate(blocks):
            assert host.read(block.ptr, 64) == pattern(seed, 64)
        reflect(device, other, host, blocks[-1].ptr, 6 * MIB, 9)
        with device.context, pytest.raises(DevIPCError) if not live else staging(device):
            again = importlib.import_module("devipc_cuda.memory_vmm")._create_block(2 * MIB, ordinal=0)[0]
            try:
                blocks[0].token.map(0, again, 2 * MIB)
                blocks[0].token._mapped.pop()
            finally:
                cuda().call("cuMemRelease", again)
        other.channel.send("end")
        for block in blocks:
            device.memory.free(block)


def keep_open(device: Any, sim: Any, channel: Channel) -> None:
    with importer(device, channel.receive()) as session, staging(device) as host:
        memory = session.open("block")
        ptr = memory.ptr  # as work that is queued has it
        channel.send("open")
        channel.receive()
        for _ in range(10):
            assert host.read(ptr, 8) == b"12345678"
            time.sleep(0.02)
        memory.close()
    channel.send("closed")


@pytest.mark.parametrize("kind", KINDS)
@simulated(poison_freed=1)
def test_memory_is_not_freed_under_its_reader(kind: str, device: Any, sim: Any) -> None:
    """Freed memory is overwritten; a session frees only what every peer has given back."""
    with staging(device) as host, peer(keep_open) as other:
        with exporter(device) as session:
            block = session.allocate(2 * MIB, kind=HandleKind(kind))
            host.write(block.ptr, b"12345678")
            session.share("block", block)
            other.channel.send(session.path)
            assert other.channel.receive() == "open"
            with pytest.raises(UsageError, match="shared"):
                session.free(block)
            other.channel.send()
            session.unshare("block", timeout_s=20.0)
            session.free(block)
        assert other.channel.receive() == "closed"
    assert sim.used_bytes() == 0


@simulated(poison_freed=1)
def test_memory_freed_too_early_shows_it(device: Any, sim: Any) -> None:
    """The caller of the bare backend guarantees that peers have closed; one that does not is seen, not hidden."""
    block = device.memory.allocate(2 * MIB, kind=HandleKind.LEGACY)
    extent = device.memory.export(block.ptr, 64)
    with peer(hold) as other:
        assert asked(other, "open", extent)[0] == "opened"
        device.memory.free(block)
        assert bytes.fromhex(asked(other, "read")) == b"\xdb" * 8
        assert asked(other, "reads_of_freed") == 1
        other.channel.send("end")
    assert sim.used_bytes() == 0


def die_with_two_importers(device: Any, sim: Any, channel: Channel) -> None:
    block = device.memory.allocate(64 * MIB, kind=HandleKind(channel.receive()))
    for _ in range(2):
        channel.send_extent(device.memory.export(block.ptr, 64))
    channel.receive()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("holder", [0, 1])
@simulated()
def test_memory_of_the_dead_is_in_use_until_its_last_holder_closes(
    kind: str, holder: int, device: Any, sim: Any
) -> None:
    """Whoever the driver charges for it: what is free on the device says the truth."""
    sim.set("holder", holder)
    switches = {**os.environ, "DEVSIM_HOLDER": str(holder)}
    before = device.transfer.memory_info().free_nbytes
    with peer(die_with_two_importers) as owner, peer(hold, switches) as other:
        owner.channel.send(kind)
        first, second = (owner.channel.receive_extent() for _ in range(2))
        opened = device.memory.open(first)
        assert asked(other, "open", second)[0] == "opened"
        for fd in (*first.fds, *second.fds):
            os.close(fd)
        owner.kill()
        owner.process.returncode = 0
        charged = [sim.used_bytes(0, pid) >= 64 * MIB for pid in (os.getpid(), other.process.pid)]
        assert sum(charged) == (1 if holder else 2)
        assert before - device.transfer.memory_info().free_nbytes >= 64 * MIB
        device.memory.close(opened)
        assert before - device.transfer.memory_info().free_nbytes >= 64 * MIB
        assert asked(other, "close") == "closed"
        assert before == device.transfer.memory_info().free_nbytes
        other.channel.send("end")


# --- stray handles ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("crash", [0, 1])
@simulated()
def test_nothing_that_is_gone_reaches_the_driver(crash: int, device: Any, sim: Any) -> None:
    """A real driver follows such pointers and crashes: our own objects are refused before."""
    sim.set("wild_crash", crash)
    transfer = device.transfer
    stream, marker = transfer.create_stream(), transfer.create_marker()
    block = device.memory.allocate(2 * MIB, kind=HandleKind.POOL)
    transfer.destroy_stream(stream)
    device.memory.free(block)
    transfer.destroy_marker(marker)
    before = {name: count for name, count in sim.report().calls.items() if "Ctx" not in name and "Thread" not in name}
    calls: tuple[Callable[[], object], ...] = (
        lambda: transfer.copy(stream, block.ptr, block.ptr + WORD, 8),
        lambda: transfer.synchronize_stream(stream),
        lambda: transfer.is_capturing(stream),
        lambda: transfer.destroy_stream(stream),
        lambda: device.sync.word_writes.write(stream, WORD, 1),
        lambda: transfer.query_marker(marker),
        lambda: device.memory.free(block),
    )
    for call in calls:
        with pytest.raises(UsageError):
            call()
    after = {name: count for name, count in sim.report().calls.items() if name in before}
    assert after == before


def stray(device: Any, sim: Any) -> None:
    transfer = device.transfer
    with pytest.raises(DriverError) as caught:
        transfer.synchronize_stream(transfer.wrap_stream(0xDEAD0000))
    assert (caught.value.code, caught.value.device) == ("invalid_handle", device.info.uuid)


test_a_stray_stream_is_a_typed_error = simulated(wild_crash=0)(stray)


def test_a_stray_stream_may_end_the_process_but_no_other() -> None:
    """An integer cannot be checked. The process that passed it dies; nothing is left of it."""
    command = [sys.executable, "-m", "backends.testing.child", "backends.cuda.tests", __name__, "stray", "{}"]
    done = subprocess.run(command, cwd=ROOT, env=environment({"wild_crash": 1}), capture_output=True, timeout=50)
    assert done.returncode == -signal.SIGSEGV
    assert b"no such stream" in done.stderr
