"""Fixtures of this folder: the host device, open for one test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from devipc.interfaces.backend import Device
from tests.completion.rig import host_device


@pytest.fixture
def device() -> Iterator[Device]:
    with host_device() as opened:
        yield opened
