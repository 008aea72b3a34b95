"""Any operation on the engine's side: its table, its state, and what the client is told.

Owns the order in which an operation ends: what it holds is given back, the client is told, then its keeper. It knows
no device and no page.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from devipc.hicache.operations import Event, Kind, Side, step, table_of, terminal_of
from devipc.hicache.requests import Request
from devipc.hicache.results import Answer

__all__ = ["EngineOp", "Tell"]


_TABLES = {kind: (table_of(kind, Side.ENGINE), terminal_of(kind, Side.ENGINE)) for kind in Kind}


class Tell(Protocol):
    """Delivers to the client; see :class:`~devipc.hicache.requests.Answers`."""

    def __call__(self, op: int, event: Event, answer: Answer, passed: tuple[Event, ...] = (), /) -> None:
        """Deliver."""
        ...


class EngineOp:
    """See the module. Stepped by one thread at a time.

    Parameters
    ----------
    request : Request
        What was asked.
    owner : bytes
        The client's instance.
    tell : callable
        Delivers to the client.
    on_end : callable
        Called once, after the client was told the status.
    """

    def __init__(self, request: Request, owner: bytes, tell: Tell, on_end: Callable[[EngineOp], None]) -> None:
        self.op = request.op
        self.kind = request.kind
        self.holder = (owner, request.op)
        self.began = time.monotonic()
        self._table, self._terminal = _TABLES[request.kind]
        self._tell = tell
        self._on_end = on_end
        self.state = self._table.initial

    @property
    def owner(self) -> bytes:
        """Whose it is."""
        return self.holder[0]

    @property
    def ended(self) -> bool:
        """True once it has its status."""
        return self.state in self._terminal

    def overdue_s(self, now: float) -> float:
        """Return for how many seconds it should have ended, at the monotonic time ``now``; 0 while it may go on."""
        return 0.0

    def allows(self, event: Event) -> bool:
        """Return True when ``event`` may happen now."""
        return (self.state, event) in self._table.transitions

    def step(self, event: Event) -> None:
        """Take one step of the table: give back what is held when that ends it, then tell the client."""
        following = step(self._table, self.state, event)
        self.state = following.state
        if self.ended:
            self.give_back()
        try:
            if following.tells is not None:
                self._tell(self.op, following.tells, self.answer())
        finally:
            if self.ended:
                self._on_end(self)

    def answer(self) -> Answer:
        """Return what the client learns now."""
        return Answer()

    def give_back(self) -> None:
        """Give back what the operation holds; called once, in its last state."""
