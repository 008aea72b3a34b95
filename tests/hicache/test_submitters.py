"""Threads that submit together: all is done, by one thread each, and nothing is under way behind an end of any kind."""

from __future__ import annotations

import contextlib
import gc
import math
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from devipc.errors import DeviceLostError, DriverError
from devipc.hicache.moving.submitters import Submitters, _quota, raise_gravest, submitter_count
from tests.hicache.pools import until


@pytest.fixture
def submitters() -> Iterator[Submitters]:
    made = Submitters()
    yield made
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "devipc-submit"]


def test_all_is_done_once_and_at_the_same_time(submitters: Submitters) -> None:
    for count in (1, 4, 2, 4):
        meeting = threading.Barrier(count, timeout=30)
        done: list[int] = []

        def work(number: int, meeting: threading.Barrier = meeting, done: list[int] = done) -> None:
            meeting.wait()
            done.append(number)

        submitters.run([lambda number=number: work(number) for number in range(count)])  # type: ignore[misc]
        assert sorted(done) == list(range(count))


def test_what_no_thread_has_begun_the_caller_does(submitters: Submitters) -> None:
    submitters.run([lambda: None, lambda: None])  # one thread beside the caller's
    leave, entered = threading.Event(), threading.Event()

    def held() -> None:
        entered.set()
        assert leave.wait(30)

    def wait() -> None:
        assert entered.wait(30)

    by: list[str] = []

    def note() -> None:
        by.append(threading.current_thread().name)
        leave.set()

    submitters._threads.append(threading.current_thread())  # as if another had been made, which does nothing
    try:
        submitters.run([wait, held, note])
    finally:
        submitters._threads.pop()
    assert by == [threading.current_thread().name]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_is_raised_when_all_is_over(submitters: Submitters, failing: int) -> None:
    started, others = threading.Barrier(3, timeout=30), [0, 1, 2]
    others.remove(failing)
    over: list[int] = []

    def work(number: int) -> None:
        started.wait()
        if number == failing:
            raise KeyError(number)
        time.sleep(0.05)
        over.append(number)

    with pytest.raises(KeyError):
        submitters.run([lambda number=number: work(number) for number in range(3)])  # type: ignore[misc]
    assert sorted(over) == others
    submitters.run([lambda: over.append(9)] * 3)
    assert over.count(9) == 3


def test_without_more_threads_the_caller_does_it_all(submitters: Submitters, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    done: list[int] = []
    submitters.run([lambda number=number: done.append(number) for number in range(3)])  # type: ignore[misc]
    assert done == [0, 1, 2]
    assert submitters._parts.empty()


def test_the_gravest_of_several_failures_is_raised_with_the_others(submitters: Submitters) -> None:
    """A defect must end the engine, and a lost device too: an error of the driver beside it hides neither."""
    errors = [DriverError("refused"), DeviceLostError("lost"), ZeroDivisionError("a defect"), DriverError("once more")]
    meeting = threading.Barrier(4, timeout=30)

    def fail(error: Exception) -> None:
        meeting.wait()
        raise error

    with pytest.raises(ZeroDivisionError) as found:
        submitters.run([lambda error=error: fail(error) for error in errors])  # type: ignore[misc]
    assert [sum(word in note for note in found.value.__notes__) for word in ("refused", "lost", "once more")] == [1] * 3
    lost = DeviceLostError("lost")
    with pytest.raises(DeviceLostError):
        raise_gravest([DriverError("refused"), lost])
    raise_gravest([])


def test_a_failure_keeps_nothing_of_what_was_to_be_done(submitters: Submitters) -> None:
    class Copies:
        pass

    copies = Copies()
    kept = weakref.ref(copies)

    def fail(_copies: Copies) -> None:
        raise DriverError("refused")

    gc.disable()
    try:
        with contextlib.suppress(DriverError):
            submitters.run([partial(fail, copies), partial(fail, copies)])
        del copies
        until(lambda: kept() is None)  # the other thread lets go of it when it looks for more
    finally:
        gc.enable()


def test_what_control_groups_may_use_counts(tmp_path: Path) -> None:
    """That of a service or a container, and those above it."""
    assert _quota(tmp_path / "none", tmp_path) == math.inf
    own, groups = tmp_path / "cgroup", tmp_path / "groups"
    own.write_text("12:cpu:/old\n0::/system.slice/cache.service\n")
    inner = groups / "system.slice" / "cache.service"
    inner.mkdir(parents=True)
    (tmp_path / "cpu.max").write_text("1 100000")  # outside of all groups
    assert _quota(own, groups) == math.inf
    for text, processors in (
        ("max 100000\n", math.inf),
        ("250000 100000\n", 2.5),
        ("", math.inf),
        ("1 0", math.inf),
        ("x y", math.inf),
        ("900000 100000", 9.0),
    ):
        (inner / "cpu.max").write_text(text)
        assert _quota(own, groups) == processors
    (inner.parent / "cpu.max").write_text("400000 100000")
    assert _quota(own, groups) == 4.0
    own.write_text("0::/\n")
    (groups / "cpu.max").write_text("300000 100000")
    assert _quota(own, groups) == 3.0


@pytest.mark.parametrize(("processors", "threads"), [(1, 1), (2, 1), (7, 1), (8, 2), (12, 3), (16, 3), (256, 3)])
def test_a_machine_keeps_most_of_its_processors(processors: int, threads: int) -> None:
    assert submitter_count(processors) == threads
    assert 1 <= submitter_count() <= 3
