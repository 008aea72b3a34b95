"""Threads that meet in the client and the engine: who may hold up whom, and what happens when there is none to be had."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from devipc.interfaces.backend import Device
from devipc.registry import load_backend
from tests.hicache.world import run_threads, world


@pytest.fixture
def device() -> Iterator[Device]:
    opened = load_backend("host").open_device()
    yield opened
    opened.close()


@pytest.fixture
def eager() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager")
def test_clients_that_ask_for_the_status_at_once_do_not_wait_for_each_other(device: Device) -> None:
    with world(device) as it:
        first, second = it.client(), it.client()
        asked = []

        def ask(client: object) -> None:
            for _ in range(1500):
                asked.append(client.status()["clients"])  # type: ignore[attr-defined]

        run_threads(lambda: ask(first), lambda: ask(second))
        assert asked == [2] * 3000
