"""Batches instead of strided copies: only with several threads, where there is more to gain than it costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from devipc.errors import DriverError
from devipc.hicache.arena import HostArena
from devipc.hicache.forms import Submitting
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


def planner(layout: PoolLayout, entry_s: float = 0.5e-6) -> Planner:
    """Plan for several threads that together submit an entry in ``entry_s``; for one when it is 0."""
    submitting = Submitting(3, entry_s, entry_s) if entry_s else Submitting()
    return Planner(layout, [POOL], arena=(ARENA, 1 << 40), submitting=submitting)


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
    alone, beside = (256 - strided(16, Direction.BACKUP, 0.7e-6, alone=alone) for alone in (True, False))
    assert alone > 100
    assert beside == pytest.approx(alone / 2, abs=1)


@pytest.mark.parametrize("page_tokens", [64, 16])
def test_one_thread_or_few_bytes_leave_it_at_strided_copies(page_tokens: int) -> None:
    assert strided(page_tokens, Direction.BACKUP, 0) == TOKENS // page_tokens
    assert strided(page_tokens, Direction.BACKUP, tokens=64) == 64 // page_tokens


@pytest.mark.parametrize(
    ("page_tokens", "row", "batches"), [(64, 2048, 1.0), (16, 2048, 0.5), (64, 512, 0.0), (16, 512, 0.0)]
)
def test_what_an_h200_measures_has_long_rows_in_batches(page_tokens: int, row: int, batches: float) -> None:
    """Rows as cheap as is believed, long entries .65 us, short ones 1.2 us: what reached most there."""
    count = TOKENS // page_tokens
    layout = llama(page_tokens=page_tokens, pages=2 * count + 1, row=row)
    host = HostPages.blocks(ARENA + np.arange(count) * layout.page_nbytes)
    found = Planner(
        layout,
        [POOL],
        arena=(ARENA, 1 << 40),
        cost=CostModel(row_s=45e-9 / 8),
        submitting=Submitting(3, 0.65e-6, 1.2e-6),
    ).plan(Direction.BACKUP, random_pages(count, 2 * count + 1), host)
    strided = sum(len(copies.strided) for copies in found.groups)
    assert 1 - strided / count == pytest.approx(batches, abs=0.1)


def test_what_one_thread_takes_for_an_entry_makes_no_strided_copies_of_a_batch() -> None:
    """One thread may be sooner with a call for each copy than with a batch; several are not asked for that."""
    layout = llama(page_tokens=64, pages=129)
    host = HostPages.blocks(ARENA + np.arange(64) * layout.page_nbytes)
    slow = CostModel(entry_s=9e-6)
    made = Planner(layout, [POOL], arena=(ARENA, 1 << 40), cost=slow, submitting=Submitting(3, 0.5e-6))
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


def test_a_job_is_not_over_while_a_side_stream_may_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver neither marks the side nor waits for it: the job says so, and keeps its pages until it does."""
    device = HostBackend().open_device()
    arena = HostArena(2**20)
    carrier = LocalCarrier(device, arena)
    copies = carrier.copies(Direction.BACKUP)
    monkeypatch.setattr("devipc.hicache.fan.PIECES", 4)
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
