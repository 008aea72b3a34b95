"""What a process holds, as the kernel shows it."""

from __future__ import annotations

import contextlib
import os


def holds(pid: int) -> tuple[int, int, int]:
    """Descriptors, threads and mappings of memory files of a process."""
    with open(f"/proc/{pid}/maps") as maps:
        mapped = maps.read().count("/memfd:")
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")), mapped


def listing(pid: int) -> list[str]:
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    names = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/comm") as comm:
            names.append(comm.read().strip())
    return sorted(found) + sorted(names)
