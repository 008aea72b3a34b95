"""Backend: what a plugin returns, and the devices behind it.

Owns the contract only: naming, listing without side effects, and opening one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from devipc.capabilities import Capability
from devipc.interfaces.memory import DeviceMemoryIPC
from devipc.interfaces.sync import DeviceSyncIPC
from devipc.interfaces.transfer import DeviceTransfer
from devipc.types import DeviceInfo

__all__ = ["Backend", "Device"]


@runtime_checkable
class Device(Protocol):
    """One opened device of one backend in this process. Capabilities that are missing are ``None``, with a reason."""

    @property
    def info(self) -> DeviceInfo:
        """Identity of the device."""
        ...

    @property
    def memory(self) -> DeviceMemoryIPC | None:
        """Memory IPC, or None."""
        ...

    @property
    def sync(self) -> DeviceSyncIPC | None:
        """Sync IPC, or None."""
        ...

    @property
    def transfer(self) -> DeviceTransfer | None:
        """Streams and copies, or None."""
        ...

    def capabilities(self) -> Mapping[str, Capability]:
        """Return the answers for ``memory``, ``sync`` and ``transfer``; what is None says why here."""
        ...

    def close(self) -> None:
        """Give back what opening the device took (contexts, threads). Idempotent. Mappings must be closed before."""
        ...


@runtime_checkable
class Backend(Protocol):
    """A vendor's way to share device memory."""

    @property
    def name(self) -> str:
        """Short lower-case name, the one of the entry point."""
        ...

    def facts(self) -> Mapping[str, str]:
        """Return versions, under ``driver`` and ``bindings``, and settings that matter; never raises.

        Loads what it must. Reports and results of the conformance suite show these two by name.
        """
        ...

    def devices(self) -> Sequence[DeviceInfo]:
        """List the devices that this process can see, without creating a context.

        Raises
        ------
        CapabilityError
            When the vendor's library or device is absent; says which layer failed.
        """
        ...

    def open_device(self, uuid: str | None = None) -> Device:
        """Open the device with this ``uuid`` (the first one when None). The same device again gives the same object.

        Raises
        ------
        CapabilityError
            When no such device is visible; lists those that are.
        """
        ...
