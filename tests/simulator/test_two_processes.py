"""Two processes through the real bindings: every kind of memory, events, values."""

from __future__ import annotations

import os
import socket
import time

import pytest

from tests.simulator.control import Simulator
from tests.simulator.harness import Parent, Simulation
from tests.simulator.programs import MIB, fetch, shared_words, world

pytestmark = pytest.mark.simulator


# ---- classic handles ----


def classic_exporter(parent: Parent, nbytes: int) -> object:
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need, raw

    w = world()
    pointer = w.alloc(nbytes)
    for at in (0, nbytes - 1):  # the ends only: a huge allocation stays sparse
        need(cu.cuMemsetD8(pointer + at, 1, 1))
    parent.send(raw(need(cu.cuIpcGetMemHandle(pointer))).hex())
    parent.receive()
    return [fetch(pointer, 4).hex(), fetch(pointer + nbytes - 1, 1).hex()]


def classic_importer(parent: Parent, handle: str, nbytes: int) -> object:
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import from_raw, need

    w = world()
    pointer = int(need(cu.cuIpcOpenMemHandle(from_raw(cu.CUipcMemHandle, bytes.fromhex(handle)), 1)))
    seen = [fetch(pointer, 1).hex(), fetch(pointer + nbytes - 1, 1).hex()]
    past = cu.cuMemcpyDtoH(bytearray(2), pointer + nbytes - 1, 2)[0].name
    need(cu.cuMemcpyHtoDAsync(pointer, b"\x01\x02\x03\x04", 4, w.stream))
    need(cu.cuStreamSynchronize(w.stream))
    need(cu.cuIpcCloseMemHandle(pointer))
    return {"seen": seen, "past": past, "live": Simulator.loaded().report()["live_mappings"]}


@pytest.mark.parametrize("nbytes", [2 * MIB, 3 * MIB + 1, (4 << 30) + 8])
def test_classic_memory_is_shared(sim: Simulation, nbytes: int) -> None:
    """The bytes of one process are the other's, up to the last and not beyond; 4 GiB too, sparsely."""
    with sim.start(classic_exporter, nbytes) as exporter:
        handle = exporter.receive()
        answer = sim.run(classic_importer, handle, nbytes)
        exporter.send("done")
        first, last = exporter.result()
    assert answer["seen"] == ["01", "01"]
    assert answer["past"] == "CUDA_ERROR_INVALID_VALUE"
    assert answer["live"] == 0
    assert (first, last) == ("01020304", "01")


# ---- physical memory by fd ----


def chunks_exporter(parent: Parent, link: int, count: int) -> object:
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w = world()
    start = w.mapped(count)
    for i in range(count):
        need(cu.cuMemsetD8(start + i * 2 * MIB, i + 1, 2 * MIB))
    channel = socket.socket(fileno=link)
    for i in range(count):
        handle = need(cu.cuMemRetainAllocationHandle(start + i * 2 * MIB))
        kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        fd = int(need(cu.cuMemExportToShareableHandle(handle, kind, 0)))
        socket.send_fds(channel, [b"x"], [fd])
        os.close(fd)
        need(cu.cuMemRelease(handle))
    parent.send("sent")
    parent.receive()
    return fetch(start + 2 * MIB - 2, 4).hex()


def chunks_importer(parent: Parent, link: int, count: int) -> object:
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w = world()
    channel = socket.socket(fileno=link)
    start = w.reserve(count * 2 * MIB)
    kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    for i in range(count):
        _, (fd,), _, _ = socket.recv_fds(channel, 1, 1)
        handle = need(cu.cuMemImportFromShareableHandle(fd, kind))
        os.close(fd)
        need(cu.cuMemMap(start + i * 2 * MIB, 2 * MIB, 0, handle, 0))
        need(cu.cuMemRelease(handle))
    need(cu.cuMemSetAccess(start, count * 2 * MIB, [w.access()], 1))
    border = fetch(start + 2 * MIB - 2, 4)
    need(cu.cuMemcpyHtoD(start + 2 * MIB - 2, b"\x0a\x0b\x0c\x0d", 4))
    need(cu.cuMemUnmap(start, count * 2 * MIB))
    report = Simulator.loaded().report()
    return {"border": border.hex(), "maps": report["live_maps"], "physical": report["live_physical"]}


