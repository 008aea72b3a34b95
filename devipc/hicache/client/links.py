"""EngineLink: how a client reaches its engine, whichever deployment that is.

Owns the contract only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from devipc.hicache.client.ticket import ClientWord, WaitFence
from devipc.hicache.layout import PoolLayout
from devipc.hicache.operations import Event
from devipc.hicache.policy import WritePolicy
from devipc.hicache.requests import Answers, CancelWord, CompletionFence, ReadyPoint, RegisterPool, Request
from devipc.hicache.tier.index import IndexReader
from devipc.hicache.wire.waiting import Waiters
from devipc.interfaces.transfer import Stream

__all__ = ["EngineLink", "LinkAnswers", "LinkFence", "LinkWord", "PoolMemory"]


class LinkFence(CompletionFence, WaitFence, Protocol):
    """A completion fence of one operation: the end that is sent along, and the one that stays."""


class LinkWord(CancelWord, ClientWord, Protocol):
    """A cancel word of one operation: both ends of it."""


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """A pool of the client, and where its memory is.

    Parameters
    ----------
    number, generation : int
        Its identity with the client.
    layout : PoolLayout
        Where the bytes of a page lie.
    namespace : bytes
        Digest.
    exports : tuple of (int, int)
        Address in this process and length in bytes of each chunk.
    """

    number: int
    generation: int
    layout: PoolLayout
    namespace: bytes
    exports: tuple[tuple[int, int], ...]

    def share_name(self, chunk: int) -> str:
        """Return the name under which a chunk is shared with an engine in another process."""
        return f"pool/{self.number}/{self.generation}/{chunk}"

    def request(self, op: int, addresses: tuple[int, ...] = ()) -> RegisterPool:
        """Return the request that makes it known; ``addresses`` are the engine's."""
        return RegisterPool(
            op=op,
            pool=self.number,
            generation=self.generation,
            layout=self.layout,
            addresses=addresses,
            namespace=self.namespace,
        )


class LinkAnswers(Answers, Protocol):
    """What a link tells its client, beside answers: its engine may end, and be followed by another."""

    def attachment_dying(self, ops: Collection[int]) -> None:
        """The engine that had these operations is dying: they have no answer any more. Others follow elsewhere."""
        ...

    def attachment_gone(self, ops: Collection[int]) -> None:
        """Nothing of the engine that had these operations can touch a page any more."""
        ...

    def attached_again(self, reader: IndexReader) -> None:
        """Another engine serves; the reader of its index is the client's."""
        ...


class EngineLink(Protocol):
    """Carries requests there, and answers back in order for each operation. Any thread."""

    @property
    def layer_groups(self) -> Sequence[int]:
        """Sizes of the engine's first layer groups."""
        ...

    @property
    def write_policy(self) -> WritePolicy:
        """When pages should be backed up, where the caller has no opinion."""
        ...

    def attach(self, answers: LinkAnswers) -> None:
        """Begin; from now on answers may come."""
        ...

    def reader(self) -> IndexReader:
        """Return a reader of the index, which is the caller's. To be called once, before :meth:`attach`."""
        ...

    def reach(self, pool: PoolMemory) -> tuple[int, ...]:
        """Make a pool's memory reachable for the engine, and for those that follow it.

        Returns the addresses there, or nothing where the engine finds them by itself.
        """
        ...

    def unreach(self, pool: int, timeout_s: float) -> None:
        """Take that back, once the engine was asked to forget the pool.

        Raises
        ------
        CompletionTimeout
            While the engine may touch the memory; may be called again.
        """
        ...

    def ready(self, stream: Stream) -> ReadyPoint:
        """Return a point behind all work of ``stream`` so far."""
        ...

    def fence(self) -> LinkFence:
        """Return a fence for one operation."""
        ...

    def word(self, fence: LinkFence) -> LinkWord:
        """Return the cancel word of the operation that has this fence."""
        ...

    def submit(self, request: Request) -> None:
        """Hand a request over. Does not wait for what becomes of it; answers a refusal where nobody else would."""
        ...

    def tell(self, op: int, event: Event) -> None:
        """Say something about an operation that was submitted. Does not wait."""
        ...

    def ended(self, op: int) -> None:
        """Note that an operation has its status on the client's side."""
        ...

    def wait(self, done: Callable[[], bool], waiters: Waiters, deadline: float) -> bool:
        """Wait as :func:`devipc.hicache.wire.waiting.park` does, and see to it that answers come meanwhile."""
        ...

    def attend(self) -> None:
        """Note that somebody wants to be called rather than to wait."""
        ...

    def status(self) -> dict[str, object]:
        """Return whether an engine serves, and what is missing, as JSON-ready values. Asks nobody."""
        ...

    def close(self, timeout_s: float) -> None:
        """Leave: when this returns, the engine touches nothing of the client's.

        Raises
        ------
        CompletionTimeout
            When it still does; may be called again.
        """
        ...
