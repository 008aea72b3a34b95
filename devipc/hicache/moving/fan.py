"""Several streams that look like one, for long lists of small copies, which one thread is too slow to submit.

Owns the side streams of one lane, the threads that submit to them, and the order: what is put on them runs behind all
earlier work of the lane's stream, and before all later. It knows no page.

Read on an H200 (PCIe 5 x16, 16 processors, driver 580, 2026-11-30), lists one behind the other, shares of one
contiguous copy to the host and back: pieces of 32 KiB in 64 classic allocations reach .57 and .53 with one thread, .94
and .94 with two, .97 and .96 with three, each with a stream of its own; both ways at once .53, .64 and .61. On
another host one thread reached .90 and .92, and both ways .86, .75 and .72: two each way while both move are a
compromise. The driver takes one piece in .3 to 1 us from one thread, and two to three in a microsecond from several.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from devipc.errors import DevIPCError
from devipc.hicache.moving.submitters import Submitters, raise_gravest
from devipc.interfaces.transfer import DeviceTransfer, Stream

if TYPE_CHECKING:
    from devipc.hicache.moving.mover import MarkerPool
    from devipc.hicache.planning.expand import CopyList

__all__ = ["FORMS", "Fan"]

FORMS = ("strided", "plain", "fanned")
"""How copies are submitted, and counted: strided, plain, and those of the plain ones that went to several streams."""

PIECES = 512
"""How many copies a stream gets at a time, so that all have work while the processor still submits."""
_MEANWHILE_PIECES = 4096
_THREADS_EACH = 2
"""How many threads submit at most for each of two lanes that are at work."""
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
    threads : int
        How many submit at a time, the lane's own among them.

    Attributes
    ----------
    threads : int
        As given.
    counts : dict
        Copies so far, for each of :data:`FORMS`.
    meanwhile : callable or None
        Called beside those who submit a long list, by a thread more or whoever is done first; the list is submitted
        when this has returned, too.
    """

    def __init__(
        self, transfer: DeviceTransfer, markers: MarkerPool, *, count: int, priority: int, threads: int = 1
    ) -> None:
        self._transfer = transfer
        self._markers = markers
        self._count = count
        self._priority = priority
        self.threads = threads
        self._submitters = Submitters()
        self._sides: list[Stream] = []
        self._unjoined: list[Stream] = []
        self.counts = dict.fromkeys(FORMS, 0)
        self.meanwhile: Callable[[], None] | None = None

    def put(self, stream: Stream, copies: CopyList, *, alone: bool = True, soon: bool = True) -> None:
        """Submit ``copies``; what ``stream`` is given later runs behind all of them, after an error too.

        Beside another lane that is at work (not ``alone``) fewer threads submit: they would wait for each other. While
        the stream has something to do (not ``soon``) plain copies go first, which take longer to submit: they are
        ready when the device comes to them, and it has the strided ones while those of the next list are submitted.
        """
        self.counts["strided"] += len(copies.strided)
        self.counts["plain"] += len(copies.nbytes)
        spread = len(copies.nbytes) > PIECES and self._count > 0
        plain_first = spread and not soon
        if len(copies.strided) and not plain_first:
            self._transfer.copy_strided(stream, copies.strided)
        if spread:
            self._spread(stream, copies, self.threads if alone else min(self.threads, _THREADS_EACH))
        elif len(copies.nbytes):
            self._transfer.copy_batch(stream, copies.dst, copies.src, copies.nbytes)
        if len(copies.strided) and plain_first:
            self._transfer.copy_strided(stream, copies.strided)

    def _spread(self, stream: Stream, copies: CopyList, threads: int) -> None:
        self.counts["fanned"] += len(copies.nbytes)
        needed = min(self._count, (len(copies.nbytes) - 1) // PIECES)  # one more costs three calls
        if threads > 1:
            needed = min(needed, threads - 1)  # a stream each
        while len(self._sides) < needed:
            self._sides.append(self._transfer.create_stream(priority=self._priority))
        sides = self._sides[:needed]
        # All steps are taken, whatever fails of them: what one stream was given is to be waited for, too.
        failures: list[BaseException] = []
        for step in (
            partial(self._submit, stream, sides, copies, threads),
            *(partial(self._join, side, stream) for side in sides),
        ):
            try:
                step()
            except BaseException as error:
                failures.append(error)
        raise_gravest(failures)

    def _submit(self, stream: Stream, sides: Sequence[Stream], copies: CopyList, threads: int) -> None:
        begun = self._markers.record(stream)
        try:
            for side in sides:
                self._transfer.wait_marker(side, begun)
        finally:
            self._markers.give_back(begun)
        lanes = [stream, *sides]
        parts = [(at, number % len(lanes)) for number, at in enumerate(range(0, len(copies.nbytes), PIECES))]
        threads = min(threads, len(lanes))
        shares = [[part for part in parts if part[1] % threads == thread] for thread in range(threads)]
        works: list[Callable[[], None]] = [partial(self._put_on, lanes, copies, share) for share in shares]
        if self.meanwhile is not None and threads > 1 and len(copies.nbytes) >= _MEANWHILE_PIECES:
            works.append(self.meanwhile)
        self._submitters.run(works)

    def _put_on(self, lanes: Sequence[Stream], copies: CopyList, parts: Sequence[tuple[int, int]]) -> None:
        """Submit parts, each the copies from the first number on, to the lane of the second. A lane has one thread."""
        for at, lane in parts:
            some = slice(at, at + PIECES)
            self._transfer.copy_batch(lanes[lane], copies.dst[some], copies.src[some], copies.nbytes[some])

    def _join(self, side: Stream, stream: Stream) -> None:
        """Let ``stream`` wait for what ``side`` has; where it cannot be told to, wait here before that is raised."""
        try:
            done = self._markers.record(side)
            try:
                self._transfer.wait_marker(stream, done)
            finally:
                self._markers.give_back(done)
        except BaseException:
            try:
                self._transfer.synchronize_stream(side)
            except BaseException as error:
                _log.warning("whether copies of a side stream are over is not known: %s", error)
                self._unjoined.append(side)
            raise

    def settle(self, stream: Stream) -> None:
        """Join the side streams of which that failed, or wait for them.

        Until this returns, what is recorded on ``stream`` says nothing about copies that were put on it before.

        Raises
        ------
        DevIPCError
            As long as neither is possible.
        """
        while self._unjoined:
            self._join(self._unjoined.pop(), stream)

    def close(self) -> None:
        """Destroy the side streams, behind the lane's own, and end the threads. A lost device gives nothing back."""
        self._submitters.close()
        while self._sides:
            try:
                self._transfer.destroy_stream(self._sides.pop())
            except DevIPCError as error:
                _log.warning("a side stream was not given back: %s", error)
