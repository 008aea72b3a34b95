"""What outlasts a single test on purpose: this process's sign of life, and the folder of its sockets."""

from __future__ import annotations

import os
import tempfile

import pytest

from devipc.listener import default_directory
from devipc.liveness import own_life
from devipc.registry import load_backend


@pytest.fixture(scope="session", autouse=True)
def _lasting() -> None:
    os.environ.setdefault("DEVIPC_TRIAL_CACHE", tempfile.mkdtemp(prefix="trials"))
    own_life()
    sync = load_backend("host").open_device().sync
    assert sync is not None
    assert sync.events is not None
    sync.events.destroy(sync.events.create())  # the device keeps the memory of its events
    os.makedirs(default_directory(), mode=0o700, exist_ok=True)
