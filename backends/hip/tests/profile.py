"""What the conformance suite may expect of this backend on the simulated runtime: every kind and every strategy.

``python -m pytest --pyargs devipc.conformance -p devipc.conformance.plugin --devipc-profile
backends.hip.tests.profile:simulated``. Knows no case but by its id.
"""

from __future__ import annotations

from dataclasses import replace

from devipc.conformance import BackendProfile
from devipc.types import HandleKind, Strategy

__all__ = ["forwarded", "forwarded_whole_device", "simulated"]

simulated = BackendProfile(
    backend="hip",
    handle_kinds=(HandleKind.LEGACY, HandleKind.VMM_FD, HandleKind.POOL, HandleKind.DMABUF),
    strategies=tuple(Strategy),
)

forwarded = BackendProfile(
    backend="hip",
    handle_kinds=(HandleKind.LEGACY, HandleKind.VMM_FD, HandleKind.POOL),
    strategies=tuple(Strategy),
)
"""The same calls forwarded to another vendor's driver, which opens no dma-buf of this kind."""

forwarded_whole_device = replace(
    forwarded,
    skips_allowed=False,
    # DISC-010: a whole device is no slice. MEM-206: a legacy handle has no descriptors.
    expected_skips=frozenset(("DISC-010", "MEM-206")),
)
"""That on a real device, where only what a whole device cannot run may be left out."""
