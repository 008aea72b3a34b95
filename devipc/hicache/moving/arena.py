"""The host tier's memory: one sealed memory file at one address, and its registration with a device.

Owns how much host memory may be taken, that every page of it exists before it is used, and that it is registered in
chunks, all or none. It knows nothing of what lies in it. The memory and its registration are two objects because they
may belong to two processes: who owns the memory need not load a driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import threading
from collections.abc import Callable

from devipc.errors import CapabilityError, DevIPCError, HandleError, ResourceExhausted, UsageError
from devipc.host.meminfo import memory_info
from devipc.interfaces.transfer import DeviceTransfer, HostRegistration
from devipc.memfd import PAGE_NBYTES, REQUIRED_SEALS, SharedMap, create_memfd, round_up, validate_memfd
from devipc.types import MemoryInfo

__all__ = ["CHUNK_NBYTES", "HEADROOM", "HostArena", "Pinned", "budget_nbytes"]

CHUNK_NBYTES = 2**30
"""Host memory that one registration covers: drivers limit one call, and hold locks of the whole machine meanwhile."""
HEADROOM = 0.1
"""Share of the free memory that the host tier leaves alone."""

_MADV_POPULATE_WRITE = 23  # linux/mman.h since 5.14
_STEP_NBYTES = 64 * 2**20
_log = logging.getLogger("devipc.hicache")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.restype = ctypes.c_int
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def budget_nbytes(*, info: Callable[[], MemoryInfo] = memory_info) -> int:
    """Return how many bytes of host memory a tier may take now.

    What the machine, and every control group around this process, has free, less :data:`HEADROOM`.
    """
    return int(info().free_nbytes * (1 - HEADROOM)) // PAGE_NBYTES * PAGE_NBYTES


class HostArena:
    """Host memory of a fixed size, all of whose pages exist. Owns the memory and its descriptor.

    Making it blocks for as long as the kernel needs to fill the pages with zeros, on several threads.

    Parameters
    ----------
    nbytes : int
        Rounded up to whole pages.
    threads : int
        Threads for the first touch; one for each processor when 0.
    info : callable
        What is free; for tests.

    Raises
    ------
    ResourceExhausted
        When the budget does not allow it, or the kernel refuses. Nothing is kept then.
    """

    def __init__(self, nbytes: int, *, threads: int = 0, info: Callable[[], MemoryInfo] = memory_info) -> None:
        if nbytes <= 0:
            raise UsageError(f"a host tier of {nbytes} bytes", remedy="ask for at least one page")
        budget = budget_nbytes(info=info)
        if nbytes > budget:
            raise ResourceExhausted(
                f"a host tier of {nbytes} bytes asked; {budget} may be taken here (machine and control groups, less"
                f" {HEADROOM:.0%} of what is free)",
                code="host_budget",
                remedy="ask for less, free host memory, or raise the container's memory limit",
            )
        self.nbytes = round_up(nbytes, PAGE_NBYTES)
        self._fd = os.memfd_create("devipc-hicache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, self.nbytes)
            self._map = SharedMap(self._fd, self.nbytes)
        except BaseException:
            os.close(self._fd)
            raise
        try:
            _touch(self._fd, self._map.address, self.nbytes, threads or os.cpu_count() or 1)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, REQUIRED_SEALS)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, fd: int, nbytes: int) -> HostArena:
        """Map an arena that another process made. The descriptor is owned, also when this raises.

        Raises
        ------
        HandleError
            When it is not sealed against a change of size, or has another one.
        """
        arena = cls.__new__(cls)
        try:
            if validate_memfd(fd, min_nbytes=nbytes) != nbytes:
                raise HandleError(f"an arena of another size than {nbytes}", code="arena")
            arena.nbytes, arena._fd = nbytes, fd
            arena._map = SharedMap(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        return arena

    @property
    def address(self) -> int:
        """Where it is mapped in this process."""
        return self._map.address

    @property
    def view(self) -> memoryview:
        """All bytes; valid until :meth:`close`."""
        return self._map.view

    def fileno(self) -> int:
        """Return the descriptor, which stays the arena's."""
        return self._fd

    def chunks(self, chunk_nbytes: int = CHUNK_NBYTES) -> list[tuple[int, int]]:
        """Return offset and length of the parts that are registered one by one."""
        step = round_up(chunk_nbytes, PAGE_NBYTES)
        return [(start, min(step, self.nbytes - start)) for start in range(0, self.nbytes, step)]

    def close(self) -> None:
        """Unmap. Only once no device can reach it any more. Calling it again does nothing."""
        if not self._map.closed:
            self._map.close()
            os.close(self._fd)


