"""The state machine of fences: signals, held work, questions, new consumers and poison, in any order.

Owns the steps and the two sides, as :mod:`devipc.conformance.stateful` does for memory. The oracle is a polled fence of
the host backend, followed in this process. Held work is compared only where a latch holds for certain.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Protocol

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from devipc.completion import ConsumerFence, ProducerFence, create_fence, open_fence
from devipc.conformance import roles_state, roles_sync
from devipc.conformance.fencing import Follower, following
from devipc.conformance.peers import Peer
from devipc.conformance.rig import Latch, Rig
from devipc.errors import DevIPCError
from devipc.spi import close_fds
from devipc.types import PoisonReason, Strategy

__all__ = ["FenceMachine", "FenceSide", "LocalFollowers", "PeerFollowers"]

_GIVE_UP_S = 20.0


class Followers(Protocol):
    """Whoever follows the fence of a side."""

    def add(self, producer: ProducerFence) -> None:
        """Let one more consumer open it."""

    def ask(self, index: int, value: int) -> str:
        """Ask one of them; the answer, or the code of the refusal."""

    def reach(self, value: int) -> None:
        """Let all wait for a value."""

    def close(self) -> None:
        """Let all close."""


class PeerFollowers:
    """Consumers in another process."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._opened: list[Follower] = []

    def add(self, producer: ProducerFence) -> None:
        """See :class:`Followers`."""
        self._opened.append(following(self._peer, producer))

    def ask(self, index: int, value: int) -> str:
        """See :class:`Followers`."""
        return str(self._peer.call(roles_state.ask, key=self._opened[index].key, value=value).body["answer"])

    def reach(self, value: int) -> None:
        """See :class:`Followers`."""
        for follower in self._opened:
            follower.synchronize(value, _GIVE_UP_S)

    def close(self) -> None:
        """See :class:`Followers`."""
        if self._peer.usable:
            for follower in self._opened:
                self._peer.call(roles_sync.close_fence, key=follower.key)
        self._opened.clear()


class LocalFollowers:
    """Consumers in this process, which may ask."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._opened: list[ConsumerFence] = []

    def add(self, producer: ProducerFence) -> None:
        """See :class:`Followers`."""
        handle = producer.export()
        try:
            self._opened.append(open_fence(self._rig.device, handle))
        finally:
            close_fds(handle.fds)

    def ask(self, index: int, value: int) -> str:
        """See :class:`Followers`."""
        try:
            return str(self._opened[index].query(value))
        except DevIPCError as error:
            return error.code

    def reach(self, value: int) -> None:
        """See :class:`Followers`."""
        for consumer in self._opened:
            consumer.synchronize(value, _GIVE_UP_S)

    def close(self) -> None:
        """See :class:`Followers`."""
        for consumer in self._opened:
            consumer.close(0.5)
        self._opened.clear()


@dataclass(slots=True)
class FenceSide:
    """A fence of one device and its followers."""

    rig: Rig
    strategy: Strategy
    followers: Followers
    latches: list[Latch] = field(default_factory=list)
    producer: ProducerFence = field(init=False)

    def __post_init__(self) -> None:
        self.producer = create_fence(self.rig.device, self.strategy)

    def signal(self, value: int) -> str:
        """Signal; "issued", or the code of the refusal."""
        try:
            self.producer.signal(self.rig.stream, value)
        except DevIPCError as error:
            return error.code
        return "issued"

    def ask(self, value: int) -> str:
        """Ask the producer."""
        try:
            return str(self.producer.query(value))
        except DevIPCError as error:
            return error.code

    def let_go(self) -> None:
        """Open what holds the stream."""
        while self.latches:
            self.latches.pop().close()

    def close(self) -> None:
        """Give everything back."""
        self.let_go()
        with contextlib.suppress(DevIPCError):
            self.rig.finish(self.rig.stream, "the work of a fence that is closed")
        self.followers.close()
        self.producer.close(1.0)


class FenceMachine(RuleBasedStateMachine):
    """Signal, hold, let go, ask, open once more, and poison."""

    def __init__(self, subject: FenceSide, oracle: FenceSide, *, can_hold: bool) -> None:
        super().__init__()
        self.sides = (subject, oracle)
        self.can_hold = can_hold
        self.issued = 0
        self.reached = 0
        self.held = False
        self.poisoned = False
        self.consumers = 0

    def settle(self) -> None:
        """Let everything that was signalled be reached by all, on both sides; nothing is held."""
        if self.issued > self.reached and not self.poisoned:
            for side in self.sides:
                side.producer.synchronize(self.issued, _GIVE_UP_S)
                side.followers.reach(self.issued)
            self.reached = self.issued

    @precondition(lambda self: self.issued - self.reached < 8)
    @rule(gap=st.sampled_from([1, 1, 2, 1000, 2**32]))
    def signal(self, gap: int) -> None:
        """Signal a larger value; refused once the fence has failed."""
        found, expected = (side.signal(self.issued + gap) for side in self.sides)
        assert found == expected, f"signal {self.issued + gap}: {found}, and on the host backend {expected}"
        if found == "issued":
            self.issued += gap

    @precondition(lambda self: self.issued)
    @rule(back=st.integers(0, 3))
    def signal_backwards(self, back: int) -> None:
        """Signal a value that does not grow."""
        found, expected = (side.signal(self.issued - back) for side in self.sides)
        assert found == expected != "issued", f"signal backwards: {found}, and on the host backend {expected}"

    @precondition(lambda self: self.can_hold and not self.held and not self.poisoned)
    @rule()
    def hold(self) -> None:
        """Hold both streams back."""
        self.settle()
        for side in self.sides:
            side.latches.append(Latch(side.rig, side.rig.stream))
        self.held = True

    @precondition(lambda self: self.held)
    @rule()
    def let_go(self) -> None:
        """Let both streams go on."""
        for side in self.sides:
            side.let_go()
        self.held = False

    @precondition(lambda self: self.consumers < 4 and not self.poisoned)
    @rule()
    def open(self) -> None:
        """Let one more consumer open the fence."""
        for side in self.sides:
            side.followers.add(side.producer)
        self.consumers += 1

    @precondition(lambda self: self.issued)
    @rule(back=st.integers(1, 3))
    def ask(self, back: int) -> None:
        """Ask everybody about a value that was passed."""
        self.ask_all(max(1, self.issued - back))

    def ask_all(self, value: int) -> None:
        """Ask everybody on both sides."""
        answers = [
            [side.ask(value), *(side.followers.ask(index, value) for index in range(self.consumers))]
            for side in self.sides
        ]
        assert answers[0] == answers[1], f"is {value} reached: {answers[0]}, and on the host backend {answers[1]}"

    @invariant()
    def alike(self) -> None:
        """After each step everybody says the same about the last value and the next one."""
        if not self.held:
            self.settle()
        for value in {max(1, self.reached), max(1, self.issued), self.issued + 1}:
            self.ask_all(value)

    @precondition(lambda self: not self.poisoned and self.issued > 1000)
    @rule(reason=st.sampled_from([PoisonReason.CANCELLED, PoisonReason.PROTOCOL]))
    def poison(self, reason: PoisonReason) -> None:
        """Let the fence fail."""
        for side in self.sides:
            side.producer.poison(reason)
        self.poisoned = True

    def teardown(self) -> None:
        """Give everything back."""
        for side in self.sides:
            side.close()
