"""Everything the backend does, once, on a real device, between two processes; one JSON with what came back.

``python -m backends.cuda.tests.hardware.smoke --out smoke.json``. Each section stands alone: a failing one is reported
with its traceback and the next one runs. Uses the backend class itself, so that nothing need be installed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from backends.testing.helpers import STAGING_NBYTES, pattern, staging
from devipc.spi import DevIPCError, HandleKind

from ..peers import Channel, Peer, peer
from ..test_memory_peers import mirror, reflect
from ..test_sync import capture, load, observe_event
from ..test_vmm import BLOCK, Grown
from .pointers import pointer_facts
from .tensors import torch_tensors

np: Any = importlib.import_module("numpy")

MIB, GIB = 2**20, 2**30
WORD = 4096


def facts(device: Any) -> dict[str, Any]:
    backend = importlib.import_module("devipc_cuda.backend").CudaBackend()
    return {
        "facts": dict(backend.facts()),
        "devices": [str(info) for info in backend.devices()],
        "kinds": {kind: c.to_json() for kind, c in device.memory.kinds().items()},
        "mechanisms": {name: c.to_json() for name, c in device.sync.mechanisms().items()},
        "max pitch": device.transfer._max_pitch,
        "granularity": importlib.import_module("devipc_cuda.memory_vmm").granularity(device.info.ordinal),
    }


def round_trips(device: Any, kind: str) -> dict[str, Any]:
    """Offsets 0, 1, 4096, 2 MiB and beyond 4 GiB, read and written by a peer."""
    block = device.memory.allocate(4 * GIB + 8 * MIB, kind=HandleKind(kind))
    ranges = [(0, 4096), (1, 4095), (4096, 4096), (2 * MIB, 3 * MIB), (4 * GIB + 4097, 5 * MIB), (0, block.nbytes)]
    ranges.append((block.nbytes - 1, 1))
    with staging(device) as host, peer(mirror) as other:
        for seed, (offset, nbytes) in enumerate(ranges):
            reflect(device, other, host, block.ptr + offset, nbytes, seed)
        other.channel.send("end")
    device.memory.free(block)
    return {"ranges": ranges}


def open_raw(device: Any, channel: Channel, sim: Any) -> None:
    """Say where this driver opens a legacy handle, and what it reports there."""
    driver = importlib.import_module("devipc_cuda.driver")
    with device.context:
        for _ in range(3):
            handle = driver.handle_from_bytes("CUipcMemHandle", bytes.fromhex(channel.receive()))
            ptr = int(driver.call("cuIpcOpenMemHandle", handle, 1))
            base, nbytes = driver.call("cuMemGetAddressRange", ptr)
            block = driver.pointer_attribute("MAPPING_BASE_ADDR", ptr) or 0
            channel.send([ptr % (2 * MIB), int(base) - ptr, int(nbytes), block - ptr])


def small_allocations(device: Any) -> dict[str, Any]:
    """Several allocations in one 2 MiB block: does each open at its own bytes?"""
    driver = importlib.import_module("devipc_cuda.driver")
    opened = []
    cu: Any = importlib.import_module("cuda.bindings.driver")
    with device.context, staging(device) as host, peer(mirror) as other:
        blocks = [int(cu.cuMemAlloc(nbytes)[1]) for nbytes in (1000, 1000, 300_000)]
        for seed, ptr in enumerate(blocks):
            reflect(device, other, host, ptr + 8, 900, seed)
        other.channel.send("end")
        with peer(open_raw) as raw:
            for ptr in blocks:
                raw.channel.send(driver.handle_bytes(driver.call("cuIpcGetMemHandle", ptr)).hex())
                opened.append(raw.channel.receive())
        for ptr in blocks:
            cu.cuMemFree(ptr)
    return {
        "distances": [ptr - blocks[0] for ptr in blocks],
        "opened at, in 2 MiB; address range, relative; its size; mapping, relative": opened,
    }


def grown_range(device: Any) -> dict[str, Any]:
    sizes = [BLOCK, 10 * BLOCK, BLOCK, 7 * BLOCK]
    with device.context, staging(device) as host, peer(mirror) as other:
        range_ = Grown(sizes)
        total = sum(sizes)
        for seed, (offset, nbytes) in enumerate([(0, total), (BLOCK - 1, 2), (3, 12 * BLOCK), (11 * BLOCK, BLOCK)]):
            reflect(device, other, host, range_.base + offset, nbytes, seed)
        other.channel.send("end")
        range_.free()
    return {"blocks": sizes}


# --- sync ---


def memops(device: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with staging(device) as host:
        sync, stream = device.sync, host.stream
        marker = host.transfer.create_marker()
        sync.word_waits.wait(stream, host.device_ptr + WORD, 5)
        sync.word_writes.write(stream, host.device_ptr + WORD + 8, 6)
        host.transfer.record(marker, stream)
        time.sleep(0.02)
        assert not host.transfer.query_marker(marker)
        host.view[WORD : WORD + 8] = (2**62 + 1).to_bytes(8, "little")  # poison releases
        host.transfer.synchronize_stream(stream)
        assert load(host.view, WORD + 8) == 6
        assert host.transfer.query_marker(marker)
        capture(device, stream, begin=True)
        found["capturing"] = host.transfer.is_capturing(stream)
        try:
            sync.word_writes.write(stream, host.device_ptr + WORD, 1)
        except DevIPCError as error:
            found["write while capturing"] = str(error)
        capture(device, stream, begin=False)
        found["write, poll: us"] = poll_latency(device, host)
        host.transfer.destroy_marker(marker)
    return found


def poll_latency(device: Any, host: Any) -> float:
    """Median of: submit a word write, see it on the host."""
    times = []
    for value in range(1, 300):
        began = time.perf_counter()
        device.sync.word_writes.write(host.stream, host.device_ptr + WORD + 16, value)
        while load(host.view, WORD + 16) != value:
            pass
        times.append(time.perf_counter() - began)
    return round(sorted(times)[len(times) // 2] * 1e6, 1)


def events(device: Any) -> dict[str, Any]:
    """A peer sees "not done" while the stream waits, then "done"."""
    sync = device.sync.events
    with staging(device) as host:
        event = sync.create()
        unrecorded = sync.query(event)
        device.sync.word_waits.wait(host.stream, host.device_ptr + WORD, 1)
        sync.record(event, host.stream)
        with peer(observe_event) as other:
            other.channel.send(sync.export(event).hex())
            busy = other.channel.receive()
            host.view[WORD : WORD + 8] = (1).to_bytes(8, "little")
            other.channel.send()
            assert other.channel.receive() == "done"
        assert busy is False
        sync.destroy(event)
    return {"unrecorded counts as done": unrecorded, "peer, while busy": busy}


# --- copies ---


def copies(device: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    size = 64 * MIB
    block = device.memory.allocate(size)
    with staging(device, 64 * MIB) as host:
        source = pattern(3, STAGING_NBYTES)
        host.view[:STAGING_NBYTES] = source
        expected = np.frombuffer(source, dtype=np.uint8)
        rows = np.array([(block.ptr + i * 70_001, host.device_ptr + i * 999, 3000, 2000, 1500, 20) for i in range(30)])
        device.transfer.copy_strided(host.stream, rows.astype(np.uint64))
        for i in range(30):
            got = np.frombuffer(host_read(host, block.ptr + i * 70_001, 20 * 3000), dtype=np.uint8)
            for row in range(20):
                start = i * 999 + row * 2000
                assert (got[row * 3000 : row * 3000 + 1500] == expected[start : start + 1500]).all(), (i, row)
        found["us for each copy, submission alone"] = submission_costs(device, host, block.ptr)
        found["batch call"] = device.transfer._submission.missing or "used"
        found["across two registrations"] = across_registrations(device, block.ptr)
    device.memory.free(block)
    return found


def host_read(host: Any, ptr: int, nbytes: int) -> bytes:
    """Read through the buffer's second half: its first holds what was copied."""
    offset = 32 * MIB
    host.transfer.copy(host.stream, host.device_ptr + offset, ptr, nbytes)
    host.transfer.synchronize_stream(host.stream)
    return bytes(host.view[offset : offset + nbytes])


