"""Roles of peers that share and use memory, and the accounts of a peer.

Owns what a peer does on request; each role does one thing and says what it saw. Verdicts about content are made here,
by assertions, because content stays in the process that can read it.
"""

from __future__ import annotations

import os
import resource
import threading
from typing import Any

from devipc.calltrace import observe
from devipc.conformance.resources import Account, Slack, grown_after_settling
from devipc.conformance.staging import content
from devipc.conformance.worker import Reply, Worker, extent_from_json, extent_to_json, role
from devipc.errors import DevIPCError, ForkError
from devipc.spi import close_fds
from devipc.types import HandleKind, MemoryKind

__all__ = [
    "account",
    "close_mapping",
    "close_twice",
    "echo",
    "expect",
    "expect_part",
    "export_imported",
    "fill",
    "fork_and_use",
    "grown",
    "identities",
    "leave",
    "open_extent",
    "open_many",
    "open_untouched",
    "open_without_fds",
    "reopen_device",
    "self_open",
    "share",
    "try_open",
    "warm_up",
]

Fds = tuple[int, ...]
Body = dict[str, Any]


# --- the peer itself ------------------------------------------------------------------------------------------------


@role
def warm_up(worker: Worker, fds: Fds) -> None:
    """Open the device and use every primitive once, and load the array library, which starts threads of its own."""
    import numpy  # noqa: F401

    worker.rig.warm_up()


@role
def identities(worker: Worker, fds: Fds, times: int = 1) -> Body:
    """List the devices without opening one."""
    for _ in range(times):
        infos = worker.backend.devices()
        worker.backend.facts()
    return {"devices": [[info.uuid, info.pci, info.total_nbytes, info.parent_uuid] for info in infos]}


@role
def account(worker: Worker, fds: Fds) -> Body:
    """Drop everything that is kept, and look at this process."""
    worker.drop_all()
    return worker.account().to_json()


@role
def grown(worker: Worker, fds: Fds, earlier: Body, limits: list[int | None]) -> Body:
    """Drop everything that is kept, and say what grew since ``earlier`` by more than maps, threads, device bytes."""
    worker.drop_all()
    maps, threads, device_nbytes = limits
    slack = Slack(maps or 0, threads or 0, device_nbytes)
    return {"grown": grown_after_settling(Account.from_json(earlier), worker.account, slack)}


@role
def leave(worker: Worker, fds: Fds) -> None:
    """End the process by returning from main, with everything still open."""
    worker.leaving = True


@role
def echo(worker: Worker, fds: Fds) -> Reply:
    """Send the descriptors back."""
    copies = tuple(os.dup(fd) for fd in fds)
    worker.keep(copies, lambda: close_fds(copies))
    return Reply({}, copies)


# --- exporting ------------------------------------------------------------------------------------------------------


@role
def share(worker: Worker, fds: Fds, kind: str, nbytes: int, seed: int) -> Reply:
    """Allocate, fill and export; keeps the allocation and the extent."""
    memory = worker.rig.memory
    allocation = memory.allocate(nbytes, kind=HandleKind(kind))
    key = worker.keep(allocation, lambda: memory.free(allocation))
    worker.rig.fill(allocation.ptr, nbytes, seed)
    extent = memory.export(allocation.ptr, nbytes)
    exported = worker.keep(extent, lambda: memory.release(extent))
    return Reply({"allocation": key, "exported": exported, "extent": extent_to_json(extent)}, extent.fds)


@role
def self_open(worker: Worker, fds: Fds, kind: str, nbytes: int) -> Body:
    """Open an own export; say whether that was refused. An alias must show the same bytes."""
    rig, memory = worker.rig, worker.rig.memory
    allocation = memory.allocate(nbytes, kind=HandleKind(kind))
    try:
        rig.fill(allocation.ptr, nbytes, 1)
        extent = memory.export(allocation.ptr, nbytes)
        try:
            try:
                opened = memory.open(extent)
            except DevIPCError as error:
                return {"refused": str(error)}
            rig.expect(opened.ptr, nbytes, 1, "an alias of memory of this process")
            rig.fill(allocation.ptr, nbytes, 2)
            rig.expect(opened.ptr, nbytes, 2, "an alias, after the memory was written")
            memory.close(opened)
        finally:
            memory.release(extent)
    finally:
        memory.free(allocation)
    return {"refused": ""}


# --- importing ------------------------------------------------------------------------------------------------------


@role
def open_extent(worker: Worker, fds: Fds, extent: Body) -> Body:
    """Open and keep a mapping."""
    memory = worker.rig.memory
    wanted = extent_from_json(extent, fds)
    opened = memory.open(wanted)
    if opened.nbytes != wanted.nbytes:
        raise AssertionError(f"the mapping has {opened.nbytes} bytes, {wanted.nbytes} were shared")
    return {"key": worker.keep(opened, lambda: memory.close(opened)), "ptr": opened.ptr}


@role
def try_open(worker: Worker, fds: Fds, extent: Body) -> Body:
    """Open and keep a mapping, or say how that was refused."""
    try:
        return {"refused": "", **open_extent(worker, fds, extent)}
    except DevIPCError as error:
        return {"refused": str(error)}


