"""What a runtime's process may answer: control believes no more than it asked for, and outlives every life of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from devipc.errors import DevIPCError, PeerGone, ProtocolError
from devipc.hicache.reference.handles import CacheExtentRef, PageRun, RequestRuntimeHandle
from devipc.hicache.reference.process import ProcessGPURuntime
from devipc.hicache.reference.runtime import BatchPlan, Decode, Keep, Prefill, check_completion
from devipc.hicache.reference.scheduler import Scheduler
from devipc.hicache.reference.spec import RuntimeSpec
from tests.hicache.reference.hostile_runtime import LIFE, WRONG, honest

MODULE = "tests.hicache.reference.hostile_runtime"
HANDLES = [RequestRuntimeHandle(LIFE, number, 1) for number in range(3)]
PLAN = BatchPlan(
    number=5,
    ask=(bytes(32),),
    prefill=(
        Prefill(handle=HANDLES[0], start=0, tokens=(1, 2), sample=True),
        Prefill(handle=HANDLES[2], start=0, tokens=(1, 2), sample=False),
    ),
    decode=(Decode(handle=HANDLES[1]),),
    keep=(Keep(handle=HANDLES[0], first_page=0, page_count=2),),
)


@pytest.mark.parametrize("fault", WRONG)
def test_no_more_is_believed_than_was_asked_for(fault: str) -> None:
    check_completion(PLAN, honest(PLAN), LIFE)
    with pytest.raises(ProtocolError):
        check_completion(PLAN, WRONG[fault](honest(PLAN)), LIFE)


@pytest.mark.parametrize("runs", [(), (0, 2), (3, -1)])
def test_an_extent_has_pages_in_each_run(runs: tuple[int, ...]) -> None:
    extent = CacheExtentRef(LIFE, 1, tuple(PageRun(1, count) for count in runs))
    with pytest.raises(ProtocolError):
        check_completion(PLAN, replace(honest(PLAN), kept=(extent,)), LIFE)


def lives(folder: Path, *faults: str, **options: Any) -> ProcessGPURuntime:
    file = folder / "faults"
    file.write_text("\n".join(faults))
    return ProcessGPURuntime(RuntimeSpec(cache=str(file)), module=MODULE, **options)


@pytest.mark.long
@pytest.mark.chaos
@pytest.mark.timeout(240)
def test_whatever_a_runtime_does_control_comes_to_its_end(tmp_path: Path) -> None:
    at_work = ["silence", "stop", "exit", "bye", "garbage", "huge", "failed", "twice", "number", "generation", "found"]
    over = lives(
        tmp_path, *at_work, "start_exit", "start_garbage", "unknown", start_timeout_s=30.0, batch_timeout_s=3.0
    )
    try:
        told: list[tuple[str, int]] = []
        scheduler = Scheduler(over, on_token=lambda name, token: told.append((name, token)))
        for number in range(3):
            scheduler.submit(f"q{number}", range(1, 60), max_tokens=8)
        found = scheduler.run()
        assert {name: one.tokens for name, one in found.items()} == {f"q{number}": (7,) * 8 for number in range(3)}
        assert scheduler.lost == len(at_work)
        assert (tmp_path / "faults").read_text() == ""
        assert sorted(told) == sorted([(f"q{number}", 7) for number in range(3)] * 8)  # once each, also after a death
        scheduler.release_all()
        assert len(scheduler._tree) == scheduler._used_pages == 0
    finally:
        over.close()


@pytest.mark.long
@pytest.mark.chaos
def test_a_runtime_that_never_starts_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(DevIPCError):
        lives(tmp_path, "start_silence", start_timeout_s=3.0)
    with pytest.raises(PeerGone, match="cannot be"):
        lives(tmp_path, "start_limits", start_timeout_s=30.0)
    over = lives(tmp_path, "exit", *["start_exit"] * 5, start_timeout_s=30.0)
    scheduler = Scheduler(over)
    scheduler.submit("q", range(1, 60), max_tokens=8)
    with pytest.raises(PeerGone):
        scheduler.run()
    for _ in range(2):  # and every call says so, until there is one again
        with pytest.raises(PeerGone):
            over.prepare_batch(BatchPlan(number=1))
        with pytest.raises(PeerGone):
            over.stats()
    over.close()
