"""Batches instead of strided copies: only with several threads, where there is more to gain than it costs."""

from __future__ import annotations

import numpy as np
import pytest

from devipc.hicache.arena import HostArena
from devipc.hicache.layout import PoolLayout
from devipc.hicache.localcopies import LocalCarrier
from devipc.hicache.planner import Direction, HostPages, Planner
from devipc.hicache.records import Places
from devipc.hicache.strips import CostModel
from devipc.host.backend import HostBackend
from devipc.probe.stage import Stage
from tests.hicache.pools import until
from tests.hicache.test_planner import ARENA, POOL, llama, random_pages

TOKENS = 4096


class Fence:
    """Takes every signal."""

    def signal(self, stream: object, n: int) -> None: ...

    def settle(self) -> None: ...

    def poison(self, reason: object) -> None: ...


def planner(layout: PoolLayout, *, threads: int, cost: CostModel | None = None) -> Planner:
    return Planner(layout, [POOL], arena=(ARENA, 1 << 40), cost=cost, threads=threads)


def strided(page_tokens: int, direction: Direction, *, threads: int, alone: bool = True, tokens: int = TOKENS) -> int:
    """How many strided copies a plan has."""
    count = tokens // page_tokens
    layout = llama(page_tokens=page_tokens, pages=2 * count + 1)
    host = HostPages.blocks(ARENA + np.arange(count) * layout.page_nbytes)
    lists = planner(layout, threads=threads).copies(
        direction,
        random_pages(count, 2 * count + 1),
        host,
        by_layer_group=direction is Direction.RESTORE,
        alone=alone,
    )
    found = [copies for copies, _ in lists]
    assert sum(copies.total_nbytes for copies in found) == count * layout.page_nbytes
    return sum(len(copies.strided) for copies in found)


def test_restores_of_large_pages_are_batches_which_cuts_cost_nothing() -> None:
    assert strided(64, Direction.RESTORE, threads=3) == 0
    assert strided(64, Direction.BACKUP, threads=3) > 0  # uncut they are as fast


@pytest.mark.parametrize("page_tokens", [16, 1])
@pytest.mark.parametrize("direction", Direction)
def test_what_would_keep_the_processor_as_long_as_the_wire_is_strided(page_tokens: int, direction: Direction) -> None:
    assert strided(page_tokens, direction, threads=3) >= TOKENS // page_tokens


def test_one_thread_another_direction_or_few_bytes_leave_it_at_strided_copies() -> None:
    assert strided(64, Direction.RESTORE, threads=1) > 0
    assert strided(64, Direction.RESTORE, threads=3, alone=False) > 0
    assert strided(64, Direction.RESTORE, threads=3, tokens=256) > 0


@pytest.mark.parametrize(("entry_s", "batch"), [(0.4e-6, True), (0.7e-6, True), (1.4e-6, True), (2.8e-6, False)])
def test_what_an_entry_takes_counts_where_it_is_far_from_usual(entry_s: float, *, batch: bool) -> None:
    """By two it varies from moment to moment; a driver that is slower than that is not given batches for their sake."""
    layout = llama(page_tokens=64, pages=129)
    host = HostPages.blocks(ARENA + np.arange(64) * layout.page_nbytes)
    made = planner(layout, threads=3, cost=CostModel(entry_s=entry_s))
    plan = made.plan(Direction.RESTORE, random_pages(64, 129), host, by_layer_group=True)
    assert (sum(len(group.strided) for group in plan.groups) == 0) is batch


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
