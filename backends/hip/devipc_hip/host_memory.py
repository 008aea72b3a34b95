"""How this runtime pins one step of host memory, and what its refusals mean.

Owns the driver calls and the words of their errors; the steps and their borders are the core's. Submits nothing.
Functions expect the device to be current.
"""

from __future__ import annotations

from devipc.spi import (
    PIN_STEP_NBYTES,
    CapabilityError,
    DevIPCError,
    DriverError,
    Pins,
    ResourceExhausted,
    pinning_limits,
)
from devipc_hip import driver

__all__ = ["HostMemory"]

_PORTABLE_AND_MAPPED = 1 | 2


class HostMemory(Pins):
    """Registrations of one device's process.

    Parameters
    ----------
    step_nbytes : int
        Bytes pinned by one driver call; a multiple of the page size.
    """

    def __init__(self, *, step_nbytes: int = PIN_STEP_NBYTES) -> None:
        super().__init__(_Pinning(), backend="hip", step_nbytes=step_nbytes)


class _Pinning:
    """The calls about one step."""

    def pin(self, address: int, nbytes: int) -> None:
        driver.call("hipHostRegister", address, nbytes, _PORTABLE_AND_MAPPED)

    def unpin(self, address: int) -> None:
        driver.call("hipHostUnregister", address)

    def device_ptr(self, address: int) -> int:
        return int(driver.call("hipHostGetDevicePointer", address, 0))

    def settle(self) -> None:
        driver.attempt("hipGetDevice")

    def explain(self, error: DevIPCError, *, nbytes: int, pinned: int) -> DevIPCError:
        """Say that it is host memory, and which limits there are: the runtime has no word for either."""
        value = error.status.value if error.status else 0
        if value == 801:
            return CapabilityError(
                "this platform does not register host memory",
                code="no_host_registration",
                remedy="use staging buffers that the runtime allocates",
                status=error.status,
            )
        if value in (1, 2, 304, 999, 1052):
            kind = ResourceExhausted if value in (2, 304) else DriverError
            return kind(
                f"host memory (not device memory) cannot be pinned: {nbytes} bytes asked, {pinned} pinned before the"
                f" failure; {pinning_limits()}",
                code="host_memory",
                remedy="raise `ulimit -l` (containers: --ulimit memlock=-1), ask for less, or free host memory",
                status=error.status,
            )
        return error
