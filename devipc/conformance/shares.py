"""One run of the suite by several processes beside each other, on a machine with processors for that.

Owns these processes: each runs a share of the cases by the same command line, and what they leave becomes one file.
Cases stand beside cases of other shares, so free device memory is not held against anybody.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from devipc.conformance.results import check_writable, merged, write_results
from devipc.errors import UsageError

__all__ = ["read_share", "run_shares"]

_KNOWN = (0, 1, 2, 3, 130, 70)
"""Statuses, the worst last."""
_SHOWN = 60
_END_S = 30.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SHARE = re.compile(r"([1-9]\d{0,2})/([1-9]\d{0,2})")


def read_share(text: str) -> tuple[int, int]:
    """Return ``2/4`` as two numbers; raises UsageError."""
    found = _SHARE.fullmatch(text)
    if found is None or int(found[1]) > int(found[2]):
        raise UsageError(f"no share {text}", remedy="pass NUMBER/OF, 1/4 to 4/4 for four shares")
    return int(found[1]), int(found[2])


def run_shares(
    arguments: Sequence[str], *, jobs: int, results: Path | None, say: Callable[[str], None]
) -> tuple[int, dict[str, Any]]:
    """Run the suite in ``jobs`` processes at once; blocks until all are over, and ends them when it is interrupted.

    Parameters
    ----------
    arguments : sequence of str
        Of ``devipc conformance run``, without files.
    jobs : int
        How many.
    results : Path, optional
        Where the results of all go, as JSON.
    say : callable
        Told a line when a share is over, and the end of its output when not all of it was well.

    Returns
    -------
    tuple of int and dict
        0, or the status of the worst share, as `devipc conformance run` ends with it; and the results of all, empty
        when a share left none.

    Raises
    ------
    SuiteError
        When shares are not of one run.
    """
    check_writable(results)
    with tempfile.TemporaryDirectory(prefix="devipc-conformance-") as folder:
        files = [Path(folder, f"{number}.json") for number in range(1, jobs + 1)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for number, file in enumerate(files, 1):
                command = [sys.executable, "-m", __name__, str(os.getpid()), "conformance", "run", *arguments]
                command += ["--share", f"{number}/{jobs}", "--results", str(file)]
                with open(file.with_suffix(".log"), "w", encoding="utf-8") as log:
                    # A session of its own: an interrupt from the terminal reaches it once, by way of this process.
                    processes.append(
                        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
                    )
            codes = []
            for number, (process, file) in enumerate(zip(processes, files, strict=True), 1):
                codes.append(process.wait())
                lines = file.with_suffix(".log").read_text(encoding="utf-8", errors="replace").splitlines()
                say(f"share {number} of {jobs}: " + "\n".join(lines[-_SHOWN if codes[-1] else -1 :]))
                if not file.exists():
                    return codes[-1] if codes[-1] in _KNOWN else 1, {}
        finally:
            _end(processes)
        documents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    document = merged(documents)
    if results is not None:
        write_results(results, document)
    return max((code if code in _KNOWN else 1 for code in codes), key=_KNOWN.index), document


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    for process in processes:
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _main(parent: str) -> None:
    """Be the command line, for as long as the process that asked for it lives."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() == int(parent):
        runpy.run_module("devipc", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main(sys.argv.pop(1))
