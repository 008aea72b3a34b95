"""The import cache: one driver mapping per export, counted here, valid for one life and generation of its exporter.

Owns which extents are mapped into this process and when they are unmapped again. It knows handles and one device's
memory interface; it knows no connection. Opens run under a deadline in a thread that can be given up, because every
vendor's open can block.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from devipc.deadline import deadline_after, remaining
from devipc.errors import (
    ClosedError,
    CompletionTimeout,
    DevIPCError,
    HandleError,
    StaleError,
    UsageError,
)
from devipc.interfaces.memory import DeviceMemoryIPC
from devipc.opening import close_extents, open_extents
from devipc.types import OpenedExtent
from devipc.undoing import undo
from devipc.wire import MemoryHandle

__all__ = ["LocalExports", "Mapping", "MappingCache", "local_exports"]

Key = tuple[bytes, int, bytes]

_REMEMBERED_REVOCATIONS = 4096
"""Only opens in flight can still meet a revoked id: the exporter grants none after it revoked."""


class LocalExports:
    """Exports of this very process, so that opening one here never reaches a driver. Forked children start empty."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._ptrs: dict[bytes, tuple[int, int]] = {}

    def add(self, export_id: bytes, ptr: int, nbytes: int) -> None:
        """Remember where an export lives in this process."""
        if os.getpid() != self._pid:  # a forked child: the parent's exports are not its own
            self._lock, self._ptrs, self._pid = threading.Lock(), {}, os.getpid()
        with self._lock:
            self._ptrs[export_id] = (ptr, nbytes)

    def remove(self, export_id: bytes) -> None:
        """Forget an export."""
        with self._lock:
            self._ptrs.pop(export_id, None)

    def find(self, export_id: bytes) -> tuple[int, int] | None:
        """Return (address, nbytes) of an export made by this process, else None."""
        if os.getpid() != self._pid:
            return None
        with self._lock:
            return self._ptrs.get(export_id)


local_exports = LocalExports()
"""The one registry of this process."""


@dataclass(slots=True, eq=False)
class Mapping:
    """One mapped extent. Counted by the cache; :attr:`stale` once its exporter's life or generation has ended.

    ``lease`` is what the exporter lent for it: an opaque key of whoever had it opened, due when it is unmapped.
    """

    key: Key
    opened: OpenedExtent
    local: bool
    lease: Hashable
    users: int = 0
    stale: str = field(default="")

    @property
    def ptr(self) -> int:
        """Device address of the first shared byte."""
        return self.opened.ptr

    @property
    def nbytes(self) -> int:
        """Length of the shared range."""
        return self.opened.nbytes

    @property
    def region(self) -> int:
        """What it was mapped side by side with; 0 for none. See :class:`~devipc.types.OpenedExtent`."""
        return self.opened.region


