"""Fence: a timeline across processes, the same for every strategy and both roles.

Owns the rules: what counts as reached, when poison wins, deadlines, and how a fence is closed while device work on its
page is pending. It knows no strategy (a half supplies that) and no peer: who died is told to it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Self

from devipc.absence import need_transfer
from devipc.completion.half import Half
from devipc.completion.page import FencePage, check_value
from devipc.completion.ticker import ticker
from devipc.errors import ClosedError, CompletionTimeout, FencePoisoned, ForkError, ResourceExhausted, UsageError
from devipc.interfaces.backend import Device
from devipc.interfaces.transfer import Stream
from devipc.turns import take_turn
from devipc.types import MAX_FENCE_VALUE, PoisonReason, Strategy

if TYPE_CHECKING:
    from devipc.completion.handle import FenceHandle

__all__ = ["CLOSE_TIMEOUT_S", "Fence"]

CLOSE_TIMEOUT_S = 5.0
"""How long :meth:`Fence.close` waits for pending work before it poisons the fence."""
_POISON_GRACE_S = 0.25
_REPEAT_S = 1e-3
_NO_THREAD_S = 0.1
_log = logging.getLogger("devipc.completion")


class Fence(ABC):
    """A 64-bit counter that only grows, signalled by one process and followed by others.

    A value is *reached* when all work that the producer's stream held before ``signal(stream, n)`` is done and
    visible. A fence that was never signalled has reached nothing. Made by :func:`devipc.completion.create_fence`
    (producer) and :func:`devipc.completion.open_fence` (consumer). All methods may be called from any thread of the
    process that made the object; after a ``fork`` the child gets :class:`~devipc.errors.ForkError`.
    """

    def __init__(self, strategy: Strategy, page: FencePage, half: Half, device: Device) -> None:
        self._strategy = strategy
        self._page = page
        self._base = half
        self._transfer = need_transfer(device)
        self._device_uuid = device.info.uuid
        self._ticker = ticker(f"devipc-poison-{device.info.uuid}")  # a device that is slow to answer delays no other
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._order = threading.Lock()  # one enqueueing call at a time; never held while waiting for _lock's owner
        self._asking = threading.Lock()  # held while the ticker asks; whoever gives the half back takes it before
        self._closing = False
        self._abandoned = False
        self._releasing = False
        self._writer_gone: Callable[[], bool] | None = None
        self._poison: PoisonReason | None = None
        self.driving: Callable[[], AbstractContextManager[object]] = nullcontext
        """Returns what is entered, without a lock, while the driver takes back what the fence has of it."""

    # --- what it is --------------------------------------------------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        """How consumers learn that a value is reached."""
        return self._strategy

    @property
    @abstractmethod
    def is_producer(self) -> bool:
        """True on the side that signals."""

    @property
    def waits_on_device(self) -> bool:
        """True when a consumer's :meth:`wait` is enqueued; False when it blocks the host."""
        return self._strategy is Strategy.STREAM_MEMOP

    @property
    def host_releasable(self) -> bool:
        """True: poison ends every wait of every strategy, because no device waits for a vendor's event."""
        return True

    @property
    def closed(self) -> bool:
        """True once :meth:`close` was called here."""
        return self._closing

    @property
    def issued(self) -> int:
        """Largest value whose signal was submitted; 0 before the first."""
        self._guard()
        return self._page.issued

    @property
    def value(self) -> int:
        """Largest value that is reached; 0 before the first.

        Raises
        ------
        FencePoisoned
            When the fence failed. After an orderly close of the producer the last reached value is returned instead.
        """
        self._guard()
        value = self._base.look()
        reason = self._poisoned(value)
        if reason is None:
            return value
        if (final := self._page.final) > 0:
            return final
        raise self._failure(reason)

    # --- asking and waiting ------------------------------------------------------------------------------------------

    def query(self, n: int) -> bool:
        """Return True when ``n`` is reached. Does not block.

        Raises
        ------
        FencePoisoned
            When the fence failed before ``n`` was known to be reached; ``code`` is the reason.
        UsageError
            When ``n`` is no legal value, or the fence is closed here.
        """
        check_value(n)
        self._guard()
        value = self._base.look()
        reason = self._poisoned(value)
        if reason is None:
            return value >= n
        if n <= self._page.final:
            return True
        raise self._failure(reason)

    def synchronize(self, n: int, timeout_s: float) -> None:
        """Block the calling thread until ``n`` is reached, at most ``timeout_s`` seconds. May be repeated.

        Raises
        ------
        CompletionTimeout
            When the time is over; the value may still be reached later.
        FencePoisoned
            When the fence failed.
        """
        if not self._page.wait_until(lambda: self.query(n), timeout_s=timeout_s, pause_s=self._base.pause_s):
            raise self._late(n, timeout_s)

    async def reached(self, n: int, timeout_s: float) -> None:
        """Await what :meth:`synchronize` blocks for.

        One thread looks for all that await a fence of this device, about every millisecond. A cancelled await leaves
        nothing behind.
        """
        from devipc.completion.awaiting import until

        if not await until(lambda: self.query(n), ticker(f"devipc-await-{self._device_uuid}"), timeout_s=timeout_s):
            raise self._late(n, timeout_s)

    def _late(self, n: int, timeout_s: float) -> CompletionTimeout:
        issued = self._page.issued
        return CompletionTimeout(
            f"fence has not reached {n} after {timeout_s:g} s (issued {issued}, strategy {self._strategy.value})",
            remedy="the producer has not signalled it yet" if issued < n else "the producer's stream is behind",
        )

    # --- roles -------------------------------------------------------------------------------------------------------

    def signal(self, stream: Stream, n: int, *, timeout_s: float = 5.0) -> None:
        """Let ``n`` be reached once all work on ``stream`` so far is done. Producer only."""
        raise UsageError("signal on a consumer's fence", remedy="only the process that made the fence signals it")

    def wait(self, stream: Stream, n: int, *, timeout_s: float = 0.0, block_timeout_s: float = 30.0) -> None:
        """Let later work on ``stream`` run once ``n`` is reached. Consumer only."""
        raise UsageError(
            "wait on the producer's own fence",
            remedy="within one process use a marker: DeviceTransfer.record and wait_marker",
        )

    def export(self) -> FenceHandle:
        """Return what one consumer needs to open the fence. Producer only."""
        raise UsageError("export of a consumer's fence", remedy="ask the producer for a handle of your own")

    # --- failing -----------------------------------------------------------------------------------------------------

    def poison(self, reason: PoisonReason, *, writer_gone: Callable[[], bool] | None = None) -> None:
        """Release all waiters, in all processes, as failed. The first cause stays. Does not block.

        The poison is stored again every millisecond until the waits that this process has put on streams are over
        and ``writer_gone()`` is true: a dead producer's queued store can land after its death was noticed.

        Parameters
        ----------
        reason : PoisonReason
            What waiters are told.
        writer_gone : callable, optional
            Returns True once nothing of the producer can store any more, for a dead one when its pidfd is readable.
            Called on a background thread; must not block.
        """
        self._guard()
        with self._lock:
            self._guard()
            self._page.poison(reason)
            if writer_gone is not None:
                self._writer_gone = writer_gone
        # Whether it is over is asked there: a driver that is slow to answer must not keep the next fence's poison back.
        self._repeat_later()

    def _repeat_later(self) -> None:
        try:
            self._ticker.wake(self._repeat_poison)
        except ResourceExhausted as error:
            _log.warning("the poison of a fence is repeated, and its close ended, when there is a thread: %s", error)

    def _repeat_poison(self) -> float | None:
        with self._asking:  # not _lock, which poison() takes: it must not wait for what is asked here
            if self._releasing:
                return None
            self._page.poison_again()
            if self._abandoned:
                if not self._quiet():
                    return _REPEAT_S
                self._releasing = True
                # Not here: unregistering can block until another fence's wait is over, which may need this thread.
                try:
                    threading.Thread(target=self._release, name="devipc-close-fence", daemon=True).start()
                except RuntimeError:  # none to be had now
                    self._releasing = False
                    return _NO_THREAD_S
                return None
            if not self._over():
                return _REPEAT_S
            self._page.poison_again()  # what landed before the writer was known to be gone
            return None

    def _over(self) -> bool:
        """Return True when neither our device work nor a dead writer's store can need the poison again."""
        return self._base.drained() and (self._writer_gone is None or self._writer_gone())

    def _poisoned(self, value: int) -> PoisonReason | None:
        """Return the reason for failure; ``value`` was loaded before the status is, and status wins."""
        if self._poison is None:
            self._poison = self._page.status
            if self._poison is None and value > MAX_FENCE_VALUE:
                self._poison = PoisonReason.PROTOCOL
        return self._poison

    def _failure(self, reason: PoisonReason) -> FencePoisoned:
        return FencePoisoned(
            f"fence failed: {reason.name.lower()}",
            code=reason.name.lower(),
            remedy="discard everything that waited for it, and get a new fence from a living producer",
        )

    def _raise_if_poisoned(self) -> None:
        reason = self._poisoned(self._page.value)
        if reason is not None:
            raise self._failure(reason)

    # --- closing -----------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Give the fence back. Calling it again does nothing.

        Blocks until device work of this process on the page is over, at most ``timeout_s``. What is then still
        pending is released by poisoning the *whole* fence (``CLOSED``). Memory that a stuck stream can still reach is
        never unmapped under it: a background thread finishes the close when the stream lets go. Drivers may make the
        last step, which unregisters the page, wait for device waits of *other* fences in this process.

        A producer that closes lets its consumers keep what was reached; values that were not are poisoned.
        """
        if os.getpid() != self._pid:
            raise _forked()
        with self._lock:
            if self._closing:
                return
            self._closing = True
        deadline = time.monotonic() + timeout_s
        in_time = self._page.wait_until(self._quiet, timeout_s=timeout_s, pause_s=_REPEAT_S)
        self._leave(deadline)
        if not in_time:
            self._page.poison(PoisonReason.CLOSED)
            self._repeat_later()
            in_time = self._page.wait_until(self._quiet, timeout_s=_POISON_GRACE_S, pause_s=_REPEAT_S)
        with self._asking:
            self._releasing, self._abandoned = in_time, not in_time
        if in_time:
            self._release()
            return
        self._repeat_later()
        _log.warning("fence closed with device work pending; its memory is kept until the stream lets go")

    def _quiet(self) -> bool:
        """Return True when no call is about to enqueue anything, and all that was enqueued is over."""
        mine: list[bool] = []
        try:
            if not take_turn(self._order, mine):
                return False
        finally:
            if mine and mine[0]:
                self._order.release()
        return self._base.drained()

    def _leave(self, deadline: float) -> None:  # noqa: B027 - a consumer has nothing to tell here
        """Tell the other side, through the page, that this side is closing; may block until ``deadline``."""

    def _release(self) -> None:
        """Give back the half, then the page; by the one thread that set ``_releasing``, without a lock.

        Unregistering can block until another fence's wait is over. Whoever repeats its poison asks for our locks.
        """
        with self.driving():
            self._base.close()
            self._depart()
            self._page.close()

    @abstractmethod
    def _depart(self) -> None:
        """Do the last store into the page, when nothing of this side is left but the mapping."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        role = "producer" if self.is_producer else "consumer"
        return f"<Fence {self._strategy.value} {role}{' closed' if self._closing else ''}>"

    # --- rules -------------------------------------------------------------------------------------------------------

    def _guard(self) -> None:
        if os.getpid() != self._pid:
            raise _forked()
        if self._closing:
            raise ClosedError("the fence is closed", remedy="keep it open while it is used")


def _forked() -> ForkError:
    return ForkError(
        "the fence was made before a fork of this process",
        remedy="start helpers with spawn, and open fences in the process that uses them",
    )
