"""``python -m devipc.hicache.engineproc FD``: what a supervisor runs."""

from __future__ import annotations

import sys

from devipc.hicache.engineproc.process import main

if __name__ == "__main__":
    main(int(sys.argv[1]))
