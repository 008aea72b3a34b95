"""What the conformance suite may expect of this backend: every kind and every strategy, no skip that is not listed.

``python -m pytest --pyargs devipc.conformance -p devipc.conformance.plugin --devipc-profile
backends.cuda.tests.profile:whole_device``. Knows no case but by its id.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from devipc_cuda import driver, streams

from devipc.conformance import BackendProfile
from devipc.types import HandleKind, Strategy

__all__ = ["forgetful", "lenient", "simulated", "whole_device"]


@contextmanager
def capture(device: Any, stream: Any) -> Iterator[None]:
    """Let a stream record a graph, which is thrown away."""
    native = streams.native(stream)
    with device.context:
        driver.call("cuStreamBeginCapture", native, driver.relaxed_capture())
    try:
        yield
    finally:
        with device.context:
            driver.call("cuGraphDestroy", driver.call("cuStreamEndCapture", native))


ONE_DEVICE = frozenset(("DISC-005", "MEM-036"))
NO_SLICE = frozenset(("DISC-010",))
NO_DESCRIPTORS = frozenset(("MEM-098", "MEM-100", "MEM-206"))
"""A legacy handle has none."""
PLACED_BY_THE_DRIVER = frozenset(("MEM-220", "MEM-221", "LIFE-220"))
"""The driver chooses where it maps memory of legacy and pool handles."""

whole_device = BackendProfile(
    backend="cuda",
    handle_kinds=(HandleKind.VMM_FD, HandleKind.LEGACY, HandleKind.POOL),
    strategies=tuple(Strategy),
    skips_allowed=False,
    expected_skips=ONE_DEVICE | NO_SLICE | NO_DESCRIPTORS | PLACED_BY_THE_DRIVER,
    capture=capture,
    hidden={"CUDA_VISIBLE_DEVICES": "-1"},
)

simulated = dataclasses.replace(
    whole_device,
    simulated=True,
    expected_skips=whole_device.expected_skips - ONE_DEVICE,
    reordered={"CUDA_VISIBLE_DEVICES": "1,0"},
)
"""The simulated driver has two devices."""

lenient = dataclasses.replace(simulated, strategies=None, skips_allowed=True)
"""A simulated driver that lacks a primitive, which must be refused by type."""

forgetful = BackendProfile(backend="cuda", keeps_freed_memory=False)
"""A driver that does not keep what an exporter freed while it is mapped."""
