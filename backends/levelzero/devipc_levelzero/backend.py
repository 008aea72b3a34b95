"""The Level Zero backend: devices by identity, and one opened object for each.

Owns listing, identity, the facts that explain a failure, and the life of opened devices. Knows nothing of how memory,
completion or copies work.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from devipc.spi import Capability, CapabilityError, DeviceInfo, DevIPCError
from devipc_levelzero import driver
from devipc_levelzero.abi import DeviceMemory, DeviceProperties, PciProperties, make
from devipc_levelzero.context import Context
from devipc_levelzero.memory import LevelZeroMemory
from devipc_levelzero.sync import LevelZeroSync
from devipc_levelzero.sysman import Management
from devipc_levelzero.transfer import LevelZeroTransfer

__all__ = ["LevelZeroBackend", "LevelZeroDevice"]

_SETTINGS = (
    "ZE_AFFINITY_MASK",
    "ZE_FLAT_DEVICE_HIERARCHY",
    "ZE_ENABLE_PCI_ID_DEVICE_ORDER",
    "ZE_ENABLE_ALT_DRIVERS",
    "ZE_ENABLE_VALIDATION_LAYER",
    "ZE_ENABLE_PARAMETER_VALIDATION",
    "ZES_ENABLE_SYSMAN",
)
_GPU = 1
_SUBDEVICE = 2


@dataclass(frozen=True, slots=True)
class _Found:
    info: DeviceInfo
    driver: int
    device: int
    raw_uuid: bytes


class LevelZeroDevice:
    """One opened device: memory, sync and transfer over a context of its own.

    Made by :meth:`LevelZeroBackend.open_device` only. All parts may be used from any thread.
    """

    def __init__(self, found: _Found) -> None:
        self._info = found.info
        self.context = Context(found.driver, found.device, found.info.uuid)
        self._memory = LevelZeroMemory(self.context)
        self._sync = LevelZeroSync(self.context)
        management = Management(found.device, found.raw_uuid, found.info.uuid)
        self._transfer = LevelZeroTransfer(self.context, management)

    @property
    def info(self) -> DeviceInfo:
        """Identity of the device."""
        return self._info

    @property
    def memory(self) -> LevelZeroMemory:
        """Memory IPC."""
        return self._memory

    @property
    def sync(self) -> LevelZeroSync:
        """Sync IPC."""
        return self._sync

    @property
    def transfer(self) -> LevelZeroTransfer:
        """Streams and copies."""
        return self._transfer

    def capabilities(self) -> Mapping[str, Capability]:
        """Return the answers for ``memory``, ``sync`` and ``transfer``: offered, to be proven by live checks."""
        offered = Capability.untested("offered by the driver; a live check decides")
        engine = "copy engines" if self.context.copies_only else "the compute engine, since no group only copies"
        return {
            "memory": offered,
            "sync": offered,
            "transfer": Capability.untested(f"by {engine} (group {self.context.ordinal}); a live check decides"),
        }

    def close(self) -> None:
        """Give the context back, unless work is queued that sets an event. Idempotent. Close mappings before."""
        if not self.context.closed:
            self.context.close(keep=not self._sync.events.close())

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self.context.closed


class LevelZeroBackend:
    """Intel GPUs, and whatever else has a Level Zero driver, through the Level Zero loader."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: dict[str, LevelZeroDevice] = {}

    @property
    def name(self) -> str:
        """``levelzero``."""
        return "levelzero"

    def facts(self) -> Mapping[str, str]:
        """Return versions, loaded libraries, settings and the rights that handles need; never raises."""
        facts = {"bindings": f"pyzes {driver.pyzes_version() or 'not installed'}"}
        facts.update({name: os.environ[name] for name in _SETTINGS if name in os.environ})
        facts["ptrace_scope"] = _first_line("/proc/sys/kernel/yama/ptrace_scope") or "no yama"
        try:
            driver.initialize()
            found = [driver.versions(handle) for handle in driver.drivers()]
            facts["driver"] = ", ".join(f"{own} with interface {api}" for own, api in found)
        except DevIPCError as error:
            facts["error"] = str(error)
        if why := driver.why_no_pyzes():
            facts["management"] = why
        facts["loader"] = ", ".join(driver.loader_paths()) or "not loaded"
        return facts

    def devices(self) -> list[DeviceInfo]:
        """List the GPUs that this process can see; creates no context.

        Raises
        ------
        CapabilityError
            Names the layer that failed: loader, driver or device.
        """
        return [found.info for found in self._find()]

    def _find(self) -> list[_Found]:
        driver.initialize()
        found: list[_Found] = []
        for handle in driver.drivers():
            for device in _handles_of(handle):
                one = _describe(handle, device, ordinal=len(found))
                if one is not None:
                    found.append(one)
        if not found:
            mask = os.environ.get("ZE_AFFINITY_MASK")
            raise CapabilityError(
                "layer 'device': the driver is loaded and shows no GPU",
                code="no_device",
                remedy="check ZE_AFFINITY_MASK" + (f" (now {mask!r})" if mask is not None else ""),
                backend=self.name,
            )
        return found

    def open_device(self, uuid: str | None = None) -> LevelZeroDevice:
        """Open the device with this ``uuid`` (the first one when None); makes a context.

        The same device again gives the same object, until it is closed.

        Raises
        ------
        CapabilityError
            When no such device is visible; lists those that are.
        """
        listed = self._find()
        found = next((one for one in listed if uuid in (None, one.info.uuid)), None)
        if found is None:
            raise CapabilityError(
                f"no device {uuid} is visible to this process; visible: {', '.join(one.info.uuid for one in listed)}",
                code="no_such_device",
                remedy="make it visible with ZE_AFFINITY_MASK",
                backend=self.name,
            )
        with self._lock:
            device = self._opened.get(found.info.uuid)
            if device is None or device.closed:
                device = self._opened[found.info.uuid] = LevelZeroDevice(found)
            return device


