"""An engine process whose driver opens or unmaps clients' memory only while a file does not forbid it.

Run as ``engine_module``; ``DEVIPC_TEST_ENGINE_HOLD`` names the folder: while it has a file ``open`` or ``close``, calls
of that name do not return; while it has ``refuse`` or ``break``, nothing is unmapped: the driver says so, or fails.
With a file ``none`` from the start, the device shares no memory.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from devipc.errors import DriverError
from devipc.hicache.engineproc.process import main
from devipc.interfaces.backend import Device
from devipc.registry import load_backend

FOLDER = "DEVIPC_TEST_ENGINE_HOLD"
MODULE = "tests.hicache.daemon.engine_that_holds_memory"


class HeldMemory:
    """Passes everything on, sooner or later."""

    def __init__(self, memory: Any, folder: Path) -> None:
        self._memory, self._folder = memory, folder

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._memory, name)
        if not name.startswith(("open", "close")):
            return found
        file = self._folder / ("open" if name.startswith("open") else "close")

        def call(*arguments: Any, **options: Any) -> Any:
            while file.exists():
                time.sleep(0.002)
            if file.name == "close" and file.with_name("refuse").exists():
                raise DriverError("the driver did not unmap it", remedy="none: it was asked to")
            if file.name == "close" and file.with_name("break").exists():
                raise RuntimeError("a defect of the backend")
            return found(*arguments, **options)

        return call


class HeldDevice:
    """A device with such memory."""

    def __init__(self, device: Device) -> None:
        self._device = device
        folder = Path(os.environ[FOLDER])
        self.memory = None if (folder / "none").exists() else HeldMemory(device.memory, folder)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


class HeldBackend:
    """A backend with such devices."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._devices: dict[str, Any] = {}

    def open_device(self, uuid: str | None = None) -> Any:
        device = self._inner.open_device(uuid)
        return self._devices.setdefault(device.info.uuid, HeldDevice(device))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


if __name__ == "__main__":
    main(int(sys.argv[1]), load=lambda name: HeldBackend(load_backend(name)))
