"""What the conformance suite may expect of this backend on the simulated runtime: every kind and every strategy.

``python -m pytest --pyargs devipc.conformance -p devipc.conformance.plugin --devipc-profile
backends.hip.tests.profile:simulated``. Knows no case but by its id.
"""

from __future__ import annotations

from devipc.conformance import BackendProfile
from devipc.types import HandleKind, Strategy

__all__ = ["forwarded", "simulated"]

simulated = BackendProfile(
    backend="hip",
    handle_kinds=(HandleKind.LEGACY, HandleKind.VMM_FD, HandleKind.POOL, HandleKind.DMABUF),
    strategies=tuple(Strategy),
)

forwarded = BackendProfile(
    backend="hip",
    handle_kinds=(HandleKind.LEGACY, HandleKind.VMM_FD, HandleKind.POOL),
    strategies=(Strategy.STREAM_MEMOP, Strategy.HOST_FLAG, Strategy.POLLING),
)
"""The same calls forwarded to another vendor's driver. Dma-bufs and events are as it has them."""
