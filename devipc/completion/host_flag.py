"""Strategy ``host_flag``: the stream brings the value into the page, consumers look at it.

Owns the form for devices without word writes: 8 bytes from a ring of prepared values in the same page, copied by way
of device memory. With word writes the producer's half is that of ``stream_memop``. Consumers need nothing of their
device.
"""

from __future__ import annotations

from devipc.absence import need_transfer
from devipc.completion.half import WORD_PAUSE_S, Drain, ProducerHalf, WordProducer, unregister
from devipc.completion.page import PAGE_FENCE_NBYTES, RING_OFFSET, RING_SLOTS, VALUE_OFFSET, FencePage
from devipc.completion.scratch import Scratch
from devipc.completion.stream_memop import MemopProducer
from devipc.interfaces.backend import Device
from devipc.interfaces.transfer import Stream

__all__ = ["CopyProducer", "flag_producer"]


def flag_producer(device: Device, page: FencePage) -> ProducerHalf:
    """Return the half that this device allows: stores where it has them, else copies."""
    if device.sync is not None and device.sync.word_writes is not None:
        return MemopProducer(device, page)
    return CopyProducer(device, page)


class CopyProducer(WordProducer):
    """Signals by copying a prepared value onto the word. A slot is prepared again only when nothing copies from it."""

    slots = RING_SLOTS
    pause_s = WORD_PAUSE_S

    def __init__(self, device: Device, page: FencePage) -> None:
        self._page = page
        self._transfer = need_transfer(device)
        self._scratch = Scratch(device, 8)
        try:
            self._registration = self._transfer.register_host(page.address, PAGE_FENCE_NBYTES)
        except BaseException:
            self._scratch.close()
            raise
        self._drain = Drain(self._transfer)
        self._signals = 0

    def room(self) -> bool:
        """Return True when the value that the next slot holds has arrived, or never will."""
        return self._page.value >= self._page.ring(self._signals % RING_SLOTS) or self._drain.done()

    def signal(self, stream: Stream, n: int) -> None:
        """Prepare the slot and enqueue the copies."""
        slot = self._signals % RING_SLOTS
        self._signals += 1  # whatever comes of it: behind an error or an interrupt the slot may be copied all the same
        self._page.set_ring(slot, n)
        base = self._registration.device_ptr
        words = base + VALUE_OFFSET, base + RING_OFFSET + 8 * slot
        self._drain.enqueue(stream, lambda: self._scratch.carry(stream, *words, 8))

    def look(self) -> int:
        """Load the word."""
        return self._page.value

    def drained(self) -> bool:
        """Return True when all copies are over."""
        return self._drain.done()

    def close(self) -> None:
        """Give the markers, the registration and the memory back."""
        self._drain.close()
        unregister(self._transfer, self._registration)
        self._scratch.close()
