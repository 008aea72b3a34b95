"""How fast this machine moves bytes at all: one contiguous copy, as the measure of everything else.

Owns one short measurement when an engine begins. It only reads host memory, which may hold pages already.
"""

from __future__ import annotations

import logging
import time

from devipc.errors import DevIPCError
from devipc.interfaces.backend import Device
from devipc.interfaces.transfer import DeviceTransfer, Stream

__all__ = ["FLOOR_NBYTES", "contiguous_nbytes_per_s"]

FLOOR_NBYTES = 32 * 2**20
"""Device memory that is taken meanwhile, at most."""

_TIMES = 4
_LIMIT_S = 20e-3
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
    """
    transfer, memory = device.transfer, device.memory
    large = min(nbytes, FLOOR_NBYTES)
    small = large // 4
    if transfer is None or memory is None or not small:
        return 0.0
    try:
        allocation = memory.allocate(large)
    except DevIPCError as error:
        _log.info("the speed of a contiguous copy was not measured: %s", error)
        return 0.0
    best = {small: float("inf"), large: float("inf")}
    begun = time.perf_counter()
    try:
        for number in range(_TIMES):  # the first one warms up
            for size in best:
                took_s = _copy_s(transfer, stream, allocation.ptr, address, size)
                best[size] = min(best[size], took_s) if number > 1 else took_s
            if time.perf_counter() - begun > _LIMIT_S:
                break
    except DevIPCError as error:
        _log.info("the speed of a contiguous copy was not measured: %s", error)
        return 0.0
    finally:
        memory.free(allocation)
    # Of copies so short that noise decides, no more than half is taken for what each costs by itself.
    more_s = max(best[large] - best[small], best[large] / 2, 1e-9)
    return (large - small) / more_s


def _copy_s(transfer: DeviceTransfer, stream: Stream, dst: int, src: int, nbytes: int) -> float:
    start = time.perf_counter()
    transfer.copy(stream, dst, src, nbytes)
    transfer.synchronize_stream(stream)
    return time.perf_counter() - start
