"""What outlasts a single command on purpose: the folder of the sockets, and the folder of known trials."""

from __future__ import annotations

import os
import tempfile

import pytest

from devipc.channel.listener import default_directory


@pytest.fixture(scope="session", autouse=True)
def _lasting() -> None:
    os.environ.setdefault("DEVIPC_TRIAL_CACHE", tempfile.mkdtemp(prefix="trials"))
    os.makedirs(default_directory(), mode=0o700, exist_ok=True)
