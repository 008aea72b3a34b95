"""Choosing how two processes learn that work is done: what is offered, then tried, then recorded.

Owns the walk over the candidates and the Decision. It is handed a link that carries bytes and descriptors and knows
no socket.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from devipc.capabilities import Capability, Verdict, is_offered
from devipc.completion.cache import TrialCache
from devipc.completion.offers import AUTOMATIC, offers, words_are_proven
from devipc.completion.pair import try_in_children
from devipc.completion.roles import DATA_NBYTES, ProducerRole, Role
from devipc.completion.trial import RemoteRole, TrialFailed, run_trial
from devipc.errors import CapabilityError, DevIPCError, FencePoisoned, PeerError
from devipc.interfaces.backend import Backend, Device
from devipc.memfd import create_memfd
from devipc.types import Strategy
from devipc.undoing import what_is_left

__all__ = ["Candidate", "Decision", "PeerLink", "Phase", "choose"]

_log = logging.getLogger("devipc.completion")


class PeerLink(Protocol):
    """What the chooser needs of a connection: the peer's offers, and a way to its :class:`TrialResponder`."""

    @property
    def peer_offers(self) -> Mapping[Strategy, Capability]:
        """What :func:`devipc.completion.offers` said in the peer's process."""
        ...

    def call(self, body: bytes, fds: Sequence[int], timeout_s: float) -> tuple[bytes, Sequence[int]]:
        """Have the peer's responder answer. Passed descriptors stay the caller's, returned ones become its own."""
        ...


class Phase(enum.StrEnum):
    """Where the verdict about a candidate was reached."""

    OFFER = "offer"
    PEER_OFFER = "peer_offer"
    CHILD = "child"
    LINK = "link"
    NOT_TRIED = "not_tried"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One strategy and what became of it.

    Parameters
    ----------
    strategy : Strategy
        Which.
    capability : Capability
        The verdict with evidence, reason and remedy.
    phase : Phase
        How far it came.
    """

    strategy: Strategy
    capability: Capability
    phase: Phase

    def to_json(self) -> dict[str, object]:
        """Return JSON-ready values."""
        return {"strategy": self.strategy.value, "phase": self.phase.value, **self.capability.to_json()}


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen strategy, and every candidate with its reason.

    Parameters
    ----------
    strategy : Strategy
        The choice.
    degraded : bool
        True when a better strategy was rejected on the way. An explicit choice is never degraded.
    candidates : tuple of Candidate
        All strategies, in the order in which they were looked at.
    """

    strategy: Strategy
    degraded: bool
    candidates: tuple[Candidate, ...]

    def to_json(self) -> dict[str, object]:
        """Return JSON-ready values, the spelling of ``--json`` and of metrics."""
        return {
            "strategy": self.strategy.value,
            "degraded": self.degraded,
            "candidates": [candidate.to_json() for candidate in self.candidates],
        }


def choose(
    device: Device,
    link: PeerLink,
    *,
    backend: Backend,
    strategy: Strategy | None = None,
    deadline_s: float = 10.0,
) -> Decision:
    """Choose the completion strategy between this process and the peer behind ``link``.

    Walks ``stream_memop``, ``host_flag``, ``polling``. A candidate must be offered by both sides, pass a trial in two
    spawned processes (known results are reused, see :mod:`devipc.completion.cache`), and pass one across the link in
    both directions. Blocks for at most about ``3 * deadline_s`` for each candidate, and as long for the device to be
    opened in two processes; calls the driver. Where that is not done in time, or no process can be started, no other
    candidate is tried in processes: it depends on none of them. Those with a known result still are chosen.

    Parameters
    ----------
    device : Device
        This side's device.
    link : PeerLink
        The peer must answer with a :class:`~devipc.completion.TrialResponder` of its device.
    backend : Backend
        Whose device it is: children load it by name, its facts are part of the cache's key.
    strategy : Strategy, optional
        Use this one. It is obeyed or refused, never replaced.
    deadline_s : float
        Limit of each trial.

    Raises
    ------
    CapabilityError
        When the asked-for strategy, or all of them, failed; the message has every reason. Retryable when one could
        not be tried.
    PeerError
        When the peer went away or broke the protocol meanwhile: that is no verdict about a strategy.
    DevIPCError
        When something of a trial across the link could not be undone; it is in ``left``.
    """
    wanted = AUTOMATIC if strategy is None else (Strategy(strategy),)
    own = offers(device)
    cache = TrialCache(backend=backend.name, device_uuid=device.info.uuid, facts=backend.facts())
    candidates: list[Candidate] = []
    untried: Capability | None = None
    for name in wanted:
        candidate = _offered(name, own, link, automatic=strategy is None)
        if candidate is None:
            candidate = _tried(name, device, link, backend.name, cache, deadline_s, untried)
            if candidate.phase is Phase.CHILD and candidate.capability.verdict is Verdict.UNTESTED:
                untried = candidate.capability
        candidates.append(candidate)
        if candidate.capability:
            return _decided(candidates, device, backend.name)
    raise _none_works(candidates, device, backend.name, None if strategy is None else wanted[0], untried)


