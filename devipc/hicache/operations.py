"""What may happen to an operation, on either side: tables of states, events and what one side tells the other.

Owns the rule that an operation ends in exactly one status per side, and the pictures of it. It performs nothing: who
copies, waits or sends asks :func:`step` for the next state, and does what the table says to send.

Some things hold in every table. On the client's side a status means that the operation's pages are the client's own
again; until then they belong to the operation, however long it takes. ``give_up`` sets the operation's cancel word
before anything else, and the engine looks at that word after it saw the copy complete and before it publishes
(``word_clear``, ``word_set``). What a side is told after its own status is dropped by the operation's id, and so is
what the other side said before it was seen dying.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from devipc.errors import ProtocolError, UsageError
from devipc.hicache import tables

__all__ = ["TABLES", "Event", "Kind", "Side", "Status", "Table", "diagram", "step", "table_of", "terminal_of"]


class Kind(enum.StrEnum):
    """Operations; those that only ask and answer share the table ``call``."""

    BACKUP = "backup"
    RESTORE = "restore"
    PREFETCH = "prefetch"
    LOOKUP = "lookup"
    UNREGISTER = "unregister"
    REGISTER_POOL = "register_pool"
    RELEASE = "release"
    INVALIDATE = "invalidate"
    FLUSH = "flush"
    STATUS = "status"
    PING = "ping"


class Side(enum.StrEnum):
    """Who keeps the state: the one that asked, or the one that moves bytes."""

    CLIENT = "client"
    ENGINE = "engine"


class Status(enum.StrEnum):
    """How an operation ended on one side."""

    COMPLETED = "completed"
    """Done; each page has a result of its own."""
    REFUSED = "refused"
    """Nothing was begun: busy, stale, out of bounds."""
    CANCELLED = "cancelled"
    """Given up by the client."""
    DISCARDED = "discarded"
    """A fence that it depended on was poisoned: nothing was published."""
    FAILED = "failed"
    """A copy, a storage tier or a driver failed."""
    TIMED_OUT = "timed_out"
    """The operation's own deadline passed at the engine."""
    EXPIRED = "expired"
    """A lease ended because nobody used it."""
    LOST = "lost"
    """The other side died."""


class Event(enum.StrEnum):
    """What moves a state. Those that a peer sends are spelled as the sender's table spells them."""

    # decided or seen by the engine
    ADMIT = "admit"
    REFUSE = "refuse"
    FENCE_READY = "fence_ready"
    FENCE_POISONED = "fence_poisoned"
    COPIED = "copied"
    COPY_FAILED = "copy_failed"
    DRAINED = "drained"
    WORD_CLEAR = "word_clear"
    WORD_SET = "word_set"
    PUBLISH = "publish"
    STORED_PAGES = "stored_pages"
    STORE_FAILED = "store_failed"
    FINISH = "finish"
    DEADLINE = "deadline"
    FOUND = "found"
    EXPIRE = "expire"
    CLIENT_DYING = "client_dying"
    # decided or seen by the client
    GIVE_UP = "give_up"
    CONFIRM_FENCES = "confirm_fences"
    DISCARD_BATCH = "discard_batch"
    USE_LEASE = "use_lease"
    RELEASE_LEASE = "release_lease"
    ENGINE_DYING = "engine_dying"
    ENGINE_GONE = "engine_gone"
    # told by the client
    CANCEL = "cancel"
    CONFIRMED = "confirmed"
    DISCARD = "discard"
    USE = "use"
    RELEASE = "release"
    # told by the engine: progress, then a status
    ADMITTED = "admitted"
    SOURCE_RELEASED = "source_released"
    VISIBLE = "visible"
    STORED = "stored"
    LEASED = "leased"
    COMPLETED = "completed"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    DISCARDED = "discarded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    EXPIRED = "expired"


REQUESTS = frozenset({Event.CANCEL, Event.CONFIRMED, Event.DISCARD, Event.USE, Event.RELEASE})
"""What a client tells the engine after it submitted."""