def submission_costs(device: Any, host: Any, ptr: int) -> dict[str, float]:
    count, transfer = 500, device.transfer
    rows = [(ptr + i * 65536, host.device_ptr + i * 32768, 8192, 4096, 2048, 8) for i in range(count)]
    strided = np.array(rows, dtype=np.uint64)
    flat = np.array([(d, s, 1, 1, 2048, 1) for d, s, *_ in rows], dtype=np.uint64)
    dst, src = strided[:, 0].copy(), strided[:, 1].copy()
    nbytes = np.full(count, 2048, dtype=np.uint64)
    costs: dict[str, float] = {}
    ways: dict[str, Callable[[], object]] = {
        "strided": lambda: transfer.copy_strided(host.stream, strided),
        "flat rows": lambda: transfer.copy_strided(host.stream, flat),
        "batch": lambda: transfer.copy_batch(host.stream, dst, src, nbytes),
    }
    for name, submit in ways.items():
        submit()
        transfer.synchronize_stream(host.stream)
        times = []
        for _ in range(7):
            began = time.perf_counter()
            submit()
            times.append((time.perf_counter() - began) / count)
            transfer.synchronize_stream(host.stream)
        costs[name] = round(min(times) * 1e6, 2)
    return costs


def across_registrations(device: Any, ptr: int) -> dict[str, Any]:
    """What the driver says to a copy whose host side lies in two registrations, and that ours is split."""
    transfer_module = importlib.import_module("devipc_cuda.transfer")
    driver = importlib.import_module("devipc_cuda.driver")
    test_transfer = importlib.import_module("backends.cuda.tests.test_transfer")
    transfer = transfer_module.CudaTransfer(device.context, pin_step_nbytes=65536)
    memory, pin, address = test_transfer.mapped(2**18)
    memory[:] = pattern(8, 2**18)
    registration = transfer.register_host(address, 2**18)
    stream = transfer.create_stream()
    with device.context:
        raw, _ = driver.attempt("cuMemcpyAsync", ptr, registration.device_ptr, 2**18, stream.native)
    transfer.copy(stream, ptr, registration.device_ptr, 2**18)
    transfer.synchronize_stream(stream)
    with staging(device) as host:
        same = host.read(ptr, 2**18) == memory[:]
    transfer.destroy_stream(stream)
    transfer.unregister_host(registration)
    del pin
    memory.close()
    assert same
    return {"status of one driver copy": raw, "ours": "right bytes"}