def _handles_of(driver_handle: int) -> list[int]:
    count = ctypes.c_uint32(0)
    driver.call("zeDeviceGet", driver_handle, ctypes.byref(count), None)
    if not count.value:  # drivers were seen to crash at an empty list
        return []
    handles = (ctypes.c_void_p * count.value)()
    driver.call("zeDeviceGet", driver_handle, ctypes.byref(count), handles)
    return [int(handle) for handle in handles[: count.value] if handle]


def _describe(driver_handle: int, device: int, *, ordinal: int) -> _Found | None:
    """Return what is known of a device; None for what is no GPU."""
    properties = make(DeviceProperties)
    driver.call("zeDeviceGetProperties", device, ctypes.byref(properties))
    if properties.type != _GPU:
        return None
    raw = bytes(properties.uuid)
    info = DeviceInfo(
        uuid=_uuid_text(raw),
        ordinal=ordinal,
        name=bytes(properties.name).decode("utf-8", "replace"),
        pci=_bus_address(device),
        parent_uuid=_parent(device) if properties.flags & _SUBDEVICE else "",
        total_nbytes=_memory_of(device),
    )
    return _Found(info, driver_handle, device, raw)


def _memory_of(device: int) -> int:
    """Return the size of all memory of a device; 0 where the driver does not say."""
    count = ctypes.c_uint32(0)
    if not driver.question("zeDeviceGetMemoryProperties", device, ctypes.byref(count), None) or not count.value:
        return 0
    parts = (DeviceMemory * count.value)(*(make(DeviceMemory) for _ in range(count.value)))
    driver.call("zeDeviceGetMemoryProperties", device, ctypes.byref(count), parts)
    return sum(int(part.total_size) for part in parts[: count.value])


def _parent(device: int) -> str:
    """Return the identity of the device that a part belongs to; empty where the loader cannot tell."""
    root, properties = ctypes.c_void_p(), make(DeviceProperties)
    if not driver.question("zeDeviceGetRootDevice", device, ctypes.byref(root)) or not root.value:
        return ""
    if not driver.question("zeDeviceGetProperties", root.value, ctypes.byref(properties)):
        return ""
    return _uuid_text(bytes(properties.uuid))


def _bus_address(device: int) -> str:
    found = make(PciProperties)
    if not driver.question("zeDevicePciGetPropertiesExt", device, ctypes.byref(found)):
        return ""
    return f"{found.domain:04x}:{found.bus:02x}:{found.device:02x}.{found.function:x}"


def _uuid_text(raw: bytes) -> str:
    text = raw.hex()
    return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()[0].strip()
    except (OSError, IndexError):
        return ""
