"""Threads that submit together: all is done, by one thread each, and nothing is under way behind an end of any kind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from devipc.hicache.submitters import Submitters, submitter_count


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


def test_behind_an_interrupt_nothing_is_begun_and_what_was_is_waited_for(submitters: Submitters) -> None:
    began, over = threading.Event(), threading.Event()

    def slow() -> None:
        began.set()
        time.sleep(0.1)
        over.set()

    def interrupted() -> None:
        assert began.wait(30)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        submitters.run([interrupted, slow])
    assert over.is_set()


@pytest.mark.parametrize(("processors", "threads"), [(1, 1), (2, 1), (7, 1), (8, 2), (12, 3), (16, 3), (256, 3)])
def test_a_machine_keeps_most_of_its_processors(processors: int, threads: int) -> None:
    assert submitter_count(processors) == threads
    assert 1 <= submitter_count() <= 3
