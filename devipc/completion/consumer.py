"""The consumer's side of a fence: waiting on a stream.

Owns the rules about legal waits. How the value is learnt is its half's business.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from devipc.completion.fence import Fence
from devipc.completion.half import ConsumerHalf
from devipc.completion.page import FencePage, LineState, check_value
from devipc.errors import ClosedError, CompletionTimeout, UsageError
from devipc.interfaces.backend import Device
from devipc.interfaces.transfer import Stream
from devipc.types import PoisonReason, Strategy

__all__ = ["ConsumerFence"]

_ISSUED_PAUSE_S = 5e-3
_LEFT = (PoisonReason.CLOSED, PoisonReason.PEER_DIED)
_LOOK_AGAIN_S = 1e-3
_PATIENCE_S = 0.25
"""How long waits on streams have, of a consumer that the producer has dropped, before all are poisoned for them."""


class ConsumerFence(Fence):
    """See :class:`~devipc.completion.fence.Fence`; made by :func:`devipc.completion.open_fence`."""

    def __init__(
        self,
        strategy: Strategy,
        page: FencePage,
        half: ConsumerHalf,
        device: Device,
        *,
        line: int,
        in_producer: bool,
    ) -> None:
        super().__init__(strategy, page, half, device)
        self._half = half
        self._line = line
        self._in_producer = in_producer

    @property
    def is_producer(self) -> bool:
        """False."""
        return False

    def wait(self, stream: Stream, n: int, *, timeout_s: float = 0.0, block_timeout_s: float = 30.0) -> None:
        """Let later work on ``stream`` run once ``n`` is reached.

        Where :attr:`waits_on_device`, enqueues a wait and returns. Otherwise blocks the calling thread until ``n`` is
        reached, after which all later work of every stream comes after it.

        While a wait is pending on the device, other driver calls of this process can block until it is satisfied.
        So nothing may be waited for that still needs this process or an unsubmitted signal: ``n`` must be *issued*.

        Parameters
        ----------
        stream : Stream
            Not capturing.
        n : int
            A value that the producer has issued already, or issues within ``timeout_s``.
        timeout_s : float
            How long to block until ``n`` is issued; 0 demands that it is.
        block_timeout_s : float
            How long to block until ``n`` is reached, where the strategy does not wait on the device.

        Raises
        ------
        UsageError
            When ``n`` is not issued and ``timeout_s`` is 0, the stream is capturing, or the producer is this process.
        CompletionTimeout
            When one of the two limits was met.
        FencePoisoned
            When the fence has failed. A wait that is enqueued already is released; ask :meth:`query` afterwards.
        """
        check_value(n)
        self._guard()
        if self._in_producer:
            super().wait(stream, n)
        if self._transfer.is_capturing(stream):
            raise UsageError(
                "wait on a capturing stream: the value would be the same at every launch",
                remedy="wait on the stream first, then launch the graph on it",
            )
        self._await_issued(n, timeout_s)
        if not self.waits_on_device:
            self.synchronize(n, block_timeout_s)
            return
        if self.query(n):
            return
        with self._order:
            self._guard()
            self._half.wait(stream, n)

    def _await_issued(self, n: int, timeout_s: float) -> None:
        if self._is_issued(n):
            return
        if timeout_s <= 0:
            raise UsageError(
                f"wait for {n}, the producer has issued {self._page.issued}: the stream could block this process",
                remedy="wait after the producer has signalled, or pass timeout_s to wait for that here",
            )
        if not self._page.wait_until(lambda: self._is_issued(n), timeout_s=timeout_s, pause_s=_ISSUED_PAUSE_S):
            raise CompletionTimeout(
                f"the producer has not issued {n} after {timeout_s:g} s (issued {self._page.issued})",
                remedy="the producer must call signal before a stream may wait for it",
            )

    def _is_issued(self, n: int) -> bool:
        self._guard()
        if self._page.issued >= n:
            return True
        self._raise_if_poisoned()
        return False

    def poison(self, reason: PoisonReason, *, writer_gone: Callable[[], bool] | None = None) -> None:
        """Release all waiters, in all processes; see :meth:`~devipc.completion.fence.Fence.poison`.

        Only its own when the producer has dropped this consumer before it left (``CLOSED``), or hung up on one that was
        too slow to hear why (``PEER_DIED``): the fence goes on for the others. When streams of this process still wait
        for it a moment later, all are: nobody would tell them of the producer's death any more.
        """
        self._guard()
        if reason not in _LEFT or self._page.line_state(self._line) is not LineState.DROPPED:
            super().poison(reason, writer_gone=writer_gone)
            return
        self._page.kick()
        if self.waits_on_device:
            self._ticker.wake(self._free_streams(reason, writer_gone))

    def _free_streams(self, reason: PoisonReason, writer_gone: Callable[[], bool] | None) -> Callable[[], float | None]:
        deadline = time.monotonic() + _PATIENCE_S

        def look() -> float | None:
            with self._asking:
                if self._releasing or self._half.drained():
                    return None
            if time.monotonic() < deadline:
                return _LOOK_AGAIN_S
            with contextlib.suppress(ClosedError):  # whoever closes poisons by itself
                super(ConsumerFence, self).poison(reason, writer_gone=writer_gone)
            return None

        return look

    def _poisoned(self, value: int) -> PoisonReason | None:
        """Also closed when the producer does not count on this consumer any more, and reuses what it has not seen.

        The line is loaded behind the value: what was stored for others after the line was dropped is not believed.
        """
        reason = super()._poisoned(value)
        if reason is None and self._page.line_state(self._line) is not LineState.OPEN:
            reason = self._poison = PoisonReason.CLOSED
        return reason

    def _depart(self) -> None:
        if self._page.line_state(self._line) in (LineState.OPEN, LineState.DROPPED):  # it can be given to another now
            self._page.set_line_state(self._line, LineState.CLOSED)
            self._page.kick()
