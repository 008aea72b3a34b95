"""Tickets: an operation on the client's side, what may be waited for, and how it ended.

Owns the client's step through its table, and every way to wait: a host wait, a callback, asyncio, and the fence. It
knows neither an engine nor how one is reached; two callables carry what it tells.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from devipc.deadline import bounded, deadline_after
from devipc.errors import CompletionTimeout, DevIPCError, UsageError
from devipc.hicache.client.callbacks import run_hooks
from devipc.hicache.operations import ANSWERS, Event, Kind, Side, Status, step, table_of, terminal_of
from devipc.hicache.results import Answer, Outcome, PageResult, Results, fresh
from devipc.hicache.wire.waiting import Wait, Waiters, park, wake
from devipc.interfaces.transfer import Stream

__all__ = ["CancelFlag", "ClientWord", "OperationFence", "Ticket", "WaitFence"]

_TABLES = {kind: (table_of(kind, Side.CLIENT), terminal_of(kind, Side.CLIENT)) for kind in Kind}
_NO_PAGES: Results = np.empty(0, np.uint8)
_PAGES_BACK = "the pages of an operation are its own until it has a status; wait again"


class WaitFence(Protocol):
    """The client's end of a completion fence: as :class:`devipc.completion.Fence`, whichever deployment made it."""

    def query(self, n: int) -> bool:
        """Return True when ``n`` is reached; raise FencePoisoned when it never will be."""
        ...

    def synchronize(self, n: int, timeout_s: float) -> None:
        """Block the calling thread until ``n`` is reached."""
        ...

    def wait(self, stream: Stream, n: int, *, timeout_s: float = 0.0) -> None:
        """Let later work on ``stream`` run once ``n`` is reached."""
        ...


class ClientWord(Protocol):
    """The client's end of a cancel word."""

    def set(self) -> None:
        """Give up. Never undone."""
        ...


class CancelFlag:
    """The cancel word of an operation within one process."""

    __slots__ = ("_set",)

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        """Give up. Never undone."""
        self._set = True

    def is_set(self) -> bool:
        """Return True once it was set."""
        return self._set


class OperationFence:
    """Completion of one operation, by layer group: for streams, and for the host.

    A fence that is reached says that the copies are over. That what they brought is right, says the ticket's status.

    Parameters
    ----------
    fence : WaitFence
        Reaches 1 .. n for the groups.
    groups : tuple of tuple of int
        The layers of each group; one empty group where an operation has no groups.
    """

    def __init__(self, fence: WaitFence, groups: tuple[tuple[int, ...], ...]) -> None:
        self._fence = fence
        self.groups = groups
        self._value_of = {layer: n for n, group in enumerate(groups, 1) for layer in group}

    def _value(self, layer: int | None) -> int:
        if layer is None:
            return len(self.groups)
        if layer not in self._value_of:
            raise UsageError(f"no layer {layer}", remedy=f"layers by group: {self.groups}")
        return self._value_of[layer]

    def query(self, *, layer: int | None = None) -> bool:
        """Return True when the group of ``layer`` (None: each) is in place. Raises FencePoisoned."""
        return self._fence.query(self._value(layer))

    def synchronize(self, *, layer: int | None = None, timeout_s: float) -> None:
        """Block the calling thread until then. Raises CompletionTimeout and FencePoisoned."""
        self._fence.synchronize(self._value(layer), timeout_s)

    def wait(self, stream: Stream, *, layer: int | None = None, timeout_s: float = 5.0) -> None:
        """Let later work of ``stream`` run then.

        Blocks the calling thread until the copies were submitted; for them only where no device waits by itself.
        """
        self._fence.wait(stream, self._value(layer), timeout_s=timeout_s)


