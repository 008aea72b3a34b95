"""What outlasts a single test on purpose: this process's sign of life, and the folder of its sockets."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest

from devipc.channel.listener import default_directory
from devipc.channel.liveness import own_life
from devipc.registry import load_backend
from devipc.session import Exporter, Importer
from tests.session.worker import TIMEOUT_S


@pytest.fixture(scope="session", autouse=True)
def _lasting() -> None:
    os.environ.setdefault("DEVIPC_TRIAL_CACHE", tempfile.mkdtemp(prefix="trials"))
    own_life()
    os.makedirs(default_directory(), mode=0o700, exist_ok=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """The device keeps the memory of its events, and a test before may have closed the device."""
    sync = load_backend("host").open_device().sync
    assert sync is not None
    assert sync.events is not None
    sync.events.destroy(sync.events.create())


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    with Exporter(strategy="stream_memop", timeout_s=TIMEOUT_S) as session:
        yield session


@pytest.fixture
def importer(exporter: Exporter) -> Iterator[Importer]:
    with Importer(exporter.path, strategy="stream_memop", timeout_s=TIMEOUT_S) as session:
        yield session
