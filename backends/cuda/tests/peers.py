"""What is CUDA's own when test bodies run in processes of their own: the simulated driver, its variables, the device.

Also names what the tests use of :mod:`backends.testing.peers`. Knows no test.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from typing import Any

from backends.testing import peers
from backends.testing.peers import ROOT, Channel, Peer, body_test, peer, run_body, simulator_folder, variables

__all__ = [
    "PACKAGE",
    "ROOT",
    "Channel",
    "Peer",
    "environment",
    "loaded",
    "open_device",
    "peer",
    "python_path",
    "run_body",
    "simulated",
    "watched",
]

PACKAGE = "backends.cuda.tests"


def environment(switches: dict[str, object]) -> dict[str, str]:
    """Variables of a process on the simulated driver, in a room of its own."""
    folders = os.pathsep.join(filter(None, (simulator_folder("cuda"), os.environ.get("LD_LIBRARY_PATH"))))
    own = {"LD_LIBRARY_PATH": folders, "CUDA_PYTHON_DISABLE_VERSION_CHECK": "1"}
    return variables("cuda", switches, cleared=("CUDA_",), **own)


def python_path(values: dict[str, str]) -> dict[str, str]:
    """Add what the children import."""
    return peers.python_path("cuda", values)


def simulated(*, bare: bool = False, **switches: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a body that runs on the simulated driver; see :func:`backends.testing.peers.body_test`."""
    return body_test(lambda: environment(switches), bare=bare)


def loaded() -> Any:
    """Controls of the simulated driver in this process."""
    return importlib.import_module("tests.simulator.control").Simulator.loaded()


def open_device() -> Any:
    """The first device."""
    from devipc_cuda.backend import CudaBackend

    return CudaBackend().open_device()


watched = contextlib.nullcontext
"""Nothing else is looked at while a body runs."""
