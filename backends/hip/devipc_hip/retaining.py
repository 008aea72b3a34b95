"""Handles of memory that is mapped here: asked for by its address, and given back as far as they were counted.

Owns when the runtime can be asked, and what has to be given back. Exports nothing. All functions expect the device to
be current.

Sources: before May 2026 ``hipMemRetainAllocationHandle`` follows a null pointer for memory of ``hipMalloc``
(ROCm/rocm-systems 5807), so that ``hipMemGetAccess`` is asked first, which knows mappings only; before 7.12.60540 it
counts nothing (2696; RCCL asks for that version), so that a release would take the memory from its owner.
"""

from __future__ import annotations

import functools

from devipc_hip import driver, layouts

__all__ = ["give_back", "is_mapped", "retain"]

_COUNTED_FROM = 71_260_540


def is_mapped(ptr: int, *, ordinal: int) -> bool:
    """Return True for physical memory that is mapped at ``ptr``, False for memory of ``hipMalloc``."""
    if driver.has("hipMemGetAccess") and driver.question("hipMemGetAccess", layouts.location(ordinal), ptr) is None:
        return False
    handle = driver.question("hipMemRetainAllocationHandle", ptr)
    if handle is not None:
        give_back(int(handle))
    return handle is not None


def retain(base: int) -> int:
    """Return the handle of the physical memory that is mapped at ``base``; the caller gives it back."""
    return int(driver.call("hipMemRetainAllocationHandle", base))


def give_back(handle: int) -> None:
    """Undo :func:`retain`."""
    if _counts():
        driver.call("hipMemRelease", handle)


@functools.cache
def _counts() -> bool:
    return driver.runtime_version() >= _COUNTED_FROM