class Ticket:
    """One operation of a client. Any thread.

    Attributes
    ----------
    op : int
        Number of the operation.
    kind : Kind
        What it does.
    fence : OperationFence or None
        Of a backup: reached when its pages may be reused. Of a restore: by layer group. None for all others.
    """

    def __init__(
        self,
        op: int,
        kind: Kind,
        *,
        page_count: int,
        tell: Callable[[int, Event], None],
        defer: Callable[[Callable[[], None]], Callable[[], None]],
        wait: Wait = park,
        attend: Callable[[], None] = lambda: None,
        forget: Callable[[int], None] = lambda _op: None,
        fence: OperationFence | None = None,
        cancel: ClientWord | None = None,
    ) -> None:
        self.op = op
        self.kind = kind
        self.fence = fence
        self._table, self._terminal = _TABLES[kind]
        self._state = self._table.initial
        self._tell = tell
        self._defer = defer
        self._cancel = cancel
        self._wait = wait
        self._attend = attend
        self._forget = forget
        self._lock = threading.RLock()
        self._waiters: Waiters = []
        self._told: dict[Event, Answer] = {}
        self._results: Results = np.zeros(page_count, np.uint8) if page_count else _NO_PAGES
        self._error: DevIPCError | None = None
        self._detail: dict[str, object] = {}
        self._hooks: list[Callable[[], None]] = []
        self._outbox: list[Event] | None = []  # until the operation was submitted

    # --- asking ------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """State of the client's table."""
        return self._state

    @property
    def status(self) -> Status | None:
        """How it ended; None while it has not. With a status, its pages are the client's own again."""
        return Status(self._state) if self._state in self._terminal else None

    @property
    def results(self) -> Results:
        """What is known of each page, uint8 ``(n,)`` of :class:`PageResult`; a copy."""
        with self._lock:
            return self._results.copy() if len(self._results) else self._results

    @property
    def detail(self) -> dict[str, object]:
        """What a question was answered with."""
        return self._detail

    @property
    def hit(self) -> npt.NDArray[np.bool_]:
        """Which pages were found, bool ``(n,)``: of a lookup that was answered, or a restore that was admitted."""
        return np.asarray(np.isin(self.results, (PageResult.HIT, PageResult.RESTORED)))

    # --- waiting -----------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float) -> Outcome:
        """Block until the operation has a status, at most ``timeout_s`` seconds; may be repeated.

        Raises
        ------
        CompletionTimeout
            When the time is over: the operation goes on, and so does its claim on its pages.
        """
        self._await_end(timeout_s)
        with self._lock:
            return Outcome(Status(self._state), self._results.copy(), self._error)

    def _await_end(self, timeout_s: float) -> None:
        if not self._until(self._has_ended, timeout_s):
            raise CompletionTimeout(
                f"{self.kind.value} {self.op} is {self._state} after {timeout_s:g} s", remedy=_PAGES_BACK
            )

    def _has_ended(self) -> bool:
        return self._state in self._terminal

    def _until(self, done: Callable[[], bool], timeout_s: float) -> bool:
        return done() or self._wait(done, self._waiters, deadline_after(bounded(timeout_s)))

    def result(self, timeout_s: float) -> Results:
        """Return the result of each page as soon as the operation is completed.

        Raises
        ------
        CompletionTimeout
            As :meth:`wait`.
        DevIPCError
            When it ended otherwise; the engine's reason where it gave one.
        """
        self._await_end(timeout_s)
        if self._state == Status.COMPLETED:
            return self.results
        outcome = self.wait(0.0)
        if outcome.error is not None:
            raise fresh(outcome.error)
        raise DevIPCError(
            f"{self.kind.value} {self.op} is {outcome.status.value}",
            code=outcome.status.value,
            remedy="nothing of it is visible; submit it again if it is still wanted",
        )

    def reached(self, event: Event, timeout_s: float) -> bool:
        """Block until the engine told ``event``; False when the operation ended without it.

        ``admitted``, ``source_released`` (pages may be reused), ``visible`` and ``leased`` are worth to wait for.

        Raises
        ------
        CompletionTimeout
            When neither happened in time.
        """
        if not self._until(lambda: event in self._told or self._has_ended(), timeout_s):
            raise CompletionTimeout(
                f"{self.kind.value} {self.op} is {self._state}, not {event.value}, after {timeout_s:g} s",
                remedy=_PAGES_BACK,
            )
        with self._lock:
            return event in self._told

    def add_callback(self, callback: Callable[[Ticket], None]) -> None:
        """Call ``callback(ticket)`` once it has a status, on the client's own thread for callbacks.

        Raises
        ------
        ResourceExhausted
            When that thread cannot be started.
        """
        self.add_hook(self._defer(lambda: callback(self)))
        self._attend()

    def __await__(self) -> Generator[object, None, Outcome]:
        """Await the outcome. A task that is cancelled stops waiting; the operation goes on."""
        return self._awaited().__await__()

    async def _awaited(self) -> Outcome:
        import asyncio  # whoever awaits has it loaded; others do not pay for it

        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def tell() -> None:
            try:
                loop.call_soon_threadsafe(done.set)
            except RuntimeError:  # the loop was closed: nobody waits
                return

        self.add_hook(tell)
        self._attend()
        try:
            await done.wait()
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._hooks.remove(tell)
        return self.wait(0.0)

    def add_hook(self, hook: Callable[[], None]) -> None:
        """Call ``hook`` once there is a status, at once or on the thread that brings it. It must not block."""
        with self._lock:
            if self._state not in self._terminal:
                self._hooks.append(hook)
                return
        hook()

    # --- steering ----------------------------------------------------------------------------------------------------

    def cancel(self) -> bool:
        """Give up. Returns False when it has a status already, or cannot be given up.

        A backup ends at once, and its pages may be reused: it will not be published. A restore ends when the engine
        says so; until then its pages are written to.
        """
        if self._cancel is not None:
            self._cancel.set()  # before anything else
        return self.happen(Event.GIVE_UP)

    def confirm(self) -> bool:
        """Say that every restore which these pages depend on was completed: a backup may be published."""
        return self.happen(Event.CONFIRM_FENCES)

    def discard(self) -> bool:
        """Say that a restore which these pages depend on failed: a backup must not be published."""
        return self.happen(Event.DISCARD_BATCH)

    def happen(self, event: Event) -> bool:
        """Take a step that this side decides; False when the table does not allow it now."""
        with self._lock:
            if (self._state, event) not in self._table.transitions:
                return False
            tells, hooks = self._step(event)
            if tells is not None and self._outbox is not None:
                self._outbox.append(tells)
                tells = None
            if self._waiters:
                wake(self._waiters)
        # Without the lock: whoever carries it may answer on this very thread.
        if tells is not None:
            self._tell(self.op, tells)
        self._finish(hooks)
        return True

    # --- for the client ----------------------------------------------------------------------------------------------

    def confirmed_with_request(self) -> None:
        """Note that the request itself says that nothing needs to be confirmed."""
        with self._lock:
            self._step(Event.CONFIRM_FENCES)

    def submitted(self) -> None:
        """Note that the engine knows the operation; what was to be told meanwhile is told now."""
        while True:
            with self._lock:
                if not self._outbox:
                    self._outbox = None
                    return
                event = self._outbox.pop(0)
            self._tell(self.op, event)

    def take(self, event: Event, answer: Answer, passed: tuple[Event, ...] = ()) -> None:
        """Take what the engine tells. What comes after the status, or after it was seen dying, changes nothing."""
        told: list[Event] = []
        hooks: list[Callable[[], None]] | None = None
        with self._lock:
            for one in (*passed, event):
                if self._state in self._terminal or self._state == "quarantined" or one not in ANSWERS:
                    break
                tells, hooks = self._step(one)
                if tells is not None:
                    (told if self._outbox is None else self._outbox).append(tells)
                self._told[one] = answer
            if hooks is None:
                return
            if answer.results is not None:
                self._results = answer.results
            self._error = answer.error or self._error
            self._detail = answer.detail or self._detail
            if self._waiters:
                wake(self._waiters)  # last: whoever looks finds all of it
        for one in told:
            self._tell(self.op, one)
        self._finish(hooks)

    def _finish(self, hooks: list[Callable[[], None]]) -> None:
        if self._state in self._terminal:  # at the first step into it, and no step follows
            self._forget(self.op)
            run_hooks(hooks)

    def _step(self, event: Event) -> tuple[Event | None, list[Callable[[], None]]]:
        """Step, with the lock held; return what to tell, and the hooks to call without it."""
        following = step(self._table, self._state, event)
        self._state = following.state
        hooks: list[Callable[[], None]] = []
        if self._state in self._terminal:
            hooks, self._hooks = self._hooks, []
        return following.tells, hooks

    def __repr__(self) -> str:
        return f"<Ticket {self.op} {self.kind.value} {self._state}>"
