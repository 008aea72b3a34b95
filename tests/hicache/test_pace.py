"""A direction keeps to its rate on average, whatever the sizes of its operations."""

from __future__ import annotations

import pytest

from devipc.hicache.moving.pace import Pace


@pytest.mark.parametrize("nbytes", [1, 100, 999, 5000])
def test_the_average_is_the_rate(nbytes: int) -> None:
    now = 0.0
    pace = Pace(1000, clock=lambda: now)
    moved = 0
    while now < 100.0:
        if pace.allows():
            pace.spend(nbytes)
            moved += nbytes
        else:
            now += 0.001
    assert moved == pytest.approx(1000 * 100, abs=nbytes + 1000 * 0.1 + 10)


def test_an_idle_time_saves_up_a_tenth_of_a_second() -> None:
    now = 0.0
    pace = Pace(1000, clock=lambda: now)
    now = 1000.0
    begun = 0
    while pace.allows():
        pace.spend(10)
        begun += 1
    assert begun == 11  # the last one overdraws


def test_without_a_rate_there_is_no_limit() -> None:
    pace = Pace(0)
    for _ in range(100):
        assert pace.allows()
        pace.spend(2**40)
