"""Any order of operations, against a model: see ``stateful.py``."""

from __future__ import annotations

import pytest

from tests.hicache.deployment import DAEMON
from tests.hicache.stateful import run


@pytest.mark.timeout(300)  # when it fails: shrinking takes longer than the run itself
def test_any_order_of_operations() -> None:
    """About 20,000 operations."""
    run(100)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_any_order_of_many_operations() -> None:
    """About 200,000 operations."""
    run(1000)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_any_order_of_operations_over_the_daemon() -> None:
    """An engine process each, so that there are fewer of them."""
    run(20, deployment=DAEMON)
