"""What scenarios share: their registry, and short hands for what each of them does.

A scenario gets an open device and leaves nothing behind. The same ones run on every backend and deployment.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, overload

import pytest

from devipc.errors import DevIPCError
from devipc.hicache.api import UNFENCED
from devipc.hicache.results import PageResult
from devipc.interfaces.backend import Device
from tests.hicache.world import TIMEOUT_S, Client, PoolMemory, World

Scenario = Callable[[Device], None]
SCENARIOS: dict[str, Scenario] = {}
ELSEWHERE: list[str] = []
"""Those that any deployment can run."""


@overload
def scenario(function: Scenario, /) -> Scenario: ...
@overload
def scenario(*, only: str) -> Callable[[Scenario], Scenario]: ...
def scenario(function: Scenario | None = None, /, *, only: str = "") -> Any:
    """Register a scenario; ``only`` names the one deployment that it is about."""

    def register(function: Scenario) -> Scenario:
        SCENARIOS[function.__name__] = function
        if not only:
            ELSEWHERE.append(function.__name__)
        return function

    return register if function is None else register(function)


def done(ticket: Any) -> list[PageResult]:
    return [PageResult(result) for result in ticket.result(TIMEOUT_S)]


def refused(call: Callable[[], object], kind: type[DevIPCError], code: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.code == code


def filled(it: World, client: Client, memory: PoolMemory, handle: Any, count: int, *, seed: int = 0) -> Any:
    """Store ``count`` pages and return their keys."""
    keys = it.keys(handle, count, seed=seed)
    pages = list(itertools.islice(itertools.count(1), count))
    memory.fill(pages, keys)
    done(client.backup(handle, pages, keys, ready=UNFENCED))
    return keys
