"""What the conformance suite may expect of this backend: its one kind and its strategies, no skip that is not listed.

``python -m pytest --pyargs devipc.conformance -p devipc.conformance.plugin --devipc-profile
backends.levelzero.tests.profile:whole_device``. Knows no case but by its id.
"""

from __future__ import annotations

from devipc.conformance import BackendProfile
from devipc.types import HandleKind, Strategy

__all__ = ["whole_device"]

whole_device = BackendProfile(
    backend="levelzero",
    handle_kinds=(HandleKind.OPAQUE,),
    strategies=(Strategy.HOST_FLAG, Strategy.POLLING, Strategy.EVENT),
)
