"""Which layer groups are submitted apart: what cuts may cost, what they are for, and that they are chosen soon."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devipc.hicache.planning.grouping import Load, cut

LAYERS = (1, 2, 4, 8, 17)
Loads = Callable[[int, int], Load]


def loads(layers: Sequence[int], *, layer_s: float = 1.0, beside_s: float = 0.0, submit_s: float = 0.0) -> Loads:
    """Loads that are so long for each layer, and for each submission so much longer."""
    return lambda begin, end: Load(submit_s, sum(layers[begin:end]) * layer_s + beside_s)


def took(ranges: Sequence[tuple[int, int]], load: Loads) -> float:
    submitted = moved = 0.0
    for one in ranges:
        submitted += load(*one).submit_s
        moved = max(moved + load(*one).move_s, submitted)
    return moved


def test_what_costs_nothing_is_cut_everywhere() -> None:
    assert cut(100, LAYERS, loads(LAYERS)) == ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        (0.005, ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))),
        (0.02, ((0, 1), (1, 3), (3, 4), (4, 5))),
        (0.03, ((0, 1), (1, 4), (4, 5))),
        (0.05, ((0, 1), (1, 5))),
        (0.07, ((0, 5),)),
    ],
)
def test_a_cut_is_made_where_it_helps_most_and_all_may_cost_6_percent(
    beside: float, expected: tuple[tuple[int, int], ...]
) -> None:
    """The first cut is for the first layer; those that there is room for are where passes end earliest for them."""
    load = loads(LAYERS, beside_s=beside * 32)
    found = cut(100, LAYERS, load)
    assert found == expected
    assert took(found, load) <= 1.06 * took([(0, 5)], load)


def test_few_pages_may_cost_relatively_more() -> None:
    load = loads(LAYERS, layer_s=1e-6, beside_s=5e-6)
    assert len(cut(1, LAYERS, load)) > len(cut(100, LAYERS, load)) == 1


def test_the_processor_may_be_what_cuts_cost() -> None:
    assert cut(100, LAYERS, loads(LAYERS, submit_s=32.0)) == ((0, 5),)
    assert len(cut(100, LAYERS, loads(LAYERS, submit_s=1.0))) == 5


@given(
    layers=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    beside=st.floats(0, 2),
    submit=st.floats(0, 2),
    pages=st.integers(1, 1 << 16),
)
@settings(max_examples=200, deadline=None)
def test_ranges_are_all_groups_in_order_within_what_cuts_may_cost(
    layers: list[int], beside: float, submit: float, pages: int
) -> None:
    load = loads(layers, beside_s=beside, submit_s=submit)
    found = cut(pages, layers, load)
    assert [at for one in found for at in range(*one)] == list(range(len(layers)))
    whole = took([(0, len(layers))], load)
    assert took(found, load) <= (1.06 * whole + 1e-5 / pages) * (1 + 1e-9)


def test_many_groups_are_cut_soon() -> None:
    layers = (1,) * 64
    asked: list[tuple[int, int]] = []

    def load(begin: int, end: int) -> Load:
        asked.append((begin, end))
        return loads(layers)(begin, end)

    began = time.perf_counter()
    assert len(cut(100, layers, load)) > 5  # as many as help
    assert time.perf_counter() - began < 5
    assert len(asked) == len(set(asked)) <= 64 * 65 // 2
