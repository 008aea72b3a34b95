"""Any order of operations, against a model: see ``machine.py``."""

from __future__ import annotations

import pytest

from tests.hicache.deployment import DAEMON
from tests.hicache.machine import CacheMachine
from tests.hicache.stateful import run


@pytest.mark.once
@pytest.mark.timeout(300)  # when it fails: shrinking takes longer than the run itself
def test_any_order_of_operations() -> None:
    """About 4,000 operations; the long run below has the many."""
    run(33)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_any_order_of_200_000_operations() -> None:
    before = CacheMachine.operations
    while CacheMachine.operations < before + 200_000:
        run(200)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_any_order_of_operations_over_the_daemon() -> None:
    """About 13,000 operations."""
    run(100, deployment=DAEMON)
