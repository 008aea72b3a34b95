"""One end of a session: its device, what it shares, its fences, and the peers it is connected to.

Owns what exporter and importer have in common. Everything it made or lent is given back when it closes, in an order
in which no peer ever reads memory that has already been freed.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Self

from devipc import completion
from devipc.absence import need_memory
from devipc.channel.identity import process_instance
from devipc.channel.link import PeerState
from devipc.completion import Decision, ProducerFence
from devipc.deadline import deadline_after, remaining
from devipc.errors import (
    ClosedError,
    CompletionTimeout,
    ForkError,
    UsageError,
)
from devipc.integrations import check_device, describe
from devipc.interfaces.backend import Backend, Device
from devipc.interfaces.memory import Allocation
from devipc.mappings import Mapping, MappingCache
from devipc.session.events import PeerEvent, PeerEvents
from devipc.session.fences import FenceTable
from devipc.session.messages import STRATEGY_FACT, encode_offers
from devipc.session.peer import Peer
from devipc.session.shares import Share, ShareTable
from devipc.types import HandleKind, Strategy
from devipc.undoing import try_each

__all__ = ["Endpoint", "PeerEvent"]

_log = logging.getLogger("devipc.session")
DEFAULT_TIMEOUT_S = 10.0
DECIDE_TIMEOUT_S = 100.0


class Endpoint(ABC):
    """Base of :class:`~devipc.session.Exporter` and :class:`~devipc.session.Importer`.

    Parameters
    ----------
    backend : str or Backend
        Name of an installed backend, or a backend object.
    device : str, optional
        Identity of the device; the backend's first when None.
    strategy : Strategy or str, optional
        Completion strategy to insist on: peers get this one or a :class:`~devipc.errors.CapabilityError`. None lets
        the peer insist, or the chooser decide.
    timeout_s : float
        Default deadline of every question to a peer.

    The device is opened here and stays open when the endpoint closes: other parts of the process may use it.
    """

    drives_trials = True

    def __init__(
        self,
        *,
        backend: str | Backend = "host",
        device: str | None = None,
        strategy: Strategy | str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if isinstance(backend, str):
            from devipc.registry import load_backend

            backend = load_backend(backend)
        self.timeout_s = timeout_s
        self.strategy = _strategy(strategy)
        self.backend_name = backend.name
        self._backend = backend
        self.device: Device = backend.open_device(device)
        self._memory = need_memory(self.device)
        self.instance = process_instance()
        self.shares = ShareTable(
            self._memory, backend=backend.name, device_uuid=self.device.info.uuid, instance=self.instance
        )
        self._events = PeerEvents()
        self._lock = threading.RLock()
        self._peers: list[Peer] = []
        self._arrived = threading.Condition(self._lock)
        self.fences = FenceTable(self.fence_device)
        self._allocations: list[Allocation] = []
        self._closed = False
        self._pid = os.getpid()

    # --- memory -------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, *, kind: HandleKind | None = None, zero: bool = True) -> Allocation:
        """Allocate shareable device memory; freed by :meth:`free` or when the endpoint closes."""
        self._check_open()
        allocation = self._memory.allocate(nbytes, kind=kind, zero=zero)
        with self._lock:
            closed = self._closed
            if not closed:
                self._allocations.append(allocation)
        if closed:
            self._memory.free(allocation)
            self._check_open()
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Free what :meth:`allocate` returned. Unshare it first: peers must not map freed memory."""
        self._check_process()
        with self._lock:
            if allocation not in self._allocations:
                raise UsageError("this endpoint has no such allocation", code="double_free", remedy="free it once")
            low, high = allocation.ptr, allocation.ptr + allocation.nbytes
            if self.shares.overlapping(low, high):
                raise UsageError(
                    "the allocation is still shared", code="shared", remedy="unshare it before you free it"
                )
            self._allocations.remove(allocation)
        self._memory.free(allocation)

    def share(self, name: str, obj: object, *, kind: HandleKind | None = None, writable: bool = True) -> Share:
        """Share the memory of ``obj`` under ``name`` with every peer that asks for it.

        Parameters
        ----------
        name : str
            1 to 255 bytes, unique in this endpoint.
        obj : object
            An :class:`~devipc.interfaces.memory.Allocation`, a tensor or array on this endpoint's device, or a pair
            (address, length in bytes). Never copied; kept alive until it is unshared.
        kind : HandleKind, optional
            Handle kind to insist on; the best that the memory allows when None.
        writable : bool
            What peers are told. No vendor enforces it for device memory.

        Raises
        ------
        UsageError
            For an object that is no memory, zero bytes, or a name in use.
        CapabilityError
            For memory that cannot be exported; names the kind and the allocator setting to change.
        """
        self._check_open()
        view = describe(obj)
        check_device(view, self.device.info)
        return self.shares.add(name, view, kind=kind, writable=writable)

    def unshare(self, name: str, *, timeout_s: float | None = None) -> None:
        """Take a share back: nobody can open it any more, peers are told, and their mappings are waited for.

        Raises
        ------
        CompletionTimeout
            When a peer still maps it. Freeing the memory would be unsafe; calling again goes on waiting.
        """
        self._check_process()
        share = self.shares.retire(name)
        for peer in self.peers:
            peer.revoke(share.handle.export_id)
        self.shares.finish(share, timeout_s=self.timeout_s if timeout_s is None else timeout_s)

    def new_generation(self, *, timeout_s: float | None = None) -> int:
        """Void everything shared so far, for all peers at once, and return the new generation.

        For a changed memory layout: share the new one afterwards. Blocks until no peer maps the old one.

        Raises
        ------
        CompletionTimeout
            When a peer still maps something old. It is void all the same, but its memory must not be freed yet;
            :meth:`free` and :meth:`close` know.
        """
        self._check_process()
        deadline = deadline_after(self.timeout_s if timeout_s is None else timeout_s)
        unfinished = self.shares.next_generation()
        for peer in self.peers:
            peer.announce_generation(self.shares.generation)
        for share in unfinished:
            self.shares.finish(share, timeout_s=remaining(deadline))
        return self.shares.generation

    # --- fences -------------------------------------------------------------------------------------------------------

    def create_fence(self, name: str, *, strategy: Strategy | str | None = None) -> ProducerFence:
        """Make a fence that this process signals, and share it under ``name``.

        Without ``strategy`` the one decided with the connected peer is used. The endpoint closes it at the end.

        Raises
        ------
        UsageError
            When no strategy is named and no peer is connected yet.
        CapabilityError
            When this device cannot signal that way.
        """
        self._check_open()
        chosen = _strategy(strategy) or self.strategy
        if chosen is None:
            peers = self.peers
            if not peers:
                raise UsageError("no strategy is decided without a peer", remedy="wait_peer() first, or name one")
            chosen = peers[-1].decision.strategy
        with self.driving():
            fence = self.fences.create(name, chosen)
        fence.driving = self.driving
        return fence

    @abstractmethod
    def decide(self, peer: Peer) -> Decision:
        """Return the decision for ``peer``, made if need be. The connecting side drives the trial."""

    # --- peers --------------------------------------------------------------------------------------------------------

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Peers that are connected now, oldest first."""
        with self._lock:
            return tuple(peer for peer in self._peers if peer.state is PeerState.CONNECTED)

    def wait_peer(self, *, timeout_s: float | None = None) -> Peer:
        """Block until a peer is connected; return the newest."""
        timeout = self.timeout_s if timeout_s is None else timeout_s
        deadline = deadline_after(timeout)
        with self._arrived:
            # One look at a time: a peer may leave between two, and then its first use says so.
            while not (arrived := self.peers):
                self._check_open()
                if not self._arrived.wait(remaining(deadline)) and not remaining(deadline):
                    raise CompletionTimeout(f"no peer connected within {timeout:g} s", remedy="start the other process")
            self._check_open()
            return arrived[-1]

    @property
    def events(self) -> queue.SimpleQueue[PeerEvent]:
        """Every change of a peer, in order; at most the newest 1,024 wait to be taken."""
        return self._events.taken

    def on_event(self, callback: Callable[[PeerEvent], None]) -> None:
        """Call ``callback(event)`` for every later change of a peer, in order, on a background thread.

        It holds no lock of the session and may use the session, but delays later events while it runs.
        """
        self._events.subscribe(callback)

    def peer_changed(self, peer: Peer, state: PeerState) -> None:
        """Record that ``peer`` is in a new state, and tell. Called by peers, with no lock held."""
        with self._arrived:
            self._events.note(PeerEvent(peer, state))
            self._arrived.notify_all()
        self._events.tell()

    def peer_left(self) -> None:
        """Forget peers that are over. Called by peers that have hung up."""
        with self._lock:
            self._peers = [peer for peer in self._peers if not peer.over]

    def new_mapping_cache(self, *, on_unmapped: Callable[[Mapping], None]) -> MappingCache:
        """Return an import cache for one peer."""
        return MappingCache(
            self._memory,
            instance=self.instance,
            on_unmapped=on_unmapped,
            driving=self.driving,
            on_refused=self.not_unmapped,
        )

    @property
    def fence_device(self) -> Device:
        """The device as fences use it; see :attr:`trial_device`."""
        return self.device

    @property
    def trial_device(self) -> Device:
        """The device as trials and offers use it: whoever watches this process may want to see these calls."""
        return self.device

    def driving(self) -> AbstractContextManager[object]:
        """Return what is entered, without a lock, by a thread that opens or closes what a peer shares, for as long."""
        return nullcontext()

    def not_unmapped(self, error: Exception) -> None:  # noqa: B027 - whoever waits for it hears it too
        """Hear, in :meth:`driving` and on any thread, why a peer's memory stays mapped that nobody uses any more."""

    def facts(self) -> dict[str, str]:
        """Return what peers are told about this end besides its environment."""
        own = {"backend": self.backend_name, "device": self.device.info.uuid}
        if self.strategy is not None:
            own[STRATEGY_FACT] = self.strategy.value
        return own | encode_offers(completion.offers(self.trial_device))

    def _joined(self, peer: Peer) -> None:
        """Count ``peer`` in; telling follows, when the caller has let go of the lock."""
        with self._arrived:
            self._peers.append(peer)
            self._events.note(PeerEvent(peer, PeerState.CONNECTED))
            self._arrived.notify_all()

    # --- closing ------------------------------------------------------------------------------------------------------

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Give everything back. Idempotent; blocks at most about ``timeout_s``.

        Peers are told and waited for. Memory that somebody still maps when the time is up stays allocated until this
        process ends, and a warning says so: freeing it would hand a peer somebody else's bytes.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._arrived.notify_all()
        deadline = deadline_after(timeout_s)
        with self._lock:
            peers = list(self._peers)
        kept: list[Share] = []
        # What this side consumes goes first: the other side's close may be waiting for it, as ours does for theirs.
        try_each(
            (
                *(lambda peer=peer: peer.close_fences(timeout_s=remaining(deadline) / 2) for peer in peers),
                lambda: self.fences.close(timeout_s=remaining(deadline) / 2),
                lambda: self._finish_shares(deadline, kept),
                *(lambda peer=peer: peer.close(timeout_s=min(2.0, remaining(deadline))) for peer in peers),
                lambda: self._give_back(kept),
            )
        )

    def _finish_shares(self, deadline: float, kept: list[Share]) -> None:
        """Take back what is shared, and add to ``kept`` what may still be mapped then."""
        shares = self.shares.close()
        for share in shares:
            for peer in self.peers:
                peer.revoke(share.handle.export_id)
        for share in shares:
            try:
                self.shares.finish(share, timeout_s=remaining(deadline))
            except CompletionTimeout as error:
                kept.append(share)
                _log.warning("closing: %s", error)
            except Exception as error:  # what a driver refuses must not keep the peers waiting
                _log.warning("closing: %r", error)

    def _give_back(self, kept: list[Share]) -> None:
        # A descriptor may be on its way to a peer whose connection stays: its number must not be another file then.
        under_way = {export_id for peer in self.peers for export_id in self.shares.lent_to(peer)}
        for share in kept:
            if share.handle.export_id not in under_way:
                self._attempt(partial(self.shares.abandon, share))
        with self._lock:
            allocations, self._allocations = self._allocations, []
        for one in allocations:
            low, high = one.ptr, one.ptr + one.nbytes
            if not (self.shares.overlapping(low, high) or any(share.overlaps(low, high) for share in kept)):
                self._attempt(partial(self._memory.free, one))

    def _attempt(self, step: Callable[[], None]) -> None:
        """Run one step of the end; when a driver refuses it, the steps behind it are owed to others all the same."""
        try:
            step()
        except Exception as error:
            _log.warning("closing: %r", error)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkError(
                "the session was made before a fork of this process",
                remedy="start helpers with spawn, and open a session in the process that uses it",
            )

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise ClosedError("the session is closed", remedy="make a new one")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _strategy(value: Strategy | str | None) -> Strategy | None:
    if value is None:
        return None
    try:
        return Strategy(value)
    except ValueError as error:
        raise UsageError(f"{value!r} is no completion strategy", remedy=f"use one of {', '.join(Strategy)}") from error
