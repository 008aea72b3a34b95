"""What the conformance suite may expect of this backend: its one kind and its strategies.

``python -m pytest --pyargs devipc.conformance -p devipc.conformance.plugin --devipc-profile
backends.levelzero.tests.profile:whole_device``. Knows no case but by its id.
"""

from __future__ import annotations

import dataclasses

from devipc.conformance import BackendProfile
from devipc.types import HandleKind, Strategy

__all__ = ["lenient", "simulated", "whole_device"]

whole_device = BackendProfile(
    backend="levelzero",
    handle_kinds=(HandleKind.OPAQUE,),
    strategies=(Strategy.HOST_FLAG, Strategy.POLLING, Strategy.EVENT),
)

simulated = dataclasses.replace(
    whole_device,
    simulated=True,
    environment={"ZES_ENABLE_SYSMAN": "1"},
    hidden={"ZE_AFFINITY_MASK": "9"},
    reordered={"DEVSIM_ORDER": "1,0"},
)
"""The simulated driver has two devices."""

lenient = dataclasses.replace(simulated, strategies=None)
"""A simulated driver that lacks a primitive, which must be refused by type."""
