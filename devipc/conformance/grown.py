"""Grown ranges: one range of addresses over several driver blocks, where a backend or its profile makes such.

Owns the choice between the two ways. It tests nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from devipc.conformance.profile import BackendProfile
from devipc.conformance.rig import Rig
from devipc.conformance.staging import Unavailable, given_back
from devipc.interfaces.memory import Allocation

__all__ = ["allocated_grown"]


@contextmanager
def allocated_grown(rig: Rig, profile: BackendProfile, sizes: Sequence[int]) -> Iterator[Allocation]:
    """Yield a grown range of blocks of these sizes.

    Raises
    ------
    Unavailable
        When neither the profile nor the device can make one.
    """
    memory = rig.memory
    if profile.allocate_grown is not None:
        allocation = profile.allocate_grown(rig.device, sizes)
    else:
        own = getattr(memory, "allocate_grown", None)
        if own is None:
            raise Unavailable("neither the profile nor the device makes a grown range")
        allocation = own(tuple(sizes))
    with given_back(lambda: memory.free(allocation)):
        yield allocation
