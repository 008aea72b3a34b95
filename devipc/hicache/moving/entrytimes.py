"""How long small copies take the processor until they are submitted in batches, by one thread and by several.

Owns one short measurement when an engine begins. It only reads host memory of others, which may hold pages already.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from devipc.errors import DevIPCError
from devipc.hicache.moving.floor import settle
from devipc.hicache.moving.submitters import Submitters
from devipc.hicache.planning.forms import LONG_PIECE, Entries, Submitting
from devipc.interfaces.backend import Device
from devipc.interfaces.transfer import DeviceTransfer, Stream
from devipc.memfd import SharedMap, create_memfd
from devipc.undoing import what_is_left

__all__ = ["submitting"]

_ENTRIES = 1024
"""Of all threads together."""
_SCRATCH_NBYTES = 2 * 2**20
_LEAST_PIECE, _SHORT_PIECE = 512, 8 * 1024
_SOONER = 0.85
"""Share of one thread's time below which several are worth it: loops that keep the interpreter are about one."""
_NO_LOOP_S = 1.5e-6
"""What an entry takes at least where a batch is a loop of driver calls in Python."""
_TIMES, _WARM_UP, _LIMIT_S = 16, 2, 50e-3
"""How often it is tried: what else the processors do makes one of several threads late."""
_COLD_LIMIT_S = 0.5
"""From when on the first tries count, too: a driver so slow is no slower when it is cold."""
_MEET_S = 5e-3
"""How long a thread waits for the others at most: it may be that there are fewer."""
_log = logging.getLogger("devipc.hicache")


