"""Several streams that look like one, for long lists of small copies, of which one stream leaves gaps between.

Owns the side streams of one lane, and the order: what is put on them runs behind all earlier work of the lane's stream,
and before all later. It knows no page.

Read on an H200 (PCIe 5 x16, driver 580, 2026-11-29), shares of one contiguous copy: pieces of 128 KiB reach .79 on
one stream, .96 on two and .97 on four; of 32 KiB .55, .73 and .74, where .6 us of processor a piece are the limit.
Strided copies reach .92 in one call on one stream (64 rows of 32 KiB), and .89 to .91 over two to four.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from devipc.errors import DevIPCError
from devipc.interfaces.transfer import DeviceTransfer, Stream

if TYPE_CHECKING:
    from devipc.hicache.expand import CopyList
    from devipc.hicache.mover import MarkerPool

__all__ = ["FORMS", "Fan"]

FORMS = ("strided", "plain", "fanned")
"""How copies are submitted, and counted: strided, plain, and those of the plain ones that went to several streams."""

PIECES = 256
"""How many copies a stream gets at a time, so that all have work while the processor still submits."""
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
        Side streams, and their priority; made when they are first needed. None: all goes on the lane's stream.

    Attributes
    ----------
    counts : dict
        Copies so far, for each of :data:`FORMS`.
    """

    def __init__(self, transfer: DeviceTransfer, markers: MarkerPool, *, count: int, priority: int) -> None:
        self._transfer = transfer
        self._markers = markers
        self._count = count
        self._priority = priority
        self._sides: list[Stream] = []
        self.counts = dict.fromkeys(FORMS, 0)

    def put(self, stream: Stream, copies: CopyList) -> None:
        """Submit ``copies``; what ``stream`` is given later runs behind all of them, after an error too."""
        self.counts["strided"] += len(copies.strided)
        self.counts["plain"] += len(copies.nbytes)
        if len(copies.strided):
            self._transfer.copy_strided(stream, copies.strided)
        if len(copies.nbytes) > PIECES and self._count:
            self._spread(stream, copies)
        elif len(copies.nbytes):
            self._transfer.copy_batch(stream, copies.dst, copies.src, copies.nbytes)

    def _spread(self, stream: Stream, copies: CopyList) -> None:
        self.counts["fanned"] += len(copies.nbytes)
        needed = min(self._count, (len(copies.nbytes) - 1) // PIECES)  # one more costs three calls
        while len(self._sides) < needed:
            self._sides.append(self._transfer.create_stream(priority=self._priority))
        sides = self._sides[:needed]
        begun = self._markers.record(stream)
        try:
            for side in sides:
                self._transfer.wait_marker(side, begun)
            lanes = [stream, *sides]
            for number, at in enumerate(range(0, len(copies.nbytes), PIECES)):
                part, lane = slice(at, at + PIECES), lanes[number % len(lanes)]
                self._transfer.copy_batch(lane, copies.dst[part], copies.src[part], copies.nbytes[part])
        finally:
            self._markers.give_back(begun)
            for side in sides:
                self._join(side, stream)

    def _join(self, side: Stream, stream: Stream) -> None:
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
