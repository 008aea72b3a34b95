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
from tests.hicache.deployment import INPROC
from tests.hicache.world import TIMEOUT_S, Client, PoolMemory, World

Scenario = Callable[[Device], None]
SCENARIOS: dict[str, Scenario] = {}
_ONLY: dict[str, str] = {}


@overload
def scenario(function: Scenario, /) -> Scenario: ...
@overload
def scenario(*, only: str) -> Callable[[Scenario], Scenario]: ...
def scenario(function: Scenario | None = None, /, *, only: str = "") -> Any:
    """Register a scenario; ``only`` names a deployment: it is about an engine in this process, or in one of its own."""

    def register(function: Scenario) -> Scenario:
        SCENARIOS[function.__name__] = function
        if only:
            _ONLY[function.__name__] = only
        return function

    return register if function is None else register(function)


def scenarios_of(deployment: str) -> list[str]:
    """Return those that are about this deployment."""
    return [name for name in SCENARIOS if name not in _ONLY or (_ONLY[name] == INPROC) == (deployment == INPROC)]


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
