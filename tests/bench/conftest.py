"""What outlasts a single test on purpose: this process's sign of life, and the folder of its sockets."""

from __future__ import annotations

import os
import tempfile

import pytest

from devipc.channel.listener import default_directory
from devipc.channel.liveness import own_life


@pytest.fixture(scope="session", autouse=True)
def _lasting() -> None:
    os.environ.setdefault("DEVIPC_TRIAL_CACHE", tempfile.mkdtemp(prefix="trials"))
    own_life()
    os.makedirs(default_directory(), mode=0o700, exist_ok=True)
