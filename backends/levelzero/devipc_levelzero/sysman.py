"""Management (Sysman) of one device, through ``pyzes``: how much memory is free.

Owns finding the device again in the management interface, which has handles of its own. With loaders below 1.20, which
lack ``zesInit``, the device's own handle is used, and the driver answers only where ``ZES_ENABLE_SYSMAN=1`` was set
before it was loaded.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from devipc.spi import CapabilityError, MemoryInfo, report
from devipc_levelzero import driver
from devipc_levelzero.status import UNINITIALIZED, error_for

__all__ = ["Management"]

_MASK = 0xFFFFFFFF
_STYPE_STATE, _STYPE_DEVICE = 0x1E, 0x1
_REMEDY = "set ZES_ENABLE_SYSMAN=1 before the process starts, or install a loader of 1.20 or newer"


class Management:
    """What the management interface knows of one device; asked when it is first needed. May be used from any thread.

    Parameters
    ----------
    device : int
        The device's handle in the core interface.
    raw_uuid : bytes
        By which it is found again.
    uuid : str
        Identity put into errors.
    """

    def __init__(self, device: int, raw_uuid: bytes, uuid: str) -> None:
        self._device = device
        self._raw_uuid = raw_uuid
        self._uuid = uuid
        self._lock = threading.Lock()
        self._modules: list[Any] | None = None

    def memory_info(self) -> MemoryInfo:
        """Return free and total bytes, summed over the device's memory modules.

        Raises
        ------
        CapabilityError
            Without pyzes, or where the driver does not manage.
        """
        with self._lock:
            if self._modules is None:
                self._modules = self._find_modules()
            free = total = 0
            for module in self._modules:
                state = self._binding().zes_mem_state_t(stype=_STYPE_STATE)
                self._call("zesMemoryGetState", module, ctypes.byref(state))
                free, total = free + int(state.free), total + int(state.size)
        return MemoryInfo(free, total)

    def _binding(self) -> Any:
        found = driver.pyzes()
        if found is None:
            raise CapabilityError(
                f"free memory is not known: {driver.why_no_pyzes()}",
                code="no_bindings",
                remedy="pip install pyzes, which needs the loader in /usr/lib/x86_64-linux-gnu",
                backend="levelzero",
                device=self._uuid,
            )
        return found

    def _call(self, name: str, *args: Any) -> None:
        report(name)
        status = int(getattr(self._binding(), name)(*args)) & _MASK
        if status == UNINITIALIZED:
            error = error_for(name, status)
            raise CapabilityError(
                "free memory is not known: the driver's management interface is off",
                code="no_sysman",
                remedy=_REMEDY,
                backend="levelzero",
                device=self._uuid,
                status=error.status,
            )
        if status:
            raise error_for(name, status, device=self._uuid)

    def _list(self, name: str, kind: Any, *parent: Any) -> list[Any]:
        """Return all handles that a call of two rounds gives: first their number, then they."""
        count = ctypes.c_uint32(0)
        self._call(name, *parent, ctypes.byref(count), None)
        if not count.value:
            return []
        found = (kind * count.value)()
        self._call(name, *parent, ctypes.byref(count), found)
        return [kind(item if isinstance(item, int) else item.value) for item in found[: count.value]]

    def _find_modules(self) -> list[Any]:
        binding = self._binding()
        modules = self._list("zesDeviceEnumMemoryModules", binding.zes_mem_handle_t, self._managed())
        if not modules:
            raise CapabilityError(
                "free memory is not known: the driver lists no memory modules of this device",
                code="no_sysman",
                remedy=_REMEDY,
                backend="levelzero",
                device=self._uuid,
            )
        return modules

    def _managed(self) -> Any:
        """Return the device's handle in the management interface."""
        binding = self._binding()
        if not driver.manages():
            return binding.zes_device_handle_t(self._device)
        self._call("zesInit", 0)
        for found in self._list("zesDriverGet", binding.zes_driver_handle_t):
            for device in self._list("zesDeviceGet", binding.zes_device_handle_t, found):
                properties = binding.zes_device_properties_t(stype=_STYPE_DEVICE)
                self._call("zesDeviceGetProperties", device, ctypes.byref(properties))
                if bytes(properties.core.uuid.id) == self._raw_uuid:
                    return device
        raise CapabilityError(
            "free memory is not known: the management interface does not list this device",
            code="no_sysman",
            remedy=_REMEDY,
            backend="levelzero",
            device=self._uuid,
        )