# --- failures ---


def refusals(device: Any) -> dict[str, str]:
    """Words and status of what must fail."""
    spi = importlib.import_module("devipc.spi")
    found: dict[str, str] = {}

    def note(name: str, call: Callable[[], object]) -> None:
        try:
            found[name] = f"no error: {call()}"
        except DevIPCError as error:
            found[name] = f"{type(error).__name__}: {error}"

    block = device.memory.allocate(4096, kind=HandleKind.LEGACY)
    own = device.memory.export(block.ptr, 16)
    (chunk,) = own.chunks
    noise = spi.Chunk(chunk.allocation_nbytes, 0, 16, b"\x01" + os.urandom(len(chunk.payload) - 1))
    note("own legacy handle", lambda: device.memory.open(own))
    note("random legacy handle", lambda: device.memory.open(spi.ExportedExtent(HandleKind.LEGACY, (noise,))))
    note("random event", lambda: device.sync.events.open(b"\x01" + os.urandom(64)))
    fd = os.memfd_create("no device memory")
    payload = importlib.import_module("devipc_cuda.payload")
    for kind, nbytes in ((HandleKind.VMM_FD, payload.VMM_NBYTES), (HandleKind.POOL, payload.POOL_NBYTES)):
        wrong = spi.Chunk(2 * MIB, 0, 16, b"\x01" + os.urandom(nbytes - 1), has_fd=True)
        note(f"memfd as {kind}", partial(device.memory.open, spi.ExportedExtent(kind, (wrong,), (fd,))))
    os.close(fd)
    device.memory.free(block)
    note("freed", lambda: device.memory.export(block.ptr, 16))
    for name, nbytes in (("too large", 2**45), ("larger than the device", 200 * GIB)):
        for each in ("vmm_fd", "legacy", "pool"):
            note(f"{each}, {name}", partial(device.memory.allocate, nbytes, kind=HandleKind(each)))
    return found


