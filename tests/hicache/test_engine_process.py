"""An engine process alone: pages move both ways, and each way in which it, its client or its supervisor can end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from devipc.hicache.planner import Direction
from tests.hicache.engine_world import PAGES, contents, engine_world
from tests.hicache.pools import until

BOTH = pytest.mark.parametrize("backend", ["host", pytest.param("cuda", marks=pytest.mark.simulator)])


def there_and_back(backend: str, strategy: str = "", **switches: Any) -> str:
    """Pages go to the host tier and come back to other places; fences are seen by layer group."""
    with engine_world(backend, strategy=strategy, **switches) as it:
        it.start()
        with it.client() as client:
            chosen = it.attach(client)
            sources = list(range(1, 9))
            client.fill(pages=sources, seed=5)
            places = it.places(8)
            job = it.move(client, Direction.BACKUP, sources, places, slot=3, op=11)
            assert job.error is None
            assert client.base(slot=3) == 1
            client.wait(direction="backup", n=1)
            assert it.host(places) == contents(client, 8, 5)
            targets = [int(page) for page in np.random.default_rng(1).permutation(np.arange(10, PAGES))[:8]]
            client.poison(pages=list(range(9, PAGES)))
            job = it.move(client, Direction.RESTORE, targets, places, slot=4, op=12)
            assert job.error is None
            assert client.base(slot=4) == 1
            client.wait(direction="restore", n=5)
            client.check(pages=targets, seed=5)
            again = it.move(client, Direction.RESTORE, targets, places, slot=5, op=13)
            assert again.error is None
            assert client.base(slot=5) == 6  # five groups of layers before it
            status: Any = it.process.status()
            assert status["lanes"]["restore"] == {"flying": 0, "jobs": 2}
            assert it.process.stuck()["process"] < 5
            it.carrier.close_pool(it.pool.opened)
            client.unshare(number=1, generation=1, chunk=0, timeout_s=10)
        it.process.close_client(it.remote)
        until(lambda: it.process.status()["clients"] == {})
        assert not it.ends
        return chosen


@BOTH
def test_there_and_back(backend: str) -> None:
    assert there_and_back(backend)
