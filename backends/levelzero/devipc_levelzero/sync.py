"""Sync primitives of one device: events in pools that processes share. Stores and waits on words do not exist here.

Owns the pools that this process exports and those that it opened. An event is set with host scope, so that what came
before it is visible outside of the device; importers only ask, from the host: no list of theirs waits for one, since
nothing would release it when its maker dies. Setting it back is the maker's alone. What a fence is, and poison, are the
core's.

Sources: an event of a pool is set once and stays set until it is reset; a pool's handle opens by the pool's descriptor,
whose number is its beginning (Level Zero core specification; compute-runtime 26.3). The contract sends bytes only, so
an importer takes the descriptor from the exporting process itself, which needs the right to trace it.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from devipc.spi import (
    Capability,
    CapabilityError,
    DevIPCError,
    HandleError,
    InterprocessEvent,
    Mechanism,
    ResourceExhausted,
    Stream,
    Turns,
    UsageError,
    Verdict,
    explain_missing_fd,
    file_of,
    undo,
)
from devipc_levelzero import driver
from devipc_levelzero.abi import HANDLE_NBYTES, IpcFlags, IpcHandle, make
from devipc_levelzero.context import Context
from devipc_levelzero.events import HOST_VISIBLE, IPC, SCOPE_HOST, create_event, create_pool, is_set
from devipc_levelzero.handles import fd_of_process, number_in, patched, process_start, to_handle
from devipc_levelzero.streams import native

__all__ = ["LevelZeroEvent", "LevelZeroEvents", "LevelZeroSync"]

_POOL_EVENTS = 32
_RECORD_TIMEOUT_S = 5.0
_PAUSE_S = 50e-6
_IPC_EVENTS = 2
_VERSION = 1
_PAYLOAD = struct.Struct(f"<B16sQIQQQII{HANDLE_NBYTES}s")
"""Version, identity of the pool, inode of the pid namespace, process, its start, device and inode of the descriptor,
events of the pool, index, handle."""

_NO_WORDS = Capability.no(
    "Level Zero has no call by which a list stores to, or waits for, a word of host memory; the driver's own extension"
    " for it is experimental",
    remedy="use host_flag, which copies the word, or polling",
)


@dataclass(slots=True, eq=False)
class _Pool:
    handle: int
    identity: bytes = b""
    raw: bytes = b""
    fd: int = -1
    file: tuple[int, int] = (0, 0)
    free: list[int] = field(default_factory=list)
    pending: dict[int, int] = field(default_factory=dict)
    users: int = 0


class LevelZeroEvent:
    """One event of a shared pool, made here or opened from a peer."""

    __slots__ = ("index", "native", "opened", "pool", "recorded")

    def __init__(self, pool: _Pool, index: int, handle: int, *, opened: bool) -> None:
        self.pool = pool
        self.index = index
        self.native: int | None = handle
        self.opened = opened
        self.recorded = False


class LevelZeroEvents:
    """Inter-process events of one device in this process. May be used from any thread.

    Parameters
    ----------
    context : Context
        Whose events they are.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._own: list[_Pool] = []
        self._opened: dict[bytes, _Pool] = {}
        self._turns = Turns()

    def create(self) -> LevelZeroEvent:
        """Make an event, not set, in a pool that has room. A pool goes when its last event is destroyed."""
        with self._lock:
            self._sweep()
            pool = next((pool for pool in self._own if pool.free), None) or self._new_pool()
            index = pool.free.pop()
            try:
                handle = create_event(self._context, pool.handle, index, wait=SCOPE_HOST)
            except BaseException:
                self._give(pool, index)
                raise
        return LevelZeroEvent(pool, index, handle, opened=False)

    def _sweep(self) -> None:
        """Destroy the events that were given back and whose last signal has come meanwhile; the lock is held."""
        for pool in list(self._own):
            for index, handle in list(pool.pending.items()):
                if self._over(handle):
                    driver.quietly(self._context.call, "zeEventDestroy", handle)
                    del pool.pending[index]
                    self._give(pool, index)

    def _over(self, handle: int) -> bool:
        try:
            return is_set(self._context, handle)
        except DevIPCError:
            return False

    def _give(self, pool: _Pool, index: int) -> None:
        """Make an index free again; the last one takes the pool with it. The lock is held."""
        pool.free.append(index)
        if len(pool.free) == _POOL_EVENTS:
            self._own.remove(pool)
            driver.quietly(self._end, pool)

    def _end(self, pool: _Pool) -> None:
        """Put the pool's handle back and destroy it."""
        if driver.has("zeEventPoolPutIpcHandle"):
            driver.attempt("zeEventPoolPutIpcHandle", self._context.handle, to_handle(pool.raw))
        self._context.call("zeEventPoolDestroy", pool.handle)

    def _new_pool(self) -> _Pool:
        pool = _Pool(create_pool(self._context, flags=HOST_VISIBLE | IPC, count=_POOL_EVENTS), os.urandom(16))
        raw = IpcHandle()
        try:
            self._context.call("zeEventPoolGetIpcHandle", pool.handle, ctypes.byref(raw))
            pool.raw = bytes(raw)
            pool.fd = number_in(pool.raw)
            pool.file = self._file_of(pool.fd)
        except BaseException:
            undo(self._context.call, "zeEventPoolDestroy", pool.handle)
            raise
        pool.free = list(range(_POOL_EVENTS - 1, -1, -1))
        self._own.append(pool)
        return pool

    def _file_of(self, fd: int) -> tuple[int, int]:
        found = file_of(fd) if fd < 2**31 else None
        if found is None:
            raise CapabilityError(
                "the handle of an event pool names no descriptor: it is of a form that this package does not know",
                code="handle_form",
                remedy="use polling, which needs no events",
                backend="levelzero",
                device=self._context.uuid,
            )
        return found

    def export(self, event: InterprocessEvent) -> bytes:
        """Return the bytes by which a peer opens ``event``; it must live until every peer has closed it."""
        own = _live(event)
        if own.opened:
            raise UsageError(
                "an opened event cannot be exported again", remedy="its maker exports it", backend="levelzero"
            )
        pool = own.pool
        return _PAYLOAD.pack(
            *(_VERSION, pool.identity, _pid_namespace(), os.getpid(), process_start(), *pool.file),
            *(_POOL_EVENTS, own.index, pool.raw),
        )

    def open(self, payload: bytes) -> LevelZeroEvent:
        """Open a peer's event; may block in the driver."""
        if len(payload) != _PAYLOAD.size or payload[0] != _VERSION:
            raise _malformed(f"event payload of {len(payload)} bytes, expected {_PAYLOAD.size} of version {_VERSION}")
        _, identity, namespace, pid, start, device, inode, count, index, raw = _PAYLOAD.unpack(payload)
        if not 0 <= index < count == _POOL_EVENTS or pid < 1 or pid >= 2**31 or number_in(raw) >= 2**31:
            raise _malformed(f"event {index} of {count} in process {pid}")
        if namespace != _pid_namespace():
            raise HandleError(
                "the exporter lives in another pid namespace, where its process cannot be reached",
                code="pid_namespace",
                remedy="share one pid namespace, or use polling, which needs no events",
                backend="levelzero",
                device=self._context.uuid,
            )
        with self._turns.of(identity):
            pool = self._opened.get(identity)
            if pool is None:
                pool = self._open_pool(identity, raw, pid, start, (device, inode))
            pool.users += 1
            try:
                handle = create_event(self._context, pool.handle, index, wait=SCOPE_HOST)
            except BaseException:
                undo(self._drop, pool)
                raise
        return LevelZeroEvent(pool, index, handle, opened=True)

    def _open_pool(self, identity: bytes, raw: bytes, pid: int, start: int, file: tuple[int, int]) -> _Pool:
        fd = fd_of_process(pid, start, number_in(raw), file)
        made = ctypes.c_void_p()
        try:
            with patched(raw, fd) as handle:
                try:
                    self._context.call("zeEventPoolOpenIpcHandle", self._context.handle, handle, ctypes.byref(made))
                except DevIPCError as error:  # here, before the descriptors are given back
                    raise explain_missing_fd(error, backend="levelzero") from error
        finally:
            os.close(fd)
        pool = self._opened[identity] = _Pool(int(made.value or 0), identity)
        return pool

    def _drop(self, pool: _Pool) -> None:
        pool.users -= 1
        if not pool.users:
            del self._opened[pool.identity]
            self._context.call("zeEventPoolCloseIpcHandle", pool.handle)

    def record(self, event: InterprocessEvent, stream: Stream) -> None:
        """Reset the event, and set it behind all work of ``stream`` so far. Only its maker records it.

        Blocks for an earlier record that is still pending, at most 5 s: a ring of events never is.
        """
        own = _live(event)
        if own.opened:
            raise UsageError("an opened event is only asked", remedy="its maker records it", backend="levelzero")
        used = native(stream)
        if own.recorded:
            self._await_last(own)
        with used.lock:
            self._context.call("zeEventHostReset", own.native)
            own.recorded = False  # until a list has it again: nobody else would ever set it
            self._context.call("zeCommandListAppendBarrier", used.handle, own.native, 0, None)
        own.recorded = True

    def _await_last(self, event: LevelZeroEvent) -> None:
        """Wait for the signal of the record before: it would be taken for that of the next."""
        deadline = time.monotonic() + _RECORD_TIMEOUT_S
        while not is_set(self._context, _handle(event)):
            if time.monotonic() > deadline:
                raise ResourceExhausted(
                    f"the event still waits for its last record after {_RECORD_TIMEOUT_S:g} s",
                    code="event_pending",
                    remedy="keep a ring of events, and record one again when it is done",
                    backend="levelzero",
                    device=self._context.uuid,
                )
            time.sleep(_PAUSE_S)

    def query(self, event: InterprocessEvent) -> bool:
        """Return whether the event is set: False for one that was never recorded."""
        return is_set(self._context, _handle(_live(event)))

    def destroy(self, event: InterprocessEvent) -> None:
        """Give an event back, made or opened. One that is still to be set is kept until it is."""
        own = _live(event)
        with self._lock:
            handle, own.native = own.native, None
        if handle is None:
            return
        if own.opened:
            with self._turns.of(own.pool.identity):
                try:
                    self._context.call("zeEventDestroy", handle)
                finally:
                    self._drop(own.pool)
            return
        with self._lock:
            if own.recorded and not self._over(handle):
                own.pool.pending[own.index] = handle
            else:
                try:
                    self._context.call("zeEventDestroy", handle)
                finally:
                    self._give(own.pool, own.index)

    def close(self) -> bool:
        """Give back what nothing uses any more; return whether that was all."""
        with self._lock:
            self._sweep()
            return not self._own and not self._opened


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _malformed(text: str) -> HandleError:
    return HandleError(
        text,
        code="malformed",
        remedy="both sides must run the same version of devipc-levelzero",
        backend="levelzero",
    )


