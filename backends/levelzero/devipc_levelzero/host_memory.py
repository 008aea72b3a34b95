"""Host memory that the device may reach: pages of this process, imported into the driver by its own extension.

Owns the two calls behind :class:`devipc.spi.Pins` and their errors. Level Zero has no such call in its core; without
the extension copies from and to ordinary memory may go through a copy of the driver's own, of which nobody knows when
it is written back, so registration is refused instead.

Source: ``zexDriverImportExternalPointer`` and ``zexDriverReleaseImportedPointer`` take the driver's own handle, and are
found by name (compute-runtime, driver extensions).
"""

from __future__ import annotations

import ctypes

from devipc.spi import CapabilityError, DevIPCError, DriverError, ResourceExhausted, pinning_limits
from devipc_levelzero import driver
from devipc_levelzero.abi import MemoryProperties, make
from devipc_levelzero.context import Context
from devipc_levelzero.status import error_for

__all__ = ["ImportedPages"]

_IMPORT = "zexDriverImportExternalPointer"
_RELEASE = "zexDriverReleaseImportedPointer"
_TYPE_HOST = 1


class ImportedPages:
    """One driver's calls about host memory; fulfils :class:`devipc.spi.Pinning`.

    Memory of ``allocate_host`` is reachable as it is and is passed over.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        raw = driver.raw_driver(context.driver)
        self._raw = raw
        self._import = driver.extension(context.driver, _IMPORT)
        self._release = driver.extension(context.driver, _RELEASE)

    def _is_drivers(self, address: int) -> bool:
        found = make(MemoryProperties)
        known = driver.question("zeMemGetAllocProperties", self._context.handle, address, ctypes.byref(found), None)
        return known and found.type == _TYPE_HOST

    def pin(self, address: int, nbytes: int) -> None:
        """Import pages; blocks in proportion to ``nbytes``."""
        if self._is_drivers(address):
            return
        if self._import is None or self._release is None:
            raise CapabilityError(
                f"this driver does not have {_IMPORT}, so the device cannot reach memory of this process",
                code="no_host_registration",
                remedy="update the GPU driver, or use host memory of allocate_host(), which peers open by handle",
                backend="levelzero",
            )
        status = self._import(self._raw, address, nbytes)
        if status:
            raise error_for(_IMPORT, status, device=self._context.uuid)

    def unpin(self, address: int) -> None:
        """Release pages that were imported at ``address``."""
        self._context.check_open()
        if self._release is None or self._is_drivers(address):
            return
        status = self._release(self._raw, address)
        if status:
            raise error_for(_RELEASE, status, device=self._context.uuid)

    def device_ptr(self, address: int) -> int:
        """Return ``address``: the device uses the host's own addresses."""
        return address

    def settle(self) -> None:
        """Nothing: a failure is not kept for the next call."""

    def explain(self, error: DevIPCError, *, nbytes: int, pinned: int) -> DevIPCError:
        """Say that it is host memory, and which limits there are: the driver speaks of device memory or arguments."""
        if error.status is None or isinstance(error, CapabilityError):
            return error
        kind = ResourceExhausted if isinstance(error, ResourceExhausted) else DriverError
        return kind(
            f"host memory (not device memory) cannot be imported: {nbytes} bytes asked, {pinned} imported before the"
            f" failure; {pinning_limits()}",
            code="host_memory",
            remedy="raise `ulimit -l` (containers: --ulimit memlock=-1), ask for less, or free host memory",
            backend="levelzero",
            status=error.status,
        )
