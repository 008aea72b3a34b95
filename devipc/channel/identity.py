"""Who this process is, in words that a peer can compare: its life, its kernel, its namespaces.

Owns the 128-bit instance id, the facts that travel at the start of a connection, and what a forked child must let go
of. It opens no socket and knows no device. Nothing here raises when a ``/proc`` entry is missing: the fact is absent.
"""

from __future__ import annotations

import os
import platform
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from devipc._version import __version__

__all__ = ["Difference", "Inherited", "close_in_child", "compare_facts", "local_facts", "process_instance"]


class Inherited(Protocol):
    """Something whose descriptors a forked child inherits and must not keep."""

    def close_in_child(self) -> None:
        """Close this process's copies; run once in the child, alone, so no lock may be taken and nothing raised."""


_instance = os.urandom(16)
_pid = os.getpid()
_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


def close_in_child(thing: Inherited) -> None:
    """Have ``thing.close_in_child()`` run in every forked child, for as long as ``thing`` lives.

    A child that kept a copy of a socket or of a file lock would hide this process's death from its peers.
    """
    _inherited.add(thing)


def _reborn() -> None:
    global _instance, _pid
    _instance = os.urandom(16)
    _pid = os.getpid()
    for thing in list(_inherited):
        thing.close_in_child()
    _inherited.clear()


os.register_at_fork(after_in_child=_reborn)


def process_instance() -> bytes:
    """Return 16 random bytes that name this life of this process.

    A forked child gets its own. Process ids are never used as an identity: two containers can both be process 1, and
    numbers come back. Any thread, never blocks.
    """
    if os.getpid() != _pid:  # a fork that Python did not make
        _reborn()
    return _instance


_NAMESPACES = ("pid", "ipc", "net", "mnt", "user")


def local_facts() -> dict[str, str]:
    """Return what this process can say about itself and where it runs, as text.

    Keys: ``devipc``, ``python``, ``arch``, ``byteorder``, ``page_nbytes``, ``kernel``, ``boot_id``, ``pid``, ``uid``,
    ``start_time`` (clock ticks after boot), ``pid_ns``, ``ipc_ns``, ``net_ns``, ``mnt_ns``, ``user_ns``, ``dev_shm``
    (device and inode of the mount). A fact that the system does not tell is missing. Any thread; reads ``/proc``.
    """
    facts = {
        "devipc": __version__,
        "python": platform.python_version(),
        "arch": platform.machine(),
        "byteorder": sys.byteorder,
        "page_nbytes": str(os.sysconf("SC_PAGE_SIZE")),
        "kernel": platform.release(),
        "boot_id": _text("/proc/sys/kernel/random/boot_id"),
        "pid": str(os.getpid()),
        "uid": str(os.getuid()),
        "start_time": _start_time(),
        "dev_shm": _inode("/dev/shm"),
    }
    facts.update((f"{name}_ns", _inode(f"/proc/self/ns/{name}")) for name in _NAMESPACES)
    return {key: value for key, value in facts.items() if value}


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(4096).strip()
    except OSError:
        return ""


def _start_time() -> str:
    # The command name is in parentheses and may hold blanks; field 22 is counted from behind it.
    fields = _text("/proc/self/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""


def _inode(path: str) -> str:
    try:
        info = os.stat(path)
    except OSError:
        return ""
    return f"{info.st_dev:x}:{info.st_ino}"


@dataclass(frozen=True, slots=True)
class Difference:
    """One fact in which two processes differ, and what that breaks.

    Parameters
    ----------
    name : str
        Key of the fact.
    ours, theirs : str
        Both values; empty when a side did not tell.
    breaks : str
        What cannot work, or must not be relied on, because of it.
    """

    name: str
    ours: str
    theirs: str
    breaks: str


_BREAKS = {
    "boot_id": "the processes run on different kernels: no memory, event or descriptor can be shared",
    "arch": "different instruction sets: words in shared memory need not mean the same",
    "byteorder": "words in shared memory mean different numbers",
    "page_nbytes": "offsets and sizes of shared mappings are rounded differently",
    "pid_ns": "process ids mean different processes: handles that name a process id, opening a peer's descriptor by"
    " its id, and checking a received pidfd against the socket's credentials do not work",
    "ipc_ns": "shared-memory events and handles that a driver keeps by name cannot be opened",
    "net_ns": "abstract sockets, used by some drivers to hand over descriptors, are not reachable",
    "mnt_ns": "paths need not name the same file: socket paths and files under the temporary folder differ",
    "dev_shm": "named shared memory and drivers' events kept under /dev/shm are not the same files",
    "user_ns": "user ids mean different users: permission checks and pidfd access can be refused",
    "uid": "the peer is another user: it is refused unless it is on the list of allowed users",
    "devipc": "the two sides run different versions: newer requests may be answered as unknown",
}


def compare_facts(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[Difference]:
    """Return the facts in which two processes differ, in a fixed order, each with what it breaks.

    A fact that only one side knows counts as a difference: what cannot be compared must not be relied on. Equal
    process ids in different namespaces are listed as ``pid``, since they mislead readers of logs. Never raises.
    """
    found = [
        Difference(name, mine, other, breaks if mine and other else f"one side does not tell; if they differ: {breaks}")
        for name, breaks in _BREAKS.items()
        if (mine := ours.get(name, "")) != (other := theirs.get(name, ""))
    ]
    pid = ours.get("pid", "")
    if pid and pid == theirs.get("pid") and any(difference.name == "pid_ns" for difference in found):
        found.append(Difference("pid", pid, pid, "both sides show the same process id: never use it as an identity"))
    return found