def _offered(
    strategy: Strategy, own: Mapping[Strategy, Capability], link: PeerLink, *, automatic: bool
) -> Candidate | None:
    """Return the rejected candidate, or None when both sides offer it."""
    capability = own[strategy]
    if not is_offered(capability) or (automatic and not words_are_proven(strategy)):
        return Candidate(strategy, capability, Phase.OFFER)
    answer = link.peer_offers.get(strategy)
    if answer is None or not is_offered(answer):
        return Candidate(strategy, answer or Capability.no("the peer does not speak of it"), Phase.PEER_OFFER)
    return None


def _tried(
    strategy: Strategy,
    device: Device,
    link: PeerLink,
    backend: str,
    cache: TrialCache,
    deadline_s: float,
    untried: Capability | None,
) -> Candidate:
    """Return what came of a trial; ``untried`` is why processes cannot try another one now either."""
    capability = cache.load(strategy)
    if capability is None and untried is not None:
        return Candidate(strategy, untried, Phase.NOT_TRIED)
    if capability is None:
        capability = try_in_children(backend, device.info.uuid, strategy, deadline_s=deadline_s)
        cache.store(strategy, capability)
    if not capability:
        return Candidate(strategy, capability, Phase.CHILD)
    return Candidate(strategy, _across(strategy, device, link, deadline_s), Phase.LINK)


def _across(strategy: Strategy, device: Device, link: PeerLink, deadline_s: float) -> Capability:
    """Try both directions with the peer."""

    def forward() -> tuple[Role, Role]:
        data_fd = create_memfd("devipc-trial", DATA_NBYTES)
        try:
            producer = ProducerRole(device, strategy, data_fd=data_fd)
            try:
                return producer, RemoteRole.opened(link.call, producer, data_fd, timeout_s=deadline_s)
            except BaseException:
                producer.close()
                raise
        finally:
            os.close(data_fd)

    def backward() -> tuple[Role, Role]:
        return RemoteRole.created(link.call, device, strategy, timeout_s=deadline_s)

    seen = {}
    for direction, opened in (("to the peer", forward), ("from the peer", backward)):
        try:
            seen[direction] = _one_way(strategy, opened, deadline_s)
        except TrialFailed as failure:
            return Capability.broken(f"{direction}: {failure}", remedy="use another strategy")
        except FencePoisoned as error:
            return Capability.broken(f"{direction}: {error.message}", remedy="use another strategy")
        except PeerError:
            raise  # the link is at fault, not the strategy
        except DevIPCError as error:
            if what_is_left(error):
                raise  # another strategy would be tried on top of what stays, and nobody would hear of that
            rejected = _rejected(error)
            return replace(rejected, reason=f"{direction}: {rejected.reason}")
    return Capability.yes("; ".join(f"{direction}: {what}" for direction, what in seen.items()))


def _rejected(error: DevIPCError) -> Capability:
    if isinstance(error, CapabilityError):
        return Capability.no(error.message, remedy=error.remedy, evidence=str(error.status or ""))
    return Capability.broken(f"{type(error).__name__}: {error.message}", remedy=error.remedy)


def _one_way(strategy: Strategy, opened: Callable[[], tuple[Role, Role]], deadline_s: float) -> str:
    producer, consumer = opened()
    # The consumer is closed first: a producer keeps what a consumer may still have open.
    with contextlib.closing(producer), contextlib.closing(consumer):
        return run_trial(strategy, producer, consumer, deadline_s=deadline_s)


def _decided(candidates: list[Candidate], device: Device, backend: str) -> Decision:
    chosen = candidates[-1]
    looked_at = {candidate.strategy for candidate in candidates}
    rest = Capability.untested(f"not needed: {chosen.strategy.value} was chosen", remedy="ask for it by name")
    others = [Candidate(each, rest, Phase.NOT_TRIED) for each in Strategy if each not in looked_at]
    decision = Decision(chosen.strategy, len(candidates) > 1, (*candidates, *others))
    rejected = "".join(f"; {each.strategy.value}: {_why(each)}" for each in candidates[:-1])
    _log.log(
        logging.WARNING if decision.degraded else logging.INFO,
        "completion strategy of %s/%s: %s%s",
        backend,
        device.info.uuid,
        chosen.strategy.value,
        rejected,
    )
    return decision


def _none_works(
    candidates: list[Candidate], device: Device, backend: str, strategy: Strategy | None, untried: Capability | None
) -> CapabilityError:
    remedies = [each.capability.remedy for each in candidates]
    reasons = "; ".join(f"{each.strategy.value} ({each.phase.value}): {_why(each)}" for each in candidates)
    return CapabilityError(
        f"completion strategy {strategy.value} cannot be used: {reasons}"
        if strategy is not None
        else f"no completion strategy works: {reasons}",
        code="completion",
        retryable=untried is not None,
        backend=backend,
        device=device.info.uuid,
        remedy=untried.remedy if untried is not None else next(filter(None, remedies), ""),
    )


def _why(candidate: Candidate) -> str:
    return candidate.capability.reason or candidate.capability.evidence or candidate.capability.verdict.value
