"""A backend with one fault, named by the environment; without one it is the host backend under another name.

Owns the faults. It is loaded by entry point in processes that :mod:`tests.probe.tool` starts, never by the tests' own.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from devipc.host.backend import HostBackend, HostDevice
from devipc.spi import Backend, Capability, CapabilityError, DeviceInfo, ResourceExhausted, hookimpl

DEVIPC_CONTRACT = 1
FAULT = os.environ.get("DEVIPC_TEST_FAULT", "")


UNREADABLE: dict[str, Any] = {
    "list_no_text": {"uuid": 5},
    "list_no_name": {"uuid": ""},
    "list_escape": {"name": "\x1b[2J"},
    "list_long": {"uuid": "FAULTY" * 10**5},
}
"""What a device is listed with, by fault."""


def segfault() -> None:
    ctypes.string_at(8)


def hang() -> None:
    ctypes.PyDLL(None).sleep(600)  # holds the GIL, as a driver call does that was bound without care


def run_away() -> None:
    """Leave a process behind that no signal to a group or a session reaches, and say which."""
    ready, written = os.pipe()
    if os.fork():
        os.close(written)
        os.read(ready, 1)
        os.close(ready)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    with open(os.environ["DEVIPC_TEST_RUNAWAYS"], "a") as file:
        file.write(f"{os.getpid()}\n")
    os.close(written)
    time.sleep(600)
    os._exit(0)


if FAULT.startswith("run_away"):
    run_away()
if FAULT == "import_segv":
    segfault()
elif FAULT == "import_hang":
    hang()
elif FAULT == "import_raise":
    raise RuntimeError("no luck")


class Changed:
    """Another object's members, but for those that a subclass defines."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Memory(Changed):
    def kinds(self) -> Any:
        if FAULT == "claims_raise":
            raise OSError("no such node")
        if FAULT == "claims_no_text":
            return {kind: Capability.no(None) for kind in self._inner.kinds()}  # type: ignore[arg-type]
        return self._inner.kinds()

    def allocate(self, *args: Any, **options: Any) -> Any:
        allocation = self._inner.allocate(*args, **options)
        if FAULT == "old_bytes":
            ctypes.memset(allocation.ptr, 7, 1)
        return allocation

    def export(self, ptr: int, nbytes: int, **options: Any) -> Any:
        if FAULT == "export_segv":
            segfault()
        if FAULT == "export_exit":
            os._exit(7)
        if FAULT == "export_raise":
            raise ZeroDivisionError("by hand")
        if FAULT == "export_escape":
            raise ValueError("\ud800\x1b[2J" + "x" * 10**6)
        if FAULT == "wrong_offset":
            ptr += 64
        return self._inner.export(ptr, nbytes, **options)

    def open(self, extent: Any) -> Any:
        if FAULT == "map_hang":
            hang()
        if FAULT == "map_segv":
            segfault()
        if FAULT == "map_refused":
            raise CapabilityError("not across this border", remedy="give both processes one namespace")
        opened = self._inner.open(extent)
        if FAULT == "map_copy":
            own = self._inner.allocate(opened.nbytes)
            ctypes.memmove(own.ptr, opened.ptr, opened.nbytes)
            opened = replace(opened, ptr=own.ptr)
        if FAULT == "map_spoils":
            ctypes.memset(opened.ptr - 1, 1 + ctypes.string_at(opened.ptr - 1, 1)[0] % 255, 1)
        return opened

    def close(self, opened: Any) -> None:
        if FAULT == "close_spoils":
            ctypes.memset(opened.ptr, 1 + ctypes.string_at(opened.ptr, 1)[0] % 255, 1)
        if FAULT != "map_copy":
            self._inner.close(opened)


class Events(Changed):
    def query(self, event: Any) -> bool:
        return True


class Sync(Changed):
    @property
    def events(self) -> Any:
        return Events(self._inner.events) if FAULT == "events_done" else self._inner.events

    @property
    def word_waits(self) -> Any:
        return None if FAULT == "no_waits" else self._inner.word_waits


class Transfer(Changed):
    def copy(self, stream: Any, dst: int, src: int, nbytes: int) -> None:
        self._inner.copy(stream, dst, src, nbytes - 1 if FAULT == "short_copy" and nbytes == 4093 else nbytes)

    def query_marker(self, marker: Any) -> bool:
        if FAULT == "markers_late":  # not before short work is done
            time.sleep(0.01)
        return FAULT.startswith("markers_") or bool(self._inner.query_marker(marker))

    def register_host(self, address: int, nbytes: int) -> Any:
        if FAULT == "no_register":
            raise CapabilityError("host memory cannot be registered", remedy="ulimit -l unlimited")
        if FAULT == "pin_limit" and nbytes > 1 << 20:
            raise ResourceExhausted("1 MiB may be pinned", remedy="ulimit -l unlimited")
        return self._inner.register_host(address, nbytes)


class Device(Changed):
    def __init__(self, inner: HostDevice, info: DeviceInfo) -> None:
        super().__init__(inner)
        self.info = info
        self.memory = Memory(inner.memory) if FAULT != "no_memory" else None
        self.sync = Sync(inner.sync) if FAULT != "no_sync" else None
        self.transfer = Transfer(inner.transfer) if FAULT != "no_transfer" else None

    def capabilities(self) -> Mapping[str, Capability]:
        found = dict(self._inner.capabilities())
        if FAULT.startswith("no_"):
            found[FAULT.removeprefix("no_")] = Capability.no("left out for a test", remedy="leave it in")
        return found


class Faulty:
    """Two devices, each the host device; says in a file which ones were opened."""

    name = "faulty"

    def __init__(self) -> None:
        self._host = HostBackend()

    def facts(self) -> Mapping[str, str]:
        return {"driver": "faulty 1.0"}

    def devices(self) -> Sequence[DeviceInfo]:
        if FAULT in ("list_hang", "run_away_hang"):
            time.sleep(600)
        if FAULT == "list_none":
            raise CapabilityError("no driver", remedy="get one")
        (info,) = self._host.devices()
        if FAULT in UNREADABLE:
            return [replace(info, **UNREADABLE[FAULT])]
        return [replace(info, uuid=f"FAULTY-{n}", ordinal=n, name=f"Faulty {n}") for n in range(2)]

    def open_device(self, uuid: str | None = None) -> Device:
        if FAULT == "device_segv":
            segfault()
        if FAULT == "device_hang":
            hang()
        if FAULT == "device_busy":
            raise CapabilityError("the device is busy", remedy="end the process that uses it alone")
        if "DEVIPC_TEST_OPENED" in os.environ:
            with open(os.environ["DEVIPC_TEST_OPENED"], "a") as file:
                file.write(f"{uuid}\n")
        info = next(info for info in self.devices() if info.uuid == uuid)
        if FAULT == "run_away_segv":
            segfault()
        if FAULT == "two_sizes":
            info = replace(info, total_nbytes=os.getpid())
        return Device(self._host.open_device(), info)


@hookimpl
def devipc_backend() -> Backend:
    return Faulty()
