"""The backend and its one device: names, listing without side effects, opening and closing."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from devipc.spi import Capability, CapabilityError, DeviceInfo, ForkError, Mechanism

from .driver import NAME, Driver
from .memory import AcornMemory, memory_info
from .sync import AcornSync
from .transfer import AcornTransfer

__all__ = ["AcornBackend", "AcornDevice"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class AcornDevice:
    """The device, opened in this process. Fulfils :class:`devipc.spi.Device`."""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self._driver = Driver()
        self.memory = AcornMemory(self._driver)
        self.sync = AcornSync(self._driver)
        self.transfer = AcornTransfer(self._driver)

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self._driver.closed

    def capabilities(self) -> Mapping[str, Capability]:
        """Answer one by one; what is missing of ``sync`` is in its ``mechanisms``."""
        return {
            "memory": Capability.yes("sealed memory files"),
            "sync": self.sync.mechanisms()[Mechanism.STREAM_MEMOP],
            "transfer": Capability.yes("threads of this process"),
        }

    def close(self) -> None:
        """Stop all streams and give everything back. Calling it again does nothing."""
        self._driver.close()


class AcornBackend:
    """Fulfils :class:`devipc.spi.Backend`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._device: AcornDevice | None = None
        self._pid = os.getpid()

    @property
    def name(self) -> str:
        """``acorn``, like the entry point."""
        return NAME

    def facts(self) -> Mapping[str, str]:
        """Return what the behaviour depends on; ``driver`` and ``bindings`` are shown in reports by name."""
        return {"driver": f"Linux {platform.release()}", "bindings": "none", "machine": platform.machine()}

    def devices(self) -> Sequence[DeviceInfo]:
        """Return the one device. Its identity is that of the running machine, equal in every process."""
        boot = _BOOT_ID.read_text().strip()
        total = memory_info().total_nbytes
        return (DeviceInfo(f"{NAME}-{boot}", 0, "Acorn", total_nbytes=total, dlpack_type=1),)

    def open_device(self, uuid: str | None = None) -> AcornDevice:
        """Open the device; the same object until it is closed."""
        if os.getpid() != self._pid:
            raise ForkError("the backend was loaded before fork", remedy="spawn processes instead", backend=NAME)
        (info,) = self.devices()
        if uuid not in (None, info.uuid):
            raise CapabilityError(f"no device {uuid}; visible: {info.uuid}", remedy="pass that uuid", backend=NAME)
        with self._lock:
            if self._device is None or self._device.closed:
                self._device = AcornDevice(info)
            return self._device
