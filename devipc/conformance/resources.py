"""Accounts: what a process holds, and what grew between two looks.

Owns the counting of descriptors, threads, children and mapped files of this process. It knows no backend; what a
device has free is handed in.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devipc.conformance.profile import BackendProfile

__all__ = ["Account", "Slack", "grown_after_settling"]

SETTLE_S = 3.0
"""How long background threads and drivers get to let go of what a case used."""


@dataclass(frozen=True, slots=True)
class Slack:
    """What may grow without being a leak."""

    maps: int = 4
    threads: int = 0
    device_nbytes: int | None = None

    @classmethod
    def of(cls, profile: BackendProfile) -> Slack:
        """Take it from a profile; device memory counts only where the device is exclusive."""
        device = profile.memory_slack_nbytes if profile.exclusive_device else None
        return cls(profile.map_slack, profile.thread_slack, device)


@dataclass(frozen=True, slots=True)
class Account:
    """What a process holds at one moment.

    Parameters
    ----------
    fds, threads, children : frozenset of str
        Number and what it is.
    maps : int
        Mapped files and device memory, shared libraries excluded: libraries are loaded late and stay.
    device_free_nbytes : int
        Free device memory, -1 when not asked for.
    """

    fds: frozenset[str]
    threads: frozenset[str]
    children: frozenset[str]
    maps: int
    device_free_nbytes: int = -1

    @classmethod
    def now(
        cls,
        *,
        ignored_fds: frozenset[int] = frozenset(),
        ignored_pids: frozenset[int] = frozenset(),
        device_free_nbytes: int = -1,
    ) -> Account:
        """Look at this process; the suite's own descriptors and children are passed over."""
        return cls(_fds(ignored_fds), _threads(), _children(ignored_pids), _maps(), device_free_nbytes)

    def grown_since(self, earlier: Account, slack: Slack) -> list[str]:
        """Return what grew, in words; empty when nothing did."""
        grown = []
        for name, allowed in (("fds", 0), ("threads", slack.threads), ("children", 0)):
            before, after = getattr(earlier, name), getattr(self, name)
            if len(after) > len(before) + allowed:
                grown.append(f"{name} {len(before)} -> {len(after)}: {sorted(after - before)}")
        if self.maps > earlier.maps + slack.maps:
            grown.append(f"mapped files {earlier.maps} -> {self.maps}")
        if slack.device_nbytes is not None and min(self.device_free_nbytes, earlier.device_free_nbytes) >= 0:
            lost = earlier.device_free_nbytes - self.device_free_nbytes
            if lost > slack.device_nbytes:
                grown.append(f"device memory: {lost} bytes less are free")
        return grown

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready values, for another process."""
        return {
            "fds": sorted(self.fds),
            "threads": sorted(self.threads),
            "children": sorted(self.children),
            "maps": self.maps,
            "device_free_nbytes": self.device_free_nbytes,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Account:
        """Undo :meth:`to_json`."""
        sets = {name: frozenset(values[name]) for name in ("fds", "threads", "children")}
        return cls(**sets, maps=values["maps"], device_free_nbytes=values["device_free_nbytes"])


def grown_after_settling(
    earlier: Account, look: Callable[[], Account], slack: Slack, *, settle_s: float = SETTLE_S
) -> list[str]:
    """Return what grew and did not come back within ``settle_s``."""
    deadline = time.monotonic() + settle_s
    while grown := look().grown_since(earlier, slack):
        if time.monotonic() > deadline:
            return grown
        gc.collect()
        time.sleep(0.01)
    return []


def _fds(ignored: frozenset[int]) -> frozenset[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        if int(name) in ignored:
            continue
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except OSError:  # the descriptor of the listing itself
            continue
    return frozenset(found)


def _threads() -> frozenset[str]:
    """Look until the list is as long as the kernel's count: a listing misses entries while another thread ends."""
    for _ in range(20):
        found = set()
        for task in Path("/proc/self/task").iterdir():
            try:
                found.add(f"{task.name} {(task / 'comm').read_text().strip()}")
            except OSError:  # it ended meanwhile
                continue
        if f"Threads:\t{len(found)}\n" in Path("/proc/self/status").read_text():
            break
        time.sleep(0.001)
    return frozenset(found)


def _children(ignored: frozenset[int]) -> frozenset[str]:
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.update(pid for pid in (task / "children").read_text().split() if int(pid) not in ignored)
        except OSError:
            continue
    return frozenset(found)


def _maps() -> int:
    count = 0
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[5:]
            name = path[0].strip() if path else ""
            count += name.startswith("/") and ".so" not in name and not name.endswith((".cache", ".mo", ".pyc"))
    return count
