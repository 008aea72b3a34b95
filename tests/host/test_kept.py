"""Memory that was given back and that the kernel keeps mapped, since the process has as many mappings as it may."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from devipc.host import maps
from devipc.host.maps import Reservation
from devipc.spi import PAGE_NBYTES

_LIMIT = int(Path("/proc/sys/vm/max_map_count").read_text())


_MANY = pytest.mark.skipif(_LIMIT > 2**18, reason="so many mappings take too long to make")


@pytest.mark.parametrize("kernel", [pytest.param("full", marks=_MANY), "refusing"])
def test_memory_that_is_not_unmapped_is_said_and_goes_with_its_neighbours(kernel: str) -> None:
    """To whoever gave it back; when a copy still used it, the device is lost."""
    command = [sys.executable, "-m", "tests.host.full", kernel]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["True False True", "True", "True", "0", ""]


def test_no_hole_is_made_where_the_range_was_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last part may be unmapped on another thread meanwhile, and somebody else map memory there."""
    reservation = Reservation(2 * PAGE_NBYTES)
    real = maps._mmap
    done: list[str] = []

    def last() -> None:
        reservation.unmap(reservation.start, PAGE_NBYTES)
        done.append("range")

    other = threading.Thread(target=last)

    def mmap(at: int | None, *arguments: Any) -> Any:
        other.start()
        other.join(0.2)
        done.append("hole")
        return real(at, *arguments)

    monkeypatch.setattr(maps, "_mmap", mmap)
    reservation.unmap(reservation.start + PAGE_NBYTES, PAGE_NBYTES)
    other.join(10)
    assert done == ["hole", "range"]
