"""The early end of a long run: it is told by a signal, or by its time limit, and then says what it has done so far.

A run that has processes lets each of them end in good order; they have sessions of their own, so that whoever
interrupts at a terminal interrupts nobody but the run itself. Who is told again waits for nobody.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_LOOK_S = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Enough:
    """Whether a run was told to end early, and why. To be made on the main thread of a program.

    Parameters
    ----------
    time_limit_s : float
        Time that it may take; 0: any.
    """

    def __init__(self, time_limit_s: float = 0.0) -> None:
        self.why = ""
        self.exit_code = 0
        self.again = False
        self._limit_s = time_limit_s
        self._ends_at = time.monotonic() + time_limit_s
        for number in _SIGNALS:
            signal.signal(number, self._told)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def _told(self, number: int, _frame: object) -> None:
        self.again = bool(self.why)
        self.why = self.why or signal.Signals(number).name
        self.exit_code = 128 + number

    def __bool__(self) -> bool:
        if not self.why and self._limit_s and time.monotonic() > self._ends_at:
            self.why = f"time limit of {self._limit_s:g} s"
        return bool(self.why)


def start(command: list[str], *, stdout: Any, folder: str) -> subprocess.Popen[str]:
    """Start a process of a run, which makes an :class:`Enough`; what it is told before that, it hears then."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            stdout=stdout,
            env={**os.environ, "TMPDIR": folder},
            start_new_session=True,
            text=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_for(
    processes: Iterable[subprocess.Popen[str]], running: Callable[[], bool], enough: Enough | None, last_s: float
) -> str:
    """Wait until nothing is running any more, and return why the processes were told to end before, if they were.

    Each leads a session. Told to end by SIGTERM, it has ``last_s`` seconds for it.
    """
    why, late = "", math.inf
    while running():
        time.sleep(_LOOK_S)
        if enough and not why:
            why, late = enough.why, time.monotonic() + last_s
            for process in processes:
                process.terminate()
        if why and enough and (enough.again or time.monotonic() > late):
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    return why
