"""What a test needs of this machine that the simulator does not bring: libraries of vendors, without a device.

Owns the one rule for them: where such a library is missing a test is skipped and says what to install; with
``DEVIPC_NEED_LOADER`` set it fails. ``.ci/run`` installs them all, and sets that.
"""

from __future__ import annotations

import ctypes
import os
from typing import NoReturn

import pytest

NEED = "DEVIPC_NEED_LOADER"
LIBRARIES = {"levelzero": ("libze_loader.so.1", "libze1")}
"""Front -> the vendor's own library that it stands behind, and the package of Debian and Ubuntu that brings it."""


def need(front: str) -> None:
    """Return when the simulated driver ``front`` can be reached on this machine."""
    if front in LIBRARIES:
        name, package = LIBRARIES[front]
        try:
            ctypes.CDLL(name)
        except OSError as error:
            is_missing(f"{name} cannot be loaded ({error})", package)


def is_missing(reason: str, package: str) -> NoReturn:
    """Skip the test, or let it fail, for want of what ``package`` brings."""
    text = f"{reason}: apt-get install {package}"
    if NEED in os.environ:
        pytest.fail(text, pytrace=False)
    pytest.skip(text)
