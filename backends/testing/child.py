"""Where a process begins that runs the body of a test: pytest is left out as far as it can be.

Owns the end of such a process. What it runs is in :mod:`backends.testing.peers`.
"""

from __future__ import annotations

import importlib
import sys
import traceback

from tests import plain_pytest


def run() -> int:
    """Run what the command line names; return the exit status."""
    plain_pytest.stand_in()
    try:
        return int(importlib.import_module("backends.testing.peers").main())
    except BaseException:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    code = run()
    sys.stdout.flush()
    sys.exit(code)