def submitting(device: Device, streams: Sequence[Stream], address: int, nbytes: int, *, most: int) -> Submitting:
    """Return whether ``most`` threads are to submit long batches, or one, and what an entry then takes.

    Several are where they submit sooner than one does, or an entry takes less than any loop would. A batch that is one
    call of the driver lets go of the interpreter, which is worth it even where the driver keeps one thread waiting for
    the other; where it is a loop, threads wait for each other as well. Each of five measurements ends after about 50
    ms, but not before three tries or half a second: all take up to three tenths of a second, longer where a driver
    takes ten microseconds or more for an entry. Blocks while the streams do. On an H200 entries to the device take as
    long to submit as those to the host or longer, and short ones 1.1 to 4 times as long as long ones, on one host more
    than on another (2026-11-30); so each is measured by itself.

    Parameters
    ----------
    device, address, nbytes
        As for :func:`contiguous_nbytes_per_s`.
    streams : sequence of Stream
        At most ``most``, where nothing else runs; others are made for the time of the call.
    most : int
        How many threads there may be.
    """
    transfer, memory = device.transfer, device.memory
    long = min(LONG_PIECE, nbytes // _ENTRIES)
    short = min(long, _SHORT_PIECE)
    if most < 2 or transfer is None or memory is None or long < _LEAST_PIECE:
        return Submitting()
    submitters, streams, owned = Submitters(), list(streams), contextlib.ExitStack()
    try:
        allocation = memory.allocate(_ENTRIES * long)
        owned.callback(memory.free, allocation)
        while len(streams) < most:
            streams.append(transfer.create_stream())
            owned.callback(transfer.destroy_stream, streams[-1])
        rig = _Rig(transfer, streams, submitters)
        to_device = partial(rig.entry_s, allocation.ptr, address, of=nbytes)
        one_s, several_s = to_device(long, together=False), to_device(long)
        _log.debug("an entry of %d bytes takes one thread %.3g s, %d threads %.3g s", long, one_s, most, several_s)
        if several_s > _SOONER * one_s and several_s > _NO_LOOP_S:
            return Submitting()
        to_host = partial(rig.entry_s, _scratch(transfer, owned), allocation.ptr, within=_SCRATCH_NBYTES)
        return Submitting(most, Entries(several_s, to_device(short)), Entries(to_host(long), to_host(short)))
    except DevIPCError as error:
        if what_is_left(error):
            raise
        _log.info("whether several threads submit sooner was not measured: %s", error)
        return Submitting()
    finally:
        submitters.close()
        settle(transfer, streams)  # where that fails all of it stays, and an engine does not begin
        owned.close()


def _scratch(transfer: DeviceTransfer, owned: contextlib.ExitStack) -> int:
    """Return the address of :data:`_SCRATCH_NBYTES` of registered host memory that nobody else has."""
    fd = create_memfd("devipc-scratch", _SCRATCH_NBYTES)
    try:
        memory = SharedMap(fd, _SCRATCH_NBYTES)
    finally:
        os.close(fd)
    try:
        registration = transfer.register_host(memory.address, _SCRATCH_NBYTES)
    except BaseException:
        memory.close()
        raise

    def give_back() -> None:
        transfer.unregister_host(registration)  # where that fails it stays mapped: a driver still has its pages
        memory.close()

    owned.callback(give_back)
    return memory.address


class _Rig:
    """Threads, a stream for each, and what they are timed with."""

    def __init__(self, transfer: DeviceTransfer, streams: Sequence[Stream], submitters: Submitters) -> None:
        self._transfer = transfer
        self._streams = streams
        self._submitters = submitters

    def entry_s(self, dst: int, src: int, nbytes: int, *, together: bool = True, within: int = 0, of: int = 0) -> float:
        """Return what an entry of ``nbytes`` takes at best until it is submitted, all threads at once or one alone.

        Entries lie one behind the other, at ``dst`` in so many bytes again and again where ``within`` is not 0. Each
        time they are read from others of the ``of`` bytes at ``src``, as far as these go: a driver may take short ones
        by the processor, and pages are in no cache.
        """
        whole = _ENTRIES * nbytes
        places = range(src, src + max(of - whole, 0) + 1, whole)
        number = np.arange(_ENTRIES, dtype=np.uint64)
        place = number % np.uint64(within // nbytes) if within else number
        dsts = np.uint64(dst) + place * np.uint64(nbytes)
        sizes = np.full(_ENTRIES, nbytes, np.uint64)
        each = -(-_ENTRIES // len(self._streams))
        parts = [slice(begin, begin + each) for begin in range(0, _ENTRIES, each)]
        best, since = math.inf, time.perf_counter()
        for attempt in range(_WARM_UP + _TIMES):
            srcs = number * np.uint64(nbytes) + np.uint64(places[attempt % len(places)])
            works: list[Callable[[], None]] = [
                partial(self._transfer.copy_batch, stream, dsts[part], srcs[part], sizes[part])
                for stream, part in zip(self._streams, parts, strict=False)
            ]
            took_s = self._together_s(works) if together else self._one_by_one_s(works)
            for stream in self._streams:
                self._transfer.synchronize_stream(stream)
            spent_s = time.perf_counter() - since
            if attempt >= _WARM_UP or spent_s > _COLD_LIMIT_S:
                best = min(best, took_s)
                if spent_s > _LIMIT_S:
                    break
        return best / _ENTRIES

    def _one_by_one_s(self, works: Sequence[Callable[[], None]]) -> float:
        begun = time.perf_counter()
        for work in works:
            work()
        return time.perf_counter() - begun

    def _together_s(self, works: Sequence[Callable[[], None]]) -> float:
        """Return how long all take, from when all have a thread."""
        arrived, begun, ended = list[None](), list[float](), list[float]()

        def timed(work: Callable[[], None]) -> None:
            met = time.perf_counter() + _MEET_S
            arrived.append(None)
            while len(arrived) < len(works) and time.perf_counter() < met:
                time.sleep(0)
            begun.append(time.perf_counter())
            work()
            ended.append(time.perf_counter())

        self._submitters.run([partial(timed, work) for work in works])
        return max(ended) - min(begun)
