"""The calls that :mod:`pending_wait` tries: each a generator that makes ready, yields the one call, and cleans up.

What comes before the first yield is done before the wait is put on its stream, what comes after it when all is over.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from devipc.spi import HandleKind

from .code import launch, load, load_module
from .evidence import MIB, SIMULATED

if TYPE_CHECKING:
    from .pending_wait import Lab

WORD = 512 * 1024
"""Where in the staging memory the words lie."""
Attempt = Iterator[Callable[[], object]]


def module_load(lab: Lab) -> Attempt:
    yield lambda: load("loaded_meanwhile")


def module_function(lab: Lab) -> Attempt:
    module = load_module("asked_for_meanwhile")
    yield lambda: lab.call("cuModuleGetFunction", module, b"asked_for_meanwhile")


def cold_launch(lab: Lab) -> Attempt:
    kernel = load("cold")
    yield lambda: launch(kernel, lab.other)


def torch_launch(lab: Lab) -> Attempt:
    """A kernel of a framework that this process has not used yet, as a user meets it."""
    torch: Any = importlib.import_module("torch")
    values = torch.arange(1000, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()

    def use() -> None:
        with torch.cuda.stream(stream):
            values.cumsum(0)

    yield use
    torch.cuda.synchronize()


def warm_launch(lab: Lab) -> Attempt:
    yield lambda: launch(lab.warm, lab.other)


def launch_behind(lab: Lab) -> Attempt:
    yield lambda: launch(lab.warm, lab.held)


def alloc(lab: Lab) -> Attempt:
    made: list[Any] = []
    yield lambda: made.append(lab.call("cuMemAlloc", 4 * MIB))
    lab.call("cuMemFree", *made)


def free(lab: Lab) -> Attempt:
    ptr = lab.call("cuMemAlloc", 4 * MIB)
    yield lambda: lab.call("cuMemFree", ptr)


def alloc_async(lab: Lab) -> Attempt:
    made: list[Any] = []
    yield lambda: made.append(lab.call("cuMemAllocAsync", 4 * MIB, lab.other.native))
    lab.call("cuMemFreeAsync", *made, lab.other.native)


def free_async(lab: Lab) -> Attempt:
    ptr = lab.call("cuMemAllocAsync", 4 * MIB, lab.other.native)
    yield lambda: lab.call("cuMemFreeAsync", ptr, lab.other.native)


def allocate_kind(kind: str, lab: Lab) -> Attempt:
    made: list[Any] = []
    yield lambda: made.append(lab.device.memory.allocate(2 * MIB, kind=HandleKind(kind), zero=False))
    lab.device.memory.free(*made)


def free_kind(kind: str, lab: Lab) -> Attempt:
    block = lab.device.memory.allocate(2 * MIB, kind=HandleKind(kind), zero=False)
    yield lambda: lab.device.memory.free(block)


def export_kind(kind: str, lab: Lab) -> Attempt:
    block = lab.device.memory.allocate(2 * MIB, kind=HandleKind(kind), zero=False)
    made: list[Any] = []
    yield lambda: made.append(lab.device.memory.export(block.ptr, 2 * MIB))
    lab.device.memory.release(*made)
    lab.device.memory.free(block)


def open_kind(kind: str, lab: Lab) -> Attempt:
    made: list[Any] = []
    yield lambda: made.append(lab.device.memory.open(lab.extents[kind]))
    lab.device.memory.close(*made)


def close_kind(kind: str, lab: Lab) -> Attempt:
    opened = lab.device.memory.open(lab.extents[kind])
    yield lambda: lab.device.memory.close(opened)


def describe(lab: Lab) -> Attempt:
    yield lambda: lab.device.memory.describe(lab.near)


def memory_info(lab: Lab) -> Attempt:
    yield lab.device.transfer.memory_info


def copy(stream: str, to: str, lab: Lab) -> Attempt:
    host = lab.host.device_ptr
    ends = {"device": (lab.near, lab.far), "host": (host, host + 4096)}
    source, target = to.split(" to ")
    if source == target:
        dst, src = ends[source]
    else:
        dst, src = ends[target][0], ends[source][1]
    yield lambda: lab.device.transfer.copy(getattr(lab, stream), dst, src, 2048)


def pageable_copy(lab: Lab) -> Attempt:
    memory = ctypes.create_string_buffer(2 * MIB)
    yield lambda: lab.device.transfer.copy(lab.other, lab.near, ctypes.addressof(memory), MIB)


def strided_copy(lab: Lab) -> Attempt:
    rows = importlib.import_module("numpy").array([(lab.near, lab.host.device_ptr, 512, 256, 128, 64)], dtype="u8")
    yield lambda: lab.device.transfer.copy_strided(lab.other, rows)


def batch_copy(lab: Lab) -> Attempt:
    numpy: Any = importlib.import_module("numpy")
    dst, src, nbytes = (numpy.array(v, dtype="u8") for v in ([lab.near] * 4, [lab.host.device_ptr] * 4, [256] * 4))
    yield lambda: lab.device.transfer.copy_batch(lab.other, dst, src, nbytes)


def blocking_copy(lab: Lab) -> Attempt:
    yield lambda: lab.call("cuMemcpyDtoD", lab.near, lab.far, 4096)


def memset_async(lab: Lab) -> Attempt:
    yield lambda: lab.call("cuMemsetD8Async", lab.near, 0, 4096, lab.other.native)


def memset(lab: Lab) -> Attempt:
    yield lambda: lab.call("cuMemsetD8", lab.near, 0, 4096)


def _pages(nbytes: int) -> tuple[Any, int]:
    memory = ctypes.create_string_buffer(nbytes + 4096)
    return memory, -(-ctypes.addressof(memory) // 4096) * 4096


def host_register(lab: Lab) -> Attempt:
    memory, address = _pages(MIB)
    made: list[Any] = []
    yield lambda: made.append(lab.device.transfer.register_host(address, MIB))
    lab.device.transfer.unregister_host(*made)
    del memory


def host_unregister(lab: Lab) -> Attempt:
    memory, address = _pages(MIB)
    registration = lab.device.transfer.register_host(address, MIB)
    yield lambda: lab.device.transfer.unregister_host(registration)
    del memory


def marker_create(lab: Lab) -> Attempt:
    made: list[Any] = []
    yield lambda: made.append(lab.device.transfer.create_marker())
    lab.device.transfer.destroy_marker(*made)


def marker_destroy(lab: Lab) -> Attempt:
    marker = lab.device.transfer.create_marker()
    lab.device.transfer.record(marker, lab.other)
    yield lambda: lab.device.transfer.destroy_marker(marker)


def marker_destroy_behind(lab: Lab) -> Attempt:
    marker = lab.device.transfer.create_marker()

    def record_and_destroy() -> None:
        lab.device.transfer.record(marker, lab.held)
        lab.device.transfer.destroy_marker(marker)

    yield record_and_destroy


def marker_query(lab: Lab) -> Attempt:
    marker = lab.device.transfer.create_marker()

    def record_and_query() -> None:
        lab.device.transfer.record(marker, lab.held)
        lab.device.transfer.query_marker(marker)

    yield record_and_query
    lab.device.transfer.destroy_marker(marker)


def stream_wait_event(lab: Lab) -> Attempt:
    marker = lab.device.transfer.create_marker()
    lab.device.transfer.record(marker, lab.other)
    yield lambda: lab.device.transfer.wait_marker(lab.other, marker)
    lab.device.transfer.destroy_marker(marker)


def ipc_event_create(lab: Lab) -> Attempt:
    made: list[Any] = []
    yield lambda: made.append(lab.device.sync.events.create())
    lab.device.sync.events.destroy(*made)


def ipc_event_export(lab: Lab) -> Attempt:
    event = lab.device.sync.events.create()
    yield lambda: lab.device.sync.events.export(event)
    lab.device.sync.events.destroy(event)


def ipc_event_open(lab: Lab) -> Attempt:
    made: list[Any] = []
    yield lambda: made.append(lab.device.sync.events.open(lab.event))
    lab.device.sync.events.destroy(*made)


def ipc_event_destroy(lab: Lab) -> Attempt:
    event = lab.device.sync.events.open(lab.event)
    yield lambda: lab.device.sync.events.destroy(event)


def stream_create(lab: Lab) -> Attempt:
    made: list[Any] = []
    yield lambda: made.append(lab.device.transfer.create_stream())
    lab.device.transfer.destroy_stream(*made)


def stream_destroy(lab: Lab) -> Attempt:
    stream = lab.device.transfer.create_stream()
    yield lambda: lab.device.transfer.destroy_stream(stream)


def synchronize_other(lab: Lab) -> Attempt:
    yield lambda: lab.device.transfer.synchronize_stream(lab.other)


def synchronize_all(lab: Lab) -> Attempt:
    yield lambda: lab.call("cuCtxSynchronize")


def word_write(lab: Lab) -> Attempt:
    yield lambda: lab.device.sync.word_writes.write(lab.other, lab.host.device_ptr + WORD + 64, 1)


def word_wait_over(lab: Lab) -> Attempt:
    yield lambda: lab.device.sync.word_waits.wait(lab.other, lab.host.device_ptr + WORD + 128, 0)


COPIES = ("host to device", "device to host", "device to device", "host to host")
KINDS = ("legacy", "vmm_fd", "pool")
CALLS: dict[str, Callable[[Lab], Attempt]] = {
    "load a module": module_load,
    "cuModuleGetFunction": module_function,
    "first launch of a kernel": cold_launch,
    **({} if SIMULATED else {"first use of a torch kernel": torch_launch}),
    "later launch of a kernel": warm_launch,
    "later launch of a kernel, behind the wait": launch_behind,
    "cuMemAlloc": alloc,
    "cuMemFree": free,
    "cuMemAllocAsync": alloc_async,
    "cuMemFreeAsync": free_async,
    **{f"allocate {kind}": partial(allocate_kind, kind) for kind in KINDS},
    **{f"free {kind}": partial(free_kind, kind) for kind in KINDS},
    **{f"export {kind}": partial(export_kind, kind) for kind in KINDS},
    **{f"open {kind}": partial(open_kind, kind) for kind in KINDS},
    **{f"close {kind}": partial(close_kind, kind) for kind in KINDS},
    "describe a pointer": describe,
    "cuMemGetInfo": memory_info,
    **{f"copy {ends}": partial(copy, "other", ends) for ends in COPIES},
    **{f"copy {ends}, behind the wait": partial(copy, "held", ends) for ends in COPIES},
    "copy from pageable memory": pageable_copy,
    "strided copy": strided_copy,
    "batch of copies": batch_copy,
    "cuMemcpyDtoD (blocking call)": blocking_copy,
    "cuMemsetD8Async, first": memset_async,
    "cuMemsetD8Async, later": memset_async,
    "cuMemsetD8": memset,
    "cuMemHostRegister": host_register,
    "cuMemHostUnregister": host_unregister,
    "cuEventCreate": marker_create,
    "cuEventDestroy": marker_destroy,
    "cuEventRecord and cuEventDestroy, behind the wait": marker_destroy_behind,
    "cuEventRecord and cuEventQuery, behind the wait": marker_query,
    "cuStreamWaitEvent": stream_wait_event,
    "cuEventCreate, interprocess": ipc_event_create,
    "cuIpcGetEventHandle": ipc_event_export,
    "cuIpcOpenEventHandle": ipc_event_open,
    "cuEventDestroy, opened": ipc_event_destroy,
    "cuStreamCreate": stream_create,
    "cuStreamSynchronize and cuStreamDestroy of another stream": stream_destroy,
    "cuStreamSynchronize of another stream": synchronize_other,
    "cuCtxSynchronize": synchronize_all,
    "cuStreamWriteValue64": word_write,
    "cuStreamWaitValue64 that is satisfied": word_wait_over,
}
