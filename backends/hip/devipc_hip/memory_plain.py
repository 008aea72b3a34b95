"""Memory of ``hipMalloc``, and the canary behind it: the base of handle kinds ``legacy`` and ``dmabuf``.

Owns allocating it, and looking at the canary in what was opened. All functions expect the device to be current.

A runtime has attached other memory than the handle named, and called that success (ROCm/rocm-systems 11892). So memory
that this package allocates ends in a page of its own with random bytes, which travel with every export and are compared
in what was opened. Memory that was allocated elsewhere has no such page; then the sizes must agree.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import TypeVar

from devipc.spi import PAGE_NBYTES, BoundsError, Chunk, HandleError, check_chunk, round_up, undo
from devipc_hip import driver
from devipc_hip.context import Context
from devipc_hip.memory_query import Mapping
from devipc_hip.payload import CANARY_NBYTES

__all__ = ["BLOCK_NBYTES", "NO_CANARY", "TAIL_NBYTES", "WrongMemory", "allocate_plain", "attach", "check_opened"]

BLOCK_NBYTES = 2 * 2**20
"""Smaller allocations come from common blocks, whose export leaked them in some releases (ROCm/rocm-systems 6407)."""

TAIL_NBYTES = PAGE_NBYTES
"""What an allocation has behind its usable bytes, for the canary."""

NO_CANARY = bytes(CANARY_NBYTES)
"""What travels for memory that was allocated elsewhere."""

_ATTEMPTS = 3
_PAUSE_S = 0.05

T = TypeVar("T")


class WrongMemory(HandleError):
    """The runtime opened the handle, and what it opened is not what was exported."""


def allocate_plain(nbytes: int, context: Context) -> tuple[int, int, bytes]:
    """Allocate at least ``nbytes`` in whole blocks; return address, usable size and canary. Blocks for a small copy."""
    whole = round_up(nbytes + TAIL_NBYTES, BLOCK_NBYTES)
    ptr = int(driver.call("hipMalloc", whole))
    canary = os.urandom(CANARY_NBYTES)
    try:
        _copy(ptr + whole - TAIL_NBYTES, ctypes.create_string_buffer(canary, CANARY_NBYTES), context, to_device=True)
    except BaseException:
        undo(driver.call, "hipFree", ptr)
        raise
    return ptr, whole - TAIL_NBYTES, canary


def _copy(ptr: int, host: ctypes.Array[ctypes.c_char], context: Context, *, to_device: bool) -> None:
    stream, address = context.internal_stream(), ctypes.addressof(host)
    dst, src = (ptr, address) if to_device else (address, ptr)
    driver.call("hipMemcpyAsync", dst, src, CANARY_NBYTES, driver.DEFAULT_COPY, stream)
    driver.call("hipStreamSynchronize", stream)


def check_opened(ptr: int, chunk: Chunk, canary: bytes, opened: Mapping, context: Context) -> None:
    """Compare what was opened at ``ptr`` with what the exporter announced.

    Parameters
    ----------
    ptr : int
        Where the exporter's allocation begins in this process.
    chunk, canary : Chunk, bytes
        What travelled.
    opened : Mapping
        What this process's runtime says about ``ptr``.
    context : Context
        The device.

    Raises
    ------
    BoundsError
        When the shared range leaves it.
    WrongMemory
        When it is other memory.
    """
    room = opened.end - ptr
    check_chunk(chunk, driver_nbytes=room)
    if canary == NO_CANARY:
        if room != chunk.allocation_nbytes:
            raise WrongMemory(
                f"the runtime opened {room} bytes, the exporter announced {chunk.allocation_nbytes}",
                code="unknown_place",
                remedy="export memory that devipc allocated, or kind 'vmm_fd'",
            )
        return
    if room < chunk.allocation_nbytes + TAIL_NBYTES:
        raise BoundsError(
            f"the runtime opened {room} bytes, too few for what the exporter announced",
            remedy="the exporter's handle is wrong or was changed on the way; export again",
        )
    seen = ctypes.create_string_buffer(CANARY_NBYTES)
    _copy(ptr + chunk.allocation_nbytes, seen, context, to_device=False)
    if seen.raw != canary:
        raise WrongMemory(
            "the runtime opened other memory than was exported: the bytes behind it are not the exporter's",
            code="wrong_memory",
            remedy="open it again when no other process exports or opens; update ROCm, or use kind 'vmm_fd'",
            retryable=True,
        )


def attach(opening: Callable[[], T]) -> T:
    """Run ``opening`` again, a few times, while the runtime opens other memory than was exported."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return opening()
        except WrongMemory as error:
            if not error.retryable:  # nor is one whose opening could not be undone
                raise
            time.sleep(_PAUSE_S)
    return opening()
