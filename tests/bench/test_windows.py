"""Steps in quiet and busy windows: which are counted, and that a slow model is waited for, but not for ever."""

from __future__ import annotations

import threading
import time

import pytest

from devipc.bench.windows import Spans, alternate
from devipc.errors import PeerGone


def test_steps_are_counted_to_the_window_that_they_lie_in() -> None:
    busy, over = threading.Event(), threading.Event()
    steps: Spans = []

    def mover() -> int:
        busy.set()
        time.sleep(0.05)
        busy.clear()
        return 1000

    def model() -> None:
        while not over.wait(0.001):
            at, slow = time.monotonic(), busy.is_set()
            time.sleep(0.004 if slow else 0.002)
            if slow is busy.is_set():  # else it lies in both
                steps.append((at, 0.002 if slow else 0.001))

    thread = threading.Thread(target=model)
    thread.start()
    try:
        found = alternate(mover, steps, windows=2, window_s=0.1)
    finally:
        over.set()
        thread.join()
    assert found["steps_quiet"] >= 2 <= found["steps_busy"]
    assert (found["quiet_mean_ms"], found["mean_over_quiet"], found["p99_over_quiet"]) == (1.0, 2.0, 2.0)
    assert found["gb_per_s"] == 0.0


def test_a_slow_model_gets_more_windows() -> None:
    steps: Spans = []
    moved = []

    def mover() -> int:
        start = time.monotonic()
        time.sleep(0.01)
        moved.append(start)
        if len(moved) > 4:  # it makes its steps late
            steps.extend([(start, 0.005), (start - 0.02, 0.001)])
        return 1

    found = alternate(mover, steps, windows=1, window_s=0.03)
    assert found["steps_quiet"] >= 2 <= found["steps_busy"]
    assert len(moved) > 4


def test_a_model_without_steps_is_not_waited_for_for_ever() -> None:
    with pytest.raises(PeerGone, match="fewer than 2 steps in 10 windows") as caught:
        alternate(lambda: 1, [], windows=1, window_s=0.001)
    assert "longer windows" in str(caught.value.remedy)
