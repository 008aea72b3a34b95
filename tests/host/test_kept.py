"""Memory that was given back and that the kernel keeps mapped, since the process has as many mappings as it may."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_LIMIT = int(Path("/proc/sys/vm/max_map_count").read_text())


@pytest.mark.skipif(_LIMIT > 2**18, reason="so many mappings take too long to make")
def test_memory_that_is_not_unmapped_is_said_and_goes_with_its_neighbours() -> None:
    """To whoever gave it back; when a copy still used it, the device is lost."""
    done = subprocess.run([sys.executable, "-m", "tests.host.full"], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["True True", "True", "True", "0", ""]
