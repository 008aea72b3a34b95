"""What the driver says about pointers of every sort: the facts on which classification and address math stand.

Collects raw answers; judges nothing.
"""

from __future__ import annotations

import importlib
import mmap
from collections.abc import Callable
from typing import Any

from backends.testing.helpers import staging

from ..test_vmm import BLOCK, Grown

ATTRIBUTES = range(1, 23)


def ask(device: Any, ptr: int) -> dict[str, Any]:
    """Return every attribute, the address range and our own description; addresses relative to ``ptr``."""
    driver = importlib.import_module("devipc_cuda.driver")
    cu = importlib.import_module("cuda.bindings.driver")
    found: dict[str, Any] = {}
    for number in ATTRIBUTES:
        try:
            name = cu.CUpointer_attribute(number).name.removeprefix("CU_POINTER_ATTRIBUTE_")
        except ValueError:
            name = str(number)
        status, value = driver.attempt_pointer_attribute(number, ptr)
        if status:
            found[name] = f"status {status}"
        elif name in ("DEVICE_POINTER", "HOST_POINTER", "RANGE_START_ADDR", "MAPPING_BASE_ADDR"):
            found[name] = f"ptr{value - ptr:+d}"
        else:
            found[name] = value
    status, value = driver.attempt("cuMemGetAddressRange", ptr)
    found["cuMemGetAddressRange"] = f"status {status}" if status else f"ptr{int(value[0]) - ptr:+d}, {int(value[1])}"
    status, handle = driver.attempt("cuMemRetainAllocationHandle", ptr)
    found["cuMemRetainAllocationHandle"] = f"status {status}"
    if status == 0:
        driver.call("cuMemRelease", handle)
    info = device.memory.describe(ptr)
    found["describe"] = {
        "base": f"ptr{info.base - ptr:+d}",
        "nbytes": info.nbytes,
        "kind": info.kind,
        "exportable": list(info.exportable),
        "reason": info.reason,
    }
    return found


def pointer_facts(device: Any) -> dict[str, Any]:
    """Return the answers for memory of every sort that a process can meet."""
    facts: dict[str, Any] = {}
    with device.context:
        cu: Any = importlib.import_module("cuda.bindings.driver")
        for name, collect in (
            ("classic", classic),
            ("grown", grown),
            ("pools", pools),
            ("host", host),
        ):
            facts[name] = collect(device, cu, lambda ptr: ask(device, ptr))
    return facts


Ask = Callable[[int], dict[str, Any]]


def classic(device: Any, cu: Any, look: Ask) -> dict[str, Any]:
    first, second = (int(cu.cuMemAlloc(1000)[1]) for _ in range(2))
    large = int(cu.cuMemAlloc(5 * 2**20)[1])
    status, managed = cu.cuMemAllocManaged(4096, 1)
    found = {
        "distance of two small ones": second - first,
        "small": look(first),
        "small, second, inside": look(second + 100),
        "large, inside": look(large + 4097),
        "managed": look(int(managed)) if int(status) == 0 else f"status {int(status)}",
    }
    for ptr in (first, second, large):
        cu.cuMemFree(ptr)
    found["freed"] = look(large)
    if int(status) == 0:
        cu.cuMemFree(managed)
    return found


def grown(device: Any, cu: Any, look: Ask) -> dict[str, Any]:
    range_ = Grown([BLOCK, 10 * BLOCK, BLOCK])
    single = device.memory.allocate(BLOCK)
    found = {
        "first block": look(range_.base),
        "second block, inside": look(range_.base + BLOCK + 4097),
        "third block": look(range_.base + 11 * BLOCK),
        "reserved, not mapped": look(range_.base + 20 * BLOCK),
        "one block of allocate()": look(single.ptr + 1),
    }
    device.memory.free(single)
    range_.free()
    found["after address free"] = look(range_.base)
    return found


def pools(device: Any, cu: Any, look: Ask) -> dict[str, Any]:
    kind = importlib.import_module("devipc.spi").HandleKind.POOL
    own = device.memory.allocate(5000, kind=kind)
    status, default = cu.cuMemAllocAsync(5000, 0)
    found = {
        "own pool, inside": look(own.ptr + 3),
        "default pool": look(int(default)) if int(status) == 0 else f"status {int(status)}",
    }
    if int(status) == 0:
        cu.cuMemFreeAsync(default, 0)
        cu.cuStreamSynchronize(0)
    device.memory.free(own)
    return found


def host(device: Any, cu: Any, look: Ask) -> dict[str, Any]:
    _, pinned = cu.cuMemHostAlloc(8192, 0)
    with staging(device) as registered, mmap.mmap(-1, 8192):
        found = {
            "driver's pinned memory": look(int(pinned) + 1),
            "registered": look(registered.device_ptr + 1),
            "device address equals host address": registered.device_ptr == registered.address,
            "null": look(1),
        }
    cu.cuMemFreeHost(pinned)
    return found
