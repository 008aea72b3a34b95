"""Roles of peers that use memory in loops and from several threads, while others do the same or die.

Owns what a peer does on request; verdicts about content are made here, as in :mod:`devipc.conformance.roles_memory`.
"""

from __future__ import annotations

import fcntl
import os
import random
from typing import Any

from devipc.conformance.worker import Worker, extent_from_json, role
from devipc.errors import DevIPCError
from devipc.spi import close_fds
from devipc.types import ExportedExtent, HandleKind, MemoryKind

__all__ = [
    "describe_mapping",
    "export_and_open",
    "open_at_number",
    "open_shuffled",
    "open_until_refused",
    "refuse_many",
]

Fds = tuple[int, ...]
Body = dict[str, Any]


@role
def export_and_open(worker: Worker, fds: Fds, extent: Body, nbytes: int, seed: int, times: int, kind: str) -> None:
    """Export own memory and open the extent, by turns."""
    rig, memory = worker.rig, worker.rig.memory
    for turn in range(times):
        allocation = memory.allocate(nbytes, kind=HandleKind(kind))
        own = memory.export(allocation.ptr, nbytes)
        opened = memory.open(extent_from_json(extent, fds))
        rig.expect(opened.ptr, nbytes, seed, f"a mapping in turn {turn}")
        memory.close(opened)
        memory.release(own)
        memory.free(allocation)


@role
def open_until_refused(worker: Worker, fds: Fds, extent: Body, nbytes: int, seed: int, times: int) -> Body:
    """Open, compare and close until that is refused by type or done ``times`` times; say which."""
    rig, memory = worker.rig, worker.rig.memory
    for turn in range(times):
        try:
            opened = memory.open(extent_from_json(extent, fds))
        except DevIPCError as error:
            return {"opened": turn, "refused": str(error)}
        rig.expect(opened.ptr, nbytes, seed, f"a mapping in turn {turn}")
        memory.close(opened)
    return {"opened": times, "refused": ""}


@role
def open_at_number(worker: Worker, fds: Fds, extent: Body, numbers: list[int], nbytes: int, seed: int) -> None:
    """Open with the descriptors at the given numbers of this process, as far as those are free, and compare."""
    rig, memory = worker.rig, worker.rig.memory
    moved = []
    try:
        for fd, number in zip(fds, numbers, strict=True):
            moved.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, number))
        opened = memory.open(extent_from_json(extent, moved))
        rig.expect(opened.ptr, nbytes, seed, f"memory whose descriptors are {moved} here")
        memory.close(opened)
    finally:
        close_fds(moved)


@role
def open_shuffled(worker: Worker, fds: Fds, extent: Body, nbytes: int, seed: int, times: int) -> None:
    """Open the extent several times and close in another order; what is left stays usable until the last."""
    rig, memory = worker.rig, worker.rig.memory
    opened = [memory.open(extent_from_json(extent, fds)) for _ in range(times)]
    random.Random(seed).shuffle(opened)
    while opened:
        memory.close(opened.pop())
        for other in opened:
            rig.expect(other.ptr, nbytes, seed, f"one of {len(opened)} mappings that are left")


@role
def describe_mapping(worker: Worker, fds: Fds, key: int) -> Body:
    """Describe both ends of a mapping."""
    memory, opened = worker.rig.memory, worker.get(key)
    ends = [memory.describe(opened.ptr), memory.describe(opened.ptr + opened.nbytes - 1)]
    kinds = [info.kind.value for info in ends]
    if any(info.kind is not MemoryKind.IMPORTED for info in ends):
        return {"kinds": kinds, "inside": False, "exportable": []}
    inside = all(
        info.base <= opened.ptr and opened.ptr + opened.nbytes <= info.base + info.nbytes and info == ends[0]
        for info in ends
    )
    return {"kinds": kinds, "inside": inside, "exportable": [kind.value for info in ends for kind in info.exportable]}


@role
def refuse_many(worker: Worker, fds: Fds, extent: Body, times: int) -> Body:
    """Open what must be refused, many times; return the accepted ones and how many files are mapped in addition."""
    memory = worker.rig.memory
    wanted: ExportedExtent = extent_from_json(extent, fds)
    before = worker.account()
    accepted, types = 0, set()
    for _ in range(times):
        try:
            opened = memory.open(wanted)
        except DevIPCError as error:
            types.add(type(error).__name__)
        else:
            accepted += 1
            memory.close(opened)
    after = worker.account()
    return {
        "accepted": accepted,
        "types": sorted(types),
        "maps": after.maps - before.maps,
        "fds": len(after.fds) - len(before.fds),
        "pid": os.getpid(),
    }