def _live(event: InterprocessEvent) -> LevelZeroEvent:
    if not isinstance(event, LevelZeroEvent) or event.native is None:
        raise UsageError(
            "no live event of this backend", remedy="use an event before it is destroyed", backend="levelzero"
        )
    return event


def _handle(event: LevelZeroEvent) -> int:
    handle = event.native
    assert handle is not None
    return handle


class LevelZeroSync:
    """Sync IPC by shared event pools.

    Parameters
    ----------
    context : Context
        The device's context.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._events = LevelZeroEvents(context)

    @property
    def word_writes(self) -> None:
        """None: there is no such call."""
        return None

    @property
    def word_waits(self) -> None:
        """None: there is no such call."""
        return None

    @property
    def events(self) -> LevelZeroEvents:
        """Inter-process events."""
        return self._events

    def mechanisms(self) -> Mapping[Mechanism, Capability]:
        """Return what the driver claims; a property is no verdict."""
        found = make(IpcFlags)
        claimed = driver.question("zeDriverGetIpcProperties", self._context.driver, ctypes.byref(found))
        says = "no answer" if not claimed else "yes" if found.flags & _IPC_EVENTS else "no"
        return {
            Mechanism.STREAM_MEMOP: _NO_WORDS,
            Mechanism.EVENT: Capability(
                Verdict.UNTESTED,
                f"property: event pool handles {says}; importers need the right to trace their exporter (ptrace)",
                f"the driver's property says {says}; a live check decides",
            ),
            Mechanism.HOST: Capability.untested("needs local markers and host memory only; a live check decides"),
        }
