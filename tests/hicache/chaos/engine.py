"""The engine process of a rig: one with faults on demand, whose pinning fails while a file beside the sockets says so.

Run by the daemon, as any engine process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from devipc.hicache.engineproc.process import main
from devipc.registry import load_backend
from tests.hicache.engine_with_faults import FOLDER, PIN_NBYTES, FaultyBackend, Switches, listen

PIN_FILE = "pin_nbytes"

if __name__ == "__main__":
    file = Path(os.environ[FOLDER]) / PIN_FILE
    if file.exists():
        os.environ[PIN_NBYTES] = file.read_text()
    switches = Switches()
    listen(str(Path(os.environ[FOLDER]) / f"{os.getpid()}.faults"), switches)
    main(int(sys.argv[1]), load=lambda name: FaultyBackend(load_backend(name), switches))
