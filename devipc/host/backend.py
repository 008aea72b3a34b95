"""The host backend and its one device.

Owns naming and life cycle. The device's identity comes from the boot id: equal in every process and container of one
running machine, different after a reboot.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from devipc.host.driver import BACKEND, HostDriver
from devipc.host.meminfo import memory_info, open_proc
from devipc.host.memory import HostMemory
from devipc.host.sync import HostSync
from devipc.host.transfer import HostTransfer
from devipc.spi import Capability, CapabilityError, DeviceInfo, ForkError, Mechanism, UsageError

__all__ = ["HostBackend", "HostDevice"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class HostDevice:
    """The host device, opened in this process. Fulfils :class:`devipc.spi.Device`.

    Parameters
    ----------
    info : DeviceInfo
        Its identity.
    """

    def __init__(self, info: DeviceInfo) -> None:
        self._info = info
        self._driver = HostDriver(info.uuid)
        self._memory = HostMemory(self._driver)
        self._transfer = HostTransfer(self._driver)
        self._sync = HostSync(self._driver)

    @property
    def info(self) -> DeviceInfo:
        """Identity of the device."""
        return self._info

    @property
    def memory(self) -> HostMemory:
        """Memory IPC."""
        return self._memory

    @property
    def sync(self) -> HostSync:
        """Sync IPC."""
        return self._sync

    @property
    def transfer(self) -> HostTransfer:
        """Streams and copies."""
        return self._transfer

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self._driver.closed

    def capabilities(self) -> Mapping[str, Capability]:
        """Say what is there; all three are, and what of ``sync`` a machine lacks is in its ``mechanisms``."""
        return {
            "memory": Capability.yes("sealed memory files"),
            "sync": self._sync.mechanisms()[Mechanism.STREAM_MEMOP],
            "transfer": Capability.yes("threads of this process"),
        }

    def lose(self, reason: str = "lost on request") -> None:
        """Make the device lost, as a sticky hardware error would: a facility of the reference backend, for tests."""
        self._driver.check(giving_back=True)
        self._driver.lose(RuntimeError(reason))

    def close(self) -> None:
        """End all streams and give back everything, allocations and mappings that are left included.

        Queued work that has not begun is dropped and pending waits end. Blocks for work that runs, at most 10 s for
        each stream. Calling it again does nothing.
        """
        if self._driver.close():
            self._sync.close_all()
            self._memory.close_all()


class HostBackend:
    """The built-in reference backend. Fulfils :class:`devipc.spi.Backend`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._device: HostDevice | None = None
        self._pid = 0

    @property
    def name(self) -> str:
        """``host``."""
        return BACKEND

    def facts(self) -> Mapping[str, str]:
        """Return what its behaviour depends on."""
        return {
            "driver": "built in",
            "kernel": platform.release(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "switch_interval_s": str(sys.getswitchinterval()),
        }

    def devices(self) -> Sequence[DeviceInfo]:
        """Return the one device."""
        with open_proc(_BOOT_ID) as file:
            boot = file.read().strip().replace("-", "")
        total_nbytes = memory_info().total_nbytes
        return (DeviceInfo(f"{BACKEND}-{boot}", 0, "host memory", total_nbytes=total_nbytes, dlpack_type=1),)

    def open_device(self, uuid: str | None = None) -> HostDevice:
        """Open the device; the same object until it is closed.

        Raises
        ------
        CapabilityError
            For any other ``uuid``.
        ForkError
            When the device was opened before ``fork`` and this is the child.
        """
        if self._pid not in (0, os.getpid()):
            raise ForkError("the backend was used before fork", remedy="start processes with spawn", backend=BACKEND)
        (info,) = self.devices()
        if uuid is not None and not isinstance(uuid, str):
            raise UsageError(f"uuid is a {type(uuid).__name__}", remedy="pass a device's uuid")
        if uuid not in (None, info.uuid):
            raise CapabilityError(
                f"no device {uuid}; visible: {info.uuid}", remedy="pass a listed uuid", backend=BACKEND
            )
        with self._lock:
            if self._device is None or self._device.closed:
                self._device = HostDevice(info)
                self._pid = os.getpid()
            return self._device
