"""DeviceSyncIPC on worker threads: word writes, word waits and events.

Owns 64-bit words in registered host memory as streams see them. What a word means is the completion layer's business.

An aligned 8-byte store through ``memoryview.cast("Q")`` is one machine store, and x86-64 keeps the order of stores, so
that everything a stream wrote before is visible first. Other machines keep less order: the primitives are absent there.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping

from devipc.host.driver import HostDriver, whole
from devipc.host.events import HostEvents
from devipc.host.ranges import Range
from devipc.host.transfer import queue_of
from devipc.spi import Capability, Mechanism, MemoryKind, Stream, UsageError

__all__ = ["HostSync", "HostWordWaits", "HostWordWrites"]

_ORDERED_MACHINE = "x86_64"
_LARGEST_WORD = 2**63 - 1


def _hold_word(driver: HostDriver, device_ptr: int) -> tuple[Range, int]:
    """Hold the registration around a word and return it with the word's index."""
    if device_ptr % 8:
        raise UsageError(f"the word at {device_ptr:#x} is not aligned to 8 bytes", remedy="align it")
    found = driver.ranges.hold(device_ptr, 8, what="word", kind=MemoryKind.HOST)
    return found, (device_ptr - found.start) // 8


class HostWordWrites:
    """Stores by a stream. Fulfils :class:`devipc.spi.WordWrites`."""

    def __init__(self, driver: HostDriver) -> None:
        self._driver = driver

    def write(self, stream: Stream, device_ptr: int, value: int) -> None:
        """Enqueue the store of ``value``, which is below 2**63."""
        queue = queue_of(self._driver, stream)
        pointer, number = whole("device_ptr", device_ptr), whole("value", value, high=_LARGEST_WORD)
        self._driver.enter("host_write_word")
        found, index = _hold_word(self._driver, pointer)

        def run() -> None:
            found.owner[index] = number

        queue.submit(run, (found,), brief=True)


class HostWordWaits:
    """Waits by a stream. Fulfils :class:`devipc.spi.WordWaits`."""

    def __init__(self, driver: HostDriver) -> None:
        self._driver = driver

    def wait(self, stream: Stream, device_ptr: int, value: int) -> None:
        """Enqueue the wait: the stream's thread polls the word, at most 0.2 ms apart."""
        queue = queue_of(self._driver, stream)
        pointer, number = whole("device_ptr", device_ptr), whole("value", value, high=_LARGEST_WORD)
        self._driver.enter("host_wait_word")
        found, index = _hold_word(self._driver, pointer)
        words = found.owner
        queue.submit(lambda: queue.wait_until(lambda: words[index] >= number), (found,))


class HostSync:
    """Sync primitives of the host device. Fulfils :class:`devipc.spi.DeviceSyncIPC`.

    Parameters
    ----------
    driver : HostDriver
        The device.
    machine : str, optional
        What ``platform.machine()`` says, to be passed by tests alone.
    """

    def __init__(self, driver: HostDriver, *, machine: str | None = None) -> None:
        self._machine = machine or platform.machine()
        self._ordered = self._machine == _ORDERED_MACHINE
        self._writes = HostWordWrites(driver) if self._ordered else None
        self._waits = HostWordWaits(driver) if self._ordered else None
        self._events = HostEvents(driver)

    @property
    def word_writes(self) -> HostWordWrites | None:
        """Stores by streams, or None on machines whose store order is not known to be enough."""
        return self._writes

    @property
    def word_waits(self) -> HostWordWaits | None:
        """Waits by streams, or None on the same machines."""
        return self._waits

    @property
    def events(self) -> HostEvents | None:
        """Inter-process events, or None on the same machines."""
        return self._events if self._ordered else None

    def mechanisms(self) -> Mapping[Mechanism, Capability]:
        """Say what is known without trying."""
        host = Capability.yes("markers of this process's own threads")
        if not self._ordered:
            unknown = Capability.untested(
                f"shared words were tried on x86-64 alone; this is {self._machine}", remedy="use the polling strategy"
            )
            return {Mechanism.STREAM_MEMOP: unknown, Mechanism.EVENT: unknown, Mechanism.HOST: host}
        return {
            Mechanism.STREAM_MEMOP: Capability.yes(
                f"aligned 64-bit stores of {self._machine} neither tear nor overtake"
            ),
            Mechanism.EVENT: Capability.untested(
                "whether a peer may open this process's descriptors under /proc is known by trying alone"
            ),
            Mechanism.HOST: host,
        }

    def close_all(self) -> None:
        """Give back what events hold, when the device is closed."""
        self._events.close_all()