def oversized(device: Any) -> dict[str, Any]:
    """A descriptor that announces more than the physical block: refused by the importing driver?"""
    spi = importlib.import_module("devipc.spi")
    found: dict[str, Any] = {}
    block = device.memory.allocate(2 * MIB)
    extent = device.memory.export(block.ptr, block.nbytes)
    (chunk,) = extent.chunks
    for name, nbytes in (("twice", 4 * MIB), ("half", MIB), ("odd", 2 * MIB + 4096)):
        wrong = spi.ExportedExtent(extent.kind, (spi.Chunk(nbytes, 0, nbytes, chunk.payload, has_fd=True),), extent.fds)
        try:
            opened = device.memory.open(wrong)
            found[name] = "opened"
            device.memory.close(opened)
        except DevIPCError as error:
            found[name] = f"{type(error).__name__}: {error}"
    device.memory.release(extent)
    device.memory.free(block)
    return found


def die_holding(device: Any, channel: Channel, sim: Any) -> None:
    block = device.memory.allocate(GIB, kind=HandleKind(channel.receive()))
    with staging(device) as host:
        host.write(block.ptr + 5, b"last words")
    channel.send_extent(device.memory.export(block.ptr, GIB))
    channel.receive()


def dead_exporter(device: Any, kind: str) -> dict[str, Any]:
    """The exporter is killed while its memory is mapped here: readable, and given back once closed."""
    before = device.transfer.memory_info().free_nbytes
    other = Peer(die_holding)
    other.channel.send(kind)
    extent = other.channel.receive_extent()
    opened = device.memory.open(extent)
    device.memory.release(extent)
    other.kill()
    other.channel.close()
    with staging(device) as host:
        assert host.read(opened.ptr + 5, 10) == b"last words"
    held = before - device.transfer.memory_info().free_nbytes
    device.memory.close(opened)
    left = before - device.transfer.memory_info().free_nbytes
    return {"held while mapped": held, "left after close": left}


def sections(device: Any) -> list[tuple[str, Callable[[], Any]]]:
    kinds = ("vmm_fd", "legacy", "pool")
    return [
        ("facts", partial(facts, device)),
        ("pointers", partial(pointer_facts, device)),
        *((f"round trips, {k}", partial(round_trips, device, k)) for k in kinds),
        ("small allocations", partial(small_allocations, device)),
        ("grown range", partial(grown_range, device)),
        ("memops", partial(memops, device)),
        ("events", partial(events, device)),
        ("copies", partial(copies, device)),
        ("refusals", partial(refusals, device)),
        ("oversized", partial(oversized, device)),
        *((f"dead exporter, {k}", partial(dead_exporter, device, k)) for k in kinds),
        *((f"torch, {o}", partial(torch_tensors, device, o)) for o in ("default", "expandable", "pool")),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("smoke.json"))
    parser.add_argument("--only", default="", help="run sections whose name contains this")
    options = parser.parse_args()
    device = importlib.import_module("devipc_cuda.backend").CudaBackend().open_device()
    free = device.transfer.memory_info().free_nbytes
    report: dict[str, Any] = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "sections": {}}
    failed = 0
    for name, run in sections(device):
        if options.only not in name:
            continue
        began = time.perf_counter()
        try:
            result = {"ok": True, "found": run()}
        except BaseException:
            result = {"ok": False, "error": traceback.format_exc()}
            failed += 1
        result["s"] = round(time.perf_counter() - began, 2)
        report["sections"][name] = result
        print(f"{'ok ' if result['ok'] else 'BAD'} {result['s']:6.2f} s  {name}", flush=True)
        if not result["ok"]:
            print(result["error"], flush=True)
        options.out.write_text(json.dumps(report, indent=1, default=str))
    report["device memory not given back"] = free - device.transfer.memory_info().free_nbytes
    print(f"device memory not given back: {report['device memory not given back']}")
    device.close()
    options.out.write_text(json.dumps(report, indent=1, default=str))
    print(f"{failed} of {len(report['sections'])} sections failed; {options.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
