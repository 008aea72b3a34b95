"""When an engine's lane expects its jobs to end: of each size by what others of that size took."""

from __future__ import annotations

import pytest

from devipc.hicache.engineproc.joblane import Rates


def test_sizes_that_take_turns_are_each_expected_when_they_end() -> None:
    rates, late_s = Rates(), dict[int, float]()
    for number in range(60):
        nbytes = (2**17, 2**25, 2**29)[number % 3]
        took_s = 0.4e-3 + nbytes / 52e9  # much more for their bytes where they are few
        late_s[nbytes] = took_s - rates.expected_s(nbytes)
        rates.learn(nbytes, late_s[nbytes])
    assert max(map(abs, late_s.values())) < 0.05e-3


@pytest.mark.parametrize("late_s", [-1.0, 0.0, 1e9])
def test_no_job_is_expected_before_it_begins(late_s: float) -> None:
    rates = Rates()
    for nbytes in (0, 1, 2**20):
        rates.learn(nbytes, late_s)
        assert rates.expected_s(nbytes) >= 0
