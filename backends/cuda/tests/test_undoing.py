"""What is undone when memory is not to be had, and what is said when that fails too, on the simulated driver."""

from __future__ import annotations

from typing import Any

import pytest

from backends.testing.undoing import check_allocations, check_opens
from devipc.spi import DevIPCError, HandleKind

from .peers import simulated

KINDS = ["legacy", "pool", "vmm_fd"]


@pytest.mark.parametrize("kind", KINDS)
@simulated()
def test_what_stays_of_an_opening_is_said(kind: str, device: Any, sim: Any) -> None:
    check_opens(device, kind)


@pytest.mark.parametrize("kind", KINDS)
@simulated()
def test_what_stays_of_an_allocation_is_said(kind: str, device: Any, sim: Any) -> None:
    check_allocations(kind)


@simulated()
def test_what_is_not_unmapped_keeps_its_addresses(device: Any, sim: Any) -> None:
    """Nothing else is ever mapped there; whoever tries again gives both back."""
    block = device.memory.allocate(2 * 2**20, kind=HandleKind.VMM_FD)
    sim.inject("cuMemUnmap@1=999")
    with pytest.raises(DevIPCError, match="cuMemUnmap"):
        device.memory.free(block)
    assert (sim.counter("live_maps"), sim.calls("cuMemAddressFree")) == (1, 0)
    with device.context:
        block.token.release()
    assert (sim.counter("live_maps"), sim.counter("live_reservations")) == (0, 0)
