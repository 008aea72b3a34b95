"""Which handle kinds and strategies work between two processes that share fewer namespaces than usual.

Exporter and importer each run behind ``unshare``, as in containers of their own; the session's socket lies in a folder
that both see. Every kind is opened, read and written; every strategy hands over once in both directions. The table
says "works", or which typed error came instead. Needs root.
``python -m backends.cuda.tests.hardware.namespaces --out FILE``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from backends.testing.ends import exporter, importer
from backends.testing.helpers import staging
from devipc.spi import DevIPCError, HandleKind

from ..peers import Channel, Peer
from . import evidence
from .evidence import MIB, SIMULATED

KINDS = ("legacy", "vmm_fd", "pool")
STRATEGIES = ("stream_memop", "host_flag", "polling", "event")
WORKS = "works"
TIMEOUT_S = 5.0

OWN_SHM = ("sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$0" "$@"')
SECOND = ("sh", "-c", '"$0" "$@"')
PID = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
MOUNT = ("unshare", "--mount", "--propagation", "private", *OWN_SHM)
PLACES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "shared": ((), ()),
    "pid, exporter alone": (PID, ()),
    "pid, equal numbers": (PID, PID),
    "pid, different numbers": (PID, (*PID, *SECOND)),
    "ipc": (("unshare", "--ipc"), ("unshare", "--ipc")),
    "mount with an own /dev/shm": (MOUNT, MOUNT),
    "net": (("unshare", "--net"), ("unshare", "--net")),
    "all, equal pids": ((*PID, "--ipc", "--net", *OWN_SHM), (*PID, "--ipc", "--net", *OWN_SHM)),
    "all, different pids": ((*PID, "--ipc", "--net", *OWN_SHM), (*PID, "--ipc", "--net", *OWN_SHM, *SECOND)),
}
"""For each row, the commands before exporter and importer."""


class Notes:
    """What became of each thing: the first failure stays."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def note(self, name: str, action: Callable[[], Any]) -> Any:
        """Do it unless an earlier step about the same thing failed."""
        if self.found.get(name, WORKS) != WORKS:
            return None
        self.found[name] = WORKS
        try:
            return action()
        except DevIPCError as error:
            status = f" ({error.status})" if error.status else ""
            self.found[name] = f"{type(error).__name__}: {error.message}{status}"
        except AssertionError as error:
            self.found[name] = f"WRONG: {error}"
        return None


def lend(device: Any, channel: Channel, sim: Any) -> None:
    """The exporter's side, step by step."""
    path = channel.receive()
    notes = Notes()
    with exporter(device, path=path, timeout_s=TIMEOUT_S) as session, staging(device) as host:
        blocks = {kind: session.allocate(2 * MIB, kind=HandleKind(kind)) for kind in KINDS}
        for kind, block in blocks.items():
            host.write(block.ptr + 77, kind.encode())
            notes.note(kind, partial(session.share, kind, block, kind=HandleKind(kind)))
        fences = {
            name: notes.note(name, partial(session.create_fence, f"there.{name}", strategy=name)) for name in STRATEGIES
        }
        channel.send([os.getpid(), notes.found])
        channel.receive()  # the importer has opened everything
        for kind, block in blocks.items():
            notes.note(kind, partial(expect, host, block.ptr + 177, kind.upper().encode()))
        peer = session.wait_peer()
        back = {name: notes.note(name, partial(peer.open_fence, f"back.{name}")) for name in STRATEGIES}
        for name, fence in fences.items():
            if fence is not None:
                notes.note(name, partial(fence.signal, host.stream, 1))
        channel.send(notes.found)
        channel.receive()  # the importer has seen all and has signalled
        for name, fence in back.items():
            if fence is not None:
                notes.note(name, partial(fence.synchronize, 1, TIMEOUT_S))
                fence.close()
        channel.send(notes.found)
        channel.receive()


def expect(host: Any, ptr: int, data: bytes) -> None:
    found = host.read(ptr, len(data))
    assert found == data, f"other bytes: {found!r}"


def borrow(device: Any, channel: Channel, sim: Any) -> None:
    """The importer's side, step by step."""
    path = channel.receive()
    notes = Notes()
    try:
        session = importer(device, path, timeout_s=TIMEOUT_S)
    except DevIPCError as error:
        channel.send([os.getpid(), {"connect": f"{type(error).__name__}: {error.message}"}])
        return
    with session, staging(device) as host:
        for kind in KINDS:
            notes.note(kind, partial(use_memory, session, host, kind))
        there = {name: notes.note(name, partial(session.open_fence, f"there.{name}")) for name in STRATEGIES}
        back = {
            name: notes.note(name, partial(session.create_fence, f"back.{name}", strategy=name)) for name in STRATEGIES
        }
        channel.send([os.getpid(), notes.found])
        channel.receive()  # the exporter has signalled
        for name, fence in there.items():
            if fence is not None:
                notes.note(name, partial(follow, fence, device, host))
                fence.close()
        for name, fence in back.items():
            if fence is not None:
                notes.note(name, partial(fence.signal, host.stream, 1))
        channel.send(notes.found)
        channel.receive()


def use_memory(session: Any, host: Any, kind: str) -> None:
    with session.open(kind) as memory:
        expect(host, memory.ptr + 77, kind.encode())
        host.write(memory.ptr + 177, kind.upper().encode())


def follow(fence: Any, device: Any, host: Any) -> None:
    fence.wait(host.stream, 1, timeout_s=TIMEOUT_S, block_timeout_s=TIMEOUT_S)
    fence.synchronize(1, TIMEOUT_S)
    device.transfer.synchronize_stream(host.stream)


def place(name: str) -> dict[str, Any]:
    """Run both sides in one arrangement; return the table's row."""
    before_exporter, before_importer = PLACES[name]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "s")
        lender, borrower = Peer(lend, prefix=before_exporter), Peer(borrow, prefix=before_importer)
        try:
            lender.channel.send(path)
            lender_pid, found = lender.channel.receive()
            borrower.channel.send(path)
            borrower_pid, more = borrower.channel.receive()
            row = dict(found)
            join(row, more)
            if "connect" not in row:
                for step in (lender, borrower, lender):
                    step.channel.send()
                    join(row, step.channel.receive())
                borrower.channel.send()
            borrower.finish()
            if "connect" in row:
                lender.kill()
            else:
                lender.channel.send()
                lender.finish()
        finally:
            for peer in (borrower, lender):
                if peer.process.poll() is None:
                    peer.kill()
                peer.channel.close()
    broken = {thing: what for thing, what in row.items() if what != WORKS}
    assert not any(what.startswith("WRONG") for what in broken.values()), broken
    assert broken == {} or name != "shared", broken
    return {"pids": [lender_pid, borrower_pid], **row}


def join(row: dict[str, str], more: dict[str, str]) -> None:
    for thing, what in more.items():
        if row.get(thing, WORKS) == WORKS:
            row[thing] = what


def sections(_device: Any) -> Sequence[evidence.Section]:
    # The simulated driver knows no namespaces, so that only the usual arrangement says anything there.
    names = ["shared"] if SIMULATED else list(PLACES)
    return [(name, partial(place, name)) for name in names]


if __name__ == "__main__":
    sys.exit(evidence.main(str(__doc__), sections))
