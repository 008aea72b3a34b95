"""The live round trip that a strategy must pass: which steps, what must be seen, and how steps cross to a peer.

Owns the verdict about one strategy between one producer and one consumer, and the bytes of a step. It knows no socket:
whoever runs it says how bytes and descriptors get to the other side.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol

from devipc.completion.handle import decode_fence_handle, encode_fence_handle
from devipc.completion.roles import DATA_NBYTES, ConsumerRole, Op, ProducerRole, Role, Seen
from devipc.errors import CapabilityError, DevIPCError, ResourceExhausted, WireError
from devipc.interfaces.backend import Device
from devipc.memfd import create_memfd
from devipc.spi import close_fds
from devipc.types import Strategy
from devipc.wire import Reader, Writer

__all__ = ["Caller", "RemoteRole", "TrialFailed", "TrialResponder", "run_trial"]

_FIRST_LOAD, _LARGEST_LOAD = 8, 512
_SLICE_MS = 100
_HOLD_MS = 20
_DO, _OPEN, _CREATE, _CLOSE = 0, 1, 2, 3
_OK, _FAILED, _REFUSED = 0, 1, 2
_MAX_HANDLE_NBYTES = 64 * 1024
_MAX_TEXT_NBYTES = 4096


class TrialFailed(Exception):
    """The strategy does not do what it says; the text is the reason."""


# --- the steps ------------------------------------------------------------------------------------------------------


class _Run:
    """One trial in progress."""

    def __init__(self, strategy: Strategy, producer: Role, consumer: Role, *, step_s: float, outlast_ms: int) -> None:
        self._strategy = strategy
        self._producer = producer
        self._consumer = consumer
        self._step_s = step_s
        self._outlast_ms = outlast_ms
        self._n = 0

    def busy(self) -> str:
        """Signal behind copies that take a while: it must be seen pending, and never before the data is there."""
        self._expect_pending(1, "a value that was never signalled is reported as reached")
        load = _FIRST_LOAD
        while True:
            n = self._next()
            wrote, _ = self._producer.do(Op.SIGNAL, n, load)
            seen, number = self._consumer.do(Op.LOOK, n)
            self._check(seen, number, n, wrote)
            held = seen
            if held == Seen.PENDING and self._outlast_ms and wrote:
                held, number = self._consumer.do(Op.LOOK, n, self._outlast_ms)
                self._check(held, number, n, wrote)
            self._reach(n, wrote)
            if held == Seen.PENDING or (seen == Seen.PENDING and load >= _LARGEST_LOAD):
                return f"pending behind {load} copies, then reached with its data"
            if not wrote or load >= _LARGEST_LOAD:
                return "reached with its data; the work was too short to be seen pending" if wrote else "reached"
            load *= 4

    def order(self) -> str:
        """Signal several values at once; they must arrive in order, the last with its data."""
        for _ in range(4):
            n = self._next()
            wrote, _ = self._producer.do(Op.SIGNAL, n, 1)
        self._reach(n, wrote)
        return "four values in order"

    def device_wait(self) -> str:
        """Let a stream wait: it must hold until the signal, and go on then, behind the data."""
        n = self._next()
        self._hold(n)
        wrote, _ = self._producer.do(Op.SIGNAL, n, 1)
        number = self._pass("a stream's wait was not released by the signal")
        if wrote and number != n:
            raise TrialFailed("a stream went on before the data that it waited for had arrived")
        return "a stream's wait held and was released"

    def poison(self, *, waits: bool) -> str:
        """Poison the fence: it must release a stream's wait, and be seen by who looks."""
        n = self._next()
        if waits:
            self._hold(n)
        self._consumer.do(Op.POISON, 0)
        if waits:
            self._pass("a stream's wait was not released by the host: a dead peer would block it for ever")
        seen, _ = self._consumer.do(Op.LOOK, n)
        if seen != Seen.POISONED:
            raise TrialFailed("a poisoned fence does not look so")
        return "poison seen"

    def _next(self) -> int:
        self._n += 1
        return self._n

    def _hold(self, n: int) -> None:
        self._producer.do(Op.ANNOUNCE, n)
        self._consumer.do(Op.ENQUEUE, n)
        passed, _ = self._consumer.do(Op.PASSED, 0, _HOLD_MS)
        if passed:
            raise TrialFailed("a stream's wait does not hold the stream")
        self._expect_pending(n, "a value that was not signalled yet is reported as reached")

    def _pass(self, reason: str) -> int:
        deadline = time.monotonic() + self._step_s
        while True:
            passed, number = self._consumer.do(Op.PASSED, 0, _SLICE_MS)
            if passed:
                return number
            if time.monotonic() > deadline:
                raise TrialFailed(f"{reason} within {self._step_s:g} s")

    def _expect_pending(self, n: int, reason: str) -> None:
        seen, _ = self._consumer.do(Op.LOOK, n)
        if seen != Seen.PENDING:
            raise TrialFailed(reason)

    def _reach(self, n: int, wrote: int) -> None:
        deadline = time.monotonic() + self._step_s
        while True:
            seen, number = self._consumer.do(Op.LOOK, n, _SLICE_MS)
            self._check(seen, number, n, wrote)
            if seen == Seen.REACHED:
                return
            if time.monotonic() > deadline:
                raise TrialFailed(f"a signal was not seen within {self._step_s:g} s")

    def _check(self, seen: int, number: int, n: int, wrote: int) -> None:
        if seen == Seen.REACHED and wrote and number != n:
            raise TrialFailed("a value is reported as reached before the work in front of it is done")
        if seen == Seen.BACKWARDS:
            raise TrialFailed("the value went backwards")
        if seen == Seen.POISONED:
            raise TrialFailed("the fence was poisoned though nobody asked for it")


