"""The desk: where a client's operations get their numbers and tickets, and where answers find them.

Owns the numbering, the open tickets and the thread for callbacks. It knows neither what operations mean nor which
deployment carries them.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence

from devipc.errors import ClosedError, DevIPCError, ForkError, UsageError
from devipc.hicache.client.callbacks import CallbackThread
from devipc.hicache.client.links import EngineLink
from devipc.hicache.client.ticket import ClientWord, OperationFence, Ticket
from devipc.hicache.operations import Event, Status
from devipc.hicache.requests import Backup, Request
from devipc.hicache.results import Answer
from devipc.hicache.tier.index import IndexReader

__all__ = ["CALL_TIMEOUT_S", "Desk", "check_tickets", "confirm_after"]

CALL_TIMEOUT_S = 10.0
"""How long a question is waited for that copies nothing."""


class Desk:
    """See the module. Fulfils :class:`~devipc.hicache.client.links.LinkAnswers`. Any thread.

    Parameters
    ----------
    link : EngineLink
        Carries requests; attached here.
    on_dying : callable
        Called when the engine is dying.
    on_reader : callable
        Called with the reader of another engine's index.
    """

    def __init__(
        self, link: EngineLink, *, on_dying: Callable[[], None], on_reader: Callable[[IndexReader], None]
    ) -> None:
        self._link = link
        self._on_dying = on_dying
        self._on_reader = on_reader
        self._numbers = threading.Lock()  # an engine takes operations in the order of their numbers
        self._ops = itertools.count(1)
        self._tickets: dict[int, Ticket] = {}
        self._callbacks = CallbackThread()
        self.closed = False
        self._pid = os.getpid()
        link.attach(self)

    @property
    def forked(self) -> bool:
        """True in a child of the process that made it: the engine's threads are not there, its locks may be held."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raise ForkError in another process."""
        if self.forked:
            raise ForkError("this client belongs to the process that forked", remedy="connect in the child, after exec")

    def check_open(self) -> None:
        """Raise ClosedError once the client is closed, or its engine is dying; ForkError in another process."""
        self.check_process()
        if self.closed:
            raise ClosedError("the client is closed, or its engine is", remedy="connect again")

    def open_tickets(self) -> list[Ticket]:
        """Return the operations that have no status."""
        return list(self._tickets.values())

    def close(self, timeout_s: float) -> None:
        """End the thread for callbacks; to be called when every ticket has its status."""
        self._callbacks.close(timeout_s)

    # --- what the link calls -----------------------------------------------------------------------------------------

    def answer(self, op: int, event: Event, answer: Answer, passed: tuple[Event, ...] = ()) -> None:
        """Take an answer. For the link alone."""
        ticket = self._tickets.get(op)
        if ticket is not None:
            ticket.take(event, answer, passed)

    def engine_dying(self) -> None:
        """Miss everything from now on; destinations of restores are quarantined. For the link alone."""
        self.closed = True
        self._on_dying()
        for ticket in list(self._tickets.values()):
            ticket.happen(Event.ENGINE_DYING)

    def engine_gone(self) -> None:
        """End what was quarantined. For the link alone."""
        for ticket in list(self._tickets.values()):
            ticket.happen(Event.ENGINE_GONE)

    def attachment_dying(self, ops: Collection[int]) -> None:
        """End, or quarantine, what this engine had; others follow it. For the link alone."""
        self._on_dying()
        self._happen(ops, Event.ENGINE_DYING)

    def attachment_gone(self, ops: Collection[int]) -> None:
        """End what was quarantined of this engine's. For the link alone."""
        self._happen(ops, Event.ENGINE_GONE)

    def attached_again(self, reader: IndexReader) -> None:
        """Search in another engine's index from now on. For the link alone."""
        self._on_reader(reader)

    def _happen(self, ops: Collection[int], event: Event) -> None:
        for op in ops:
            ticket = self._tickets.get(op)
            if ticket is not None:
                ticket.happen(event)

    @property
    def quarantined_pages(self) -> int:
        """Pages that a dying engine may still write to."""
        return sum(len(ticket.results) for ticket in self.open_tickets() if ticket.state == "quarantined")

    # --- submitting --------------------------------------------------------------------------------------------------

    def submit(
        self,
        request: Callable[[int], Request],
        *,
        page_count: int = 0,
        fence: OperationFence | None = None,
        cancel: ClientWord | None = None,
    ) -> Ticket:
        """Number a request, make its ticket, and hand it over.

        Raises
        ------
        ClosedError
            When the client is closed, or its engine is dying.
        """
        if self.closed or os.getpid() != self._pid:
            self.check_open()
        with self._numbers:
            if self.closed:  # meanwhile
                self.check_open()
            asked = request(next(self._ops))
            ticket = Ticket(
                asked.op,
                asked.kind,
                page_count=page_count,
                tell=self._link.tell,
                defer=self._callbacks.later,
                wait=self._link.wait,
                attend=self._link.attend,
                forget=self._forget,
                fence=fence,
                cancel=cancel,
            )
            self._tickets[asked.op] = ticket
            if isinstance(asked, Backup) and asked.confirmed:
                ticket.confirmed_with_request()
            try:
                self._link.submit(asked)
            except DevIPCError:
                self._forget(asked.op)
                raise
            except BaseException:  # an interrupt: it may have begun, and nobody will have its ticket
                ticket.submitted()
                if not ticket.happen(Event.RELEASE_LEASE):
                    ticket.cancel()
                raise
        ticket.submitted()
        return ticket

    def ask(self, request: Callable[[int], Request]) -> Ticket:
        """Submit what is answered without a copy, and block until it is completed; raises as :meth:`Ticket.result`."""
        ticket = self.submit(request)
        ticket.result(CALL_TIMEOUT_S)
        return ticket

    def _forget(self, op: int) -> None:
        self._tickets.pop(op, None)
        self._link.ended(op)


def check_tickets(tickets: object) -> tuple[Ticket, ...]:
    """Return the tickets on which an operation is about to depend; to be called before it is submitted."""
    found = tuple(tickets) if isinstance(tickets, Iterable) else (tickets,)
    if not all(isinstance(one, Ticket) for one in found):
        raise UsageError(f"{found!r} are no tickets", code="ticket", remedy="pass what restore() or lookup() returned")
    return found


def confirm_after(ticket: Ticket, after: Sequence[Ticket]) -> None:
    """Confirm ``ticket`` when all of ``after`` are completed, and discard it when one is not."""
    left = set(range(len(after)))
    lock = threading.Lock()

    def ended(number: int) -> None:
        if after[number].status is not Status.COMPLETED:
            ticket.discard()
            return
        with lock:
            left.discard(number)
            last = not left
        if last:
            ticket.confirm()

    for number, one in enumerate(after):
        one.add_hook(lambda number=number: ended(number))  # type: ignore[misc]