def _touch(fd: int, address: int, nbytes: int, threads: int) -> None:
    """Make all pages exist, in parallel: an error here instead of a SIGBUS at the first store."""
    steps = iter(range(0, nbytes, _STEP_NBYTES))
    lock = threading.Lock()
    failures: list[int] = []

    def work() -> None:
        while not failures:
            with lock:
                start = next(steps, None)
            if start is None:
                return
            length = min(_STEP_NBYTES, nbytes - start)
            if _libc.madvise(address + start, length, _MADV_POPULATE_WRITE):
                failures.append(ctypes.get_errno())

    workers: list[threading.Thread] = []
    try:
        for _ in range(min(threads, nbytes // _STEP_NBYTES)):
            worker = threading.Thread(target=work, name="devipc-touch")
            with contextlib.suppress(RuntimeError):  # no thread to be had: fewer do it, or this one alone
                worker.start()
                workers.append(worker)
        work()
    except BaseException:
        failures.append(errno.EINTR)  # the others stop, and are waited for: the memory is about to be unmapped
        raise
    finally:
        for worker in workers:
            worker.join()
    try:
        if failures and failures[0] == errno.EINVAL:  # Linux before 5.14
            failures.clear()
            os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        failures.append(error.errno or errno.ENOMEM)
    if failures:
        raise ResourceExhausted(
            f"the kernel does not give {nbytes} bytes of host memory ({os.strerror(failures[0])})",
            code="host_memory",
            remedy="ask for less, free host memory, or raise the container's memory limit",
        )


class Pinned:
    """Host memory that a device reaches: the whole arena where that is allowed, else a small buffer beside it.

    Parameters
    ----------
    arena : HostArena
        Must outlive this object.
    transfer : DeviceTransfer
        The device's.
    chunk_nbytes : int
        Bytes of one registration.
    required : bool
        Raise instead of falling back.
    bounce_nbytes : int
        Size of the buffer through which an unpinned arena is reached; halved while it cannot be registered.
    least_nbytes : int
        Smallest buffer that makes sense.

    Attributes
    ----------
    reason : str
        Empty when the arena is pinned; else why not, with the remedy.
    bounce : SharedMap or None
        The registered buffer, when the arena is not pinned.
    """

    def __init__(
        self,
        arena: HostArena,
        transfer: DeviceTransfer,
        *,
        chunk_nbytes: int = CHUNK_NBYTES,
        required: bool = False,
        bounce_nbytes: int = 32 * 2**20,
        least_nbytes: int = PAGE_NBYTES,
    ) -> None:
        self._transfer = transfer
        self._registrations: list[HostRegistration] = []
        self.reason = ""
        self.bounce: SharedMap | None = None
        try:
            for offset, nbytes in arena.chunks(chunk_nbytes):
                self._registrations.append(transfer.register_host(arena.address + offset, nbytes))
        except (ResourceExhausted, CapabilityError) as error:
            self.close()
            if required:
                raise
            self._fall_back(error, bounce_nbytes, least_nbytes)
        except BaseException:
            self.close()
            raise

    @property
    def pinned(self) -> bool:
        """True when the device reaches the arena itself."""
        return self.bounce is None

    def _fall_back(self, cause: DevIPCError, nbytes: int, least_nbytes: int) -> None:
        size = round_up(max(nbytes, least_nbytes), PAGE_NBYTES)
        while True:
            bounce = _anonymous(size)
            try:
                self._registrations.append(self._transfer.register_host(bounce.address, size))
                break
            except DevIPCError:
                bounce.close()
                if size == round_up(least_nbytes, PAGE_NBYTES):
                    raise
            size = round_up(max(size // 2, least_nbytes), PAGE_NBYTES)
        self.bounce = bounce
        self.reason = f"{cause.message}; remedy: {cause.remedy}"
        _log.warning("host tier is not pinned, copies go through %d bytes and are slow: %s", size, self.reason)

    def close(self) -> None:
        """Unregister everything, in reverse; each step is tried. Blocks while device work uses it."""
        while self._registrations:
            try:
                self._transfer.unregister_host(self._registrations.pop())
            except DevIPCError as error:
                _log.warning("host memory was not unregistered: %s", error)
        if self.bounce is not None:
            self.bounce.close()
            self.bounce = None


def _anonymous(nbytes: int) -> SharedMap:
    fd = create_memfd("devipc-bounce", nbytes)
    try:
        return SharedMap(fd, nbytes)
    finally:
        os.close(fd)
