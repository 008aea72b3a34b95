"""What is undone when memory is not to be had, and what is said when that fails too, on the simulated driver."""

from __future__ import annotations

from typing import Any

import pytest

from backends.testing.undoing import check_allocations, check_opens

from .peers import simulated

KINDS = ["opaque"]


@pytest.mark.parametrize("kind", KINDS)
@simulated()
def test_what_stays_of_an_opening_is_said(kind: str, device: Any, sim: Any) -> None:
    check_opens(device, kind)


@pytest.mark.parametrize("kind", KINDS)
@simulated()
def test_what_stays_of_an_allocation_is_said(kind: str, device: Any, sim: Any) -> None:
    check_allocations(kind)
