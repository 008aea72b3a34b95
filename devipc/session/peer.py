"""One connected peer: what it shares, the fences between the two, and what happens when it dies.

Owns the session's messages on one link. Both ends are alike: each may share, open, create fences and open the other's.
What is lent and held is undone here when the peer leaves, however it leaves.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from devipc import completion
from devipc.capabilities import Capability
from devipc.channel import Message
from devipc.channel.link import Link, PeerState, Reply
from devipc.completion import Decision, Fence, TrialResponder
from devipc.deadline import deadline_after, remaining
from devipc.errors import CapabilityError, ClosedError, DevIPCError, PeerGone, UsageError
from devipc.session.borrowing import Borrowed
from devipc.session.lending import LentFences
from devipc.session.messages import (
    Kind,
    decode_decision,
    decode_names,
    decode_offers,
    decode_token,
    decode_token_name,
    decode_tokens_names,
    encode_decision,
    encode_names,
    encode_opened,
    encode_token,
    encode_token_name,
)
from devipc.session.opened import OpenedFences
from devipc.session.remote import RemoteMemory
from devipc.session.shares import Share, check_name
from devipc.session.telling import tell_surely
from devipc.types import PoisonReason, Strategy
from devipc.undoing import try_each, undo
from devipc.wire import Reader

if TYPE_CHECKING:
    from devipc.session.endpoint import Endpoint

__all__ = ["Peer"]

_log = logging.getLogger("devipc.session")
_ASK_AGAIN_S = 5e-3
_MAX_ANSWER_FDS = 250  # a process may have no more than 1,024 open


class Peer:
    """The other process of one connection. Made by an endpoint; every method may be called from any thread."""

    def __init__(self, endpoint: Endpoint, link: Link) -> None:
        self._endpoint = endpoint
        self._link = link
        self._lock = threading.Lock()
        self._fence_tokens = itertools.count(1)
        self._opened_fences = OpenedFences()
        self._lent_fences = LentFences(endpoint.fences.lend)
        self._decision: Decision | None = None
        self._left = self._hung_up = self._watching = False
        self._trials = TrialResponder(endpoint.trial_device)
        self._borrowed = Borrowed(
            endpoint, self.instance, ask=self._ask, tell=self._tell, on_last=lambda: self._hang_up()
        )
        self.mappings = self._borrowed.mappings
        for kind, handler in {
            Kind.NAMES: self._on_names,
            Kind.OPEN: self._on_open,
            Kind.RETURN: self._on_return,
            Kind.REVOKE: self._on_revoke,
            Kind.GENERATION: self._on_generation,
            Kind.FENCE_OPEN: self._on_fence_open,
            Kind.FENCE_TAKEN: lambda message: self._lent_fences.taken(decode_token(message.body)),
            Kind.FENCE_RETURN: lambda message: self._lent_fences.give_back(decode_token(message.body)),
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

    def open(self, name: str, *, timeout_s: float | None = None, wait_s: float = 0.0) -> RemoteMemory:
        """Map what the peer shares as ``name``; see :meth:`open_all`."""
        return self.open_all([name], timeout_s=timeout_s, wait_s=wait_s)[0]

    def open_all(
        self, names: Sequence[str], *, timeout_s: float | None = None, wait_s: float = 0.0
    ) -> list[RemoteMemory]:
        """Map what the peer shares under several names: all or none, in one round trip and one open of the driver.

        What was not mapped before is mapped side by side, in the order of ``names``, where the backend can place
        memory of its kind (:attr:`RemoteMemory.region` tells); very many descriptors take more than one round trip.

        Parameters
        ----------
        names : sequence of str
            As the peer gave them to ``share``.
        timeout_s : float, optional
            Limit of the round trip and the driver's open; the endpoint's when None.
        wait_s : float
            How long to wait before that for the peer to share the names; 0 refuses an unknown name at once.

        Raises
        ------
        HandleError
            For an unknown name, or a handle that this process must not use.
        PeerGone
            When the peer left meanwhile.
        CompletionTimeout
            When the peer or the driver did not answer in time; nothing stays lent.
        """
        wanted = [check_name(name) for name in names]
        self._wait_for(wanted, 0, wait_s)
        return self._borrowed.open_all(wanted, timeout_s=self._endpoint.timeout_s if timeout_s is None else timeout_s)

    def _wait_for(self, names: Sequence[str], kind: int, wait_s: float) -> None:
        """Ask until the peer lists ``names`` among its memory (0) or its fences (1), or the time is up."""
        deadline = deadline_after(wait_s)
        while wait_s and remaining(deadline) and not set(names) <= set(self.names()[kind]):
            time.sleep(min(_ASK_AGAIN_S, remaining(deadline)))

    # --- fences -------------------------------------------------------------------------------------------------------

    def create_fence(self, name: str) -> Fence:
        """Make a fence of the strategy that was decided for this peer and share it as ``name``."""
        return self._endpoint.create_fence(name, strategy=self.decision.strategy)

    def open_fence(self, name: str, *, timeout_s: float | None = None, wait_s: float = 0.0) -> Fence:
        """Open a fence that the peer made. The caller closes it; if the peer dies, it is poisoned at once.

        Parameters and errors as for :meth:`open`.
        """
        self._wait_for([check_name(name)], 1, wait_s)
        token, fence = next(self._fence_tokens), None
        try:
            answer = self._ask(Kind.FENCE_OPEN, encode_token_name(token, check_name(name)), timeout_s)
            try:
                handle = completion.decode_fence_handle(Reader(answer.body), answer.fds)
                with self._endpoint.driving():
                    fence = completion.open_fence(self._endpoint.fence_device, handle)
                fence.driving = self._endpoint.driving
            finally:
                answer.close_fds()
            if not self._opened_fences.add(fence):
                raise PeerGone(f"peer {self.pid} is {self.state.value}", remedy="connect again")
            self._tell(Kind.FENCE_TAKEN, encode_token(token))
        except BaseException:  # what nobody looks at would hold up the producer's ring
            back = partial(self._tell, Kind.FENCE_RETURN, encode_token(token))
            try_each((lambda: undo(fence.close, 0.0) if fence else None, lambda: undo(tell_surely, back)))
            raise
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
        """Keep a decision that one of the two ends has made, and return the one that stays: the first.

        Raises
        ------
        CapabilityError
            When it is not the strategy that this end insists on.
        """
        wanted = self._endpoint.strategy
        if wanted not in (None, decision.strategy):
            raise CapabilityError(
                f"the peer decided for completion strategy {decision.strategy}, this end insists on {wanted}",
                code="completion",
                remedy="use the same version of devipc at both ends, and name the same strategy or none",
            )
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
        the peer has mapped of ours is asked back; what it does not give back in time can be freed when it is gone.
        """
        if not self._borrowed.end():
            if self._hung_up:
                self._hang_up()  # the endpoint may be closing now, and waits for no end of a process then
            return
        deadline = deadline_after(timeout_s)
        try_each(  # also when an interrupt ends one of the waits
            (
                lambda: self.close_fences(timeout_s=timeout_s / 2),
                lambda: self._attempt(self.mappings.close),
                lambda: self._attempt(self._trials.close),
                lambda: self._ask_back(deadline),
                lambda: self._lent_fences.drop_all(gone=self.state is PeerState.GONE, hung_up=False),
                lambda: self._hang_up() if self._borrowed.unused else None,
            )
        )

    def _ask_back(self, deadline: float) -> None:
        if self.state is PeerState.CONNECTED:
            for export_id in self._endpoint.shares.lent_to(self):
                self.revoke(export_id)
            self._endpoint.shares.wait_returned(self, timeout_s=remaining(deadline))

    def _hang_up(self) -> None:
        owes = bool(self._endpoint.shares.lent_to(self)) or self._lent_fences.owed
        self._watching = owes and not self._endpoint.shares.closed
        self._link.close(until_gone=self._gone if self._watching else None)
        self._attempt(self._trials.close)  # again: a request that was under way may have begun another
        self._lent_fences.drop_all(gone=False, hung_up=True)
        self._hung_up = True
        self._gone() if self.state is PeerState.GONE else self._endpoint.peer_left()

    def _gone(self) -> None:
        self._endpoint.shares.give_back_all(self)
        self._lent_fences.drop_all(gone=True, hung_up=True)
        self._watching = False
        self._endpoint.peer_left()

    @property
    def over(self) -> bool:
        """True when nothing is left to be closed here: no connection, debt, or fence opened from the peer."""
        return self._hung_up and not self._watching and self._opened_fences.all_closed

    def _attempt(self, step: Callable[[], None]) -> None:
        """Run one step of an end; when a driver refuses it, the steps behind it are owed to others all the same."""
        try:
            step()
        except Exception as error:
            _log.warning("leaving peer %d: %r", self.pid, error)

    def close_fences(self, *, timeout_s: float) -> None:
        """Close every fence that was opened from the peer; together at most about ``timeout_s``."""
        self._opened_fences.close(timeout_s=timeout_s)

    def _on_state(self, state: PeerState) -> None:
        if state is PeerState.CONNECTED:
            return
        if state in (PeerState.CLOSED, PeerState.DYING):
            with self._lock:
                first, self._left = not self._left, True
            if first:
                reason = PoisonReason.CLOSED if state is PeerState.CLOSED else PoisonReason.PEER_DIED
                self._opened_fences.poison(reason, writer_gone=lambda: self.state in (PeerState.CLOSED, PeerState.GONE))
                self.mappings.peer_died(self.instance)
        # A peer that said goodbye has unmapped everything; one that died may still have transfers in flight.
        if state in (PeerState.CLOSED, PeerState.GONE):
            self._endpoint.shares.give_back_all(self)
            self._lent_fences.drop_all(gone=state is PeerState.GONE, hung_up=False)
        self._endpoint.peer_changed(self, state)
        # Only now, and by a thread that can be spared: a driver may not unmap while a wait of this process is pending.
        unmap = threading.Thread(target=self._attempt, args=(self.mappings.collect,), name="devipc-unmap", daemon=True)
        self._attempt(unmap.start)
        if state in (PeerState.CLOSED, PeerState.GONE):
            self._hang_up()

    # --- messages -----------------------------------------------------------------------------------------------------

    def _ask(self, kind: Kind, body: bytes, timeout_s: float | None) -> Message:
        return self._call(kind, body, (), self._endpoint.timeout_s if timeout_s is None else timeout_s)

    def _call(self, kind: Kind, body: bytes, fds: Sequence[int], timeout_s: float) -> Message:
        try:
            return self._link.call(kind, body, fds=fds, timeout_s=timeout_s)
        except ClosedError as error:
            if self._borrowed.ending:
                raise
            raise PeerGone(f"peer {self.pid} is {self.state.value}", remedy="connect again") from error

    def _tell(self, kind: Kind, body: bytes) -> bool:
        """Say something that needs no answer; False when the peer lives and did not take it, else True."""
        try:
            self._link.notify(kind, body)
        except (PeerGone, UsageError):
            _log.debug("peer left before it could be told %s", kind.name)
        except DevIPCError as error:
            _log.warning("peer %d was not told %s: %s", self.pid, kind.name, error)
            return False
        return True

    def revoke(self, export_id: bytes) -> None:
        """Tell the peer that an export is being taken back."""
        self._tell(Kind.REVOKE, export_id)

    def announce_generation(self, generation: int) -> None:
        """Tell the peer that everything of an older generation is void."""
        self._tell(Kind.GENERATION, encode_token(generation))

    def _on_names(self, message: Message) -> Reply:
        return encode_names(self._endpoint.shares.names(), self._endpoint.fences.names()), ()

    def _on_open(self, message: Message) -> Reply:
        """Lend as many as fit into one answer, at least one; the peer asks again for the others."""
        granted: list[tuple[int, Share]] = []
        fds: list[int] = []
        try:
            for token, name in decode_tokens_names(message.body):
                share = self._endpoint.shares.grant(name, (self, token))
                granted.append((token, share))
                if len(granted) > 1 and len(fds) + len(share.handle.extent.fds) > _MAX_ANSWER_FDS:
                    self._endpoint.shares.give_back((self, granted.pop()[0]))
                    break
                fds += share.handle.extent.fds
            return encode_opened([(share.handle, share.meta) for _, share in granted]), fds
        except BaseException:
            for token, _ in granted:
                self._endpoint.shares.give_back((self, token))
            raise

    def _on_return(self, message: Message) -> None:
        self._endpoint.shares.give_back((self, decode_token(message.body)))

    def _on_revoke(self, message: Message) -> None:
        self.mappings.revoke(Reader(message.body).raw(16))

    def _on_generation(self, message: Message) -> None:
        self.mappings.new_generation(self.instance, decode_token(message.body))

    def _on_fence_open(self, message: Message) -> Reply:
        token, name = decode_token_name(message.body)
        handle = self._lent_fences.lend(token, name)
        return completion.encode_fence_handle(handle), handle.fds

    def _on_trial(self, message: Message) -> Reply:
        return self._trials.answer(message.body, message.fds)

    def _on_decide(self, message: Message) -> Reply:
        if self.known_decision is None and not self._endpoint.drives_trials:
            raise UsageError("this side listens, it does not decide", code="role", remedy="the connecting side decides")
        return encode_decision(self.decision), ()

    def _on_decided(self, message: Message) -> None:
        self.adopt(decode_decision(message.body))
