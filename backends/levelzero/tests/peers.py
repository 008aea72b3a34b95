"""What is Level Zero's own when test bodies run in processes of their own: the simulated driver behind the real loader.

Owns its variables, the device, and the check that the parameter validation of the loader, which is on in every process,
refused no call. Also names what the tests use of :mod:`backends.testing.peers`. Knows no test.
"""

from __future__ import annotations

import collections
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from backends.testing import peers
from backends.testing.peers import CHILD_TIMEOUT_S, ROOT, Channel, Peer, body_test, peer, run_body, variables
from tests.simulator.needs import need

__all__ = [
    "OPTIONAL",
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
    "simulator_folder",
    "watched",
]

DRIVER = "libze_intel_gpu.so.1"
OPTIONAL = (
    "zeDeviceGetRootDevice",
    "zeEventPoolPutIpcHandle",
    "zeMemGetFileDescriptorFromIpcHandleExp",
    "zeMemGetIpcHandleWithProperties",
    "zeMemPutIpcHandle",
)
"""Calls that the oldest driver does not have."""


def simulator_folder() -> str:
    """Build the simulated driver; skip where loader or compiler are missing, fail where it does not compile."""
    need("levelzero")
    return peers.simulator_folder("levelzero")


def environment(switches: dict[str, object]) -> dict[str, str]:
    """Variables of a process on the simulated driver, in a room of its own, with the loader's validation on."""
    own = {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, (simulator_folder(), os.environ.get("LD_LIBRARY_PATH")))),
        "ZE_ENABLE_VALIDATION_LAYER": "1",
        "ZE_ENABLE_PARAMETER_VALIDATION": "1",
        "ZES_ENABLE_SYSMAN": "1",
    }
    return variables("levelzero", switches, cleared=("ZE_", "ZES_"), **own)


def python_path(values: dict[str, str]) -> dict[str, str]:
    """Add what the children import."""
    return peers.python_path("levelzero", values)


def simulated(
    *, bare: bool = False, quick: bool = False, limit_s: float = CHILD_TIMEOUT_S, **switches: object
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a body that runs on the simulated driver; see :func:`backends.testing.peers.body_test`.

    Each starts a process, so it is ``long`` unless it is said to be ``quick``.
    """
    decorate = body_test(lambda: environment(switches), bare=bare, limit_s=limit_s)
    return decorate if quick else lambda body: pytest.mark.long(decorate(body))


def loaded() -> Any:
    """Controls of the simulated driver in this process."""
    return importlib.import_module("tests.simulator.control").Simulator.loaded(DRIVER)


def open_device() -> Any:
    """The first device."""
    from devipc_levelzero.backend import LevelZeroBackend

    return LevelZeroBackend().open_device()


@contextmanager
def watched(sim: Any) -> Iterator[None]:
    """Check afterwards that every call came to the driver."""
    from devipc.calltrace import observe

    counted = Counted(sim)
    with observe(counted.note):
        yield
        counted.check()


class Counted:
    """Calls that this process made; each must have passed the loader's validation and come to the driver."""

    def __init__(self, sim: Any) -> None:
        self._sim = sim
        self.made: collections.Counter[str] = collections.Counter()

    def note(self, name: str) -> None:
        if name.startswith(("ze", "zes")) and not name.startswith("zel"):
            self.made[name] += 1

    def check(self) -> None:
        absent = os.environ.get("DEVSIM_MISSING", "").split(",")
        if "DEVSIM_API_VERSION" in os.environ:  # an old driver: the loader answers for what it does not have
            absent += OPTIONAL
        refused = {
            name: n - self._sim.calls(name)
            for name, n in self.made.items()
            if self._sim.calls(name) < n and name not in absent
        }
        assert not refused, f"calls that never came to the driver: {refused}"
        assert self.made
