"""What a page costs beside its copies: the benchmark finds all stages, and the cost stays near its bound."""

from __future__ import annotations

import pytest

tier = pytest.importorskip("benchmarks.tier")


@pytest.mark.timing
def test_a_page_costs_little_beside_its_copies() -> None:
    """Bounds hold with a factor of six: other work shares the cores, and a machine may be half as fast as another."""
    backup, restore = tier.measure(256, 16, 10)
    assert [backup["direction"], restore["direction"]] == ["backup", "restore"]
    before, after = "admission to submission", "completion to visible"
    assert set(backup[before]["of_which"]) >= {"names", "present", "reserve", "move"}
    assert set(restore[before]["of_which"]) >= {"names", "hold", "move"}
    assert "commit" in backup[after]["of_which"]
    for row in (backup, restore):
        for stage in (before, after):
            assert 0 < row[stage]["us_a_page"] <= 6 * tier.LIMIT_US
