"""A forked child can use nothing of its parent's, harms nothing, and does not hide its parent's death."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from devipc.channel.link import Link, PeerState
from devipc.channel.listener import Listener
from tests.channel.processes import Child, eventually

Spawn = Callable[..., Child]


def test_everything_is_refused_in_a_child_and_unharmed_in_the_parent(path: str, spawn: Spawn) -> None:
    child = spawn("forker", path)
    assert child.line() == "0"
    assert child.line() == "still here True True"
    assert child.line() == "True connected"
    assert child.code() == 0
    assert not os.path.exists(path)


@pytest.mark.chaos
def test_a_child_that_lives_on_does_not_hide_its_parents_death(folder: str, spawn: Spawn) -> None:
    path, own = os.path.join(folder, "s"), os.path.join(folder, "own")
    told: list[PeerState] = []
    with Listener(path) as listener:
        parent = spawn("bereaved", path, own)
        link = Link.accept(listener.accept(20), facts={}, timeout_s=20)
        link.on_state(told.append)
        link.start()
    grandchild = int(parent.line().split()[0])
    try:
        parent.kill()
        assert eventually(lambda: told == [PeerState.DYING, PeerState.GONE])
        assert eventually(lambda: not link._channel.is_quiet())  # the socket hung up as well
        with Listener(own):  # its lock did not live on in the child
            pass
        os.kill(grandchild, 0)
    finally:
        os.kill(grandchild, signal.SIGKILL)
    link.close()
