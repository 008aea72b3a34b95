"""Holds a stream of this process back, on whatever driver it is: on the host and the simulator by their controls.

A real driver has no such control: ``DEVIPC_TEST_HOLD`` names a module that does it there.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

HOLD = "DEVIPC_TEST_HOLD"


def hold(device: Any, stream: Any, *, on: bool) -> None:
    """Let nothing of ``stream`` run that is not running yet, or let it go on."""
    if str(device.info.uuid).startswith("host-"):
        stream.stall() if on else stream.resume()
        return
    if HOLD in os.environ:
        importlib.import_module(os.environ[HOLD]).hold(device, stream, on=on)
        return
    from tests.simulator.control import Simulator

    Simulator.loaded().stall(on, stream=stream.handle)
