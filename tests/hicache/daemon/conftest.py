"""What outlasts a single test on purpose: this process's sign of life, which peers get."""

from __future__ import annotations

import pytest

from devipc.channel.liveness import own_life


@pytest.fixture(scope="session", autouse=True)
def _lasting() -> None:
    own_life()
