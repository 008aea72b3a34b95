"""Backends and profiles that lie once about devices: which there are, what they are called, and how they end."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from devipc.conformance import BackendProfile
from devipc.errors import CapabilityError
from devipc.host.backend import HostDevice
from devipc.spi import (
    Backend,
    Capability,
    DeviceInfo,
    ExportedExtent,
    HandleKind,
    MemoryInfo,
    OpenedExtent,
    Verdict,
)
from tests.suite.lying import LIARS, Disguise, LyingBackend, caught_by

__all__ = ["LIARS", "TwoDevices", "two_devices", "two_devices_profile"]

ORDER = "DEVIPC_TEST_ORDER"
"""Order of the two devices in a process, ``0,1`` when not set; empty hides both."""


class TwoDevices(LyingBackend):
    """An honest backend of two devices, both the host; the second one opens what the first one exports."""

    def __init__(self) -> None:
        super().__init__()
        self._first = LyingBackend()
        self._second: HostDevice | None = None

    def devices(self) -> Sequence[DeviceInfo]:
        (first,) = self._first.devices()
        both = (first, dataclasses.replace(first, uuid=f"{first.uuid}-second", pci="0000:00:02.0"))
        order = [int(index) for index in os.environ.get(ORDER, "0,1").split(",") if index]
        if not order:
            raise CapabilityError("no device is visible", remedy=f"unset {ORDER}")
        return [dataclasses.replace(both[index], ordinal=place) for place, index in enumerate(order)]

    def open_device(self, uuid: str | None = None) -> HostDevice:
        infos = self.devices()
        info = next((info for info in infos if uuid in (None, info.uuid)), None)
        if info is None:
            names = ", ".join(info.uuid for info in infos)
            raise CapabilityError(f"no device {uuid}; visible: {names}", remedy="pass a listed uuid")
        if not info.uuid.endswith("-second"):
            return self._first.open_device(None)
        if self._second is None or self._second.closed:
            self._second = HostDevice(info)
        return self._second


def two_devices() -> Backend:
    return TwoDevices()


def two_devices_profile() -> BackendProfile:
    return profile_of("two_devices")


def profile_of(factory: str) -> BackendProfile:
    return BackendProfile(backend=f"{__name__}:{factory}", hidden={ORDER: ""}, reordered={ORDER: "1,0"})


# --- which there are ------------------------------------------------------------------------------------------------


def starts_a_thread() -> Backend:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return LyingBackend()


@caught_by("DISC-001")
def loading_starts_a_thread() -> BackendProfile:
    """Starts a thread as soon as the plugin is loaded."""
    return BackendProfile(backend=f"{__name__}:starts_a_thread")


def shows_hidden() -> Backend:
    class Showing(TwoDevices):
        def devices(self) -> Sequence[DeviceInfo]:
            try:
                return super().devices()
            except CapabilityError:
                return LyingBackend().devices()

    return Showing()


@caught_by("DISC-002")
def hidden_devices_are_listed() -> BackendProfile:
    """Lists a device that the environment hides."""
    return profile_of("shows_hidden")


def named_by_order() -> Backend:
    class Naming(TwoDevices):
        def devices(self) -> Sequence[DeviceInfo]:
            names = sorted(info.uuid for info in super().devices())
            return [dataclasses.replace(info, uuid=name) for info, name in zip(super().devices(), names, strict=True)]

        def open_device(self, uuid: str | None = None) -> HostDevice:
            return self._first.open_device(None)

    return Naming()


@caught_by("DISC-005")
def identity_by_position() -> BackendProfile:
    """Names devices by their position in the process."""
    return profile_of("named_by_order")


def zeros_elsewhere() -> Backend:
    class Wrong(TwoDevices):
        def open_device(self, uuid: str | None = None) -> HostDevice:
            device = super().open_device(uuid)
            if device.info.uuid.endswith("-second"):

                class Memory(Disguise):
                    def open(self, extent: ExportedExtent) -> OpenedExtent:
                        own = self.inner.allocate(extent.nbytes)
                        return OpenedExtent(own.ptr, extent.nbytes, None)

                device._memory = Memory(device._memory, device)  # type: ignore[assignment]
            return device

    return Wrong()


@caught_by("MEM-036")
def other_device_maps_zeros() -> BackendProfile:
    """Opens an extent on another device as memory of nobody."""
    return profile_of("zeros_elsewhere")


@caught_by("DISC-205")
def profile_expects_too_much() -> BackendProfile:
    """A profile that names a kind which is not there."""
    return BackendProfile(
        backend="devipc.host.plugin:devipc_backend", handle_kinds=(HandleKind.MEMFD, HandleKind.FABRIC)
    )


@caught_by("DISC-010")
def slice_is_its_parent() -> Backend:
    class Slicing(LyingBackend):
        """Gives a slice the identity of the whole device."""

        def devices(self) -> Sequence[DeviceInfo]:
            return [dataclasses.replace(info, parent_uuid=info.uuid) for info in super().devices()]

    return Slicing()


@caught_by("DISC-201")
def opens_any_device() -> Backend:
    class Opening(LyingBackend):
        """Opens its device under any name."""

        def open_device(self, uuid: str | None = None) -> HostDevice:
            return super().open_device(None)

    return Opening()


@caught_by("DISC-202")
def opens_a_second_device() -> Backend:
    class Opening(LyingBackend):
        """Makes another object for a device that is open."""

        def open_device(self, uuid: str | None = None) -> HostDevice:
            super().open_device(uuid)
            return HostDevice(self.devices()[0])

    return Opening()


@caught_by("DISC-203")
def device_without_a_name() -> Backend:
    class Nameless(LyingBackend):
        """Has no name for its device."""

        def devices(self) -> Sequence[DeviceInfo]:
            return [dataclasses.replace(info, name="") for info in super().devices()]

    return Nameless()


@caught_by("DISC-204")
def facts_are_numbers() -> Backend:
    class Numbers(LyingBackend):
        """Tells versions as numbers."""

        def facts(self) -> Mapping[str, str]:
            return {**super().facts(), "version": 13}  # type: ignore[dict-item]

    return Numbers()


# --- what they answer -----------------------------------------------------------------------------------------------


class Answering(LyingBackend):
    """A backend whose device answers otherwise about its capabilities."""

    def open_device(self, uuid: str | None = None) -> HostDevice:
        device = super().open_device(uuid)
        answers = device.capabilities()
        device.capabilities = lambda: self.change(answers)  # type: ignore[method-assign]
        return device

    def change(self, answers: Mapping[str, Capability]) -> Mapping[str, Capability]:
        raise NotImplementedError


@caught_by("DISC-009")
def denies_what_is_there() -> Backend:
    class Denying(Answering):
        """Says no to an interface that it has."""

        def change(self, answers: Mapping[str, Capability]) -> Mapping[str, Capability]:
            return {**answers, "memory": Capability.no("not today", remedy="tomorrow")}

    return Denying()


@caught_by("DISC-206")
def changes_its_mind() -> Backend:
    class Wavering(Answering):
        """Answers another way every second time."""

        asked = 0

        def change(self, answers: Mapping[str, Capability]) -> Mapping[str, Capability]:
            self.asked += 1
            verdict = Verdict.YES if self.asked % 2 else Verdict.BROKEN
            return {**answers, "memory": Capability(verdict, "seen", "" if self.asked % 2 else "seen otherwise")}

    return Wavering()


@caught_by("XFER-210")
def more_free_than_there_is() -> Backend:
    class Transfer(Disguise):
        """Reports twice the memory as free."""

        def memory_info(self) -> MemoryInfo:
            info = self.inner.memory_info()
            return MemoryInfo(2 * info.total_nbytes, info.total_nbytes)

    return LyingBackend(transfer=Transfer)


# --- how they end ---------------------------------------------------------------------------------------------------


@caught_by("LIFE-201")
def closed_for_ever() -> Backend:
    class Closed(LyingBackend):
        """Gives out the closed device when it is opened again."""

        first: HostDevice | None = None

        def open_device(self, uuid: str | None = None) -> HostDevice:
            if self.first is None:
                self.first = super().open_device(uuid)
            return self.first

    return Closed()


@caught_by("LIFE-202")
def works_when_closed() -> Backend:
    class Memory(Disguise):
        """Pretends to allocate on a closed device."""

        def allocate(self, nbytes: int, **options: Any) -> Any:
            if self.device.closed:
                return None
            return self.inner.allocate(nbytes, **options)

    return LyingBackend(memory=Memory)
