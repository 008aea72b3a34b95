"""A kernel of one process faults: what every later call there answers, what its peer sees, and that both end well.

``python -m backends.cuda.tests.hardware.sticky --out FILE``.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from backends.testing.ends import exporter, importer
from backends.testing.helpers import Staging, staging
from devipc.spi import DeviceLostError, DevIPCError, HandleKind

from ..peers import Channel, Peer
from . import evidence
from .code import launch, load
from .evidence import MIB, open_device, until

STRATEGIES = ("stream_memop", "host_flag", "polling", "event")
KINDS = ("vmm_fd", "legacy", "pool")
PATIENCE_S = 5.0


def name_of(action: Callable[[], object]) -> str:
    """Return the type and the status of what ``action`` raises."""
    try:
        action()
    except DevIPCError as error:
        return f"{type(error).__name__}: {error.message}" + (f" ({error.status})" if error.status else "")
    except Exception as error:
        return f"UNTYPED {type(error).__name__}: {error}"
    return "no error"


def faulting(channel: Channel, sim: Any) -> None:
    """Share memory and fences, fault, try every call, close everything, end."""
    device = open_device()
    host = Staging(device)
    session = exporter(device)
    blocks = {kind: session.allocate(2 * MIB, kind=HandleKind(kind)) for kind in KINDS}
    for kind, block in blocks.items():
        host.write(block.ptr, kind.encode())
        session.share(kind, block)
    fences = {name: session.create_fence(name, strategy=name) for name in STRATEGIES}
    for fence in fences.values():
        fence.signal(host.stream, 1)
    event, marker, spare = device.sync.events.create(), device.transfer.create_marker(), device.transfer.create_stream()
    foreign = device.memory.export(blocks["vmm_fd"].ptr, MIB)
    channel.send(session.path)
    channel.receive()
    with device.context:
        kernel = load("fault", faulting=True)
        launch(kernel, host.stream)
    if sim is not None:
        sim.lose(0, 700)
    found = {"signal behind the fault": {n: name_of(partial(f.signal, host.stream, 2)) for n, f in fences.items()}}
    found["synchronize"] = {"": name_of(lambda: device.transfer.synchronize_stream(host.stream))}
    found["later calls"] = {n: name_of(c) for n, c in calls(device, host, blocks, event, marker, spare).items()}
    found["signal later"] = {n: name_of(partial(f.signal, host.stream, 3)) for n, f in fences.items()}
    channel.send(found)
    channel.receive()
    began = time.perf_counter()
    closing = {
        "release": name_of(lambda: device.memory.release(foreign)),
        "session": name_of(session.close),
        "event": name_of(lambda: device.sync.events.destroy(event)),
        "marker": name_of(lambda: device.transfer.destroy_marker(marker)),
        "stream": name_of(lambda: device.transfer.destroy_stream(spare)),
        "staging": name_of(host.close),
        "device": name_of(device.close),
        "device, again": name_of(device.close),
    }
    channel.send([closing, round(time.perf_counter() - began, 3)])


faulting.bare = True  # type: ignore[attr-defined] # a lost device gives nothing back, so that nothing is counted


def calls(
    device: Any, host: Staging, blocks: dict[str, Any], event: Any, marker: Any, spare: Any
) -> dict[str, Callable[[], object]]:
    memory, transfer, sync, ptr = device.memory, device.transfer, device.sync, blocks["vmm_fd"].ptr
    numpy: Any = importlib.import_module("numpy")
    rows = numpy.array([(ptr, host.device_ptr, 512, 256, 128, 64)], dtype="u8")
    flat = [numpy.array([value], dtype="u8") for value in (ptr, host.device_ptr, 4096)]
    page = mmap.mmap(-1, 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return {
        **{f"allocate {kind}": partial(memory.allocate, 2 * MIB, kind=HandleKind(kind)) for kind in KINDS},
        **{f"describe {kind}": partial(memory.describe, block.ptr) for kind, block in blocks.items()},
        **{f"export {kind}": partial(memory.export, block.ptr, 4096) for kind, block in blocks.items()},
        "copy": lambda: transfer.copy(spare, ptr, host.device_ptr, 4096),
        "copy_strided": lambda: transfer.copy_strided(spare, rows),
        "copy_batch": lambda: transfer.copy_batch(spare, *flat),
        "create_stream": transfer.create_stream,
        "synchronize_stream": lambda: transfer.synchronize_stream(spare),
        "is_capturing": lambda: transfer.is_capturing(spare),
        "create_marker": transfer.create_marker,
        "record": lambda: transfer.record(marker, spare),
        "register_host": lambda: transfer.register_host(address, 4096),
        "memory_info": transfer.memory_info,
        "word write": lambda: sync.word_writes.write(spare, host.device_ptr, 1),
        "word wait": lambda: sync.word_waits.wait(spare, host.device_ptr, 0),
        "create event": sync.events.create,
        "record event": lambda: sync.events.record(event, spare),
        "export event": lambda: sync.events.export(event),
        "query event": lambda: sync.events.query(event),
    }


def look(fence: Any, n: int) -> str:
    """What a consumer is told about ``n`` now."""
    errors = importlib.import_module("devipc.errors")
    try:
        return "reached" if fence.query(n) else "pending"
    except errors.FencePoisoned as error:
        return f"poisoned: {error.code}"


def fault(device: Any) -> dict[str, Any]:
    child = Peer(faulting)
    try:
        with staging(device) as host, importer(device, child.channel.receive()) as session:
            return watch(device, host, session, child)
    finally:
        if child.process.poll() is None:
            child.kill()
        child.channel.close()


def watch(device: Any, host: Staging, session: Any, child: Peer) -> dict[str, Any]:
    memories = {kind: session.open(kind) for kind in KINDS}
    fences = {name: session.open_fence(name) for name in STRATEGIES}
    for fence in fences.values():
        fence.synchronize(1, PATIENCE_S)
    child.channel.send("fault")
    victim = child.channel.receive()
    until(lambda: all("poisoned" in look(fence, 2) for fence in fences.values()), 1.0, pause_s=0.01)
    told = {name: look(fence, 2) for name, fence in fences.items()}
    # The peer's own work, and the memory that it has mapped from the faulting process.
    block = device.memory.allocate(MIB, zero=True)
    host.write(block.ptr, b"unaffected")
    assert host.read(block.ptr, 10) == b"unaffected"
    device.memory.free(block)
    shown = {kind: host.read(memory.ptr, len(kind)).decode() for kind, memory in memories.items()}
    assert shown == {kind: kind for kind in KINDS}, shown
    child.channel.send("close")
    for memory in memories.values():
        memory.close()
    closing, seconds = child.channel.receive()
    code = child.process.wait(timeout=30)
    at_last = {name: look(fence, 2) for name, fence in fences.items()}
    for fence in fences.values():
        fence.close()
    lost = DeviceLostError.__name__
    odd = {name: what for name, what in victim["later calls"].items() if not what.startswith(lost)}
    untyped = [what for what in (*closing.values(), *victim["later calls"].values()) if what.startswith("UNTYPED")]
    assert not untyped, untyped
    assert not odd, odd
    assert code == 0, f"the faulting process ended with {code}"
    assert all("poisoned" in what for what in at_last.values()), at_last
    return {
        "faulting process": victim,
        "calls that are no DeviceLostError": odd,
        "fences, told to the peer after the fault": told,
        "fences, told to the peer after the close": at_last,
        "closing": closing,
        "closing, s": seconds,
        "exit status": code,
        "memory of the faulting process, read by the peer": shown,
    }


def sections(device: Any) -> Sequence[evidence.Section]:
    return [("a faulting kernel", partial(fault, device))]


if __name__ == "__main__":
    sys.exit(evidence.main(str(__doc__), sections))
