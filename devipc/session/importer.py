"""Importer: the end that connects.

Owns one connection. It drives the choice of the completion strategy for both ends.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from os import PathLike

from devipc import completion
from devipc.channel.link import Link, PeerState
from devipc.completion import Decision
from devipc.interfaces.backend import Backend
from devipc.session.endpoint import DEFAULT_TIMEOUT_S, Endpoint
from devipc.session.messages import agreed_strategy
from devipc.session.peer import Peer
from devipc.session.remote import RemoteMemory
from devipc.types import Strategy

__all__ = ["Importer"]


class Importer(Endpoint):
    """Open what an exporter shares. It can share and make fences as well: the ends differ only in who connects.

    Parameters
    ----------
    path : path-like
        The exporter's socket.
    backend, device, strategy, timeout_s
        See :class:`~devipc.session.Endpoint`; ``timeout_s`` also bounds the connecting.

    Raises
    ------
    PeerGone
        When nobody listens at ``path``.
    PeerRefused
        When the exporter runs as another user, or does not accept this one.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        backend: str | Backend = "host",
        device: str | None = None,
        strategy: Strategy | str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        allow_uids: Collection[int] = (),
    ) -> None:
        super().__init__(backend=backend, device=device, strategy=strategy, timeout_s=timeout_s)
        self._deciding = threading.Lock()
        link = Link.connect(path, facts=self.facts(), timeout_s=timeout_s, allowed_uids=allow_uids)
        try:
            self._peer = Peer(self, link)
            self._joined(self._peer)
            link.start()
        except BaseException:
            link.close()
            raise
        self._events.tell()

    @property
    def peer(self) -> Peer:
        """The exporter."""
        return self._peer

    @property
    def state(self) -> PeerState:
        """Whether the exporter is connected, closed, dying or gone."""
        return self._peer.state

    @property
    def decision(self) -> Decision:
        """How completion is learned here, with every candidate that was passed over and why."""
        return self._peer.decision

    def names(self) -> list[str]:
        """Return the names of the memory that the exporter shares now."""
        return self._peer.names()[0]

    def open(self, name: str, *, timeout_s: float | None = None, wait_s: float = 0.0) -> RemoteMemory:
        """Map what the exporter shares as ``name``; see :meth:`devipc.session.Peer.open`."""
        return self._peer.open(name, timeout_s=timeout_s, wait_s=wait_s)

    def open_all(
        self, names: Sequence[str], *, timeout_s: float | None = None, wait_s: float = 0.0
    ) -> list[RemoteMemory]:
        """Map several shares at once, side by side where possible; see :meth:`devipc.session.Peer.open_all`."""
        return self._peer.open_all(names, timeout_s=timeout_s, wait_s=wait_s)

    def open_fence(self, name: str, *, timeout_s: float | None = None, wait_s: float = 0.0) -> completion.Fence:
        """Open a fence of the exporter; see :meth:`devipc.session.Peer.open_fence`."""
        return self._peer.open_fence(name, timeout_s=timeout_s, wait_s=wait_s)

    def decide(self, peer: Peer) -> Decision:
        """Run the trials with the exporter, once; tell it what came out."""
        with self._deciding:
            decision = peer.known_decision
            if decision is None:
                wanted = agreed_strategy(self.strategy, peer.facts)
                decision = peer.adopt(completion.choose(self.device, peer, backend=self._backend, strategy=wanted))
                peer.announce_decision(decision)
            return decision
