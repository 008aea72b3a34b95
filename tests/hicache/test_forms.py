"""Batches instead of strided copies: only with several threads, where there is more to gain than it costs."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devipc.errors import DriverError
from devipc.hicache.engine.localcopies import LocalCarrier
from devipc.hicache.layout import PoolLayout
from devipc.hicache.moving.arena import HostArena
from devipc.hicache.planning.forms import LONG_PIECE, Entries, Part, Submitting
from devipc.hicache.planning.planner import CopyPlan, Direction, HostPages, Planner
from devipc.hicache.planning.strips import CostModel
from devipc.hicache.tier.records import Places
from devipc.host.backend import HostBackend
from devipc.probe.stage import Stage
from tests.hicache.geometry import by_several, direction_of, places, pools
from tests.hicache.pools import until
from tests.hicache.test_planner import ARENA, COSTS, LIMITS, POOL, check_bytes, check_limits, llama, random_pages

TOKENS = 4096


@pytest.mark.once
@settings(max_examples=500)
@given(st.data())
def test_whatever_shares_of_the_pages_go_in_batches(data: st.DataObject) -> None:
    """And in whatever lists: each byte is copied once, and the lists end where their layer groups do."""
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
        groups=(1, 2),
        submitting=by_several(3, data.draw(st.sampled_from([1e-9, 1e-6, math.inf]))),
    )
    groups = len(planner.groups)
    cuts = sorted({0, groups, *data.draw(st.lists(st.integers(0, groups), max_size=2))})
    share = st.sampled_from([0.0, 1e-9, 0.1, 0.5, 0.9, 1.0])
    parts = tuple(Part(begin, end, data.draw(share)) for begin, end in pairwise(cuts))
    planner._choose = lambda *_, **__: parts  # type: ignore[method-assign]
    lists = planner.copies(
        direction_of(to_host=to_host),
        where.pages,
        where.host,
        by_layer_group=True,
        alone=data.draw(st.booleans()),
        first_runs=data.draw(st.integers(0, 3)),
        part_runs=data.draw(st.integers(0, 3)),
    )
    copies, ends = zip(*lists, strict=True)
    nbytes = len(where.pages) * planner.page_nbytes
    plan = CopyPlan(copies, tuple(filter(None, ends)), len(where.pages), nbytes, planner.cost)
    assert list(plan.ends) == (cuts[1:] if len(where.pages) else [groups])
    check_bytes(pool, where, plan, to_host=to_host)
    check_limits(plan, limits)


class Fence:
    """Takes every signal."""

    def signal(self, stream: object, n: int) -> None: ...

    def settle(self) -> None: ...

    def poison(self, reason: object) -> None: ...


def planner(layout: PoolLayout, entry_s: float = 0.5e-6) -> Planner:
    """Plan for several threads that together submit an entry in ``entry_s``; for one when it is 0."""
    submitting = by_several(3, entry_s, entry_s) if entry_s else Submitting()
    return Planner(layout, [POOL], arena=(ARENA, 1 << 40), submitting=submitting)


def as_on_an_h200(layout: PoolLayout, long_s: float = 0.65e-6, short_s: float = 1.2e-6) -> Planner:
    """Plan by what one measures: rows as cheap as is believed, and what an entry takes."""
    cost, submitting = CostModel(row_s=45e-9 / 8), by_several(3, long_s, short_s)
    return Planner(layout, [POOL], arena=(ARENA, 1 << 40), cost=cost, submitting=submitting)


QUICK = {"long_s": 0.44e-6, "short_s": 0.9e-6}


def strided(page_tokens: int, direction: Direction, entry_s: float = 0.5e-6, **options: Any) -> int:
    """How many strided copies a plan has."""
    return made(page_tokens, direction, entry_s, **options)[0]


def made(
    page_tokens: int, direction: Direction, entry_s: float, *, alone: bool = True, tokens: int = TOKENS
) -> tuple[int, int]:
    """How many strided and plain copies a plan has."""
    count = tokens // page_tokens
    layout = llama(page_tokens=page_tokens, pages=2 * count + 1)
    host = HostPages.blocks(ARENA + np.arange(count) * layout.page_nbytes)
    lists = planner(layout, entry_s).copies(
        direction,
        random_pages(count, 2 * count + 1),
        host,
        by_layer_group=direction is Direction.RESTORE,
        alone=alone,
    )
    found = [copies for copies, _ in lists]
    assert sum(copies.total_nbytes for copies in found) == count * layout.page_nbytes
    return sum(len(copies.strided) for copies in found), sum(len(copies.nbytes) for copies in found)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(("page_tokens", "entry_s"), [(64, 0.5e-6), (16, 0.2e-6)])
def test_what_several_threads_submit_much_faster_than_the_wire_takes_it_is_a_batch(
    page_tokens: int, entry_s: float, direction: Direction
) -> None:
    assert strided(page_tokens, direction, entry_s) == 0


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("entry_s", [0.5e-6, 0.7e-6])
def test_of_others_as_many_are_as_several_threads_submit_in_about_half_the_time_of_the_wire(
    entry_s: float, direction: Direction
) -> None:
    takes_s = TOKENS * llama(page_tokens=1).page_nbytes / 55e9
    copies, entries = made(16, direction, entry_s)
    assert copies >= TOKENS // 16 // 4
    assert 0.55 * takes_s < entries * entry_s < 0.75 * takes_s


def test_beside_another_direction_half_as_many_go_in_batches() -> None:
    layout = llama(pages=513)
    host = HostPages.blocks(ARENA + np.arange(256) * layout.page_nbytes)
    one = planner(layout, 0.7e-6)

    def batched(*, alone: bool) -> int:
        lists = one.copies(Direction.BACKUP, random_pages(256, 513), host, alone=alone)
        return 256 - sum(len(copies.strided) for copies, _ in lists)

    assert batched(alone=True) > 100
    assert batched(alone=False) == pytest.approx(batched(alone=True) / 2, abs=1)


def test_what_is_all_in_batches_is_cut_for_every_layer_group() -> None:
    """Cuts cost batches nothing, and each lets a layer be used earlier."""
    for page_tokens, entry_s in ((64, 0.65e-6), (64, 0.3e-6), (16, 0.3e-6)):
        count = TOKENS // page_tokens
        layout = llama(page_tokens=page_tokens, pages=2 * count + 1)
        host = HostPages.blocks(ARENA + np.arange(count) * layout.page_nbytes)
        plan = planner(layout, entry_s).plan(
            Direction.RESTORE, random_pages(count, 2 * count + 1), host, by_layer_group=True
        )
        assert plan.ends == (1, 2, 3, 4, 5)


def test_a_share_of_many_small_lists_is_not_worth_it() -> None:
    """Pages of one token would have a thirtieth in batches, of each of eight lists."""
    layout = llama(page_tokens=1, pages=2 * TOKENS + 1)
    host = HostPages.blocks(ARENA + np.arange(TOKENS) * layout.page_nbytes)
    one = as_on_an_h200(layout)

    def batched(part_runs: int) -> int:
        lists = one.copies(Direction.BACKUP, random_pages(TOKENS, 2 * TOKENS + 1), host, part_runs=part_runs)
        return TOKENS - sum(len(copies.strided) for copies, _ in lists)

    assert batched(512) == 0
    assert batched(TOKENS) > 0


def test_short_entries_are_never_taken_for_less_than_long_ones() -> None:
    some = Entries(0.5e-6, 1.2e-6)
    assert [some.each_s(nbytes) for nbytes in (LONG_PIECE - 1, LONG_PIECE)] == [1.2e-6, 0.5e-6]
    assert Entries(0.5e-6, 0.1e-6).each_s(1) == 0.5e-6


@pytest.mark.parametrize("page_tokens", [64, 16])
def test_one_thread_or_few_bytes_leave_it_at_strided_copies(page_tokens: int) -> None:
    assert strided(page_tokens, Direction.BACKUP, 0) == TOKENS // page_tokens
    assert strided(page_tokens, Direction.BACKUP, tokens=64) == 64 // page_tokens


@pytest.mark.parametrize("row", [2048, 512])
@pytest.mark.parametrize(
    ("page_tokens", "entries", "batches"), [(64, {}, 1.0), (16, {}, 0.5), (64, QUICK, 1.0), (16, QUICK, 0.75)]
)
def test_what_an_h200_measures_has_long_rows_in_batches(
    page_tokens: int, entries: dict[str, float], batches: float, row: int
) -> None:
    """What reached most there, on two hosts. Of short rows, which take a bus as long as few entries, none are."""
    batches = batches if row == 2048 else 0.0
    count = TOKENS // page_tokens
    layout = llama(page_tokens=page_tokens, pages=2 * count + 1, row=row)
    host = HostPages.blocks(ARENA + np.arange(count) * layout.page_nbytes)
    found = as_on_an_h200(layout, **entries).plan(Direction.BACKUP, random_pages(count, 2 * count + 1), host)
    strided = sum(len(copies.strided) for copies in found.groups)
    assert 1 - strided / count == pytest.approx(batches, abs=0.1)


@pytest.mark.parametrize("entries", [{}, QUICK])
def test_restores_that_take_a_bus_little_time_stay_strided_on_an_h200(entries: dict[str, float]) -> None:
    """4,096 entries of 32 KiB, of which batches took 3,451 at .44 us: .72 of the wire, where strided copies had .88."""
    layout = llama(page_tokens=64, pages=129, row=512)
    host = HostPages.blocks(ARENA + np.arange(64) * layout.page_nbytes)
    found = as_on_an_h200(layout, **entries).plan(Direction.RESTORE, random_pages(64, 129), host, by_layer_group=True)
    assert sum(len(copies.nbytes) for copies in found.groups) <= 1024


def test_what_one_thread_takes_for_an_entry_makes_no_strided_copies_of_a_batch() -> None:
    """One thread may be sooner with a call for each copy than with a batch; several are not asked for that."""
    layout = llama(page_tokens=64, pages=129)
    host = HostPages.blocks(ARENA + np.arange(64) * layout.page_nbytes)
    slow = CostModel(entry_s=9e-6)
    made = Planner(layout, [POOL], arena=(ARENA, 1 << 40), cost=slow, submitting=by_several(3, 0.5e-6))
    plan = made.plan(Direction.BACKUP, random_pages(64, 129), host)
    assert [len(group.strided) for group in plan.groups] == [0]


def test_a_lane_says_whether_it_is_alone_and_whether_its_stream_has_something_to_do() -> None:
    device = HostBackend().open_device()
    arena = HostArena(2**20)
    carrier = LocalCarrier(device, arena)
    told: list[tuple[bool, bool]] = []
    backups, restores = (carrier.copies(direction) for direction in Direction)

    class Recorder:
        def move(self, *_arguments: object, alone: bool, soon: bool, **_options: object) -> None:
            told.append((alone, soon))

    block, layout = Stage(device, 2**16), llama(page_tokens=1, pages=4, layers=2, row=64)
    planner = carrier.planner(layout, [block.ptr])
    pages, places = np.array([1]), Places(np.zeros(1, np.int64), None, None)
    fence = Fence()
    for copies in (backups, restores):
        copies.mover = Recorder()  # type: ignore[assignment]
    first = backups.move(planner, Direction.BACKUP, pages, places, fence)
    jobs = [first, backups.move(planner, Direction.BACKUP, pages, places, fence)]
    jobs.append(restores.move(planner, Direction.RESTORE, pages, places, fence))
    for job in jobs:
        until(job.poll)
    jobs = [restores.move(planner, Direction.RESTORE, pages, places, fence)]
    until(jobs[0].poll)
    assert told == [(True, True), (True, False), (False, True), (True, True)]
    block.close()
    for copies in (backups, restores):
        copies.close()
    carrier.close()
    arena.close()
    device.close()


def test_only_the_first_list_of_a_job_finds_an_idle_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    device = HostBackend().open_device()
    arena = HostArena(2**20)
    carrier = LocalCarrier(device, arena)
    copies = carrier.copies(Direction.BACKUP)
    monkeypatch.setattr("devipc.hicache.moving.mover._PART_RUNS", 2)
    told, put = list[bool](), copies.fan.put

    def recorded(*arguments: Any, soon: bool, **options: Any) -> None:
        told.append(soon)
        put(*arguments, soon=soon, **options)

    monkeypatch.setattr(copies.fan, "put", recorded)
    block, layout = Stage(device, 2**16), llama(page_tokens=1, pages=12, layers=2, row=64)
    planner = carrier.planner(layout, [block.ptr])
    pages, places = np.array([1, 3, 5, 7, 9]), Places(np.arange(5) * planner.block_nbytes, None, None)
    until(copies.move(planner, Direction.BACKUP, pages, places, Fence()).poll)
    assert told == [True, False, False]
    block.close()
    for one in (copies, carrier.copies(Direction.RESTORE)):
        one.close()
    carrier.close()
    arena.close()
    device.close()


def test_a_job_is_not_over_while_a_side_stream_may_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver neither marks the side nor waits for it: the job says so, and keeps its pages until it does."""
    device = HostBackend().open_device()
    arena = HostArena(2**20)
    carrier = LocalCarrier(device, arena)
    copies = carrier.copies(Direction.BACKUP)
    monkeypatch.setattr("devipc.hicache.moving.fan.PIECES", 4)
    count, layers = 9, 4
    block, layout = Stage(device, 2**18), llama(page_tokens=1, pages=2 * count + 1, layers=layers, row=64)
    planner = Planner(layout, [block.ptr], arena=(arena.address, arena.nbytes), cost=CostModel(call_s=1.0))
    pages, places = np.arange(1, 2 * count, 2), Places(np.arange(count) * layout.page_nbytes, None, None)
    job = copies.move(planner, Direction.BACKUP, pages, places, Fence())
    until(job.poll)
    sides: list[Any] = list(copies.fan._sides)
    assert sides
    record = copies.markers.record

    def refusing(stream: Any) -> Any:
        if stream in sides:
            raise DriverError("the driver refused a marker", remedy="none: it was asked to")
        return record(stream)

    def refused(_stream: Any) -> None:
        raise DriverError("the driver refused to wait", remedy="none: it was asked to")

    monkeypatch.setattr(copies.markers, "record", refusing)
    monkeypatch.setattr(copies.transfer, "synchronize_stream", refused)
    sides[-1].stall()
    job = copies.move(planner, Direction.BACKUP, pages, places, Fence())
    assert isinstance(job.error, DriverError)
    for _ in range(2):
        with pytest.raises(DriverError):
            job.poll()
    monkeypatch.undo()
    assert not job.poll()
    sides[-1].resume()
    until(job.poll)
    assert copies.flying == 0
    block.close()
    carrier.abandon()
    arena.close()
    device.close()
