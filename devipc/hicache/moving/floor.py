"""How fast this machine moves bytes at all, and what it takes beside them for calls, rows and entries.

Owns one short measurement when an engine begins. It only reads host memory, which may hold pages already.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from devipc.errors import DeviceLostError, DevIPCError
from devipc.hicache.planning.strips import CostModel
from devipc.interfaces.backend import Device
from devipc.interfaces.memory import Allocation, DeviceMemoryIPC
from devipc.interfaces.transfer import DeviceTransfer, Stream
from devipc.undoing import what_is_left

__all__ = ["FLOOR_NBYTES", "contiguous_nbytes_per_s", "measured_costs", "settle"]

FLOOR_NBYTES = 32 * 2**20
"""Device memory that is taken meanwhile, at most."""

_TIMES = 4
_LIMIT_S = 20e-3
_WIDTH, _PITCH = 512, 1024
_ROWS, _CALLS, _ENTRIES = 1024, 32, 256
_STEPS = 3
"""A cost is changed by at most two to this power."""
_log = logging.getLogger("devipc.hicache")


def contiguous_nbytes_per_s(device: Device, stream: Stream, address: int, nbytes: int) -> float:
    """Return how many bytes a second one contiguous copy moves from registered host memory to the device.

    From a small and a large copy, so that what each costs by itself is left out. Takes a few milliseconds; blocks
    while ``stream`` does. 0 where it cannot be told: no memory to be had, or less of it than a copy needs to tell.

    Parameters
    ----------
    device : Device
        Gets as many bytes for the time of the call.
    stream : Stream
        Where nothing else runs.
    address, nbytes : int
        Host memory that is registered; only read.

    Raises
    ------
    DevIPCError
        When memory that was not to be had is not whole given back either: an engine does not begin with that.
    """
    transfer, memory = device.transfer, device.memory
    large = min(nbytes, FLOOR_NBYTES)
    small = large // 4
    if transfer is None or memory is None or not small:
        return 0.0
    try:
        allocation = memory.allocate(large)
    except DevIPCError as error:
        if what_is_left(error):
            raise
        _log.info("the speed of a contiguous copy was not measured: %s", error)
        return 0.0
    best = {small: float("inf"), large: float("inf")}
    begun = time.perf_counter()
    try:
        for number in range(_TIMES):  # the first one warms up, and counts for nothing
            for size in best:
                took_s = _copy_s(transfer, stream, allocation.ptr, address, size)
                best[size] = min(best[size], took_s) if number > 1 else took_s
            if number and time.perf_counter() - begun > _LIMIT_S:
                break
    except DevIPCError as error:
        _log.info("the speed of a contiguous copy was not measured: %s", error)
        return 0.0
    finally:
        _give_back(transfer, memory, allocation, stream)
    # Of copies so short that noise decides, no more than half is taken for what each costs by itself.
    more_s = max(best[large] - best[small], best[large] / 2, 1e-9)
    return (large - small) / more_s


def measured_costs(
    device: Device, stream: Stream, address: int, nbytes: int, *, floor_nbytes_per_s: float
) -> CostModel:
    """Return the cost model for this device: what a strided copy, a row and an entry of a batch take here.

    A cost is what one more of them takes until all are over, so of processor and device the slower one decides. It is
    rounded, towards the default, to a power of two of it: noise of less than a factor of two changes none of them.
    Takes a few milliseconds, blocks while ``stream`` does, and leaves the defaults where nothing can be told.

    Parameters
    ----------
    device, stream, address, nbytes
        As for :func:`contiguous_nbytes_per_s`.
    floor_nbytes_per_s : float
        What that has returned.
    """
    default = CostModel()
    transfer, memory = device.transfer, device.memory
    if transfer is None or memory is None or not floor_nbytes_per_s:
        return default
    default = replace(default, byte_s=1 / floor_nbytes_per_s)
    size = _ROWS * _PITCH
    if nbytes < size:
        return default
    try:
        allocation = memory.allocate(size)
    except DevIPCError as error:
        if what_is_left(error):
            raise
        _log.info("the cost of small copies was not measured: %s", error)
        return default
    try:
        tries = _tries(transfer, stream, allocation.ptr, address)
        for submit in (*tries.values(), *tries.values()):  # what is cold is slow, and would look dear beside the others
            submit()
            transfer.synchronize_stream(stream)
        took_s = {name: _best_s(transfer, stream, submit) for name, submit in tries.items()}
    except DevIPCError as error:
        _log.info("the cost of small copies was not measured: %s", error)
        return default
    finally:
        _give_back(transfer, memory, allocation, stream)
    byte_s, one = default.byte_s, took_s["one strided"]
    row_s = (took_s["rows"] - one) / (_ROWS - 2) - _WIDTH * byte_s
    call_s = (took_s["strided"] - one) / _CALLS - 2 * (_WIDTH * byte_s + max(row_s, 0.0))
    entry_s = (took_s["entries"] - took_s["one entry"]) / _ENTRIES - _WIDTH * byte_s
    found = replace(
        default,
        call_s=_rounded(call_s, default.call_s),
        row_s=_rounded(row_s, default.row_s),
        entry_s=_rounded(entry_s, default.entry_s),
    )
    _log.debug("measured: call %.3g s, row %.3g s, entry %.3g s; taken: %s", call_s, row_s, entry_s, found)
    return found


def _tries(transfer: DeviceTransfer, stream: Stream, dst: int, src: int) -> dict[str, Callable[[], None]]:
    def strided(count: int, rows: int) -> Callable[[], None]:
        at = np.arange(count, dtype=np.uint64) * np.uint64(rows * _PITCH)
        copies = np.empty((count, 6), np.uint64)
        copies[:] = (dst, src, _PITCH, _PITCH, _WIDTH, rows)
        copies[:, :2] += at[:, None]
        return lambda: transfer.copy_strided(stream, copies)

    return {
        "one strided": strided(1, 2),
        "strided": strided(1 + _CALLS, 2),
        "rows": strided(1, _ROWS),
        "one entry": _batch(transfer, stream, dst, src, 1),
        "entries": _batch(transfer, stream, dst, src, 1 + _ENTRIES),
    }


def _batch(transfer: DeviceTransfer, stream: Stream, dst: int, src: int, count: int) -> Callable[[], None]:
    at = np.arange(count, dtype=np.uint64) * np.uint64(_PITCH)
    lists = (at + np.uint64(dst), at + np.uint64(src), np.full(count, _WIDTH, np.uint64))
    return lambda: transfer.copy_batch(stream, *lists)


def _best_s(transfer: DeviceTransfer, stream: Stream, submit: Callable[[], None]) -> float:
    best = math.inf
    begun = time.perf_counter()
    for number in range(2 * _TIMES):
        start = time.perf_counter()
        submit()
        transfer.synchronize_stream(stream)
        end = time.perf_counter()
        if number:  # the first one warms up
            best = min(best, end - start)
            if end - begun > _LIMIT_S / 5:
                break
    return best


def _rounded(measured_s: float, default_s: float) -> float:
    """Return the default times a power of two between it and what was measured."""
    if measured_s <= 0:
        return math.ldexp(default_s, -_STEPS)  # less than what can be told
    steps = math.trunc(math.log2(measured_s / default_s))
    return math.ldexp(default_s, max(-_STEPS, min(_STEPS, steps)))


def settle(transfer: DeviceTransfer, streams: Sequence[Stream]) -> None:
    """Return when nothing is under way on ``streams``; on a lost device nothing is."""
    for stream in streams:
        with contextlib.suppress(DeviceLostError):
            transfer.synchronize_stream(stream)


def _give_back(transfer: DeviceTransfer, memory: DeviceMemoryIPC, allocation: Allocation, stream: Stream) -> None:
    """Free ``allocation`` when nothing on ``stream`` uses it any more.

    Where that cannot be known it stays, and the error is raised: an engine does not begin with that.
    """
    settle(transfer, [stream])
    memory.free(allocation)


def _copy_s(transfer: DeviceTransfer, stream: Stream, dst: int, src: int, nbytes: int) -> float:
    start = time.perf_counter()
    transfer.copy(stream, dst, src, nbytes)
    transfer.synchronize_stream(stream)
    return time.perf_counter() - start
