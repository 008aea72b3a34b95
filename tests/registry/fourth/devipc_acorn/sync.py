"""Sync IPC: words that streams store and wait for. There are no inter-process events, and the answers say so."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping

from devipc.spi import Capability, Mechanism, MemoryKind, Stream, UsageError

from .driver import NAME, Driver
from .transfer import worker_of

__all__ = ["AcornSync", "AcornWords"]

_ORDERED_MACHINE = "x86_64"
"""Its aligned 64-bit stores do not tear and keep their order; others keep less."""


class AcornWords:
    """Fulfils :class:`devipc.spi.WordWrites` and :class:`devipc.spi.WordWaits`."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def _word(self, device_ptr: int) -> memoryview:
        """Return the word as a view, whose loads and stores are single ones of the machine."""
        found = self._driver.find(device_ptr, 8)
        if device_ptr % 8 or found is None or found.kind is not MemoryKind.HOST:
            raise UsageError(
                f"{device_ptr:#x} is no aligned word of registered memory", remedy="register it first", backend=NAME
            )
        return memoryview((ctypes.c_char * 8).from_address(device_ptr)).cast("B").cast("Q")

    def write(self, stream: Stream, device_ptr: int, value: int) -> None:
        """Enqueue the store of ``value``."""
        self._driver.enter("write_word")
        worker, word = worker_of(stream), self._word(device_ptr)
        if not 0 <= value < 2**63:
            raise UsageError(f"{value} is no value of a word", remedy="0 <= value < 2**63", backend=NAME)

        def run() -> None:
            word[0] = value

        worker.submit(run, self._driver.hold([(device_ptr, 8)]))

    def wait(self, stream: Stream, device_ptr: int, value: int) -> None:
        """Enqueue the wait until the word is ``value`` or larger; the stream's thread looks again and again."""
        self._driver.enter("wait_word")
        worker, word = worker_of(stream), self._word(device_ptr)
        worker.submit(lambda: worker.poll(lambda: word[0] >= value), self._driver.hold([(device_ptr, 8)]))


class AcornSync:
    """Fulfils :class:`devipc.spi.DeviceSyncIPC`."""

    def __init__(self, driver: Driver) -> None:
        self._words = AcornWords(driver) if platform.machine() == _ORDERED_MACHINE else None

    @property
    def word_writes(self) -> AcornWords | None:
        """Stores by streams, or None on machines whose order of stores was not tried."""
        return self._words

    @property
    def word_waits(self) -> AcornWords | None:
        """Waits by streams, on the same machines."""
        return self._words

    @property
    def events(self) -> None:
        """None: see :meth:`mechanisms`."""
        return None

    def mechanisms(self) -> Mapping[Mechanism, Capability]:
        """Answer for each mechanism; whatever is None above is not a yes here."""
        words = Capability.yes(f"aligned 64-bit stores of {_ORDERED_MACHINE}")
        if self._words is None:
            words = Capability.untested(
                f"the order of stores was never tried on {platform.machine()}", remedy="use the polling strategy"
            )
        return {
            Mechanism.STREAM_MEMOP: words,
            Mechanism.EVENT: Capability.no(
                "an Acorn device has no events that two processes share", remedy="use any other strategy"
            ),
            Mechanism.HOST: Capability.yes("markers of threads of this process"),
        }
