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
from functools import partial

import numpy as np

from devipc.errors import DeviceLostError, DevIPCError
from devipc.hicache.moving.submitters import Submitters
from devipc.hicache.planning.forms import LONG_PIECE, Submitting
from devipc.hicache.planning.strips import CostModel
from devipc.interfaces.backend import Device
from devipc.interfaces.memory import Allocation, DeviceMemoryIPC
from devipc.interfaces.transfer import DeviceTransfer, Stream
from devipc.undoing import what_is_left

__all__ = ["FLOOR_NBYTES", "contiguous_nbytes_per_s", "measured_costs", "submitting"]

FLOOR_NBYTES = 32 * 2**20
"""Device memory that is taken meanwhile, at most."""

_TIMES = 4
_LIMIT_S = 20e-3
_WIDTH, _PITCH = 512, 1024
_ROWS, _CALLS, _ENTRIES = 1024, 32, 256
_BATCH, _SHORT_PIECE = 512, 8 * 1024
_SOONER = 0.85
"""Share of one thread's time below which two are worth it: loops that keep the interpreter are about one."""
_PAIRS = 16
"""How often it is tried: what else the processors do makes one of two threads late."""
_SUBMIT_LIMIT_S = 50e-3
_MEET_S = 5e-3
"""How long a thread waits for the other at most: it may be that there is none."""
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
        _give_back(transfer, memory, allocation, (stream,))
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
        _give_back(transfer, memory, allocation, (stream,))
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


def submitting(device: Device, streams: Sequence[Stream], address: int, nbytes: int, *, most: int) -> Submitting:
    """Return whether ``most`` threads are to submit long batches, or one, and what an entry takes.

    Several are where two threads submit two batches sooner than one does. A batch that is one call of the driver lets
    go of the interpreter; where it is a loop, threads wait for each other. Takes some ten milliseconds, where copies
    are slow up to about a tenth of a second, and blocks while the streams do. Copies to the device stand for both
    directions: on an H200 those take as long to submit as the others or longer, and short ones 1.1 to 4 times as long
    as long ones, on one host more than on another (2026-11-30).

    Parameters
    ----------
    device, address, nbytes
        As for :func:`contiguous_nbytes_per_s`.
    streams : sequence of Stream
        Two, where nothing else runs.
    most : int
        How many threads there may be.
    """
    transfer, memory = device.transfer, device.memory
    long, short = (min(piece, nbytes // (2 * _BATCH)) for piece in (LONG_PIECE, _SHORT_PIECE))
    if most < 2 or transfer is None or memory is None or short < _WIDTH:
        return Submitting()
    submitters = Submitters()
    try:
        allocation = memory.allocate(2 * _BATCH * long)
    except DevIPCError as error:
        if what_is_left(error):
            raise
        _log.info("whether several threads submit sooner was not measured: %s", error)
        return Submitting()

    def measured(piece: int) -> tuple[float, float]:
        works = [
            _batch(transfer, stream, allocation.ptr + at, address + at, _BATCH, width=piece, pitch=piece)
            for stream, at in zip(streams, (0, _BATCH * piece), strict=True)
        ]
        one_s, two_s = _submitted_s(transfer, streams, works, submitters)
        _log.debug("two batches of %d bytes by one thread took %.3g s, by two %.3g s", piece, one_s, two_s)
        return two_s / one_s, two_s / (2 * _BATCH)

    try:
        share, entry_s = measured(long)
        return Submitting(most, entry_s, measured(short)[1]) if share < _SOONER else Submitting()
    except DevIPCError as error:
        _log.info("whether several threads submit sooner was not measured: %s", error)
        return Submitting()
    finally:
        submitters.close()
        _give_back(transfer, memory, allocation, streams)


def _submitted_s(
    transfer: DeviceTransfer, streams: Sequence[Stream], works: Sequence[Callable[[], None]], submitters: Submitters
) -> tuple[float, float]:
    """Return how long all ``works`` take at best, one after the other and at once, from when all have a thread."""
    begun, ended = list[float](), list[float]()

    def timed(work: Callable[[], None]) -> None:
        met = time.perf_counter() + _MEET_S
        arrived.append(None)
        while len(arrived) < len(works) and time.perf_counter() < met:
            time.sleep(0)
        begun.append(time.perf_counter())
        work()
        ended.append(time.perf_counter())

    def one_by_one() -> None:
        for work in works:
            work()

    best, since = [math.inf, math.inf], time.perf_counter()
    for number in range(2 * _PAIRS):
        arrived = list[None]()
        begun.clear()
        ended.clear()
        if number % 2:
            submitters.run([partial(timed, work) for work in works])
        else:
            arrived += [None] * len(works)
            timed(one_by_one)
        for stream in streams:
            transfer.synchronize_stream(stream)
        if number > 3:  # the first ones warm up
            best[number % 2] = min(best[number % 2], max(ended) - min(begun))
        if number > 2 * _TIMES and time.perf_counter() - since > _SUBMIT_LIMIT_S:
            break
    return best[0], best[1]


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


def _batch(
    transfer: DeviceTransfer,
    stream: Stream,
    dst: int,
    src: int,
    count: int,
    *,
    width: int = _WIDTH,
    pitch: int = _PITCH,
) -> Callable[[], None]:
    at = np.arange(count, dtype=np.uint64) * np.uint64(pitch)
    lists = (at + np.uint64(dst), at + np.uint64(src), np.full(count, width, np.uint64))
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


def _give_back(
    transfer: DeviceTransfer, memory: DeviceMemoryIPC, allocation: Allocation, streams: Sequence[Stream]
) -> None:
    """Free ``allocation`` when nothing on ``streams`` uses it any more; on a lost device nothing does.

    Where that cannot be known it stays, and the error is raised: an engine does not begin with that.
    """
    for stream in streams:
        with contextlib.suppress(DeviceLostError):
            transfer.synchronize_stream(stream)
    memory.free(allocation)


def _copy_s(transfer: DeviceTransfer, stream: Stream, dst: int, src: int, nbytes: int) -> float:
    start = time.perf_counter()
    transfer.copy(stream, dst, src, nbytes)
    transfer.synchronize_stream(stream)
    return time.perf_counter() - start
