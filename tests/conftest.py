"""What holds for every test: nothing is left behind, and temporary files go to a folder that is looked into.

Owns the leak guard, the Hypothesis profile, and which files come first. It must not import devipc: the import tests
measure that.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
from hypothesis import settings

# No deadline: two cores are shared with other processes. No database: a run leaves no file behind.
settings.register_profile("devipc", deadline=None, database=None, print_blob=True)
settings.load_profile("devipc")

# Whoever starts the tests in the background of a script has interrupts ignored, here and in all that is started here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_SETTLE_S = 2.0
_KERNEL_OBJECTS = ("socket:", "pipe:", "anon_inode:", "/memfd:", "/dev/shm/")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What this process holds that outlives a test unless somebody ends it."""

    processes: frozenset[str]
    threads: frozenset[str]
    fds: frozenset[str]
    files: frozenset[str]

    @classmethod
    def now(cls) -> Footprint:
        return cls(
            processes=_processes(),
            threads=frozenset(f"{thread.name} ({thread.ident})" for thread in threading.enumerate()),
            fds=_fds(),
            files=frozenset(os.listdir(tempfile.gettempdir())),
        )

    def new_since(self, earlier: Footprint) -> list[str]:
        return [
            f"{field.name}: {sorted(new)}"
            for field in fields(self)
            if (new := getattr(self, field.name) - getattr(earlier, field.name))
        ]


def _processes() -> frozenset[str]:
    """All children, zombies included, but multiprocessing's own tracker, which lives as long as this process."""
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except OSError:  # the thread ended meanwhile
            continue
        found.update(f"{pid} {_command(pid)}" for pid in pids if int(pid) != tracker)
    return frozenset(found)


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _fds() -> frozenset[str]:
    tracker = getattr(resource_tracker._resource_tracker, "_fd", None)
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of the listing itself
            continue
        if target.startswith(_KERNEL_OBJECTS) and int(name) != tracker:
            found.add(f"{name} {target}")
    return frozenset(found)


LONGEST = (
    "tests/hicache/test_stateful.py",
    "tests/suite/test_liars.py",
    "tests/hicache/daemon/test_chaos.py",
    "tests/hicache/test_daemon_scenarios.py",
)
"""Files that take minutes, the longest first: one that begins at the end lets all processors but one wait for it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files; all others stay in their order."""
    items.sort(key=lambda item: LONGEST.index(item.location[0]) if item.location[0] in LONGEST else len(LONGEST))


@pytest.fixture(scope="session", autouse=True)
def _temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the run, its children included, a temporary folder of its own, so that leftovers can be seen.

    Its path is short: sockets lie in folders below it, and a socket's path has 107 bytes at most.
    """
    tmp_path_factory.getbasetemp()  # made once, and not in there
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(autouse=True)
def _leaves_nothing(_temporary_folder: None) -> Iterator[None]:
    """Fail a test that leaves a process, thread, kernel object or temporary file behind."""
    before = Footprint.now()
    yield
    deadline = time.monotonic() + _SETTLE_S
    while left := Footprint.now().new_since(before):
        if time.monotonic() > deadline:
            pytest.fail("the test left behind " + "; ".join(left), pytrace=False)
        gc.collect()
        time.sleep(0.02)
