"""SIGKILL of either side at every channel call of a conversation: the survivor is told, never hangs, keeps nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from devipc.channel.link import Link, PeerState
from devipc.channel.listener import Listener
from devipc.errors import CompletionTimeout, PeerGone
from tests.channel.conversation import Client, Server
from tests.channel.processes import Child, eventually, holdings

Spawn = Callable[..., Child]
MAX_CALLS = 200
BOUND_S = 10.0

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]


def accept_while(child: Child, listener: Listener) -> Link | None:
    """Return the link to ``child``, or None when it died before it came; raises PeerGone when it died in between."""
    while True:
        try:
            channel = listener.accept(0.05)
        except CompletionTimeout:
            if child.process.poll() is not None:
                return None
            continue
        return Link.accept(channel, facts={}, timeout_s=BOUND_S)


def serve(child: Child, path: str) -> tuple[str, list[PeerState]]:
    """Be the server of a client that may die; return how it ended."""
    side = Server(path, timeout_s=BOUND_S)
    with Listener(path) as listener:
        try:
            link = accept_while(child, listener)
        except PeerGone:
            return "gone in greeting", []
    if link is None:
        return "never came", []
    try:
        side.begin(link)
        assert side.left.wait(BOUND_S), "the death of the client was not noticed"
        if side.states[0] is PeerState.CLOSED:
            return "closed", side.states
        assert eventually(lambda: PeerState.GONE in side.states)
        with pytest.raises(PeerGone):
            link.call(64, timeout_s=BOUND_S)
        return "died", side.states
    finally:
        side.close()


def ask(child: Child, path: str) -> tuple[str, list[PeerState]]:
    """Be the client of a server that may die; return how it ended."""
    side = Client(path, timeout_s=BOUND_S)
    link = None
    while link is None:
        try:
            link = Link.connect(path, facts={}, timeout_s=BOUND_S)
        except PeerGone as error:
            if child.process.poll() is not None:
                return "never there" if error.code == "no_listener" else "gone in greeting", []
            if error.code != "no_listener":
                return "gone in greeting", []
            time.sleep(0.002)
    try:
        side.begin(link)
        try:
            side.talk(link)
        except PeerGone:
            assert eventually(lambda: PeerState.GONE in side.states)
            return "died", side.states
        return "closed", side.states
    finally:
        side.close()


@pytest.mark.parametrize("victim", ["client", "server"])
def test_killed_at_every_channel_call(folder: str, spawn: Spawn, victim: str) -> None:
    survive = serve if victim == "client" else ask
    held = holdings()
    outcomes: dict[str, int] = {}
    number = 0
    while True:
        number += 1
        assert number < MAX_CALLS
        path = os.path.join(folder, str(number))
        child = spawn("converse", victim, path, number)
        started = time.monotonic()
        outcome, states = survive(child, path)
        took = time.monotonic() - started
        code = child.code()
        assert took < BOUND_S, f"call {number}: {outcome} only after {took:.1f} s"
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        if outcome == "died":
            assert states == [PeerState.DYING, PeerState.GONE]
        child.end()
        assert eventually(lambda: holdings() == held), f"call {number}: {outcome}: {held} {holdings()}"
        if code == 0:  # it came to its end before that call
            break
        assert code == -signal.SIGKILL
    print(f"{victim}: {number - 1} calls, {outcomes}")
    assert outcomes["died"] >= 10
    assert outcome == "closed"


@pytest.mark.parametrize("victim", ["client", "server"])
def test_the_conversation_itself_works(path: str, spawn: Spawn, victim: str) -> None:
    child = spawn("converse", victim, path, 0)
    outcome, states = (serve if victim == "client" else ask)(child, path)
    assert outcome == "closed"
    assert states in ([PeerState.CLOSED], [])
    assert int(child.line()) > 20
    assert child.code() == 0
