"""The producer's side of a fence: signalling, and handing it out.

Owns the order of values, the publication of ``issued``, back-pressure, and the lines of the consumers. How a value
reaches the page is its half's business.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import time

from devipc.completion.fence import Fence
from devipc.completion.half import ProducerHalf
from devipc.completion.handle import FenceHandle
from devipc.completion.page import MAX_CONSUMERS, FencePage, LineState, check_value
from devipc.errors import ClosedError, DeviceLostError, DevIPCError, ResourceExhausted, UsageError
from devipc.interfaces.backend import Device
from devipc.interfaces.transfer import Stream
from devipc.types import PoisonReason, Strategy

__all__ = ["ProducerFence", "process_token"]

_LIVE = (LineState.GIVEN, LineState.OPEN)
_token: tuple[int, bytes] = (0, b"")
_log = logging.getLogger("devipc.completion")


def process_token() -> bytes:
    """Return 16 random bytes that stand for this process; a forked child has its own."""
    global _token
    if _token[0] != os.getpid():
        _token = (os.getpid(), secrets.token_bytes(16))
    return _token[1]


class ProducerFence(Fence):
    """See :class:`~devipc.completion.fence.Fence`; made by :func:`devipc.completion.create_fence`."""

    def __init__(self, strategy: Strategy, page: FencePage, half: ProducerHalf, device: Device, *, fd: int) -> None:
        super().__init__(strategy, page, half, device)
        self._half = half
        self._fd = fd
        self._issued = 0
        self._stream: int | None = None
        self._tickets = 0
        self._ticket_of: dict[int, int] = {}  # kept here: the page can be written to by consumers

    @property
    def is_producer(self) -> bool:
        """True."""
        return True

    @property
    def consumers(self) -> tuple[int, ...]:
        """Lines of the consumers that hold a handle or the open fence, as in :attr:`FenceHandle.line`."""
        self._guard()
        return tuple(line for line in range(1, MAX_CONSUMERS + 1) if self._page.line_state(line) in _LIVE)

    def signal(self, stream: Stream, n: int, *, timeout_s: float = 5.0) -> None:
        """Let ``n`` be reached once all work on ``stream`` so far is done.

        Does not wait for that work. Where a strategy has a bounded ring and the ring is full, blocks until a slot is
        free. All values of a fence come from one stream; another may take over when nothing is pending.

        Parameters
        ----------
        stream : Stream
            Not capturing: the value would be baked into the graph.
        n : int
            Larger than every value before; gaps are allowed. Behind an error of the driver it may be reached all the
            same: signal it again for the same work, never for work that came later.
        timeout_s : float
            Limit of the back-pressure.

        Raises
        ------
        UsageError
            For a value that does not grow, a capturing stream, or a second stream.
        ResourceExhausted
            When the ring stayed full.
        FencePoisoned
            When the fence has failed.
        DeviceLostError
            When the device is lost; all who wait for the fence are told.
        """
        check_value(n)
        self._guard()
        try:
            self._submit(stream, n, timeout_s)
        except DeviceLostError:  # nothing that was issued before will be reached either, and nobody else can know
            self.poison(PoisonReason.DEVICE_LOST)
            raise
        self._page.kick()

    def _submit(self, stream: Stream, n: int, timeout_s: float) -> None:
        if not self._half.refuses_capture and self._transfer.is_capturing(stream):
            raise UsageError(
                "signal on a capturing stream: the value would be the same at every launch",
                remedy="launch the graph, then signal on the stream that it was launched on",
            )
        with self._order:
            self._guard()
            self._raise_if_poisoned()
            self._check_order(stream, n)
            self._await_room(timeout_s)
            before = self._stream, self._issued
            # First: an interrupt may come when n is queued already, which then must not come again, behind more work.
            self._stream, self._issued = stream.handle, n
            try:
                self._half.signal(stream, n)
            except DevIPCError:
                self._stream, self._issued = before
                raise
            self._page.issued = n

    def announce(self, n: int) -> None:
        """Publish ``n`` as issued without a signal, so that a trial can see a wait hold. For trials alone."""
        check_value(n)
        self._guard()
        self._page.issued = n

    def _check_order(self, stream: Stream, n: int) -> None:
        if n <= self._issued:
            raise UsageError(
                f"signal {n} after {self._issued}", remedy="values of a fence grow; start again with a new fence"
            )
        if self._stream not in (None, stream.handle) and not self._half.drained():
            raise UsageError(
                "signal from a second stream while values of the first are pending: they could come out of order",
                remedy="make one fence for each stream, or let one stream wait for a marker of the other",
            )

    def _await_room(self, timeout_s: float) -> None:
        if self._half.room():
            return
        if not self._page.wait_until(self._room, timeout_s=timeout_s, pause_s=self._half.pause_s):
            raise ResourceExhausted(
                f"all {self._half.slots} slots of the fence hold signals that are not over, for {timeout_s:g} s",
                code="fence_ring",
                remedy="consumers must look at the fence and streams must advance; drop consumers that died",
            )

    def _room(self) -> bool:
        self._guard()
        self._raise_if_poisoned()
        return self._half.room()

    def export(self) -> FenceHandle:
        """Return a handle for one consumer. It owns a descriptor, which the caller closes when it was sent.

        Raises
        ------
        ResourceExhausted
            When 32 consumers hold the fence already, or no descriptor is left.
        FencePoisoned
            When the fence has failed.
        """
        with self._order:
            self._guard()
            self._raise_if_poisoned()
            line = self._free_line()
            try:
                fd = os.dup(self._fd)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                raise ResourceExhausted(
                    "no file descriptor left for the handle of a fence", code="fds", remedy="raise `ulimit -n`"
                ) from error
            self._tickets += 1
            ack, start = self._half.start()
            self._ticket_of[line] = self._tickets
            self._page.give_line(line, ticket=self._tickets, ack=ack, start=start)
            return FenceHandle(
                strategy=self._strategy,
                producer=process_token(),
                line=line,
                ticket=self._tickets,
                payloads=self._half.payloads,
                fds=(fd,),
            )

    def _free_line(self) -> int:
        for line in range(1, MAX_CONSUMERS + 1):
            if self._page.line_state(line) in (LineState.FREE, LineState.CLOSED):
                return line
        raise ResourceExhausted(
            f"the fence has {MAX_CONSUMERS} consumers", code="fence_lines", remedy="make another fence for more"
        )

    def serves(self, line: int, *, ticket: int, dropped: bool = False) -> bool:
        """Return whether the consumer that got ``line`` under ``ticket`` may still have it, or ever open it.

        ``dropped``: also one that is not counted any more, and whose line cannot be given to another yet.
        """
        if self._page.closed or self._ticket_of.get(line) != ticket:
            return False
        try:
            return self._page.line_state(line) in (*_LIVE, *[LineState.DROPPED] * dropped)
        except ClosedError:
            return False

    def drop_consumer(self, line: int, *, ticket: int | None = None, gone: bool = False) -> None:
        """Stop counting a consumer that died, or whose handle was never delivered.

        With the ``ticket`` of its handle, nothing happens when the line has been given to another consumer since.
        ``gone`` says that nothing of its process is left: only then is the line given away again, for one that still
        lives could store to it.
        """
        if self._page.closed or (ticket is not None and self._ticket_of.get(line) != ticket):
            return
        if not 1 <= line <= MAX_CONSUMERS:
            raise UsageError(f"line {line} of a fence", remedy="pass FenceHandle.line of the consumer's handle")
        if gone or self._page.line_state(line) in _LIVE:
            self._page.set_line_state(line, LineState.FREE if gone else LineState.DROPPED)
            self._page.kick()

    def _leave(self, deadline: float) -> None:
        try:
            reached = self._half.look()
        except DevIPCError as error:  # consumers are told, and waited for, whatever the device answers
            self._page.poison(PoisonReason.DEVICE_LOST)
            _log.warning("while a fence was closed: %s", error)
        else:
            if self._poisoned(reached) is None:
                self._page.final = reached
                self._page.poison(PoisonReason.CLOSED)
        self._page.wait_until(self._half.released, timeout_s=deadline - time.monotonic(), pause_s=5e-3)

    def _depart(self) -> None:
        os.close(self._fd)
