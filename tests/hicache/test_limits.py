"""Sizes and limits that make no sense are refused before anything is made, and the smallest that do are served."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from devipc.errors import UsageError
from devipc.hicache.api import UNFENCED
from devipc.hicache.engine import EngineConfig
from devipc.hicache.engine import session as session_module
from devipc.hicache.operations import Kind, Status
from devipc.hicache.planning.planner import layer_groups
from devipc.interfaces.backend import Device
from devipc.registry import load_backend
from tests.hicache.scenario import done
from tests.hicache.world import TIMEOUT_S, world
from tests.host.test_interrupts import interrupt_at


@pytest.fixture
def device() -> Iterator[Device]:
    opened = load_backend("host").open_device()
    yield opened
    opened.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"tier_nbytes": 0},
        {"tier_nbytes": 2.5e6},
        {"slab_nbytes": -64},
        {"chunk_nbytes": 0},
        {"index_entries": -1},
        {"extent_pages": 0},
        {"extent_pages": 1.5},
        {"bounce_nbytes": 0},
        {"kept_percent": 91},
        {"kept_percent": -1},
        {"max_ops": 0},
        {"max_flying": -1},
        {"max_flying_nbytes": 0},
        {"layer_groups": (2, 0)},
        {"layer_groups": (-1,)},
        {"layer_groups": ("1",)},
    ],
    ids=str,
)
def test_what_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        EngineConfig(**wrong)
    assert caught.value.code == "config"


def test_groups_go_forward() -> None:
    with pytest.raises(UsageError):
        layer_groups(range(4), (-1,))


def test_the_smallest_that_is_served(device: Device) -> None:
    smallest: dict[str, Any] = dict.fromkeys(("max_ops", "max_flying", "max_flying_nbytes", "extent_pages"), 1)
    sizes = {"tier_nbytes": np.int64(4096), "slab_nbytes": 1152, "index_entries": 1, "layer_groups": ()}
    with world(device, **smallest, **sizes) as it:
        memory, client = it.attention_pool(), it.client()
        handle = it.register(client, memory)
        keys = it.keys(handle, 9)
        memory.fill(range(1, 10), keys)
        for number in range(9):
            done(client.backup(handle, [1 + number], keys[number : number + 1], ready=UNFENCED))
            restore = client.restore(handle, keys[number : number + 1], [20 + number], ready=UNFENCED)
            assert restore.wait(TIMEOUT_S).status is Status.COMPLETED
        memory.check(range(20, 29), keys)
        assert it.tier.status()["evicted"]


def test_a_submission_that_is_interrupted_anywhere_counts_as_long_as_it_is_open(device: Device) -> None:
    """A count without an operation would be one transfer less for its client, and a pool that never goes."""
    with world(device) as it:
        memory, client = it.attention_pool(), it.client()
        handle = it.register(client, memory)
        (session,) = it.engine._sessions
        point, hit = 0, True
        while hit:
            point += 1
            hit = interrupt_at(
                point,
                lambda: client.backup(handle, [1], it.keys(handle, 1, seed=point), ready=UNFENCED),  # noqa: B023
                (str(session_module.__file__),),
            )
            with session._lock:
                transfers = [op for op in session.open_ops() if op.kind is Kind.BACKUP]
                assert session._transfers == len(transfers), f"after an interrupt at place {point}"
                assert sum(pool.users for pool in session._pools.values()) == len(transfers)
        assert point > 10
