"""One connected peer: what it shares, the fences between the two, and what happens when it dies.

Owns the session's messages on one link. Both ends are alike: each may share, open, create fences and open the other's.
What is lent and held is undone here when the peer leaves, however it leaves.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from devipc import completion
from devipc.capabilities import Capability
from devipc.channel import Message
from devipc.completion import Decision, Fence, FenceHandle, ProducerFence, TrialResponder
from devipc.errors import ClosedError, DevIPCError, HandleError, PeerGone, UsageError
from devipc.lease import deadline_after, remaining
from devipc.link import Link, PeerState, Reply
from devipc.mappings import Mapping
from devipc.session.messages import (
    Kind,
    decode_decision,
    decode_names,
    decode_offers,
    decode_opened,
    decode_token,
    decode_token_name,
    encode_decision,
    encode_names,
    encode_opened,
    encode_token,
    encode_token_name,
)
from devipc.session.remote import RemoteMemory, check_meta
from devipc.session.shares import check_name
from devipc.spi import close_fds
from devipc.types import PoisonReason, Strategy
from devipc.wire import MemoryHandle, Reader

if TYPE_CHECKING:
    from devipc.session.endpoint import Endpoint

__all__ = ["Peer"]

_log = logging.getLogger("devipc.session")


def _drop_consumer(fence: ProducerFence, handle: FenceHandle) -> None:
    """Let ``fence`` go on without a consumer that is gone, or never came."""
    close_fds(handle.fds)
    try:
        fence.drop_consumer(handle.line)
    except UsageError:
        _log.debug("the fence was closed before its consumer was dropped")


class Peer:
    """The other process of one connection. Made by an endpoint; every method may be called from any thread."""

    def __init__(self, endpoint: Endpoint, link: Link) -> None:
        self._endpoint = endpoint
        self._link = link
        self._lock = threading.Lock()
        self._tokens = itertools.count(1)
        self._held: dict[bytes, int] = {}
        self._opened_fences: dict[int, Fence] = {}
        self._lent_fences: dict[int, tuple[ProducerFence, FenceHandle]] = {}
        self._decision: Decision | None = None
        self._left = False
        self._closing = False
        self._trials = TrialResponder(endpoint.device)
        self.mappings = endpoint.new_mapping_cache(on_unmapped=self._unmapped)
        for kind, handler in {
            Kind.NAMES: self._on_names,
            Kind.OPEN: self._on_open,
            Kind.RETURN: self._on_return,
            Kind.REVOKE: self._on_revoke,
            Kind.GENERATION: self._on_generation,
            Kind.FENCE_OPEN: self._on_fence_open,
            Kind.FENCE_TAKEN: self._on_fence_taken,
            Kind.FENCE_RETURN: self._on_fence_return,
            Kind.TRIAL: self._on_trial,
            Kind.DECIDE: self._on_decide,
            Kind.DECIDED: self._on_decided,
        }.items():
            link.handle(kind, handler)
        link.on_state(self._on_state)

    # --- who ----------------------------------------------------------------------------------------------------------

    @property
    def instance(self) -> bytes:
        """The peer's 16-byte instance: one life of one process."""
        return self._link.peer.instance

    @property
    def pid(self) -> int:
        """The peer's process id as it told it; for people, not for identity."""
        return self._link.peer.pid

    @property
    def facts(self) -> dict[str, str]:
        """What the peer said about its environment, backend and device."""
        return self._link.peer.facts

    @property
    def state(self) -> PeerState:
        """Connected, closed, dying or gone."""
        return self._link.state

    # --- memory -------------------------------------------------------------------------------------------------------

    def names(self, *, timeout_s: float | None = None) -> tuple[list[str], list[str]]:
        """Ask the peer what it shares now; return the names of its memory and of its fences."""
        return decode_names(self._ask(Kind.NAMES, b"", timeout_s).body)

    def open(self, name: str, *, timeout_s: float | None = None) -> RemoteMemory:
        """Map what the peer shares as ``name``; blocks for one round trip and, the first time, the driver's open.

        Raises
        ------
        HandleError
            For an unknown name, or a handle that this process must not use.
        PeerGone
            When the peer left meanwhile.
        CompletionTimeout
            When the peer or the driver did not answer in time; nothing stays lent.
        """
        deadline = deadline_after(self._endpoint.timeout_s if timeout_s is None else timeout_s)
        token = next(self._tokens)
        try:
            answer = self._ask(Kind.OPEN, encode_token_name(token, check_name(name)), remaining(deadline))
            try:
                handle, meta = decode_opened(answer.body, answer.fds)
                self._check_handle(handle)
                check_meta(meta, handle.extent.nbytes)
                mapping = self._acquire(handle, token, remaining(deadline))
            finally:
                answer.close_fds()
        except BaseException:
            self._tell(Kind.RETURN, encode_token(token))
            raise
        return RemoteMemory(name, self._endpoint.device, mapping, meta, release=self.mappings.release)

    def _acquire(self, handle: MemoryHandle, token: int, timeout_s: float) -> Mapping:
        # The driver's mapping holds one lease, whoever opened it first; a hit in the cache needs no second one.
        mapping, fresh = self.mappings.acquire(handle, timeout_s=timeout_s)
        if not fresh:
            self._tell(Kind.RETURN, encode_token(token))
            return mapping
        with self._lock:
            self._held[handle.export_id] = token
        return mapping

    def _unmapped(self, export_id: bytes) -> None:
        with self._lock:
            token = self._held.pop(export_id, None)
            last = self._closing and not self._held
        if token is not None:
            self._tell(Kind.RETURN, encode_token(token))
        if last:  # perhaps on a garbage collector's thread, which must not wait for the link's threads
            threading.Thread(target=self._hang_up, name="devipc-goodbye", daemon=True).start()

    def _check_handle(self, handle: MemoryHandle) -> None:
        if handle.instance != self.instance:
            raise HandleError(
                "the handle belongs to another process than the one that sent it",
                code="foreign",
                remedy="open it from the process that exported it",
            )
        if handle.backend != self._endpoint.backend_name:
            raise HandleError(
                f"the handle is of backend {handle.backend!r}, this endpoint uses {self._endpoint.backend_name!r}",
                code="wrong_backend",
                remedy="use the same backend on both sides",
            )
        if handle.device_uuid != self._endpoint.device.info.uuid:
            raise HandleError(
                f"the handle is of device {handle.device_uuid}, this endpoint uses {self._endpoint.device.info.uuid}",
                code="wrong_device",
                remedy="open the importer on the exporter's device",
            )

    # --- fences -------------------------------------------------------------------------------------------------------

    def create_fence(self, name: str) -> Fence:
        """Make a fence of the strategy that was decided for this peer and share it as ``name``."""
        return self._endpoint.create_fence(name, strategy=self.decision.strategy)

    def open_fence(self, name: str, *, timeout_s: float | None = None) -> Fence:
        """Open a fence that the peer made. The caller closes it; if the peer dies, it is poisoned at once."""
        token = next(self._tokens)
        try:
            answer = self._ask(Kind.FENCE_OPEN, encode_token_name(token, check_name(name)), timeout_s)
            try:
                handle = completion.decode_fence_handle(Reader(answer.body), answer.fds)
                fence = completion.open_fence(self._endpoint.device, handle)
            finally:
                answer.close_fds()
        except BaseException:
            self._tell(Kind.FENCE_RETURN, encode_token(token))
            raise
        self._tell(Kind.FENCE_TAKEN, encode_token(token))
        with self._lock:
            self._opened_fences = {key: kept for key, kept in self._opened_fences.items() if not kept.closed}
            self._opened_fences[token] = fence
        if self.state is not PeerState.CONNECTED:
            self._poison(fence)
        return fence

    @property
    def decision(self) -> Decision:
        """How completion is learned between the two; chosen at first use, which may take seconds, then kept."""
        return self.known_decision or self._endpoint.decide(self)

    @property
    def known_decision(self) -> Decision | None:
        """The decision if it was made already; never runs a trial."""
        with self._lock:
            return self._decision

    def adopt(self, decision: Decision) -> Decision:
        """Keep a decision that one of the two ends has made, and return the one that stays: the first."""
        with self._lock:
            if self._decision is None:
                self._decision = decision
            return self._decision

    def ask_decision(self, *, timeout_s: float) -> Decision:
        """Have the connecting side decide, which may run trials with this one meanwhile."""
        return self.adopt(decode_decision(self._ask(Kind.DECIDE, b"", timeout_s).body))

    def announce_decision(self, decision: Decision) -> None:
        """Tell the peer what was decided here."""
        self._tell(Kind.DECIDED, encode_decision(decision))

    @property
    def peer_offers(self) -> dict[Strategy, Capability]:
        """What the peer's device offers for completion, as it said when it connected."""
        return decode_offers(self.facts)

    def call(self, body: bytes, fds: Sequence[int], timeout_s: float) -> tuple[bytes, Sequence[int]]:
        """Carry one request of a trial to the peer's responder; descriptors that come back are the caller's."""
        answer = self._call(Kind.TRIAL, body, fds, timeout_s)
        return answer.body, answer.take_fds()

    # --- leaving ------------------------------------------------------------------------------------------------------

    def close(self, *, timeout_s: float = 2.0) -> None:
        """Leave in good order; idempotent. Blocks at most about ``timeout_s``.

        Fences opened from the peer are closed and idle mappings unmapped. The connection stays up behind the scenes
        while arrays or tensors still look at the peer's memory, so that the peer does not free it under them. What
        the peer has mapped of ours is asked back; what it does not give back in time is never freed.
        """
        with self._lock:
            first, self._closing = not self._closing, True
        if not first:
            return
        deadline = deadline_after(timeout_s)
        for fence in self._take_opened_fences():
            fence.close(remaining(deadline) / 2)
        self.mappings.close()
        self._trials.close()
        if self.state is PeerState.CONNECTED:
            for export_id in self._endpoint.shares.lent_to(self):
                self.revoke(export_id)
            self._endpoint.shares.wait_returned(self, timeout_s=remaining(deadline))
        self._drop_lent_fences()
        if not self.mappings.stats()["open"]:
            self._hang_up()

    def _hang_up(self) -> None:
        self._link.close()
        self._endpoint.peer_left(self)

    def _take_opened_fences(self) -> list[Fence]:
        with self._lock:
            fences = list(self._opened_fences.values())
            self._opened_fences.clear()
        return fences

    def _on_state(self, state: PeerState) -> None:
        if state is PeerState.CONNECTED:
            return
        if state in (PeerState.CLOSED, PeerState.DYING):
            with self._lock:
                first, self._left = not self._left, True
                fences = list(self._opened_fences.values())
            if first:
                for fence in fences:
                    self._poison(fence)
                self.mappings.peer_died(self.instance)
                self._trials.close()
        # A peer that said goodbye has unmapped everything; one that died may still have transfers in flight.
        if state in (PeerState.CLOSED, PeerState.GONE):
            self._endpoint.shares.give_back_all(self)
            self._drop_lent_fences()
        self._endpoint.peer_changed(self, state)
        if state in (PeerState.CLOSED, PeerState.GONE):
            self._hang_up()

    def _poison(self, fence: Fence) -> None:
        reason = PoisonReason.CLOSED if self.state is PeerState.CLOSED else PoisonReason.PEER_DIED
        try:
            fence.poison(reason, writer_gone=lambda: self.state in (PeerState.CLOSED, PeerState.GONE))
        except UsageError:
            _log.debug("fence was closed while its peer left")

    def _drop_lent_fences(self) -> None:
        with self._lock:
            lent = dict(self._lent_fences)
            self._lent_fences.clear()
        for fence, handle in lent.values():
            _drop_consumer(fence, handle)

    # --- messages -----------------------------------------------------------------------------------------------------

    def _ask(self, kind: Kind, body: bytes, timeout_s: float | None) -> Message:
        return self._call(kind, body, (), self._endpoint.timeout_s if timeout_s is None else timeout_s)

    def _call(self, kind: Kind, body: bytes, fds: Sequence[int], timeout_s: float) -> Message:
        try:
            return self._link.call(kind, body, fds=fds, timeout_s=timeout_s)
        except ClosedError as error:
            if self._closing:
                raise
            raise PeerGone(f"peer {self.pid} is {self.state.value}", remedy="connect again") from error

    def _tell(self, kind: Kind, body: bytes) -> None:
        try:
            self._link.notify(kind, body)
        except (PeerGone, UsageError):
            _log.debug("peer left before it could be told %s", kind.name)
        except DevIPCError as error:
            _log.warning("peer %d was not told %s: %s", self.pid, kind.name, error)

    def revoke(self, export_id: bytes) -> None:
        """Tell the peer that an export is being taken back."""
        self._tell(Kind.REVOKE, export_id)

    def announce_generation(self, generation: int) -> None:
        """Tell the peer that everything of an older generation is void."""
        self._tell(Kind.GENERATION, encode_token(generation))

    def _on_names(self, message: Message) -> Reply:
        return encode_names(self._endpoint.shares.names(), self._endpoint.fence_names()), ()

    def _on_open(self, message: Message) -> Reply:
        token, name = decode_token_name(message.body)
        share = self._endpoint.shares.grant(name, (self, token))
        return encode_opened(share.handle, share.meta), share.handle.extent.fds

    def _on_return(self, message: Message) -> None:
        self._endpoint.shares.give_back((self, decode_token(message.body)))

    def _on_revoke(self, message: Message) -> None:
        self.mappings.revoke(Reader(message.body).raw(16))

    def _on_generation(self, message: Message) -> None:
        self.mappings.new_generation(self.instance, decode_token(message.body))

    def _on_fence_open(self, message: Message) -> Reply:
        token, name = decode_token_name(message.body)
        fence, handle = self._endpoint.lend_fence(name)
        with self._lock:
            self._lent_fences[token] = (fence, handle)
        return completion.encode_fence_handle(handle), handle.fds

    def _on_fence_return(self, message: Message) -> None:
        with self._lock:
            lent = self._lent_fences.pop(decode_token(message.body), None)
        if lent is not None:
            _drop_consumer(*lent)

    def _on_fence_taken(self, message: Message) -> None:
        token = decode_token(message.body)
        with self._lock:
            if token in self._lent_fences:
                fence, handle = self._lent_fences[token]
                close_fds(handle.fds)
                self._lent_fences[token] = (fence, replace(handle, fds=()))

    def _on_trial(self, message: Message) -> Reply:
        return self._trials.answer(message.body, message.fds)

    def _on_decide(self, message: Message) -> Reply:
        return encode_decision(self.decision), ()

    def _on_decided(self, message: Message) -> None:
        self.adopt(decode_decision(message.body))
