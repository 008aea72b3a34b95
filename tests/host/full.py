"""A process that has as many mappings as the kernel allows, and gives memory of the host backend back.

``python -m tests.host.full refusing``: no more than others, and no hole is made, as if it had. For kernels whose limit
takes too long to reach.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import sys
from pathlib import Path
from typing import Any

from devipc.host import maps
from devipc.host.backend import HostBackend
from devipc.host.transfer import HostStream
from devipc.spi import PAGE_NBYTES, DeviceLostError, DevIPCError, ResourceExhausted

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
FAILED = 2**64 - 1
UNUSED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000


class Full:
    """Mappings up to the limit, in one range."""

    def __init__(self) -> None:
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        self.nbytes = (2 * limit + 2) * PAGE_NBYTES
        self.base = LIBC.mmap(None, self.nbytes, 0, UNUSED, -1, 0)
        at = self.base + PAGE_NBYTES
        while LIBC.mmap(at, PAGE_NBYTES, mmap.PROT_READ, UNUSED | 0x10, -1, 0) != FAILED:
            at += 2 * PAGE_NBYTES
        self.more: list[int] = []  # one goes in where a range would have to be split for it
        for number in range(8):
            protection = (mmap.PROT_READ, mmap.PROT_WRITE)[number % 2]
            self.more.append(LIBC.mmap(None, PAGE_NBYTES, protection, UNUSED, -1, 0))

    def end(self) -> None:
        for each in self.more:
            assert each == FAILED or LIBC.munmap(ctypes.c_void_p(each), PAGE_NBYTES) == 0
        assert LIBC.munmap(ctypes.c_void_p(self.base), self.nbytes) == 0


class Refusing:
    """The answer of a kernel to whoever makes a hole then."""

    def __init__(self) -> None:
        self._mmap = maps._mmap
        self._put(self._refuse)

    def _put(self, mmap: Any) -> None:
        maps._mmap = mmap

    def _refuse(self, at: int | None, nbytes: int, protection: int, flags: int, fd: int, offset: int) -> Any:
        if at is not None and protection == 0:
            ctypes.set_errno(errno.ENOMEM)
            return FAILED
        return self._mmap(at, nbytes, protection, flags, fd, offset)

    def end(self) -> None:
        self._put(self._mmap)


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("devipc-host")


def main(kernel: type[Full] | type[Refusing]) -> None:
    device = HostBackend().open_device()
    memory = device.memory
    blocks = [memory.allocate(4 * PAGE_NBYTES) for _ in range(2)]
    extents = [memory.export(block.ptr, block.nbytes) for block in blocks]
    opened = memory.open_side_by_side(extents)
    stream = device.transfer.create_stream()
    assert isinstance(stream, HostStream)
    before = mapped()
    refused: DevIPCError | None = None
    full = kernel()
    try:
        memory.close(opened[0])
    except DevIPCError as error:
        refused = error
    full.end()
    assert refused is not None
    print(type(refused) is ResourceExhausted, refused.retryable, mapped() == before)
    memory.close(opened[1])
    print(mapped() == before - 2)

    opened = memory.open_side_by_side(extents)
    stream.stall()
    device.transfer.copy(stream, opened[0].ptr, blocks[0].ptr, 64)
    memory.close(opened[0])  # when the copy is done
    lost: DevIPCError | None = None
    full = kernel()
    stream.resume()
    try:
        device.transfer.synchronize_stream(stream)
        device.transfer.copy(stream, blocks[1].ptr, blocks[0].ptr, 64)
    except DeviceLostError as error:
        lost = error
    full.end()
    print(lost is not None)
    for extent in extents:
        memory.release(extent)
    device.close()
    print(mapped())


if __name__ == "__main__":
    main(Refusing if "refusing" in sys.argv else Full)
