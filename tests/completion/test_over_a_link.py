"""The chooser across the project's own connection, both sides at once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from devipc.capabilities import Capability
from devipc.channel import Channel, channel_pair
from devipc.channel.link import Link
from devipc.channel.liveness import own_life
from devipc.channel.message import Message
from devipc.completion import TrialResponder, choose, offers
from devipc.interfaces.backend import Device
from devipc.registry import load_backend
from devipc.types import Strategy
from tests.completion.peer import Pipe, spawn
from tests.completion.rig import ALL, host_device

TRIAL = 64


@pytest.fixture(scope="module", autouse=True)
def _life() -> None:
    """A process says that it lives by a thread that ends with it; here it is begun before a test is looked at."""
    own_life()


class LinkedPeer:
    """The few lines that a session needs between a link and the chooser."""

    def __init__(self, link: Link, own: Mapping[Strategy, Capability]) -> None:
        self._link = link
        self.peer_offers = own  # both sides of these tests have the same device

    def call(self, body: bytes, fds: Sequence[int], timeout_s: float) -> tuple[bytes, Sequence[int]]:
        answer = self._link.call(TRIAL, body, fds=fds, timeout_s=timeout_s)
        return answer.body, answer.take_fds()


def decide(link: Link, device: Device, strategy: Strategy, meet: Pipe) -> bool:
    responder = TrialResponder(device)

    def answer(message: Message) -> tuple[bytes, Sequence[int]]:
        return responder.answer(message.body, message.fds)

    with link:
        link.handle(TRIAL, answer)
        link.start()
        meet.ask()
        decision = choose(
            device, LinkedPeer(link, offers(device)), backend=load_backend("host"), strategy=strategy, deadline_s=8.0
        )
        meet.ask()
        responder.close()
    return decision.strategy is strategy


def other_side(pipe: Pipe) -> None:
    strategy, (fd,) = pipe.receive()
    with host_device() as device:
        link = Link.over(Channel.adopt(fd), facts={}, timeout_s=10.0)
        pipe.send(decide(link, device, Strategy(strategy), pipe))


@pytest.mark.parametrize("strategy", ALL)
def test_both_sides_choose_at_once(
    device: Device, strategy: Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEVIPC_TRIAL_CACHE", str(tmp_path))
    with spawn(other_side) as peer:
        ours, theirs = channel_pair()
        fd = theirs.detach()
        peer.send(strategy.value, (fd,))
        os.close(fd)
        assert decide(Link.accept(ours, facts={}, timeout_s=10.0), device, strategy, peer)
        assert peer.receive()[0] is True
