"""Roles of peers that open several extents side by side, where their device can.

Owns what a peer does on request.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from devipc.conformance.staging import Unavailable, compare, content
from devipc.conformance.worker import Worker, extent_from_json, role
from devipc.errors import CapabilityError, DevIPCError
from devipc.interfaces.memory import SideBySide
from devipc.types import ExportedExtent, OpenedExtent

__all__ = ["close_one_by_one", "open_beside", "refuse_beside"]

Fds = tuple[int, ...]
Body = dict[str, Any]


def split(extents: Sequence[Body], fds: Fds) -> list[ExportedExtent]:
    """Give each extent its descriptors, which arrive in one row."""
    found, start = [], 0
    for values in extents:
        count = sum(bool(chunk[4]) for chunk in values["chunks"])
        found.append(extent_from_json(values, fds[start : start + count]))
        start += count
    return found


def open_all(worker: Worker, extents: Sequence[ExportedExtent]) -> tuple[OpenedExtent, ...]:
    """Open them, or test the refusal and say that it is not there."""
    memory = worker.rig.memory
    if not isinstance(memory, SideBySide):
        raise Unavailable("this device does not choose where it maps")
    answer = memory.side_by_side(extents[0].kind)
    if answer or answer.verdict.value == "untested":
        return memory.open_side_by_side(extents)
    try:
        memory.open_side_by_side(extents)
    except CapabilityError as error:
        raise Unavailable(f"{extents[0].kind.value}: {error.message}") from None
    raise AssertionError(f"side_by_side() says {answer.verdict.value} to {extents[0].kind.value}, the open works")


@role
def open_beside(worker: Worker, fds: Fds, extents: list[Body], nbytes: int, row_nbytes: int) -> Body:
    """Open extents of seeds 1, 2, ...; compare each, and a column of them that one strided copy brings."""
    rig = worker.rig
    opened = open_all(worker, split(extents, fds))
    distances = {later.ptr - earlier.ptr for earlier, later in itertools.pairwise(opened)}
    for seed, one in enumerate(opened, 1):
        rig.expect(one.ptr, nbytes, seed, f"extent {seed} of several")
    column = b""
    if len(distances) == 1:
        rows = len(opened)
        rect = (rig.staging.ptr, opened[0].ptr, row_nbytes, next(iter(distances)), row_nbytes, rows)
        rig.transfer.copy_strided(rig.stream, np.array([rect], dtype=np.uint64))
        rig.finish(rig.stream, "a strided copy over several extents")
        column = bytes(rig.staging.view[: rows * row_nbytes])
        compare(column, b"".join(content(seed + 1, row_nbytes) for seed in range(rows)), "one copy over all extents")
    for one in opened:
        rig.memory.close(one)
    return {"distances": sorted(distances), "regions": sorted({one.region for one in opened}), "column": len(column)}


@role
def close_one_by_one(worker: Worker, fds: Fds, extents: list[Body], nbytes: int, times: int) -> None:
    """Open extents of seeds 1, 2, ... and close them one by one, another one first each time."""
    rig = worker.rig
    for turn in range(times):
        left = dict(enumerate(open_all(worker, split(extents, fds)), 1))
        while left:
            rig.memory.close(left.pop(sorted(left)[turn % len(left)]))
            for seed, one in left.items():
                rig.expect(one.ptr, nbytes, seed, f"extent {seed} while another one is closed")


@role
def refuse_beside(worker: Worker, fds: Fds, extents: list[Body], times: int) -> Body:
    """Open extents of which one is bad; return how often that was accepted, and how many files are mapped since."""
    found = split(extents, fds)
    before, accepted = worker.account(), 0
    for _ in range(times):
        try:
            opened = open_all(worker, found)
        except DevIPCError:
            continue
        accepted += 1
        for one in opened:
            worker.rig.memory.close(one)
    return {"accepted": accepted, "maps": worker.account().maps - before.maps}
