"""What a command adopts: nothing any more once it is over, unless its process did so before."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys
from devipc.cli.orphans import no_orphans
prctl, adopts = ctypes.CDLL(None).prctl, ctypes.c_int()
prctl(36, int(sys.argv[1]), 0, 0, 0)
for _ in range(2):
    prctl(37, ctypes.byref(adopts), 0, 0, 0)
    print(adopts.value)
    with no_orphans():
        prctl(37, ctypes.byref(adopts), 0, 0, 0)
        print(adopts.value)
"""


@pytest.mark.parametrize("before", ["0", "1"])
def test_a_process_adopts_behind_a_command_as_it_did_before(before: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, before], stdout=subprocess.PIPE, text=True, timeout=50, check=True
    )
    assert done.stdout.split() == [before, "1", before, "1"]
