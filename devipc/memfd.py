"""Sealed anonymous shared memory: made here, checked here, mapped here.

Owns the rule that no shared memory is mapped before it is known that nobody can shrink it: a peer's ``ftruncate`` on
an unsealed file would be our SIGBUS. Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat

from devipc.errors import CapabilityError, ClosedError, HandleError, ResourceExhausted, UsageError

__all__ = ["PAGE_NBYTES", "SharedMap", "create_memfd", "create_published_memfd", "round_up", "validate_memfd"]

PAGE_NBYTES = mmap.PAGESIZE
"""Size of a page of this machine in bytes."""

REQUIRED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
F_SEAL_FUTURE_WRITE = 0x0010  # linux/fcntl.h since 5.1; the fcntl module has no name for it
_MAX_NAME_NBYTES = 249

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = 2 ** (8 * ctypes.sizeof(ctypes.c_void_p)) - 1


def round_up(nbytes: int, multiple: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of ``multiple``."""
    return -(-nbytes // multiple) * multiple


def create_memfd(name: str, nbytes: int) -> int:
    """Make a sealed memfd whose pages are all reserved, and return its descriptor (close-on-exec, owned by the caller).

    Parameters
    ----------
    name : str
        Shown in ``/proc/PID/maps``; need not be unique.
    nbytes : int
        Size, at least 1; the file gets exactly this size, zero-filled.

    Raises
    ------
    UsageError
        For a size below 1 or a name that the kernel does not take (over 249 bytes, or with a zero byte in it).
    ResourceExhausted
        When descriptors or memory ran out. Space is reserved here, so that a later store cannot end in SIGBUS.
    """
    fd = _reserve(name, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, REQUIRED_SEALS)
    return fd


def create_published_memfd(name: str, nbytes: int) -> tuple[int, SharedMap]:
    """Make a memory file that nobody but the returned mapping can write to: one writer, any number of readers.

    Descriptor and mapping are the caller's. Whoever receives the descriptor can map it for reading only, and so can
    the caller. Parameters and further errors as :func:`create_memfd`.

    Raises
    ------
    CapabilityError
        When the kernel has no F_SEAL_FUTURE_WRITE (Linux before 5.1).
    """
    fd = _reserve(name, nbytes)
    mapping: SharedMap | None = None
    try:
        mapping = SharedMap(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, REQUIRED_SEALS | F_SEAL_FUTURE_WRITE)
    except BaseException as error:
        if mapping is not None:
            mapping.close()
        os.close(fd)
        if not isinstance(error, OSError):
            raise
        raise CapabilityError(
            f"shared memory cannot be sealed against later writers here ({error.strerror})",
            code="future_write",
            remedy="use Linux 5.1 or newer",
        ) from error
    return fd, mapping


def _reserve(name: str, nbytes: int) -> int:
    """Make a memory file of a fixed size with all of its pages, not sealed yet."""
    if nbytes <= 0:
        raise UsageError(f"shared memory of {nbytes} bytes", remedy="ask for at least one byte")
    if len(os.fsencode(name)) > _MAX_NAME_NBYTES or "\0" in name:
        raise UsageError(f"{name[:40]!r}... is no name for shared memory", remedy="use a short name")
    if nbytes > os.sysconf("SC_PHYS_PAGES") * PAGE_NBYTES:
        # The kernel would not refuse: it would fill all memory with pages and then kill a process, perhaps not ours.
        raise _exhausted("memfd_create", nbytes, OSError(errno.ENOMEM, "more than this machine has"))
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise _exhausted("memfd_create", nbytes, error) from error
    try:
        os.ftruncate(fd, nbytes)
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        os.close(fd)
        raise _exhausted("posix_fallocate", nbytes, error) from error
    return fd


def _exhausted(call: str, nbytes: int, error: OSError) -> ResourceExhausted:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ResourceExhausted(
            f"{call}: no file descriptor left ({error.strerror})",
            code="fds",
            remedy="raise `ulimit -n` or close mappings that are no longer used",
        )
    return ResourceExhausted(
        f"{call}: cannot reserve {nbytes} bytes of shared host memory ({error.strerror})",
        code="host_memory",
        remedy="free host memory, raise the container's memory limit, or ask for less",
    )


def validate_memfd(fd: int, *, min_nbytes: int) -> int:
    """Check a received descriptor before it is mapped, and return the file's size in bytes.

    Raises
    ------
    HandleError
        When it is no memfd, has huge pages, lacks one of the seals SHRINK, GROW and SEAL, or is smaller than
        ``min_nbytes``. A huge page that its peer takes back (no seal forbids that) has no other to come when the pool
        is empty, which ends who touches it; and less than a whole one is never unmapped.
    """
    try:
        info, page_nbytes = os.fstat(fd), os.fstatvfs(fd).f_bsize
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise HandleError(
            f"received descriptor is not a sealable memory file ({error.strerror})",
            code="not_a_memfd",
            remedy="the exporter must pass a memfd; check that both sides run the same devipc version",
        ) from error
    if not stat.S_ISREG(info.st_mode) or seals & REQUIRED_SEALS != REQUIRED_SEALS:
        raise HandleError(
            "received memory file is not sealed against a change of size",
            code="unsealed",
            remedy="seal it with F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_SEAL before sending it",
        )
    if page_nbytes != PAGE_NBYTES:
        raise HandleError(
            f"received memory file has pages of {page_nbytes} bytes",
            code="huge_pages",
            remedy=f"the exporter must make it with ordinary pages of {PAGE_NBYTES} bytes",
        )
    if info.st_size < min_nbytes:
        raise HandleError(
            f"received memory file has {info.st_size} bytes, at least {min_nbytes} were announced",
            code="too_small",
            remedy="the exporter announced more than it shares; its handle is not to be trusted",
        )
    return info.st_size


def _size(fd: int) -> int:
    try:
        return os.fstat(fd).st_size
    except OSError as error:
        raise HandleError(f"descriptor {fd} cannot be mapped ({error.strerror})", code="not_a_memfd") from error


class SharedMap:
    """A shared mapping of one descriptor, at a plain address.

    The descriptor is not kept: the mapping lives on when it is closed. Views taken from :attr:`view` must not be used
    after :meth:`close`; whoever hands them out keeps the map open. Not thread-safe against its own ``close``.

    Parameters
    ----------
    fd : int
        A descriptor that :func:`create_memfd` made or :func:`validate_memfd` accepted.
    nbytes : int
        Length to map, from offset ``offset``.
    offset : int
        Multiple of the page size.
    writable : bool
        False maps read-only: a store through it ends the process, so only readers ask for it.

    Raises
    ------
    UsageError
        For a length below 1 or an offset that is no multiple of the page size.
    HandleError
        When the file is shorter than what is to be mapped, or does not allow to be mapped like this (a seal against
        writing): touching such a mapping would end the process.
    ResourceExhausted
        When the system has no room for another mapping.
    """

    __slots__ = ("_view", "address", "nbytes")

    def __init__(self, fd: int, nbytes: int, *, offset: int = 0, writable: bool = True) -> None:
        if nbytes <= 0 or offset < 0 or offset % PAGE_NBYTES:
            raise UsageError(
                f"mapping of {nbytes} bytes at offset {offset}",
                remedy=f"map at least one byte, at a multiple of {PAGE_NBYTES}",
            )
        if offset + nbytes > _size(fd):
            raise HandleError(
                f"memory file ends before byte {offset + nbytes}",
                code="too_small",
                remedy="map no more than validate_memfd() reported",
            )
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _libc.mmap(None, nbytes, protection, mmap.MAP_SHARED, fd, offset)
        if address is None or address == _MAP_FAILED:
            code = ctypes.get_errno()
            if code in (errno.EPERM, errno.EACCES, errno.ENODEV):
                raise HandleError(
                    f"memory file does not allow to be mapped {'for writing' if writable else 'for reading'}"
                    f" ({os.strerror(code)})",
                    code="mmap",
                    remedy="the exporter must neither seal it against writing nor open it for reading only",
                )
            raise ResourceExhausted(
                f"mmap of {nbytes} bytes failed ({os.strerror(code)})",
                code="mmap",
                remedy="check `ulimit -v`, vm.max_map_count and the container's memory limit",
            )
        self.address: int = address
        self.nbytes = nbytes
        raw = (ctypes.c_char * nbytes).from_address(address)
        view = memoryview(raw).cast("B")
        self._view: memoryview | None = view if writable else view.toreadonly()

    @property
    def view(self) -> memoryview:
        """The mapped bytes (format ``B``); valid until :meth:`close`."""
        if self._view is None:
            raise ClosedError("the mapping is closed", remedy="keep it open while it is used")
        return self._view

    @property
    def closed(self) -> bool:
        """True once the address range was given back."""
        return self._view is None

    def close(self) -> None:
        """Unmap. Calling it again does nothing."""
        if self._view is None:
            return
        self._view = None
        _libc.munmap(self.address, self.nbytes)