@role
def open_untouched(worker: Worker, fds: Fds, extent: Body) -> Body:
    """Try to open what must be refused before any driver call; a call that is made first is an assertion."""
    calls: list[str] = []
    memory = worker.rig.memory
    with observe(calls.append):
        try:
            memory.open(extent_from_json(extent, fds))
        except DevIPCError:
            if calls:
                raise AssertionError(f"the driver was called before the refusal: {calls}") from None
            raise
    return {}


@role
def close_mapping(worker: Worker, fds: Fds, key: int) -> Body:
    """Close a mapping; return what its address is called afterwards."""
    opened = worker.get(key)
    worker.drop(key)
    return {"kind": worker.rig.memory.describe(opened.ptr).kind.value}


@role
def close_twice(worker: Worker, fds: Fds, key: int, other: int, nbytes: int, seed: int) -> Body:
    """Close a mapping twice; the second time is refused or does nothing, and never harms another mapping."""
    opened = worker.get(key)
    worker.drop(key)
    try:
        worker.rig.memory.close(opened)
    except DevIPCError as error:
        refused = str(error)
    else:
        refused = ""
    expect(worker, (), other, nbytes, seed)
    return {"refused": refused}


@role
def expect(worker: Worker, fds: Fds, key: int, nbytes: int, seed: int, offset: int = 0) -> None:
    """Compare what a mapping shows with the content of a seed."""
    worker.rig.expect(worker.get(key).ptr + offset, nbytes, seed, "the mapping")


@role
def expect_part(worker: Worker, fds: Fds, key: int, offset: int, nbytes: int, seed: int, skip: int) -> None:
    """Compare ``nbytes`` at ``offset`` of a mapping with the content of a seed from byte ``skip`` on."""
    found = worker.rig.read(worker.get(key).ptr + offset, nbytes)
    if found != content(seed, skip + nbytes)[skip:]:
        raise AssertionError(f"{nbytes} bytes at {offset} of the mapping are not byte {skip} on of the exporter's")


@role
def fill(worker: Worker, fds: Fds, key: int, nbytes: int, seed: int, offset: int = 0) -> None:
    """Write through a mapping."""
    worker.rig.fill(worker.get(key).ptr + offset, nbytes, seed)


@role
def export_imported(worker: Worker, fds: Fds, key: int) -> None:
    """Try to export an imported mapping."""
    opened = worker.get(key)
    info = worker.rig.memory.describe(opened.ptr)
    if info.kind is not MemoryKind.IMPORTED or info.exportable or not info.reason:
        raise AssertionError(f"an imported mapping is described as {info}")
    worker.rig.memory.export(opened.ptr, opened.nbytes)


@role
def open_many(worker: Worker, fds: Fds, extent: Body, nbytes: int, seed: int, threads: int, times: int) -> None:
    """Open, read and close the same extent from several threads at once."""
    rig, memory = worker.rig, worker.rig.memory
    failures: list[BaseException] = []
    reading = threading.Lock()

    def run() -> None:
        try:
            for _ in range(times):
                opened = memory.open(extent_from_json(extent, fds))
                with reading:
                    rig.expect(opened.ptr, nbytes, seed, "a mapping among several")
                memory.close(opened)
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=run) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if failures:
        raise failures[0]


@role
def open_without_fds(worker: Worker, fds: Fds, extent: Body) -> Body:
    """Open while no descriptor is left; return the refusal, if any, and prove that it works again afterwards."""
    memory = worker.rig.memory
    wanted = extent_from_json(extent, fds)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, highest + 1), hard))
    full: list[int] = []
    refused = ""
    try:
        try:
            while True:
                full.append(os.dup(0))
        except OSError:
            pass
        try:
            memory.close(memory.open(wanted))
        except DevIPCError as error:
            refused = str(error)
    finally:
        close_fds(full)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    memory.close(memory.open(wanted))
    return {"refused": refused}


@role
def fork_and_use(worker: Worker, fds: Fds) -> Body:
    """Fork, and let the child use the device; return how the child ended: 0 refused, 1 allowed, 2 another error."""
    memory = worker.rig.memory
    child = os.fork()
    if child == 0:
        status = 2
        try:
            memory.allocate(4096)
            status = 1
        except ForkError:
            status = 0
        except BaseException:
            status = 2
        os._exit(status)
    _, status = os.waitpid(child, 0)
    return {"status": os.waitstatus_to_exitcode(status)}


@role
def reopen_device(worker: Worker, fds: Fds) -> Body:
    """Close the device twice and open it again; it must work as before."""
    device = worker.rig.device
    uuid = device.info.uuid
    worker.rig.close()
    device.close()
    worker.forget_rig()
    worker.rig.fill(worker.rig.staging.ptr + (1 << 20), 4096, 5)
    worker.rig.expect(worker.rig.staging.ptr + (1 << 20), 4096, 5, "memory after the device was opened again")
    return {"uuid": worker.rig.device.info.uuid, "before": uuid}
