"""What is HIP's own when test bodies run in processes of their own: the simulated runtime, its variables, the device.

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

RUNTIME = 71_500_000
"""The runtime of the bindings, HIP 7.15."""


def environment(wanted: dict[str, object]) -> dict[str, str]:
    """Variables of a process on the simulated runtime, in a room of its own.

    ``missing`` lists entry points that its library shall not have.
    """
    switches = dict(wanted)
    missing = switches.pop("missing", ())
    assert isinstance(missing, list | tuple)
    own = {"ROCM_PATH": simulator_folder("hip", *missing), "DEVSIM_DRIVER_VERSION": str(RUNTIME)}
    return variables("hip", switches, cleared=("HIP_", "ROCR_", "ROCM_", "CUDA_"), **own)


def python_path(values: dict[str, str]) -> dict[str, str]:
    """Add what the children import."""
    return peers.python_path("hip", values)


def simulated(*, bare: bool = False, **switches: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a body that runs on the simulated runtime; see :func:`backends.testing.peers.body_test`."""
    return body_test(lambda: environment(switches), bare=bare)


def loaded() -> Any:
    """Controls of the simulated runtime in this process."""
    control = importlib.import_module("tests.simulator.control")
    return control.Simulator.loaded(f"{os.environ['ROCM_PATH']}/lib/libamdhip64.so")


def open_device() -> Any:
    """The first device."""
    from devipc_hip.backend import HipBackend

    return HipBackend().open_device()


watched = contextlib.nullcontext
"""Nothing else is looked at while a body runs."""
