"""What tests of this folder ask of a device again and again."""

from __future__ import annotations

import time
from collections.abc import Callable

from devipc.host.backend import HostDevice
from devipc.host.sync import HostWordWaits, HostWordWrites
from devipc.host.transfer import HostStream, HostTransfer


def writes_of(device: HostDevice) -> HostWordWrites:
    writes = device.sync.word_writes
    assert writes is not None
    return writes


def waits_of(device: HostDevice) -> HostWordWaits:
    waits = device.sync.word_waits
    assert waits is not None
    return waits


def until(ready: Callable[[], bool], *, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def passed(transfer: HostTransfer, stream: HostStream) -> Callable[[], bool]:
    """Record a new marker and return its query."""
    marker = transfer.create_marker()
    transfer.record(marker, stream)
    return lambda: transfer.query_marker(marker)
