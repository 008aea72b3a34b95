"""Strategy ``stream_memop``: streams store into the fence's word and wait for it.

Owns the use of word writes and word waits on a registered page. The producer's half serves ``host_flag`` too, where
the device can store a word but nothing needs to wait for it on a device.
"""

from __future__ import annotations

from functools import partial

from devipc.absence import need_transfer, need_word_waits, need_word_writes
from devipc.completion.half import WORD_PAUSE_S, Drain, WordProducer, unregister
from devipc.completion.page import PAGE_FENCE_NBYTES, VALUE_OFFSET, FencePage
from devipc.interfaces.backend import Device
from devipc.interfaces.transfer import Stream

__all__ = ["MemopConsumer", "MemopProducer"]


class _Registered:
    """The page, reachable by the device, and what of this process is pending on it."""

    def __init__(self, device: Device, page: FencePage) -> None:
        self._page = page
        self._transfer = need_transfer(device)
        self._registration = self._transfer.register_host(page.address, PAGE_FENCE_NBYTES)
        self._word = self._registration.device_ptr + VALUE_OFFSET
        self._drain = Drain(self._transfer)
        self.pause_s = WORD_PAUSE_S

    def look(self) -> int:
        return self._page.value

    def drained(self) -> bool:
        return self._drain.done()

    def close(self) -> None:
        self._drain.close()
        unregister(self._transfer, self._registration)


class MemopProducer(_Registered, WordProducer):
    """Signals by a stream's own store."""

    slots = 0
    refuses_capture = True

    def __init__(self, device: Device, page: FencePage) -> None:
        self._writes = need_word_writes(device)
        super().__init__(device, page)

    def room(self) -> bool:
        """Stores need no slot."""
        return True

    def signal(self, stream: Stream, n: int) -> None:
        """Enqueue the store."""
        self._drain.enqueue(stream, partial(self._writes.write, stream, self._word, n))


class MemopConsumer(_Registered):
    """Waits on the device, or looks at the word."""

    def __init__(self, device: Device, page: FencePage) -> None:
        self._waits = need_word_waits(device)
        super().__init__(device, page)

    def wait(self, stream: Stream, n: int) -> None:
        """Enqueue the wait."""
        self._drain.enqueue(stream, partial(self._waits.wait, stream, self._word, n))
