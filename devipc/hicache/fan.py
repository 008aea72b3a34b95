"""Several streams that look like one: for long lists of small copies, which one stream runs slower than the wire.

Owns the side streams of one lane, and the order: what is put on them runs behind all earlier work of the lane's stream,
and before all later. It knows no page.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from devipc.errors import DevIPCError
from devipc.interfaces.transfer import DeviceTransfer, Stream

if TYPE_CHECKING:
    from devipc.hicache.expand import U64
    from devipc.hicache.mover import MarkerPool

__all__ = ["Fan"]

# On an H200 (PCIe 5 x16, 2026-11-29) pieces of 32 KiB over four streams reach .83 of the wire; each stream gets a few
# hundred at a time, so that all have work while the processor still submits.
_PIECES = 256
_log = logging.getLogger("devipc.hicache")


class Fan:
    """See the module. Calls come from the lane's thread, one at a time.

    Parameters
    ----------
    transfer : DeviceTransfer
        The device's.
    markers : MarkerPool
        The lane's.
    count, priority : int
        Side streams, and their priority; made when they are first needed.
    """

    def __init__(self, transfer: DeviceTransfer, markers: MarkerPool, *, count: int, priority: int) -> None:
        self._transfer = transfer
        self._markers = markers
        self._count = count
        self._priority = priority
        self._sides: list[Stream] = []

    def copy_batch(self, stream: Stream, dst: U64, src: U64, nbytes: U64) -> None:
        """Do as :meth:`DeviceTransfer.copy_batch`, also in what ``stream`` waits for after an error."""
        if len(dst) <= _PIECES or not self._count:
            self._transfer.copy_batch(stream, dst, src, nbytes)
            return
        while len(self._sides) < self._count:
            self._sides.append(self._transfer.create_stream(priority=self._priority))
        begun = self._markers.record(stream)
        try:
            for side in self._sides:
                self._transfer.wait_marker(side, begun)
            lanes = [stream, *self._sides]
            for number, at in enumerate(range(0, len(dst), _PIECES)):
                part = slice(at, at + _PIECES)
                self._transfer.copy_batch(lanes[number % len(lanes)], dst[part], src[part], nbytes[part])
        finally:
            self._markers.give_back(begun)
            for side in self._sides:  # after an error too: what has begun is waited for with the stream
                done = self._markers.record(side)
                try:
                    self._transfer.wait_marker(stream, done)
                finally:
                    self._markers.give_back(done)

    def close(self) -> None:
        """Destroy the side streams, behind the lane's own. A lost device gives nothing back."""
        while self._sides:
            try:
                self._transfer.destroy_stream(self._sides.pop())
            except DevIPCError as error:
                _log.warning("a side stream was not given back: %s", error)