def test_a_grown_range_is_shared_by_fds(sim: Simulation) -> None:
    """Many chunks travel over a socket and lie side by side again; one copy spans their border."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        ends = (here.fileno(), there.fileno())
        with sim.start(chunks_exporter, ends[0], 5, fds=(ends[0],)) as exporter:
            exporter.receive()
            answer = sim.run(chunks_importer, ends[1], 5, fds=(ends[1],))
            exporter.send("done")
            assert exporter.result() == "0a0b0c0d"
    assert answer == {"border": "01010202", "maps": 0, "physical": 0}


# ---- pools ----


def pool_exporter(parent: Parent, link: int) -> object:
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need, raw

    w = world()
    pool = w.pool()
    pointers = [w.pooled(nbytes, pool) for nbytes in (1000, 4 * MIB)]
    for i, pointer in enumerate(pointers):
        need(cu.cuMemsetD8(pointer, i + 5, 1000))
    kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    fd = int(need(cu.cuMemPoolExportToShareableHandle(pool, kind, 0)))
    socket.send_fds(socket.socket(fileno=link), [b"x"], [fd])
    os.close(fd)
    parent.send([raw(need(cu.cuMemPoolExportPointer(pointer))).hex() for pointer in pointers])
    parent.receive()
    return [fetch(pointer, 1).hex() for pointer in pointers]


def pool_importer(parent: Parent, link: int, exports: list[str]) -> object:
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import from_raw, need

    w = world()
    _, (fd,), _, _ = socket.recv_fds(socket.socket(fileno=link), 1, 1)
    kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    pool = need(cu.cuMemPoolImportFromShareableHandle(fd, kind, 0))
    os.close(fd)
    seen = []
    for export in exports:
        pointer = int(need(cu.cuMemPoolImportPointer(pool, from_raw(cu.CUmemPoolPtrExportData, bytes.fromhex(export)))))
        seen.append(fetch(pointer, 1).hex())
        need(cu.cuMemsetD8(pointer, 0x20 + len(seen), 1))
        need(cu.cuMemFreeAsync(pointer, w.stream))
    need(cu.cuStreamSynchronize(w.stream))
    need(cu.cuMemPoolDestroy(pool))
    return {"seen": seen, "live": Simulator.loaded().report()["live_pool_pointers"]}


def test_pool_memory_is_shared(sim: Simulation) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        ends = (here.fileno(), there.fileno())
        with sim.start(pool_exporter, ends[0], fds=(ends[0],)) as exporter:
            answer = sim.run(pool_importer, ends[1], exporter.receive(), fds=(ends[1],))
            exporter.send("done")
            assert exporter.result() == ["21", "22"]
    assert answer == {"seen": ["05", "06"], "live": 0}


# ---- events and values ----


def event_exporter(parent: Parent) -> object:
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need, raw

    w, sim = world(), Simulator.loaded()
    event = w.event(6)
    parent.send(raw(need(cu.cuIpcGetEventHandle(event))).hex())
    while parent.receive() == "again":
        sim.stall()
        need(cu.cuMemsetD8Async(w.alloc(4096), 1, 4096, w.stream))
        need(cu.cuEventRecord(event, w.stream))
        parent.send("recorded")
        parent.receive()
        sim.stall(False)
        need(cu.cuEventSynchronize(event))
        parent.send("done")
    return None


def event_importer(parent: Parent, handle: str) -> object:
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import from_raw, need

    w = world()
    event = need(cu.cuIpcOpenEventHandle(from_raw(cu.CUipcEventHandle, bytes.fromhex(handle))))
    parent.send(cu.cuEventQuery(event)[0].name)
    for _ in range(2):
        parent.receive()
        need(cu.cuStreamWaitEvent(w.stream, event, 0))
        parent.send([cu.cuEventQuery(event)[0].name, cu.cuStreamQuery(w.stream)[0].name])
        parent.receive()
        need(cu.cuStreamSynchronize(w.stream))
        parent.send([cu.cuEventQuery(event)[0].name, cu.cuStreamQuery(w.stream)[0].name])
    return cu.cuEventDestroy(event)[0].name


def test_an_event_orders_two_processes(sim: Simulation) -> None:
    """Unrecorded is done; recorded is not ready while the stream stands; the same again after a re-record."""
    with sim.start(event_exporter) as exporter, sim.start(event_importer, exporter.receive()) as importer:
        assert importer.receive() == "CUDA_SUCCESS"
        for _ in range(2):
            exporter.send("again")
            exporter.receive()
            importer.send("look")
            assert importer.receive() == ["CUDA_ERROR_NOT_READY", "CUDA_ERROR_NOT_READY"]
            exporter.send("release")
            assert exporter.receive() == "done"
            importer.send("look")
            assert importer.receive() == ["CUDA_SUCCESS", "CUDA_SUCCESS"]
        exporter.send("end")
        assert importer.result() == "CUDA_SUCCESS"
        exporter.result()


def value_writer(parent: Parent, fd: int) -> object:
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w = world()
    _area, address = shared_words(fd)
    need(cu.cuMemHostRegister(address, 4096, 3))
    pointer = int(need(cu.cuMemHostGetDevicePointer(address, 0)))
    parent.send("ready")
    for _ in range(100):
        n = parent.receive()
        need(cu.cuStreamWaitValue64(w.stream, pointer + 64, n - 1, 0))
        need(cu.cuStreamWriteValue64(w.stream, pointer, n, 0))
    need(cu.cuStreamSynchronize(w.stream))
    return cu.cuMemHostUnregister(address)[0].name


def value_waiter(parent: Parent, fd: int) -> object:
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w = world()
    area, address = shared_words(fd)
    need(cu.cuMemHostRegister(address, 4096, 3))
    pointer = int(need(cu.cuMemHostGetDevicePointer(address, 0)))
    parent.send("ready")
    for _ in range(100):
        n = parent.receive()
        need(cu.cuStreamWaitValue64(w.stream, pointer, n, 0))
        need(cu.cuStreamWriteValue64(w.stream, pointer + 64, n, 0))
    need(cu.cuStreamSynchronize(w.stream))
    value = int.from_bytes(area[64:72], "little")
    need(cu.cuMemHostUnregister(address))
    return value


def test_values_order_two_processes(sim: Simulation) -> None:
    """A hundred hand-overs to and fro through one registered shared page."""
    fd = os.memfd_create("words")
    os.ftruncate(fd, 4096)
    try:
        with sim.start(value_writer, fd, fds=(fd,)) as writer, sim.start(value_waiter, fd, fds=(fd,)) as waiter:
            writer.receive(), waiter.receive()
            for n in range(1, 101):
                waiter.send(n)
                writer.send(n)
            assert waiter.result() == 100
            assert writer.result() == "CUDA_SUCCESS"
    finally:
        os.close(fd)


# ---- memory of a process that is gone ----


def holder(parent: Parent, handle: str) -> object:
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import from_raw, need

    world()
    sim = Simulator.loaded()
    pointer = int(need(cu.cuIpcOpenMemHandle(from_raw(cu.CUipcMemHandle, bytes.fromhex(handle)), 1)))
    parent.send([sim.used_bytes(), sim.used_bytes(pid=os.getpid())])
    parent.receive()
    time.sleep(0.05)
    seen = fetch(pointer, 1).hex()
    held = [sim.used_bytes(), sim.used_bytes(pid=os.getpid())]
    need(cu.cuIpcCloseMemHandle(pointer))
    return {"seen": seen, "held": held, "after": sim.used_bytes()}


def test_a_killed_exporters_memory_lives_in_its_importer(sim: Simulation) -> None:
    """It stays readable and charged until the mapping closes, and is then free for everybody."""
    nbytes = 8 * MIB
    with sim.start(classic_exporter, nbytes) as exporter:
        with sim.start(holder, exporter.receive()) as importer:
            assert importer.receive() == [nbytes, 0]
            exporter.kill()
            exporter.status()
            importer.send("gone")
            assert importer.result() == {"seen": "01", "held": [nbytes, nbytes], "after": 0}
