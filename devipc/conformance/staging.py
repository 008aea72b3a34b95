"""Staging: host memory that the device reaches, content to fill it with, and ways to wait and to give up.

Owns what does not need to know a device's state; :mod:`devipc.conformance.rig` builds on it.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from devipc.interfaces.transfer import DeviceTransfer
from devipc.memfd import SharedMap, create_memfd
from devipc.spi import close_fds

__all__ = [
    "PAGE",
    "STAGING_NBYTES",
    "Staging",
    "Unavailable",
    "attempt",
    "compare",
    "content",
    "given_back",
    "until",
]

STAGING_NBYTES = 4 << 20
"""Size of the staging memory of a rig; more is moved in pieces."""
PAGE = 4096
"""A small piece of memory, in bytes."""


class Unavailable(Exception):
    """The device lacks what a case needs: the case is skipped, with this as the reason."""


def content(seed: int, nbytes: int) -> bytes:
    """Return the first ``nbytes`` bytes that ``seed`` stands for; no two seeds and no shifted copy look alike."""
    return random.Random(seed).randbytes(-(-nbytes // 4) * 4)[:nbytes]


def until(condition: Callable[[], bool], timeout_s: float, *, pause_s: float = 0.0005) -> bool:
    """Ask until ``condition()`` is true or the time is over; return whether it became true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
    return True


@contextmanager
def given_back(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` at the end of the block; after a failure without waiting for it, since a driver may be stuck."""
    try:
        yield
    except BaseException:
        attempt(undo, 1.0)
        raise
    undo()


def attempt(call: Callable[[], object], timeout_s: float) -> bool:
    """Run a call that may never return, on a thread that is left behind then; return whether it did."""

    def run() -> None:
        with contextlib.suppress(Exception):
            call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


class Staging:
    """Host memory that the device reaches; the host reads and writes it through :attr:`view`."""

    def __init__(self, transfer: DeviceTransfer, nbytes: int) -> None:
        fd = create_memfd("devipc-staging", nbytes)
        try:
            self._map = SharedMap(fd, nbytes)
        finally:
            close_fds([fd])
        self._transfer = transfer
        self.nbytes = nbytes
        self.address = self._map.address
        try:
            self._registration = transfer.register_host(self._map.address, nbytes)
        except BaseException:
            self._map.close()
            raise
        self.ptr = self._registration.device_ptr

    @property
    def view(self) -> memoryview:
        """The bytes."""
        return self._map.view

    def word(self, index: int) -> int:
        """Load one 64-bit word."""
        words = self._map.view.cast("Q")
        try:
            return words[index]
        finally:
            words.release()

    def set_word(self, index: int, value: int) -> None:
        """Store one 64-bit word in one store."""
        words = self._map.view.cast("Q")
        words[index] = value
        words.release()

    def close(self) -> None:
        """Unregister and unmap."""
        self._transfer.unregister_host(self._registration)
        self._map.close()


def compare(found: bytes, expected: bytes, what: str) -> None:
    """Raise AssertionError that says where and how ``found`` differs."""
    if found == expected:
        return
    wrong = [index for index in range(len(expected)) if found[index] != expected[index]]
    shape = "all zeros" if not any(found) else "other content"
    raise AssertionError(
        f"{what}: {len(wrong)} of {len(expected)} bytes are wrong, the first at {wrong[0]}; it reads {shape}"
    )