class MappingCache:
    """Keeps mappings open while they are used, and the most recently used idle ones for the next open.

    All methods may be called from any thread. Opens of *different* exports run side by side; a second open of the same
    export waits for the first.

    Parameters
    ----------
    memory : DeviceMemoryIPC
        Where handles are opened.
    instance : bytes
        This process's own instance.
    idle_limit : int
        Idle mappings to keep; used ones are never dropped and never counted.
    on_unmapped : callable
        Called with the mapping after each driver unmap, on the thread that did it, when it drives no more.
    driving : callable
        Returns what is entered for as long as something may be mapped or unmapped, by the thread that does it, without
        a lock. An open that is given up stays in it until the driver has returned.
    on_refused : callable
        Called in there with what kept the driver from unmapping something, which stays mapped; on any thread.
    """

    def __init__(
        self,
        memory: DeviceMemoryIPC,
        *,
        instance: bytes,
        idle_limit: int = 8,
        on_unmapped: Callable[[Mapping], None] = lambda _mapping: None,
        driving: Callable[[], AbstractContextManager[object]] = nullcontext,
        on_refused: Callable[[Exception], None] = lambda _error: None,
    ) -> None:
        self._memory = memory
        self._instance = instance
        self._idle_limit = idle_limit
        self._on_unmapped = on_unmapped
        self._driving = driving
        self._on_refused = on_refused
        self._lock = threading.Condition()
        self._mappings: OrderedDict[Key, Mapping] = OrderedDict()
        self._opening: set[Key] = set()
        self._generations: dict[bytes, int] = {}
        self._dead: set[bytes] = set()
        self._revoked: OrderedDict[bytes, None] = OrderedDict()
        self._closed = False

    def acquire(self, handle: MemoryHandle, *, timeout_s: float, lease: Hashable = None) -> tuple[Mapping, bool]:
        """Return a counted mapping of ``handle`` and whether this call mapped it anew; see :meth:`acquire_all`."""
        return self.acquire_all([handle], timeout_s=timeout_s, leases=[lease])[0]

    def acquire_all(
        self, handles: Sequence[MemoryHandle], *, timeout_s: float, leases: Sequence[Hashable]
    ) -> list[tuple[Mapping, bool]]:
        """Return a counted mapping of each handle and whether this call mapped it anew: all or none.

        What is not mapped yet is mapped side by side where that can be done. The handles' descriptors stay the
        caller's. A lease stays with a mapping that is made anew; whether one holds it, after an error too, says
        :meth:`holds`.

        Raises
        ------
        StaleError
            For a handle of a dead peer, an older generation or a revoked export.
        CompletionTimeout
            When the driver's open did not return.
        """
        taken: list[Mapping] = []
        try:
            with self._driving():
                return self._acquire_all(handles, deadline_after(timeout_s), leases, taken)
        except BaseException:
            if taken:
                undo(self._release_all, taken)
            raise

    def _acquire_all(
        self, handles: Sequence[MemoryHandle], deadline: float, leases: Sequence[Hashable], taken: list[Mapping]
    ) -> list[tuple[Mapping, bool]]:
        """Add to ``taken`` what is counted; after an error, it is to be released."""
        keys = [(handle.instance, handle.generation, handle.export_id) for handle in handles]
        missing: dict[Key, tuple[MemoryHandle, Hashable]] = {}
        made: dict[Key, Mapping] = {}
        try:
            with self._lock:
                self._check_all(handles)
                if not self._lock.wait_for(lambda: self._opening.isdisjoint(keys), remaining(deadline)):
                    raise CompletionTimeout(
                        "another thread's open of the same export did not return", code="driver_blocked"
                    )
                self._check_all(handles)
                for key, handle, lease in zip(keys, handles, leases, strict=True):
                    mapping = self._mappings.get(key)
                    if mapping is None:
                        missing.setdefault(key, (handle, lease))
                    else:
                        mapping.users += 1
                        taken.append(mapping)
                        self._mappings.move_to_end(key)
                self._opening.update(missing)
            if missing:
                self._open(missing, remaining(deadline), made)
            return self._made(keys, missing, made, taken)
        except BaseException:
            with self._lock:
                self._opening.difference_update(missing)
                self._lock.notify_all()
                lost = [one for key, one in made.items() if self._mappings.get(key) is not one]
            undo(self._unmap, [one.opened for one in lost if not one.local])
            raise

    def _made(
        self,
        keys: Sequence[Key],
        missing: dict[Key, tuple[MemoryHandle, Hashable]],
        made: dict[Key, Mapping],
        taken: list[Mapping],
    ) -> list[tuple[Mapping, bool]]:
        """Keep what was mapped; raise when it has become stale meanwhile."""
        refused: DevIPCError | None = None
        found: list[tuple[Mapping, bool]] = []
        with self._lock:
            self._opening.difference_update(missing)
            self._mappings.update(made)
            self._lock.notify_all()
            fresh = set(made)
            for key in keys:
                mapping = self._mappings[key]
                found.append((mapping, key in fresh))
                fresh.discard(key)
                if key in made:
                    mapping.users += 1
                    taken.append(mapping)
            for key, (handle, _) in missing.items():
                try:
                    self._check(handle)
                except DevIPCError as error:
                    refused = error
                    made[key].stale = error.message
        if refused is not None:
            raise refused
        return found

    def holds(self, lease: Hashable) -> bool:
        """Return whether a mapping holds ``lease``: it is due only when that has been unmapped."""
        with self._lock:
            return any(mapping.lease == lease for mapping in self._mappings.values())

    def release(self, mapping: Mapping) -> None:
        """Give one use back. The last use of a stale mapping unmaps it; of a valid one makes it idle."""
        self._release_all([mapping])

    def _release_all(self, taken: Sequence[Mapping]) -> None:
        with self._changing():
            for mapping in taken:
                if mapping.users <= 0:
                    raise UsageError("a mapping was released more often than acquired", code="double_release")
                mapping.users -= 1

    def new_generation(self, instance: bytes, generation: int) -> None:
        """Invalidate everything of ``instance`` that is older than ``generation``, at once."""
        with self._changing():
            self._generations[instance] = max(generation, self._generations.get(instance, 0))
            for mapping in self._mappings.values():
                if mapping.key[0] == instance and mapping.key[1] < generation:
                    mapping.stale = "the exporter replaced its layout"

    def revoke(self, export_id: bytes) -> None:
        """Invalidate one export that its owner takes back."""
        with self._changing():
            self._revoked[export_id] = None
            while len(self._revoked) > _REMEMBERED_REVOCATIONS:
                self._revoked.popitem(last=False)
            for mapping in self._mappings.values():
                if mapping.key[2] == export_id:
                    mapping.stale = "the exporter took this memory back"

    def peer_died(self, instance: bytes) -> None:
        """Invalidate everything of a dead peer, at once and without a driver call; :meth:`collect` unmaps it.

        Memory in use stays readable until it is released.
        """
        with self._lock:
            self._dead.add(instance)
            for mapping in self._mappings.values():
                if mapping.key[0] == instance:
                    mapping.stale = "the exporter died"

    def collect(self) -> None:
        """Unmap what is neither used nor kept. Blocks in the driver."""
        with self._changing():
            pass

    def set_idle_limit(self, idle_limit: int) -> None:
        """Keep at most ``idle_limit`` idle mappings from now on; unmap the surplus."""
        with self._changing():
            self._idle_limit = idle_limit

    def stats(self) -> dict[str, int]:
        """Return how many mappings are open and idle, and their bytes."""
        with self._lock:
            idle = sum(1 for mapping in self._mappings.values() if not mapping.users)
            nbytes = sum(mapping.nbytes for mapping in self._mappings.values() if not mapping.local)
            return {"open": len(self._mappings), "idle": idle, "nbytes": nbytes}

    def close(self) -> None:
        """Unmap what is idle and refuse new opens; what is in use is unmapped by its last release."""
        with self._changing():
            self._closed = True
            self._idle_limit = 0

    def _check(self, handle: MemoryHandle) -> None:
        if self._closed:
            raise ClosedError("the import cache is closed", remedy="open a new session")
        if handle.instance in self._dead:
            raise StaleError("the exporter died", remedy="connect to its successor")
        if handle.generation < self._generations.get(handle.instance, 0):
            raise StaleError("the handle is of an older generation", remedy="ask the exporter again")
        if handle.export_id in self._revoked:
            raise StaleError("the exporter took this memory back", remedy="ask the exporter again")

    def _check_all(self, handles: Sequence[MemoryHandle]) -> None:
        for handle in handles:
            self._check(handle)

    def _open(
        self, missing: dict[Key, tuple[MemoryHandle, Hashable]], timeout_s: float, made: dict[Key, Mapping]
    ) -> None:
        """Map what is missing and add it to ``made``; what is not in there stays unmapped."""
        foreign: list[Key] = []
        for key, (handle, lease) in missing.items():
            if handle.instance != self._instance:
                foreign.append(key)
                continue
            found = local_exports.find(handle.export_id)
            if found is None:
                raise StaleError("this process no longer shares that memory", remedy="open before it is unshared")
            if found[1] != handle.extent.nbytes:
                raise HandleError("the handle announces another length than this process shares", code="bounds")
            made[key] = Mapping(key, OpenedExtent(*found, token=None), local=True, lease=lease)
        if foreign:
            extents = [missing[key][0].extent for key in foreign]
            opened = open_extents(
                self._memory, extents, timeout_s=timeout_s, driving=self._driving, on_refused=self._on_refused
            )
            try:
                for key, one in zip(foreign, opened, strict=True):
                    made[key] = Mapping(key, one, local=False, lease=missing[key][1])
            except BaseException:
                undo(self._unmap, [one for key, one in zip(foreign, opened, strict=True) if key not in made])
                raise

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Change something with the lock, then unmap what is unused by then, then tell who lent it."""
        dropped: list[Mapping] = []
        try:
            with self._driving():
                with self._lock:
                    yield
                    dropped = self._collect()
                self._unmap([mapping.opened for mapping in dropped if not mapping.local])
        finally:
            for mapping in dropped:
                self._on_unmapped(mapping)

    def _unmap(self, opened: Sequence[OpenedExtent]) -> None:
        close_extents(self._memory, opened, on_refused=self._on_refused)

    def _collect(self) -> list[Mapping]:
        idle = [mapping for mapping in self._mappings.values() if not mapping.users]
        kept = [mapping for mapping in idle if not mapping.stale and not mapping.local]
        surplus = kept[: max(0, len(kept) - self._idle_limit)]
        dropped = [mapping for mapping in idle if mapping.stale or mapping.local] + surplus
        for mapping in dropped:
            del self._mappings[mapping.key]
        return dropped
