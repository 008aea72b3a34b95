"""How much memory the host device has: the machine's, or the tighter limit of a control group.

Owns the reading of /proc and /sys. Formats: proc(5), and the kernel's cgroup-v1 and cgroup-v2 documents.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from devipc.spi import CapabilityError, MemoryInfo, ResourceExhausted

__all__ = ["memory_info", "open_proc"]

_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


@contextmanager
def open_proc(path: Path) -> Iterator[TextIO]:
    """Open a file that every Linux has.

    Raises
    ------
    ResourceExhausted
        When this process has no descriptor left for it.
    CapabilityError
        When it cannot be read.
    """
    try:
        with path.open(errors="replace") as file:
            yield file
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise ResourceExhausted(
                f"no descriptor left to read {path} ({error.strerror})", code="fds", remedy="raise `ulimit -n`"
            ) from error
        raise CapabilityError(
            f"the host backend reads {path}, which failed ({error.strerror})",
            remedy="run on Linux with /proc mounted",
            backend="host",
        ) from error


def memory_info(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> MemoryInfo:
    """Return what is free for this process, and the total; files that cannot be read set no limit."""
    with open_proc(proc / "meminfo") as file:
        table = dict(line.split(":", 1) for line in file)
    machine = total = int(table["MemTotal"].split()[0]) * 1024
    free = int(table["MemAvailable"].split()[0]) * 1024
    for folder, names in _groups(proc, cgroups):
        limit = _number(folder / names[0])
        used = _number(folder / names[1])
        if limit is not None and used is not None and limit < machine:
            # Cached file pages that nobody used lately are given up before an allocation fails. A group with the wider
            # limit can still be the one with less left.
            total, free = min(total, limit), min(free, max(limit - used + _inactive(folder, names[2]), 0))
    return MemoryInfo(free, total)


def _groups(proc: Path, cgroups: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """Return the folders of this process's control group and its parents, innermost first."""
    found = []
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, _V2
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", _V1
        else:
            continue
        relative = Path(path.lstrip("/"))
        found += [(root / folder, names) for folder in (relative, *relative.parents)]
    return found


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _inactive(folder: Path, name: str) -> int:
    try:
        rows = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(rows.get(name, 0))
