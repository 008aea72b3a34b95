"""What the tests of this folder share: a life that outlasts them, a private folder, child processes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator

import pytest

from devipc.channel import Channel, channel_pair
from devipc.channel.liveness import own_life
from tests.channel.processes import Child, eventually, holdings


@pytest.fixture(scope="session", autouse=True)
def _life() -> None:
    """The process's one life is made before the leak guard looks: it stays until the process ends."""
    own_life()


@pytest.fixture
def flat() -> Iterator[None]:
    """Descriptors and threads are as many after the test as before."""
    held = holdings()
    yield
    assert eventually(lambda: holdings() == held), (held, holdings())


@pytest.fixture
def folder() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="c")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def path(folder: str) -> str:
    return os.path.join(folder, "s")


@pytest.fixture
def spawn() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(role: str, *arguments: object, pass_fds: tuple[int, ...] = ()) -> Child:
        child = Child(role, *arguments, pass_fds=pass_fds)
        children.append(child)
        return child

    yield start
    for child in children:
        child.end()


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    left, right = channel_pair()
    with left, right:
        yield left, right
