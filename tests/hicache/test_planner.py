"""Plans move exactly the bytes of the pages, in few copies, and refuse what must not reach a copy."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devipc.errors import BoundsError, UsageError
from devipc.hicache.layout import Component, Plane, PoolChunk, PoolLayout, Rule
from devipc.hicache.planning.expand import CopyList
from devipc.hicache.planning.forms import Submitting
from devipc.hicache.planning.planner import CopyPlan, Direction, HostPages, Planner, layer_groups, page_runs
from devipc.hicache.planning.strips import CostModel, Limits
from devipc.types import HandleKind
from tests.hicache.geometry import Places, Pool, by_several, direction_of, execute, pairs, places, pools

COSTS = [
    CostModel(),
    CostModel(entry_s=math.inf),
    CostModel(call_s=1.0),
    CostModel(call_s=1e-9, row_s=0.0),
    CostModel(call_s=1e-6, row_s=1e-9, entry_s=1e-6),
    CostModel(strided_s=1e9, byte_s=1.0),  # with several threads all is in batches
]
LIMITS = [Limits(), Limits(max_pitch_nbytes=24, max_width_nbytes=16, max_height=3), Limits(max_pitch_nbytes=7)]
ARENA = 1 << 40
POOL = 1 << 44


@pytest.mark.once
@settings(max_examples=500)
@given(st.data())
def test_a_plan_moves_the_pages_and_nothing_else(data: st.DataObject) -> None:
    pool = data.draw(pools())
    where = data.draw(places(pool))
    to_host, limits = data.draw(st.booleans()), data.draw(st.sampled_from(LIMITS))
    planner = Planner(
        pool.layout,
        pool.addresses,
        arena=where.arena,
        block_nbytes=where.block_nbytes,
        regions=pool.regions,
        limits=limits,
        cost=data.draw(st.sampled_from(COSTS)),
        groups=data.draw(st.sampled_from([(1, 2, 4, 8), (2,), (1, 1)])),
        submitting=data.draw(st.sampled_from([Submitting(), by_several(3, 1e-9)])),
    )
    plan = planner.plan(direction_of(to_host=to_host), where.pages, where.host, by_layer_group=data.draw(st.booleans()))
    check_bytes(pool, where, plan, to_host=to_host)
    check_limits(plan, limits)


def check_bytes(pool: Pool, where: Places, plan: CopyPlan, *, to_host: bool) -> None:
    memory = np.random.default_rng(7).integers(0, 256, sum(where.arena) + 8, np.uint8)
    expected, counts = memory.copy(), np.zeros(len(memory), np.int64)
    for device, host in pairs(pool, where):
        dst, src = (host, device) if to_host else (device, host)
        expected[dst] = memory[src]
        counts[dst] += 1
    assert counts.max() <= 1
    written = execute(plan, memory)
    assert np.array_equal(written, counts)
    assert np.array_equal(memory, expected)
    assert plan.nbytes == counts.sum() == sum(group.total_nbytes for group in plan.groups)


def check_limits(plan: CopyPlan, limits: Limits) -> None:
    for group in plan.groups:
        tall = group.strided[group.strided[:, 5] > 1]
        assert (tall[:, 2:4] <= limits.max_pitch_nbytes).all()
        assert (tall[:, 4] <= limits.max_width_nbytes).all()
        assert (tall[:, 5] <= limits.max_height).all()


def llama(page_tokens: int = 16, pages: int = 4096, *, layers: int = 32, row: int = 2048) -> PoolLayout:
    """K and V of 32 layers in one allocation: all planes at one distance."""
    plane = pages * page_tokens * row
    planes = tuple(Plane(i // 2, 0, i * plane, row, row, page_tokens * row) for i in range(2 * layers))
    component = Component("kv", Rule.FULL_ATTENTION, page_tokens, page_tokens, planes)
    return PoolLayout(pages, (PoolChunk(2 * layers * plane, HandleKind.LEGACY),), (component,), 1)


def separate(page_tokens: int = 16, pages: int = 4096, *, kind: HandleKind = HandleKind.LEGACY) -> PoolLayout:
    """K and V of a layer in one allocation, one allocation a layer; V behind K, rows that fill no whole 2 MiB."""
    row, plane = 2048, pages * page_tokens * 2048
    planes = tuple(Plane(i // 2, i // 2, (i % 2) * plane, row, row, page_tokens * row) for i in range(64))
    component = Component("kv", Rule.FULL_ATTENTION, page_tokens, page_tokens, planes)
    return PoolLayout(pages, (PoolChunk(2 * plane, kind),) * 32, (component,), 1)


def random_pages(n: int, pages: int = 4096) -> np.ndarray:
    return np.random.default_rng(n).permutation(np.arange(1, pages, 2))[:n]


def blocks(n: int, page_nbytes: int) -> HostPages:
    return HostPages.blocks(ARENA + np.random.default_rng(3).permutation(4 * n)[:n] * page_nbytes)


def shape(plan: CopyPlan) -> list[tuple[int, int]]:
    return [(len(group.strided), len(group.nbytes)) for group in plan.groups]


def planner_for(layout: PoolLayout, addresses: list[int] | None = None, **options: object) -> Planner:
    spread = [POOL + index * (1 << 34) + index**2 * 4096 for index in range(len(layout.chunks))]
    return Planner(layout, addresses or spread, arena=(ARENA, 1 << 42), **options)  # type: ignore[arg-type]


def test_a_page_over_all_planes_is_one_strided_copy() -> None:
    layout = llama()
    plan = planner_for(layout).plan(Direction.BACKUP, random_pages(50), blocks(50, layout.page_nbytes))
    assert shape(plan) == [(50, 0)]
    assert (plan.groups[0].strided[:, 4:] == (32 * 1024, 64)).all()


def test_a_run_in_one_extent_is_one_strided_copy() -> None:
    layout = llama(page_tokens=1)
    plan = planner_for(layout).plan(Direction.BACKUP, np.arange(100, 356), HostPages.one_extent(ARENA, 256))
    assert shape(plan) == [(1, 0)]
    assert plan.groups[0].strided[0, 4:].tolist() == [256 * 2048, 64]


def test_a_page_of_an_extent_is_a_strided_view() -> None:
    layout = llama()
    host = HostPages.extents(np.full(3, ARENA), np.full(3, 256), np.array([0, 9, 255]))
    plan = planner_for(layout).plan(Direction.RESTORE, np.array([5, 3, 9]), host)
    assert shape(plan) == [(3, 0)]
    assert (plan.groups[0].strided[:, 3] == 256 * 32 * 1024).all()


def test_separate_allocations_are_batched_and_never_spanned() -> None:
    layout = separate()
    plan = planner_for(layout).plan(Direction.BACKUP, random_pages(50), blocks(50, layout.page_nbytes))
    assert shape(plan) == [(0, 50 * 64)]
    run = planner_for(layout).plan(Direction.BACKUP, np.arange(1, 51), HostPages.one_extent(ARENA, 50))
    assert shape(run) == [(0, 64)]
    runs_in_blocks = planner_for(layout).plan(
        Direction.BACKUP, np.arange(1, 51), HostPages.blocks(ARENA + np.arange(50) * layout.page_nbytes)
    )
    assert shape(runs_in_blocks) == [(64, 0)]


def test_allocations_side_by_side_take_one_copy_for_k_and_one_for_v() -> None:
    layout = separate(kind=HandleKind.VMM_FD)
    stride = layout.chunks[0].nbytes + (2 << 20)
    addresses = [POOL + index * stride for index in range(32)]
    planner = planner_for(layout, addresses, regions=[0] * 32)
    plan = planner.plan(Direction.BACKUP, random_pages(50), blocks(50, layout.page_nbytes))
    assert shape(plan) == [(100, 0)]
    assert (plan.groups[0].strided[:, 5] == 32).all()


def test_rows_with_gaps_move_as_one_tall_copy_a_plane_and_run() -> None:
    planes = tuple(Plane(layer, 0, layer << 30, 512, 640, 16 * 640) for layer in range(3))
    component = Component("kv", Rule.FULL_ATTENTION, 16, 16, planes)
    layout = PoolLayout(64, (PoolChunk(3 << 30, HandleKind.LEGACY),), (component,))
    plan = planner_for(layout).plan(Direction.RESTORE, np.arange(8, 40), HostPages.one_extent(ARENA, 32))
    assert shape(plan) == [(3, 0)]
    assert plan.groups[0].strided[:, 2:].tolist() == [[640, 512, 512, 32 * 16]] * 3


def test_a_run_that_lies_alike_on_both_sides_is_one_plain_copy() -> None:
    planes = tuple(Plane(layer, 0, layer * 4096, 4096, 4096, 8 * 4096) for layer in range(8))
    layout = PoolLayout(
        64, (PoolChunk(64 * 8 * 4096, HandleKind.LEGACY),), (Component("kv", Rule.FULL_ATTENTION, 16, 1, planes),)
    )
    plan = planner_for(layout).plan(
        Direction.BACKUP, np.arange(8, 40), HostPages.blocks(ARENA + np.arange(32) * layout.page_nbytes)
    )
    assert shape(plan) == [(0, 1)]
    assert plan.groups[0].nbytes.tolist() == [32 * 8 * 4096]


def test_a_region_never_joins_a_classic_allocation() -> None:
    with pytest.raises(UsageError) as caught:
        planner_for(separate(), regions=[0, *range(31)])
    assert caught.value.code == "regions"


def test_pitch_limit_turns_strips_into_batches() -> None:
    layout = llama()
    planner = planner_for(layout, limits=Limits(max_pitch_nbytes=1 << 20))
    plan = planner.plan(Direction.BACKUP, random_pages(50), blocks(50, layout.page_nbytes))
    assert shape(plan) == [(0, 50 * 64)]


def test_layer_groups_are_delivered_one_after_the_other() -> None:
    layout = llama(page_tokens=64)
    planner = planner_for(layout)
    assert [len(group) for group in planner.groups] == [1, 2, 4, 8, 17]
    plan = planner.plan(Direction.RESTORE, random_pages(20), blocks(20, layout.page_nbytes), by_layer_group=True)
    assert [group.total_nbytes // (20 * 4 * 65536) for group in plan.groups] == [1, 2, 4, 8, 17]
    assert plan.ends == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(("page_tokens", "ends"), [(64, (1, 2, 4, 5)), (16, (1, 2, 5)), (1, (5,))])
def test_groups_whose_own_copies_would_cost_too_much_are_submitted_as_one(
    page_tokens: int, ends: tuple[int, ...]
) -> None:
    """By the cost model: 4,096 tokens of small pages are so many copies that fewer groups are apart, or none."""
    count = 4096 // page_tokens
    layout = llama(page_tokens=page_tokens, pages=2 * count + 1)
    where = random_pages(count, 2 * count + 1), blocks(count, layout.page_nbytes)
    plan = planner_for(layout).plan(Direction.RESTORE, *where, by_layer_group=True)
    assert plan.ends == ends
    assert sum(group.total_nbytes for group in plan.groups) == plan.nbytes == 4096 * 32 * 4096
    whole = planner_for(layout).plan(Direction.RESTORE, *where)
    assert len(whole.groups) == 1
    cost = plan.cost
    beside = [
        sum(len(group.strided) * cost.strided_s + len(group.nbytes) * cost.copy_s for group in one.groups)
        for one in (plan, whole)
    ]
    assert beside[0] - beside[1] <= 0.06 * (whole.nbytes * cost.byte_s + beside[1])


def test_neighbours_leave_room_for_more_groups() -> None:
    layout = llama(page_tokens=1, pages=8192)
    host = HostPages.one_extent(ARENA, 4096)
    plan = planner_for(layout).plan(Direction.RESTORE, np.arange(1, 4097), host, by_layer_group=True)
    assert plan.ends == (1, 2, 3, 4, 5)


def test_a_list_in_parts_is_the_same_copies() -> None:
    layout = llama()
    ids = np.concatenate((np.arange(100, 140), random_pages(30, 90)))
    host = HostPages.blocks(ARENA + np.arange(70) * layout.page_nbytes)
    planner = planner_for(layout)
    for direction in Direction:
        whole = planner.plan(direction, ids, host, by_layer_group=True)
        parts = list(planner.copies(direction, ids, host, by_layer_group=True, part_runs=4))
        assert [end for _, end in parts if end] == list(whole.ends)
        assert len(parts) > 2 * len(whole.ends)
        same_copies(parts, whole)


def same_copies(parts: list[tuple[CopyList, int]], whole: CopyPlan) -> None:
    for columns in ("strided", "dst", "src", "nbytes"):
        found = np.concatenate([getattr(copies, columns) for copies, _ in parts])
        wanted = np.concatenate([getattr(copies, columns) for copies in whole.groups])
        assert sorted(found.tolist()) == sorted(wanted.tolist())


@pytest.mark.parametrize("first_runs", [1, 2, 5, 15])
@pytest.mark.parametrize("part_runs", [0, 4, 20])
def test_the_first_list_is_short_so_that_it_is_submitted_soon(first_runs: int, part_runs: int) -> None:
    layout = llama()
    ids = np.concatenate((np.arange(100, 104), np.arange(200, 204), random_pages(30, 90)))
    host = HostPages.blocks(ARENA + np.arange(38) * layout.page_nbytes)
    planner = planner_for(layout)
    for direction in Direction:
        whole = planner.plan(direction, ids, host, by_layer_group=True)
        parts = list(
            planner.copies(direction, ids, host, by_layer_group=True, first_runs=first_runs, part_runs=part_runs)
        )
        assert [end for _, end in parts if end] == list(whole.ends)
        assert parts[0][0].total_nbytes <= 4 * first_runs * layout.page_nbytes
        same_copies(parts, whole)


@pytest.mark.parametrize(
    ("layers", "sizes", "expected"),
    [(0, (1, 2), []), (1, (1, 2), [1]), (2, (1, 2), [1, 1]), (5, (1, 2), [1, 2, 2]), (5, (), [5])],
)
def test_layer_groups(layers: int, sizes: tuple[int, ...], expected: list[int]) -> None:
    groups = layer_groups(range(layers), sizes)
    assert [len(group) for group in groups] == expected
    assert [layer for group in groups for layer in group] == list(range(layers))


@given(st.lists(st.integers(0, 8), max_size=30))
def test_page_runs_cover_the_pages_in_order(ids: list[int]) -> None:
    starts, lengths = page_runs(np.array(ids, np.int64))
    rebuilt = [ids[s] + k for s, n in zip(starts.tolist(), lengths.tolist(), strict=True) for k in range(n)]
    assert rebuilt == ids
    assert all(ids[s - 1] + 1 != ids[s] for s in starts.tolist() if s)


PAGE = 4 * 16 * 8  # two layers, K and V
SMALL = llama(pages=8, layers=2, row=8)


@pytest.mark.parametrize(
    ("direction", "pages", "host", "code"),
    [
        ("backup", [0], [0], "page"),
        ("backup", [8], [0], "page"),
        ("restore", [2**40], [0], "page"),
        ("backup", [-1], [0], "page"),
        ("restore", [1, 1], [0, PAGE], "duplicate"),
        ("backup", [1, 2], [0, 0], "overlap"),
        ("backup", [1, 2], [0, PAGE - 1], "overlap"),
        ("restore", [1, 2], [PAGE - 1, 0], "overlap"),
        ("backup", [1], [-8], "host_bounds"),
        ("backup", [1], [9 * PAGE + 1], "host_bounds"),
        ("backup", [1, 2], [0], "shape"),
        ("backup", [[1]], [0], "shape"),
        ("backup", [1.0], [0], "shape"),
    ],
)
def test_what_must_not_reach_a_copy_is_refused(direction: str, pages: list[int], host: list[int], code: str) -> None:
    planner = Planner(SMALL, [POOL], arena=(ARENA, 10 * PAGE))
    with pytest.raises((BoundsError, UsageError)) as caught:
        planner.plan(Direction(direction), np.array(pages), HostPages.blocks(ARENA + np.array(host)))
    assert caught.value.code == code
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("base", "span", "index", "code"),
    [
        ([0, 0], [2, 2], [1, 1], "overlap"),
        ([0, 0], [2, 3], [0, 1], "overlap"),
        ([0, PAGE], [2, 2], [0, 0], "overlap"),
        ([PAGE, 0], [1, 4], [0, 3], "overlap"),
        ([0, 5 * PAGE], [2, 2], [0, 2], "host_bounds"),
        ([0, 9 * PAGE], [1, 2], [0, 0], "host_bounds"),
        ([0, 0], [2**61, 2**61], [0, 1], "host_bounds"),
        ([0, 0], [0, 0], [0, 0], "host_bounds"),
    ],
)
def test_bad_extents_are_refused(base: list[int], span: list[int], index: list[int], code: str) -> None:
    planner = Planner(SMALL, [POOL], arena=(ARENA, 10 * PAGE))
    host = HostPages.extents(ARENA + np.array(base), np.array(span), np.array(index))
    with pytest.raises(BoundsError) as caught:
        planner.plan(Direction.BACKUP, np.array([1, 2]), host)
    assert caught.value.code == code


def test_one_host_page_may_be_restored_to_two_pages() -> None:
    planner = Planner(SMALL, [POOL], arena=(ARENA, 10 * PAGE))
    plan = planner.plan(Direction.RESTORE, np.array([1, 3]), HostPages.blocks(np.array([ARENA, ARENA])))
    assert plan.page_count == 2
    same = HostPages.extents(np.full(2, ARENA), np.full(2, 4), np.full(2, 3))
    assert planner.plan(Direction.RESTORE, np.array([1, 3]), same).nbytes == 2 * PAGE


def test_no_pages_are_no_copies() -> None:
    planner = Planner(SMALL, [POOL], arena=(ARENA, 10 * PAGE))
    plan = planner.plan(Direction.RESTORE, np.empty(0, np.int64), HostPages.blocks(np.empty(0, np.int64)))
    assert shape(plan) == [(0, 0)]
    assert plan.estimate_s == 0


def test_addresses_must_match_the_chunks() -> None:
    with pytest.raises(UsageError, match="chunks"):
        Planner(SMALL, [1, 2], arena=(0, 1))
    with pytest.raises(UsageError, match="no page"):
        Planner(SMALL, [1], arena=(0, 1), block_nbytes=PAGE - 1)


def best_s(call: Callable[[], object], repeat: int) -> float:
    """Fastest of ``repeat``: on shared cores anything else measures the neighbours."""
    gc.collect()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def plan_s(layout: PoolLayout, pages: int, repeat: int, submitting: Submitting | None = None) -> float:
    planner = planner_for(layout, submitting=submitting or Submitting())
    ids = random_pages(pages, 2 * pages + 2)
    host = blocks(pages, layout.page_nbytes)
    return best_s(lambda: planner.plan(Direction.BACKUP, ids, host), repeat)


@pytest.mark.timing
def test_planning_is_fast_and_grows_linearly() -> None:
    """Bounds are the project's; they hold with a factor to spare that ``benchmarks/planner.py`` measures."""
    regular, irregular = llama(pages=160_002, row=256), separate(pages=160_002)
    assert plan_s(regular, 10_000, 20) <= 3e-3
    assert plan_s(irregular, 10_000, 20) <= 20e-3
    assert plan_s(regular, 16, 200) <= 100e-6
    several = by_several(3, 0.65e-6, 1.2e-6)
    assert plan_s(regular, 10_000, 20, submitting=several) <= 3e-3
    assert plan_s(irregular, 10_000, 20, submitting=several) <= 20e-3
    # Eight times the pages: 8 is linear and 64 quadratic; fresh memory, which small plans reuse, adds up to 20.
    assert plan_s(regular, 80_000, 7) <= 32 * plan_s(regular, 10_000, 20)
    assert plan_s(irregular, 80_000, 5) <= 32 * plan_s(irregular, 10_000, 20)
