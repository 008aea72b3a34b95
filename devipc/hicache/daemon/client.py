"""One attached client: its frames become requests, its answers frames, and when it goes, it is taken apart.

Owns the thread that serves the client, and the order in which what it has is given back: nothing more is begun, what
moves is drained, the engine process lets go of its memory, and only then the client is forgotten. It knows neither
other clients nor how an engine is started.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import Any, Protocol

import numpy as np

from devipc.channel.link import Link, PeerState
from devipc.deadline import deadline_after, remaining, start_thread
from devipc.errors import ClosedError, CompletionTimeout, DevIPCError, HandleError, PeerGone, ProtocolError, WireError
from devipc.hicache.daemon.outbox import Outbox
from devipc.hicache.engine.session import Session
from devipc.hicache.operations import Event
from devipc.hicache.requests import Answers
from devipc.hicache.results import Answer, PageResult
from devipc.hicache.wire import protocol as p
from devipc.hicache.wire.codec import Named, request_of
from devipc.hicache.wire.transport import Transport
from devipc.types import PoisonReason

__all__ = ["AttachedClient", "Host", "OperationNumbers"]

_LOOK_S = 0.1
_FLUSH_S = 0.05
_TRANSFERS = (p.BackupFrame, p.RestoreFrame)  # a union would be made anew for each operation
_LETTING_GO_S = 5.0
_KEPT_WHILE_DRAINING = (p.UnregisterFrame, p.InvalidateFrame, p.FlushFrame, p.StatusFrame)
_log = logging.getLogger("devipc.hicache")


class Host(Protocol):
    """What a client needs of its supervisor."""

    @property
    def refusal(self) -> DevIPCError | None:
        """Why nothing new is begun; None while it is."""
        ...

    def status(self) -> dict[str, Any]:
        """Return what the daemon does."""
        ...

    def let_go(self, client: AttachedClient, timeout_s: float) -> None:
        """Have the engine process give up what it has of a client of which nothing moves. Blocks.

        When it returns, nothing of the client's memory is mapped.

        Raises
        ------
        CompletionTimeout
            When that is not so yet; may be called again.
        """
        ...

    def forget(self, client: AttachedClient) -> None:
        """Note that a client is over."""
        ...


class OperationNumbers(Named, Protocol):
    """What the numbers in a request stand for. The one thread that asks says first which operation it is about."""

    op: int


class AttachedClient(Answers):
    """See the module. Any thread.

    Parameters
    ----------
    client : bytes
        Its id: 16 bytes, one life of one client object.
    link : Link
        Its connection, on which it greeted; closed with the client.
    transport : Transport
        Owned.
    numbers : OperationNumbers
        What its numbers stand for.
    host : Host
        Its supervisor.
    way : str
        How its frames travel.
    joins : bool
        It takes several events in one answer.
    """

    def __init__(
        self,
        client: bytes,
        link: Link,
        transport: Transport,
        numbers: OperationNumbers,
        *,
        host: Host,
        way: str,
        joins: bool,
    ) -> None:
        self.client = client
        self.link = link
        self.way = way
        self.since = time.monotonic()
        self._submitted: Counter[type[p.RequestFrame]] = Counter()
        self.session: Session  # set before start()
        self._transport = transport
        self._numbers = numbers
        self._host = host
        self._outbox = Outbox(transport, joins=joins)
        self._why: DevIPCError | None = None
        self._leaving = threading.Event()
        self._left_at = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="devipc-hicache-client", daemon=True)

    def start(self) -> None:
        """Begin to serve.

        Raises
        ------
        ResourceExhausted
            When no thread is to be had; the caller gives everything back.
        """
        self.link.on_state(self._on_state)
        start_thread(self._thread, "serve a client")

    def counts(self) -> Counter[tuple[str, str]]:
        """Return requests taken, by kind, and answers given, by event."""
        found = Counter(
            {("submitted", str(kind.__struct_config__.tag)): n for kind, n in self._submitted.copy().items()}
        )
        found.update({("answered", str(event)): count for event, count in self._outbox.answered.items()})
        return found

    @property
    def over(self) -> bool:
        """True once nothing of it is left."""
        return self._over.is_set()

    def wait_over(self, timeout_s: float) -> bool:
        """Block until nothing of it is left; False when the time is up."""
        return self._over.wait(timeout_s)

    def describe(self) -> dict[str, object]:
        """Return who it is and what it has, as JSON-ready values."""
        return {
            "client": self.client.hex(),
            "pid": self.link.peer.pid,
            "uid": self.link.peer.uid,
            "way": self.way,
            "attached_s": time.monotonic() - self.since,
            "leaving": self._leaving.is_set(),
            "pools": self.session.pool_count,
            "open": len(self.session.open_ops()),
            "waiting_answers": len(self._outbox.waiting),
        }

    # --- Answers -----------------------------------------------------------------------------------------------------

    def answer(self, op: int, event: Event, answer: Answer, passed: tuple[Event, ...] = ()) -> None:
        """See :class:`~devipc.hicache.requests.Answers`."""
        self._outbox.answer(op, event, answer, passed)

    def engine_dying(self) -> None:
        """See :class:`~devipc.hicache.requests.Answers`."""
        self.hang_up(ClosedError("the daemon ends", remedy="connect again"))

    def engine_gone(self) -> None:
        """See :class:`~devipc.hicache.requests.Answers`."""

    # --- the end -----------------------------------------------------------------------------------------------------

    def hang_up(self, why: DevIPCError) -> None:
        """Begin the end: nothing more is taken. Never blocks; the first reason stays."""
        self._why = self._why or why
        self._left_at = self._left_at or time.monotonic()
        self._leaving.set()

    def leaving_s(self) -> float:
        """Return for how many seconds its end has been going on; 0 while it is served."""
        return time.monotonic() - self._left_at if self._left_at else 0.0

    def leave(self, timeout_s: float) -> None:
        """Let go of everything because the client asks; its connection stays.

        Raises
        ------
        CompletionTimeout
            With code ``stalled_stream`` when copies still run on its pages, or the engine process may still map them;
            may be called again.
        """
        deadline = deadline_after(timeout_s)
        self.session.dying()
        if not self.session.wait_idle(timeout_s=timeout_s):
            raise CompletionTimeout(
                f"operations of this client still use its pages, or the engine unmaps them, after {timeout_s:g} s",
                code="stalled_stream",
                remedy="free no pool yet; find out what the engine's stream waits for, then leave again",
            )
        try:
            self._host.let_go(self, max(remaining(deadline), _FLUSH_S))
        except CompletionTimeout as error:
            raise CompletionTimeout(error.message, code="stalled_stream", remedy=error.remedy) from error

    def _on_state(self, state: PeerState) -> None:
        self.hang_up(PeerGone(f"the client is {state.value}"))
        self._transport.end(PeerGone(f"the client is {state.value}"))

    def _run(self) -> None:
        try:
            self._serve()
        except PeerGone as error:
            self.hang_up(error)
        except DevIPCError as error:
            if not self._leaving.is_set():
                _log.warning("client %s of process %d: %s", self.client.hex()[:8], self.link.peer.pid, error)
            self.hang_up(error)
        except BaseException as error:  # also those that would end a thread without a word
            _log.exception("a defect while a client was served, which ends the client")
            self.hang_up(ProtocolError(f"{type(error).__name__}: {error}", code="internal"))
        finally:
            self._take_apart()

    def _take_apart(self) -> None:
        self.session.dying()
        while not self.session.wait_idle(timeout_s=_LOOK_S):
            self._flush()
        self._flush()
        while not self._is_let_go():  # or the watchdog ends the engine
            _log.warning("the engine still maps memory of client %s", self.client.hex()[:8])
        self._outbox.end()
        self.link.close()
        self._transport.close()
        self._host.forget(self)
        self._over.set()

    def _is_let_go(self) -> bool:
        try:
            self._host.let_go(self, _LETTING_GO_S)
        except CompletionTimeout:
            return False
        return True

    def _flush(self) -> None:
        try:
            self._outbox.flush(timeout_s=_FLUSH_S)
        except DevIPCError:
            self._outbox.end()

    # --- serving -----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        # Every operation of every client comes through here: names are looked up once.
        outbox, take, decode, leaving = self._outbox, self._transport.take, p.decode_request, self._leaving.is_set
        while not leaving():
            if outbox.waiting and not outbox.flush(timeout_s=_FLUSH_S):
                continue  # it takes no answers, so nothing more is taken from it
            try:
                frame = decode(take(timeout_s=_LOOK_S))
            except CompletionTimeout:
                continue
            if isinstance(frame, p.PingFrame):
                outbox.completed(frame.op)
            elif isinstance(frame, p.TellFrame):
                self.session.tell(frame.op, frame.event)
            else:
                self._submit(frame)

    def _submit(self, frame: p.RequestFrame) -> None:
        self._submitted[type(frame)] += 1
        refusal = self._host.refusal
        if refusal is not None and not isinstance(frame, _KEPT_WHILE_DRAINING):
            self._refuse(frame, refusal)
            return
        if isinstance(frame, p.StatusFrame):
            self._outbox.answer(frame.op, Event.COMPLETED, Answer(detail=self._host.status()))
            return
        if isinstance(frame, _TRANSFERS):
            self.session.announce(backup=isinstance(frame, p.BackupFrame))
        try:
            self._numbers.op = frame.op
            request = request_of(frame, self._numbers)
        except HandleError as error:
            if isinstance(error, WireError) or not isinstance(frame, p.RegisterPoolFrame):
                raise
            self._refuse(frame, error)
            return
        self.session.submit(request)

    def _refuse(self, frame: p.RequestFrame, error: DevIPCError) -> None:
        """Answer without the engine's knowing of it."""
        results = None
        if isinstance(frame, _TRANSFERS):
            self._numbers.op = frame.op
            self._numbers.fence(frame.slot).poison(PoisonReason.CANCELLED)
            results = np.full(len(frame.pages) // 8, PageResult.NOT_DONE, np.uint8)
        self._outbox.answer(frame.op, Event.REFUSED, Answer(results, error))