ANSWERS = frozenset(list(Event)[list(Event).index(Event.ADMITTED) :])
"""What the engine tells a client."""


@dataclass(frozen=True, slots=True)
class Transition:
    """What follows an event: the next state, and what the other side is told (None: nothing)."""

    state: str
    tells: Event | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """All that may happen to one kind of operation on one side.

    Parameters
    ----------
    name : str
        Kind, or ``call`` for those that only ask and answer.
    side : Side
        Whose states they are.
    initial : str
        State in which an operation begins.
    transitions : mapping of (state, event) to Transition
        Everything that is allowed. States without a transition are terminal, and are a :class:`Status` each.
    """

    name: str
    side: Side
    initial: str
    transitions: Mapping[tuple[str, Event], Transition]

    @property
    def states(self) -> tuple[str, ...]:
        """All states, the initial one first, in the order of the table."""
        ordered = dict.fromkeys([self.initial, *(state for state, _ in self.transitions)])
        return tuple(ordered | dict.fromkeys(transition.state for transition in self.transitions.values()))

    @property
    def terminal(self) -> tuple[str, ...]:
        """States that nothing follows; each is a status."""
        sources = {state for state, _ in self.transitions}
        return tuple(state for state in self.states if state not in sources)

    def events(self, state: str) -> tuple[Event, ...]:
        """Return what is allowed in ``state``."""
        return tuple(event for source, event in self.transitions if source == state)


@cache
def terminal_of(kind: Kind, side: Side) -> frozenset[str]:
    """Return the terminal states of ``kind`` on ``side``; they are computed once."""
    return frozenset(table_of(kind, side).terminal)


def step(table: Table, state: str, event: Event) -> Transition:
    """Return what follows ``event`` in ``state``.

    Raises
    ------
    ProtocolError
        When the event is one that a peer sends, and does not belong here.
    UsageError
        For any other event that does not belong here.
    """
    found = table.transitions.get((state, event))
    if found is not None:
        return found
    message = f"{event.value!r} in state {state!r} of {table.name} on the {table.side.value}'s side"
    if event in REQUESTS or event in ANSWERS:
        raise ProtocolError(message, code="state", remedy="close the connection; the peer breaks the protocol")
    raise UsageError(message, code="state", remedy="step an operation only by what its state allows")


def diagram(table: Table) -> str:
    """Return a Mermaid state diagram of ``table``; ``/ word`` behind an event is what the other side is told."""
    lines = ["stateDiagram-v2", f"    [*] --> {table.initial}"]
    for (state, event), following in table.transitions.items():
        told = f" / {following.tells.value}" if following.tells else ""
        lines.append(f"    {state} --> {following.state}: {event.value}{told}")
    lines += [f"    {state} --> [*]" for state in table.terminal]
    return "\n".join(lines) + "\n"


def _parse(name: str, side: Side, text: str) -> Table:
    """Read a table: ``state: event -> state [/ told]``, one transition a line; the first state is the initial one."""
    transitions: dict[tuple[str, Event], Transition] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        state, rest = line.split(": ", 1)
        event, rest = rest.split(" -> ", 1)
        following, _, told = rest.partition(" / ")
        key = (state, Event(event))
        if key in transitions:
            raise UsageError(f"two rules for {line!r}", code="table", remedy="correct the table")
        transitions[key] = Transition(following, Event(told) if told else None)
    return Table(name, side, next(iter(transitions))[0], transitions)


def _all_tables() -> Iterator[Table]:
    for name, (client, engine) in tables.TEXT.items():
        yield _parse(name, Side.CLIENT, client)
        yield _parse(name, Side.ENGINE, engine)


TABLES: Mapping[tuple[str, Side], Table] = {(table.name, table.side): table for table in _all_tables()}
"""Every table by its name and side."""


def table_of(kind: Kind, side: Side) -> Table:
    """Return the table of ``kind`` on ``side``."""
    return TABLES.get((kind.value, side)) or TABLES["call", side]