def run_trial(strategy: Strategy, producer: Role, consumer: Role, *, deadline_s: float, outlast_ms: int = 0) -> str:
    """Try ``strategy`` between two roles and return what was seen.

    Who looks for ``outlast_ms`` at work that lasts longer also finds a value that is published too early, but late for
    shorter work, as by a thread that comes to it when that is done.

    No single step may take longer than a quarter of ``deadline_s``. The roles stay open, in whatever state they are.

    Raises
    ------
    TrialFailed
        When something was seen that must not be, or not seen in time.
    """
    run = _Run(strategy, producer, consumer, step_s=deadline_s / 4, outlast_ms=outlast_ms)
    waits = strategy is Strategy.STREAM_MEMOP
    seen = [run.busy(), run.order()]
    if waits:
        seen.append(run.device_wait())
    seen.append(run.poison(waits=waits))
    return "; ".join(seen)


# --- crossing to a peer ---------------------------------------------------------------------------------------------


class Caller(Protocol):
    """How a trial reaches the other process. Passed descriptors stay the caller's, returned ones become its own."""

    def __call__(self, body: bytes, fds: Sequence[int], timeout_s: float) -> tuple[bytes, Sequence[int]]:
        """Send a body with descriptors and return the answer, or raise after ``timeout_s``."""
        ...


