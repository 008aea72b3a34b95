"""Pauses between two looks at what wakes nobody."""

from __future__ import annotations

import pytest

from devipc.deadline import pause_after


def test_a_pause_is_a_sixteenth_of_the_wait_so_far_within_bounds() -> None:
    assert pause_after(0.0, 1e-3) == 20e-6
    assert pause_after(3.2e-3, 1e-3) == pytest.approx(0.2e-3)
    assert pause_after(1.0, 1e-3) == 1e-3
    assert pause_after(1.0, 5e-6) == 5e-6
