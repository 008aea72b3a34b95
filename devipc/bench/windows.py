"""Steps of a model in quiet and in busy windows, which alternate while it runs without a break.

Owns which window a step is counted to: the one that it lies in whole. It knows neither model nor mover.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from devipc.bench.facts import quantile, ratio
from devipc.errors import PeerGone

__all__ = ["Mover", "Spans", "alternate"]

Spans = list[tuple[float, float]]
"""Begin and length of each step, or begin and end of each window, in seconds of ``time.monotonic()``."""
Mover = Callable[[], int]
"""Moves pages, waits for them and returns how many bytes they were."""

_LEAST_STEPS = 2
_MOST_WINDOWS = 10


def alternate(mover: Mover, steps: Spans, *, windows: int, window_s: float, late_s: float = 0.0) -> dict[str, Any]:
    """Run windows of both sorts and say how the model's steps differ, and what was moved. Blocks.

    Parameters
    ----------
    mover : Mover
        Called again and again in busy windows.
    steps : Spans
        Another thread adds the model's steps to it meanwhile.
    windows : int
        Of each sort. On a machine so busy that steps are too few, more, up to ten.
    window_s : float
        Seconds of each.
    late_s : float
        Seconds until a step that is over has come to ``steps``.

    Raises
    ------
    PeerGone
        When too few steps lie in the windows.
    """
    quiet: Spans = []
    busy: Spans = []
    moved, busy_s = 0, 0.0
    mover()

    def times() -> list[list[float]]:
        found = list(steps)
        return [[took for at, took in found if any(a <= at and at + took <= b for a, b in w)] for w in (quiet, busy)]

    def enough() -> bool:
        return min(len(some) for some in times()) >= _LEAST_STEPS

    while len(quiet) < windows or (not enough() and len(quiet) < _MOST_WINDOWS):
        start = time.monotonic()
        time.sleep(window_s)
        quiet.append((start, time.monotonic()))
        start = time.monotonic()
        while time.monotonic() < start + window_s:
            moved += mover()
        busy.append((start, time.monotonic()))
        busy_s += busy[-1][1] - start
        if len(quiet) >= windows:
            time.sleep(late_s)
    if not enough():
        raise PeerGone(
            f"the model made fewer than {_LEAST_STEPS} steps in {len(quiet)} windows of {window_s:g} s",
            remedy="choose longer windows, or run the model by hand: python -m devipc.bench.model",
        )
    alone, beside = times()
    return {
        "mean_over_quiet": ratio(statistics.fmean(beside), statistics.fmean(alone)),
        "p99_over_quiet": ratio(quantile(beside, 0.99), quantile(alone, 0.99)),
        "quiet_mean_ms": round(statistics.fmean(alone) * 1e3, 3),
        "quiet_p99_ms": round(quantile(alone, 0.99) * 1e3, 3),
        "steps_quiet": len(alone),
        "steps_busy": len(beside),
        "gb_per_s": round(moved / busy_s / 1e9, 2),
    }
