"""A device some of whose calls fail, around a real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from devipc.errors import DriverError, ResourceExhausted
from devipc.interfaces.backend import Device
from devipc.interfaces.transfer import HostRegistration


class FaultyTransfer:
    """Passes everything on, but what ``fault(name)`` raises for; registers ``pin_nbytes`` of host memory at most."""

    def __init__(self, transfer: Any) -> None:
        self._transfer = transfer
        self.fault: Callable[[str], None] = lambda _name: None
        self.pin_nbytes = 2**40
        self.pinned = 0

    def register_host(self, address: int, nbytes: int) -> HostRegistration:
        if self.pinned + nbytes > self.pin_nbytes:
            raise ResourceExhausted(f"{nbytes} bytes cannot be pinned", code="host_memory", remedy="ulimit -l")
        found: HostRegistration = self._transfer.register_host(address, nbytes)
        self.pinned += nbytes
        return found

    def unregister_host(self, registration: HostRegistration) -> None:
        self._transfer.unregister_host(registration)
        self.pinned -= registration.nbytes

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._transfer, name)
        if name not in ("copy_strided", "copy_batch", "copy", "record", "query_marker"):
            return found

        def call(*arguments: Any) -> Any:
            self.fault(name)
            return found(*arguments)

        return call


class FaultyDevice:
    """A device whose transfer is a :class:`FaultyTransfer`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.transfer = FaultyTransfer(device.transfer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


class Failing:
    """A fault: the ``n``-th copy from now on, and ``more`` after it, are refused by the driver."""

    def __init__(self, n: int, more: int = 0) -> None:
        self.left = n
        self.more = more

    def __call__(self, name: str) -> None:
        if not name.startswith("copy"):
            return
        self.left -= 1
        if -self.more <= self.left <= 0:
            raise DriverError("the driver refused the copy", remedy="none: it was asked to")
