"""What a client asks of an engine, and the small contracts of what a request carries.

Owns the shape of requests, the same for every deployment. It knows neither how a request travels nor who serves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from devipc.hicache.layout import PoolLayout
from devipc.hicache.operations import Event, Kind
from devipc.hicache.results import Answer
from devipc.interfaces.transfer import Stream
from devipc.types import PoisonReason

__all__ = [
    "Answers",
    "Backup",
    "CancelWord",
    "CompletionFence",
    "Flush",
    "Invalidate",
    "Keys",
    "Lookup",
    "PageIds",
    "Ping",
    "PoolRequest",
    "Prefetch",
    "ReadyPoint",
    "RegisterPool",
    "Request",
    "Restore",
    "SignalledFence",
    "StatusRequest",
    "UnregisterPool",
]

Keys = npt.NDArray[np.uint8]
"""Page keys, uint8 ``(n, 16)``."""
PageIds = npt.NDArray[np.int64]
"""Page ids in a pool, int64 ``(n,)``."""


class ReadyPoint(Protocol):
    """Work of the client that must be done before a copy touches its pages. The engine asks, and never waits on it."""

    def reached(self) -> bool:
        """Return True when that work is done. Raises FencePoisoned when it never will be."""
        ...


class CompletionFence(Protocol):
    """A timeline of one operation, whose end the engine tells: 1 .. n for the layer groups of a restore, else 1."""

    def settle(self) -> None:
        """Note that all values are reached: the engine has seen the last copy complete."""
        ...

    def poison(self, reason: PoisonReason) -> None:
        """Release all waiters as failed, unless it was settled."""
        ...


class SignalledFence(CompletionFence, Protocol):
    """One that is signalled by whoever has the stream."""

    def signal(self, stream: Stream, n: int) -> None:
        """Let ``n`` be reached once all work on ``stream`` so far is done."""
        ...


class CancelWord(Protocol):
    """Set by a client that gives up, before it uses its pages again; read by the engine before it publishes."""

    def is_set(self) -> bool:
        """Return True once the client gave up."""
        ...


class Answers(Protocol):
    """Where an engine's answers to one client go. Called on the engine's threads, in order for each operation."""

    def answer(self, op: int, event: Event, answer: Answer, passed: tuple[Event, ...] = ()) -> None:
        """Deliver what the engine says about operation ``op``. Must not block, nor call back into a lock of its own.

        ``passed`` has happened just before ``event``, and is told with it: the answer is that of all.
        """
        ...

    def engine_dying(self) -> None:
        """The engine serves nobody any more."""
        ...

    def engine_gone(self) -> None:
        """Nothing of the engine can touch a page any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What every request carries: the client's number for it, used once."""

    kind: ClassVar[Kind]
    op: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterPool(Request):
    """Make a pool known.

    Parameters
    ----------
    pool, generation : int
        The client's number of the pool, and of this layout of it; both only grow.
    layout : PoolLayout
        Where the bytes of a page lie.
    addresses : tuple of int
        Device address of each chunk, in the engine's process; empty where another process opens them by name.
    namespace : bytes
        16 bytes that stand for everything beside tokens that decides a page's content.
    """

    kind: ClassVar[Kind] = Kind.REGISTER_POOL
    pool: int
    generation: int
    layout: PoolLayout
    addresses: tuple[int, ...]
    namespace: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest(Request):
    """A request about one generation of a pool."""

    pool: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnregisterPool(PoolRequest):
    """Forget a pool once no copy touches it any more."""

    kind: ClassVar[Kind] = Kind.UNREGISTER


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup(PoolRequest):
    """Copy pages to the host tier.

    Parameters
    ----------
    pages, keys : numpy.ndarray
        Page ids, and the key of each.
    ready : ReadyPoint
        When the pages hold what they shall.
    fence : CompletionFence
        Reaches 1 when the pages may be reused.
    cancel : CancelWord
        Read before anything is published.
    timeout_s : float
        After which the engine gives up.
    confirmed : bool
        The client needs not confirm: the pages depend on no restore.
    partial : bool
        Store the first pages when not all of them fit the host tier, instead of refusing.
    """

    kind: ClassVar[Kind] = Kind.BACKUP
    pages: PageIds
    keys: Keys
    ready: ReadyPoint
    fence: CompletionFence
    cancel: CancelWord
    timeout_s: float
    confirmed: bool
    partial: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore(PoolRequest):
    """Copy pages to the device.

    Parameters
    ----------
    pages, keys : numpy.ndarray
        Destinations, and the key of each.
    ready : ReadyPoint
        When the destinations may be overwritten.
    fence : CompletionFence
        Reaches n when the n-th layer group is in place.
    timeout_s : float
        After which the engine gives up.
    partial : bool
        Restore what is there when pages are missing, instead of refusing.
    """

    kind: ClassVar[Kind] = Kind.RESTORE
    pages: PageIds
    keys: Keys
    ready: ReadyPoint
    fence: CompletionFence
    timeout_s: float
    partial: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup(PoolRequest):
    """Find pages and keep what was found for ``lease_s`` seconds at most."""

    kind: ClassVar[Kind] = Kind.LOOKUP
    keys: Keys
    lease_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch(PoolRequest):
    """Bring pages from the storage tier to the host tier."""

    kind: ClassVar[Kind] = Kind.PREFETCH
    keys: Keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Invalidate(PoolRequest):
    """Forget pages, those that are being written included."""

    kind: ClassVar[Kind] = Kind.INVALIDATE
    keys: Keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush(PoolRequest):
    """Forget all pages of the pool's namespace, those that are being written included."""

    kind: ClassVar[Kind] = Kind.FLUSH


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRequest(Request):
    """Ask what the engine does."""

    kind: ClassVar[Kind] = Kind.STATUS


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping(Request):
    """Ask whether anybody is there: answered by whoever takes requests, before any engine."""

    kind: ClassVar[Kind] = Kind.PING
