"""A backend named ``liar``: the host device with one lie, for a chooser that must not believe it.

Owns the lies. It is a plugin like any other, found through an entry point that :func:`install` writes, so that the
children of a trial load it too. The lie is named by an environment variable.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from devipc.host.backend import HostBackend
from devipc.spi import (
    Capability,
    CapabilityError,
    Device,
    DeviceInfo,
    HostRegistration,
    InterprocessEvent,
    Marker,
    Mechanism,
    MemoryKind,
    Stream,
    hookimpl,
)

DEVIPC_CONTRACT = 1
VARIABLE = "DEVIPC_TEST_LIE"


class Wrapped:
    """Passes everything on that is not overridden."""

    def __init__(self, real: Any, lie: str) -> None:
        self._real = real
        self._lie = lie

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class LyingWrites(Wrapped):
    def write(self, stream: Stream, device_ptr: int, value: int) -> None:
        if self._lie == "writes_nothing":
            return
        if self._lie == "writes_early":
            word(self._real, device_ptr, value)
            return
        self._real.write(stream, device_ptr, value)


class LyingWaits(Wrapped):
    def wait(self, stream: Stream, device_ptr: int, value: int) -> None:
        if self._lie == "waits_nothing":
            return
        if self._lie == "waits_hang":
            time.sleep(3600)
        if self._lie == "waits_crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        self._real.wait(stream, device_ptr, 2**63 - 1 if self._lie == "waits_for_ever" else value)


class LyingEvents(Wrapped):
    def open(self, payload: bytes) -> InterprocessEvent:
        if self._lie == "events_blocked":
            raise CapabilityError("events need a shared folder", remedy="share it")
        event: InterprocessEvent = self._real.open(payload)
        return event

    def query(self, event: InterprocessEvent) -> bool:
        return self._lie == "events_true" or bool(self._real.query(event))


class LyingTransfer(Wrapped):
    def register_host(self, address: int, nbytes: int) -> HostRegistration:
        if self._lie == "no_registration":
            raise CapabilityError("this device reaches no host memory")
        registration: HostRegistration = self._real.register_host(address, nbytes)
        return registration

    def query_marker(self, marker: Marker) -> bool:
        return self._lie == "markers_true" or bool(self._real.query_marker(marker))


class LyingSync(Wrapped):
    @property
    def word_writes(self) -> Any:
        return LyingWrites(self._real.word_writes, self._lie) if self._lie != "no_writes" else None

    @property
    def word_waits(self) -> Any:
        return LyingWaits(self._real.word_waits, self._lie) if self._lie != "no_waits" else None

    @property
    def events(self) -> Any:
        return LyingEvents(self._real.events, self._lie) if self._lie != "no_events" else None

    def mechanisms(self) -> Mapping[Mechanism, Capability]:
        known = dict(self._real.mechanisms())
        if self._lie == "no_waits":
            known[Mechanism.STREAM_MEMOP] = Capability.no("waits are switched off", remedy="switch waits on")
        return known


class LyingDevice(Wrapped):
    @property
    def sync(self) -> Any:
        return LyingSync(self._real.sync, self._lie) if self._lie != "no_sync" else None

    @property
    def transfer(self) -> Any:
        return LyingTransfer(self._real.transfer, self._lie) if self._lie != "no_transfer" else None

    def capabilities(self) -> Mapping[str, Capability]:
        known = dict(self._real.capabilities())
        for name in ("sync", "transfer"):
            if self._lie == f"no_{name}":
                known[name] = Capability.no(f"{name} is switched off", remedy=f"switch {name} on")
        return known


class LyingBackend:
    """The host backend under another name, with a lie."""

    name = "liar"

    def __init__(self, lie: str) -> None:
        self._lie = lie
        self._real = HostBackend()

    def facts(self) -> Mapping[str, str]:
        return {"lie": self._lie}

    def devices(self) -> Sequence[DeviceInfo]:
        return self._real.devices()

    def open_device(self, uuid: str | None = None) -> Device:
        if self._lie == "open_hangs":
            time.sleep(3600)
        if self._lie == "open_crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self._lie.startswith("opens_in_"):
            time.sleep(float(self._lie.removeprefix("opens_in_")))
        device: Any = LyingDevice(self._real.open_device(uuid), self._lie)
        return device  # type: ignore[no-any-return]


def word(writes: Any, device_ptr: int, value: int) -> None:
    """Store at once, on the host: what a device does that does not wait for its stream."""
    found = writes._driver.ranges.hold(device_ptr, 8, what="word", kind=MemoryKind.HOST)
    found.owner[(device_ptr - found.start) // 8] = value
    writes._driver.ranges.drop((found,))


@hookimpl
def devipc_backend() -> LyingBackend:
    return LyingBackend(os.environ.get(VARIABLE, ""))


def install(folder: Path) -> None:
    """Write what makes this module a plugin for processes that have ``folder`` on their path."""
    info = folder / "devipc_liar-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: devipc-liar\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[devipc.backends]\nliar = {__name__}\n")
