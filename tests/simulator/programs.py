"""Small pieces that the children of several tests are made of.

They import the bindings inside functions: the test run's own process loads no driver.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulator.trace_cases.world import World

MIB = 1 << 20


def world(device: int = 0) -> World:
    """The driver started, a context current, a stream made."""
    from tests.simulator.trace_cases.world import World

    return World(device)


def fetch(pointer: int, nbytes: int) -> bytes:
    """Bytes of device memory, copied in the default stream."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    out = bytearray(nbytes)
    need(cu.cuMemcpyDtoH(out, pointer, nbytes))
    return bytes(out)


def code(answer: tuple[Any, ...]) -> str:
    """The name of a driver's answer, without its common beginning."""
    return str(answer[0].name).removeprefix("CUDA_ERROR_").removeprefix("CUDA_")


def shared_words(fd: int, nbytes: int = 4096) -> tuple[mmap.mmap, int]:
    """A mapping of a shared file and its address."""
    area = mmap.mmap(fd, nbytes)
    return area, ctypes.addressof(ctypes.c_char.from_buffer(area))


class Background:
    """A call on a thread of its own, to see whether it blocks."""

    def __init__(self, w: World, call: Callable[[], Any]) -> None:
        self._answer: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(w, call), daemon=True)
        self._thread.start()

    def _run(self, w: World, call: Callable[[], Any]) -> None:
        from cuda.bindings import driver as cu

        cu.cuCtxSetCurrent(w.context)
        self._answer.append(call())

    def blocks(self, for_s: float = 0.15) -> bool:
        """Whether it is still running after ``for_s``."""
        self._thread.join(for_s)
        return self._thread.is_alive()

    def answer(self, timeout_s: float = 10.0) -> Any:
        """What the call gave."""
        self._thread.join(timeout_s)
        assert self._answer, "the call still blocks"
        return self._answer[0]