def _told(status: int, *texts: str) -> bytes:
    writer = Writer().u8(status)
    for text in texts:
        writer.text(text[: _MAX_TEXT_NBYTES // 4], limit=_MAX_TEXT_NBYTES)
    return writer.done()


class RemoteRole:
    """A role in the other process, driven through a caller."""

    def __init__(self, call: Caller, *, timeout_s: float) -> None:
        self._call = call
        self._timeout_s = timeout_s

    @classmethod
    def opened(cls, call: Caller, producer: ProducerRole, data_fd: int, *, timeout_s: float) -> RemoteRole:
        """Have the other side consume what ``producer`` signals."""
        role = cls(call, timeout_s=timeout_s)
        handle = producer.export()
        try:
            body = Writer().u8(_OPEN).blob(encode_fence_handle(handle), limit=_MAX_HANDLE_NBYTES).done()
            role._ask_plain(body, (*handle.fds, data_fd))
        finally:
            close_fds(handle.fds)
        return role

    @classmethod
    def created(
        cls, call: Caller, device: Device, strategy: Strategy, *, timeout_s: float
    ) -> tuple[RemoteRole, ConsumerRole]:
        """Have the other side signal, and consume that here."""
        role = cls(call, timeout_s=timeout_s)
        reader, fds = role._ask(Writer().u8(_CREATE).text(strategy.value, limit=32).done(), ())
        try:
            handle = decode_fence_handle(Reader(reader.blob(limit=_MAX_HANDLE_NBYTES)), fds[:1])
            if len(fds) != 2:
                raise WireError(f"{len(fds)} descriptors came, a trial needs two", code="fd_count")
            return role, ConsumerRole(device, handle, fds[1])
        except BaseException:
            role.close()
            raise
        finally:
            close_fds(fds)

    def do(self, op: Op, a: int, b: int = 0) -> tuple[int, int]:
        """Have one step done."""
        reader = self._ask_plain(Writer().u8(_DO).u8(op).u64(a).u64(b).done())
        return reader.u64(), reader.u64()

    def close(self) -> None:
        """End the other side's role; a peer that is gone has nothing to end."""
        try:
            self._ask_plain(Writer().u8(_CLOSE).done())
        except (DevIPCError, TrialFailed):
            return

    def _ask_plain(self, body: bytes, fds: Sequence[int] = ()) -> Reader:
        """Ask what is answered without descriptors; those that come all the same are closed."""
        reader, received = self._ask(body, fds)
        close_fds(received)
        return reader

    def _ask(self, body: bytes, fds: Sequence[int]) -> tuple[Reader, Sequence[int]]:
        answer, received = self._call(body, fds, self._timeout_s)
        reader = Reader(answer)
        status = _FAILED
        try:
            status = reader.u8()
        finally:
            if status != _OK:
                close_fds(received)
        if status == _OK:
            return reader, received
        text = f"the other side: {reader.text(limit=_MAX_TEXT_NBYTES)}"
        if status == _REFUSED:
            raise CapabilityError(text, remedy=reader.text(limit=_MAX_TEXT_NBYTES))
        raise TrialFailed(text)


class TrialResponder:
    """Plays the other side's role in this process, one at a time. :meth:`close` may come from any thread.

    Parameters
    ----------
    device : Device
        Whose streams take part.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._role: Role | None = None
        self._sent: tuple[int, ...] = ()
        self._lock = threading.Lock()
        self._answering = False
        self._closed = False

    def answer(self, body: bytes, fds: Sequence[int]) -> tuple[bytes, tuple[int, ...]]:
        """Answer one request of a trial; to be called by one thread at a time, blocks for a fraction of a second.

        Descriptors of the request stay the caller's; those of the answer stay this object's, until the next call.
        Never raises for what a peer sends or a driver does: the answer says so.
        """
        with self._lock:
            if self._closed:
                return _told(_FAILED, "the session is closed"), ()
            self._answering = True
        try:
            return self._answer(body, fds)
        finally:
            if self._closed_meanwhile():
                self._end()

    def _answer(self, body: bytes, fds: Sequence[int]) -> tuple[bytes, tuple[int, ...]]:
        self._forget_sent()
        try:
            return self._serve(Reader(body), fds), self._sent
        except (CapabilityError, ResourceExhausted) as error:
            return _told(_REFUSED, error.message, error.remedy), ()
        except Exception as error:
            return _told(_FAILED, f"{type(error).__name__}: {error}"), ()

    def _serve(self, reader: Reader, fds: Sequence[int]) -> bytes:
        request = reader.u8()
        if request == _DO:
            op, a, b = Op(reader.u8()), reader.u64(), reader.u64()
            if self._role is None:
                raise WireError("a step of a trial that was not begun", code="trial")
            if b > _LARGEST_LOAD:  # copies or milliseconds: this thread has others to serve
                raise WireError(f"a step of {b}, at most {_LARGEST_LOAD} are done at once", code="trial")
            first, second = self._role.do(op, a, b)
            return Writer().u8(_OK).u64(first).u64(second).done()
        self._end_role()
        if request == _CLOSE:
            return Writer().u8(_OK).done()
        if request == _OPEN:
            handle = decode_fence_handle(Reader(reader.blob(limit=_MAX_HANDLE_NBYTES)), fds[:1])
            if len(fds) != 2:
                raise WireError(f"{len(fds)} descriptors came, a trial needs two", code="fd_count")
            self._role = ConsumerRole(self._device, handle, fds[1])
            return Writer().u8(_OK).done()
        if request == _CREATE:
            return self._create(Strategy(reader.text(limit=32)))
        raise WireError(f"unknown request {request} of a trial", code="trial")

    def _create(self, strategy: Strategy) -> bytes:
        data_fd = create_memfd("devipc-trial", DATA_NBYTES)
        self._sent = (data_fd,)
        self._role = role = ProducerRole(self._device, strategy, data_fd=data_fd)
        handle = role.export()
        self._sent = (*handle.fds, data_fd)
        return Writer().u8(_OK).blob(encode_fence_handle(handle), limit=_MAX_HANDLE_NBYTES).done()

    def close(self) -> None:
        """End the role in progress, when the peer is gone or the session closes. May be called again.

        A step that another thread is doing is not disturbed, since it reads memory that this would unmap: that thread
        ends the role behind it.
        """
        with self._lock:
            self._closed = True
            if self._answering:
                return
        self._end()

    def _closed_meanwhile(self) -> bool:
        with self._lock:
            self._answering = False
            return self._closed

    def _end(self) -> None:
        self._forget_sent()
        self._end_role()

    def _forget_sent(self) -> None:
        sent, self._sent = self._sent, ()
        close_fds(sent)

    def _end_role(self) -> None:
        role, self._role = self._role, None
        if role is not None:
            role.close()
