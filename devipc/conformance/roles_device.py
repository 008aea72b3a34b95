"""Roles of peers about the plugin, its devices and their end, in processes that nobody uses afterwards.

Owns what a peer does on request; each role says what it saw.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from devipc.conformance.rig import Rig
from devipc.conformance.worker import Worker, extent_from_json, role
from devipc.errors import CapabilityError, DevIPCError

__all__ = ["cost_of_loading", "open_elsewhere", "shm_files", "use_closed_device", "used_files", "visible_devices"]

Fds = tuple[int, ...]
Body = dict[str, Any]

_HARMLESS = ("/dev/null", "/dev/pts", "/dev/tty", "/dev/urandom", "/dev/random", "/dev/zero", "/dev/shm")


def used_files() -> set[str]:
    """Return the names of all files that this process has open or mapped."""
    names = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # the descriptor of the listing itself
            continue
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        names |= {fields[5].strip() for line in maps if len(fields := line.split(maxsplit=5)) == 6}
    return names


@role
def cost_of_loading(worker: Worker, fds: Fds) -> Body:
    """Say what a process holds in which the plugin was loaded and asked nothing: threads and device files."""
    devices = sorted(name for name in used_files() if name.startswith("/dev/") and not name.startswith(_HARMLESS))
    return {"threads": len(os.listdir("/proc/self/task")), "devices": devices}


@role
def visible_devices(worker: Worker, fds: Fds) -> Body:
    """List the devices, or say how that was refused."""
    try:
        infos = worker.backend.devices()
    except CapabilityError as error:
        return {"devices": [], "refused": error.message, "remedy": error.remedy}
    identities = [[info.uuid, info.pci, info.name, info.total_nbytes, info.parent_uuid] for info in infos]
    return {"devices": identities, "refused": "", "remedy": ""}


@role
def open_elsewhere(worker: Worker, fds: Fds, extent: Body, nbytes: int, seed: int) -> Body:
    """Open an extent on every other device and compare what opens; return each device with its refusal."""
    rig = worker.rig
    answers: dict[str, str] = {}
    for info in worker.backend.devices():
        if info.uuid == rig.device.info.uuid:
            continue
        device = worker.backend.open_device(info.uuid)
        if device.info.uuid != info.uuid:
            raise AssertionError(f"{device.info.uuid} was opened instead of {info.uuid}")
        if device.memory is None:
            answers[info.uuid] = "it shares no memory"
            continue
        try:
            opened = device.memory.open(extent_from_json(extent, fds))
        except DevIPCError as error:
            answers[info.uuid] = str(error)
            continue
        other = Rig(device, deadline_s=worker.deadline_s)
        other.expect(opened.ptr, nbytes, seed, f"memory that was opened on {info.uuid}")
        device.memory.close(opened)
        answers[info.uuid] = ""
        other.close()
    return {"answers": answers}


@role
def use_closed_device(worker: Worker, fds: Fds) -> Body:
    """Close the device and go on using its parts; return the type of each refusal, empty where it was accepted."""
    rig = worker.rig
    memory, transfer, stream = rig.device.memory, rig.transfer, rig.stream
    assert memory is not None
    allocation = memory.allocate(4096)
    rig.close()
    worker.forget_rig()
    calls: dict[str, Callable[[], object]] = {
        "allocate": lambda: memory.allocate(4096),
        "export": lambda: memory.export(allocation.ptr, 4096),
        "create_stream": transfer.create_stream,
        "copy": lambda: transfer.copy(stream, allocation.ptr, allocation.ptr, 64),
    }
    answers = {}
    for name, call in calls.items():
        try:
            call()
        except DevIPCError as error:
            answers[name] = type(error).__name__
        else:
            answers[name] = ""
    return {"answers": answers, "threads": threading.active_count()}


@role
def shm_files(worker: Worker, fds: Fds) -> Body:
    """Return the files of shared memory that this process has open or mapped, by path."""
    shared = (name for name in used_files() if name.startswith("/dev/shm/") and not name.endswith("(deleted)"))
    return {"files": sorted(shared)}
