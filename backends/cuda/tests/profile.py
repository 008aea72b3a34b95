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


whole_device = BackendProfile(
    backend="cuda",
    handle_kinds=(HandleKind.VMM_FD, HandleKind.LEGACY, HandleKind.POOL),
    strategies=tuple(Strategy),
    skips_allowed=False,
    # DISC-005 and MEM-036: there is one device. DISC-010: a whole device is no slice. MEM-098, MEM-100 and MEM-206: a
    # legacy handle has no descriptors.
    expected_skips=frozenset(("DISC-005", "DISC-010", "MEM-036", "MEM-098", "MEM-100", "MEM-206")),
    capture=capture,
    hidden={"CUDA_VISIBLE_DEVICES": "-1"},
)

simulated = dataclasses.replace(
    whole_device,
    simulated=True,
    expected_skips=whole_device.expected_skips - {"DISC-005", "MEM-036"},
    reordered={"CUDA_VISIBLE_DEVICES": "1,0"},
)
"""The simulated driver has two devices."""

lenient = dataclasses.replace(simulated, strategies=None, skips_allowed=True)
"""A simulated driver that lacks a primitive, which must be refused by type."""

forgetful = BackendProfile(backend="cuda", keeps_freed_memory=False)
"""A driver that does not keep what an exporter freed while it is mapped."""
