"""A child with all that it starts: what it leaves behind is adopted, whatever session it is in, and ended with it.

Owns the process in between, which this file is as well: a small program that starts a command, adopts what that leaves,
ends all of it behind the command, and then ends as the command did. So whoever starts it needs to adopt nothing, which
would concern all else that its process started. As a program it has nothing of devipc but this file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time

TYPE_CHECKING = False  # typing's own would take longer to import than all the rest
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence
    from typing import NoReturn

__all__ = ["ADOPTER", "adopted", "end_adopted"]

ADOPTER = "{adopter}"
"""Stands in a command for the number of the process in between, which is its parent."""

_LIMIT_S = 2.0
_GRACE_S = 3.0
_PAUSE_S = 0.005
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_NOT_FOUND = 127


def adopted(command: Sequence[str]) -> list[str]:
    """Return the command that runs ``command`` with all that it leaves behind; to be started in a session of its own.

    What the command has is what it is given: descriptors, environment, its end as exit status or signal. It has a
    process group of its own. All is over with it, at SIGTERM, and when the thread ends that started it.
    """
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *command]


def end_adopted(process: subprocess.Popen[bytes]) -> None:
    """End a process of :func:`adopted` with all that it has, and reap it; what is stuck in the kernel is left to it.

    Blocks for three seconds at most.
    """
    import subprocess

    for signal_, limit_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _LIMIT_S)):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal_)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(limit_s)
            return


# --- the process in between -------------------------------------------------------------------------------------------


def _main(parent: int, command: Sequence[str]) -> NoReturn:
    news = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, news)
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before it could be followed
        os._exit(0)
    words = [str(os.getpid()) if word == ADOPTER else word for word in command]
    ignored = [signal.SIGPIPE, signal.SIGXFSZ]  # by this interpreter
    pid = os.posix_spawn(words[0], words, os.environ, setpgroup=0, setsigmask=(), setsigdef=ignored)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # whose end is news for who has the other one
    status = None
    while status is None and signal.sigwait(news) != signal.SIGTERM:
        status = _reaped(pid)
    _end_children()
    _end_as(status)


def _reaped(pid: int) -> int | None:
    """Reap whoever ended; return the status of ``pid`` if it did."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == pid:
                status = found[1]
    return status


def _children() -> set[int]:
    found = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
            if int(stat.read().rpartition(b")")[2].split()[1]) == os.getpid():
                found.add(int(name))
    return found


def _end_children() -> None:
    """End and reap all children, the adopted ones too; two seconds at most for those that are stuck in the kernel."""
    deadline = time.monotonic() + _LIMIT_S
    # Again and again: the children of one that was ended are adopted only then.
    while (left := _children()) and time.monotonic() < deadline:
        for pid in left:  # nobody else reaps them, so that the numbers are theirs
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_PAUSE_S)


def _end_as(status: int | None) -> NoReturn:
    """End as the command did; by SIGKILL where it was not over."""
    code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else _NOT_FOUND)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
