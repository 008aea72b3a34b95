"""Leases are counted per holder, never below zero, and end with their holder."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devipc.errors import StaleError, UsageError
from devipc.lease import LeaseTable


@given(st.lists(st.tuples(st.sampled_from("gr"), st.integers(0, 2)), max_size=60))
def test_counts_match_a_simple_model(steps: list[tuple[str, int]]) -> None:
    table, model = LeaseTable(), [0, 0, 0]
    table.add("item")
    for action, holder in steps:
        if action == "g":
            table.grant("item", holder)
            model[holder] += 1
        else:
            assert table.release("item", holder) is (model[holder] > 0)
            model[holder] = max(0, model[holder] - 1)
        assert table.holders("item") == {index for index, count in enumerate(model) if count}
        assert table.wait_free("item", timeout_s=0) is (sum(model) == 0)


def test_a_retired_item_is_lent_no_more_but_waits_for_what_is_out() -> None:
    table = LeaseTable()
    table.add("item")
    table.grant("item", "a")
    table.retire("item")
    with pytest.raises(StaleError):
        table.grant("item", "b")
    with pytest.raises(UsageError, match="leased out"):
        table.remove("item")
    assert not table.wait_free("item", timeout_s=0.01)
    timer = threading.Timer(0.05, table.release, ("item", "a"))
    timer.start()
    assert table.wait_free("item", timeout_s=5)
    timer.join()
    table.remove("item")


def test_a_dead_holder_loses_everything_once() -> None:
    table = LeaseTable()
    for item in ("one", "two"):
        table.add(item)
        table.grant(item, "dead")
        table.grant(item, "dead")
    table.grant("two", "alive")
    assert table.drop_holder("dead") == ["one"]
    assert table.drop_holder("dead") == []
    assert table.holders("two") == {"alive"}


def test_an_unknown_item_is_stale_and_a_known_one_not_added_twice() -> None:
    table = LeaseTable()
    with pytest.raises(StaleError):
        table.grant("nothing", "a")
    table.add("item")
    with pytest.raises(UsageError):
        table.add("item")


def test_held_gives_back_also_after_an_error() -> None:
    table = LeaseTable()
    table.add("item")
    with pytest.raises(ZeroDivisionError), table.held("item", "a"):
        raise ZeroDivisionError
    assert table.wait_free("item", timeout_s=0)
