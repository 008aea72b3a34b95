"""What a backend starts in a session of its own, so that its process group's end is not its end: a command ends it.

Owns the adoption of such processes and their end. Only for a command's own process: the whole process adopts, whatever
it started, so that a library must not do it for its user.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator

__all__ = ["no_orphans"]

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h
_LIMIT_S = 2.0
_PAUSE_S = 0.005


@contextlib.contextmanager
def no_orphans() -> Iterator[None]:
    """Adopt what processes started in the block leave behind, and end it behind the block. Also a decorator.

    Blocks for two seconds at most, for those that are stuck inside the kernel. Children that were there before stay.
    """
    prctl = ctypes.CDLL(None).prctl
    before, adopted = _children(), ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(adopted), 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        deadline = time.monotonic() + _LIMIT_S
        # Again and again: the children of one that was ended are adopted only then.
        while (left := _children() - before) and time.monotonic() < deadline:
            for pid in left:  # nobody else reaps them, so that the numbers are theirs
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(_PAUSE_S)
        prctl(_PR_SET_CHILD_SUBREAPER, adopted.value, 0, 0, 0)


def _children() -> set[int]:
    found = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
            if int(stat.read().rpartition(b")")[2].split()[1]) == os.getpid():
                found.add(int(name))
    return found
