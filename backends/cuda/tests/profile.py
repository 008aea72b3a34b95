"""What the conformance suite may expect of this backend: every kind and every strategy, no skip that is not listed.

``python -m pytest --pyargs devipc.conformance -p devipc.conformance.plugin --devipc-profile
backends.cuda.tests.profile:whole_device``. Knows no case but by its id.
"""

from __future__ import annotations

from devipc.conformance import BackendProfile
from devipc.types import HandleKind, Strategy

__all__ = ["forgetful", "whole_device"]

whole_device = BackendProfile(
    backend="cuda",
    handle_kinds=(HandleKind.VMM_FD, HandleKind.LEGACY, HandleKind.POOL),
    strategies=tuple(Strategy),
    skips_allowed=False,
    # DISC-010: a whole device is no slice. MEM-206: a legacy handle has no descriptors.
    expected_skips=frozenset(("DISC-010", "MEM-206")),
)

forgetful = BackendProfile(backend="cuda", keeps_freed_memory=False)
"""A driver that does not keep what an exporter freed while it is mapped."""
