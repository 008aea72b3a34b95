"""The counter that keeps a mapping until the last view is gone, whoever lets go last and wherever."""

from __future__ import annotations

import gc
import os
import sys
import threading

import pytest

from devipc.errors import ClosedError, ForkError, UsageError
from devipc.integrations import ViewKeeper


def test_the_last_one_ends_it_once_and_for_all() -> None:
    ends: list[int] = []
    keeper = ViewKeeper(lambda: ends.append(1))
    assert keeper.count == 1
    keeper.acquire()
    hold = keeper.hold()
    keeper.release()
    keeper.release()
    assert (keeper.count, ends) == (1, [])
    del hold
    assert (keeper.count, ends) == (0, [1])
    for take in (keeper.acquire, keeper.hold):
        with pytest.raises(ClosedError):
            take()
    with pytest.raises(UsageError):
        keeper.release()
    assert ends == [1]


def test_what_the_end_raises_reaches_who_released() -> None:
    def fail() -> None:
        raise OSError("driver said no")

    with pytest.raises(OSError, match="driver said no"):
        ViewKeeper(fail).release()


@pytest.mark.parametrize("rounds", [3])
def test_many_threads_and_the_garbage_collector_lose_no_count(rounds: int) -> None:
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(rounds):
            ends: list[int] = []
            keeper = ViewKeeper(lambda ends=ends: ends.append(1))  # type: ignore[misc]
            start = threading.Barrier(6)

            def work(keeper: ViewKeeper = keeper, start: threading.Barrier = start) -> None:
                start.wait()
                for _ in range(500):
                    cycle: list[object] = [keeper.hold()]
                    cycle.append(cycle)  # dies in a collection, inside whatever allocates next

            threads = [threading.Thread(target=work) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            gc.collect()
            assert (keeper.count, ends) == (1, [])
            keeper.release()
            assert (keeper.count, ends) == (0, [1])
    finally:
        sys.setswitchinterval(switch)


def test_a_race_for_the_end_has_one_winner() -> None:
    for _ in range(200):
        ends: list[int] = []
        keeper = ViewKeeper(lambda ends=ends: ends.append(1))  # type: ignore[misc]
        holds: list[object] = []
        barrier = threading.Barrier(2)

        def take(keeper: ViewKeeper = keeper, holds: list[object] = holds, wait: threading.Barrier = barrier) -> None:
            wait.wait()
            try:
                holds.append(keeper.hold())
            except ClosedError:
                pass

        thread = threading.Thread(target=take)
        thread.start()
        barrier.wait()
        keeper.release()
        thread.join()
        assert len(ends) == 1 - len(holds)
        holds.clear()
        assert ends == [1]


def test_a_forked_child_gives_nothing_back_and_takes_nothing() -> None:
    ends: list[int] = []
    keeper = ViewKeeper(lambda: ends.append(1))
    hold = keeper.hold()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            keeper.acquire()
        except ForkError:
            code = 0
        del hold
        keeper.release()
        os._exit(code or (3 if ends else 0))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert keeper.count == 2
