"""Events of this process: taken, set by a list, asked, and used again when nothing can touch them any more.

Owns the pools of events and the rule of their reuse. An event of Level Zero is set once and stays set until somebody
resets it, so each record takes a fresh one: a signal that is still on its way could set a reset one at any time. One is
used again when it is set and no list waits for it. Events that peers share are in :mod:`devipc_levelzero.sync`.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from devipc.spi import DevIPCError
from devipc_levelzero import driver
from devipc_levelzero.abi import EventDesc, EventPoolDesc, make
from devipc_levelzero.status import NOT_READY, error_for

if TYPE_CHECKING:
    from devipc_levelzero.context import Context

__all__ = ["SCOPE_DEVICE", "SCOPE_HOST", "Event", "EventArena", "create_event", "create_pool", "is_set"]

POOL_EVENTS = 256
"""Events of one pool, made when they are first needed."""
HOST_VISIBLE = 1
"""ZE_EVENT_POOL_FLAG_HOST_VISIBLE."""
IPC = 2
"""ZE_EVENT_POOL_FLAG_IPC."""
_MISSES = 4  # retired events that are still at work, before a look at the rest is given up
SCOPE_DEVICE = 2
"""Waiting on the device sees what was written on it."""
SCOPE_HOST = 4
"""Setting the event makes earlier writes visible to the host, and with it to other processes."""


class Event:
    """One event, how many lists still wait for it, and the event that one of them waits for before it sets this one."""

    __slots__ = ("handle", "parent", "pool", "waits")

    def __init__(self, handle: int, pool: _Pool) -> None:
        self.handle = handle
        self.pool = pool
        self.waits = 0
        self.parent: Event | None = None


@dataclass(slots=True, eq=False)
class _Pool:
    handle: int
    made: list[Event] = field(default_factory=list)
    free: list[Event] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        return len(self.free) == len(self.made)


def create_pool(context: Context, *, flags: int, count: int) -> int:
    """Make a pool for one device; return its handle."""
    desc = make(EventPoolDesc, flags=flags, count=count)
    device, pool = ctypes.c_void_p(context.device), ctypes.c_void_p()
    context.call("zeEventPoolCreate", context.handle, ctypes.byref(desc), 1, ctypes.byref(device), ctypes.byref(pool))
    return int(pool.value or 0)


def create_event(context: Context, pool: int, index: int, *, wait: int) -> int:
    """Make the event at ``index`` of a pool, set with host scope; return its handle."""
    desc, event = make(EventDesc, index=index, signal=SCOPE_HOST, wait=wait), ctypes.c_void_p()
    context.call("zeEventCreate", pool, ctypes.byref(desc), ctypes.byref(event))
    return int(event.value or 0)


def is_set(context: Context, handle: int) -> bool:
    """Return whether an event is set.

    Raises
    ------
    DeviceLostError, DriverError
        When the driver cannot say.
    """
    context.check_open()
    status = driver.attempt("zeEventQueryStatus", handle)
    if status not in (0, NOT_READY):
        raise error_for("zeEventQueryStatus", status, device=context.uuid)
    return status == 0


class EventArena:
    """All local events of one context. May be used from any thread."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._pools: list[_Pool] = []
        self._retired: deque[Event] = deque()

    def prepare(self) -> None:
        """Make the first pool, so that no later use of the device is the one that does."""
        with self._lock:
            self._new_pool()

    def take(self) -> Event:
        """Return an event that is not set and that nobody knows."""
        with self._lock:
            event = self._take_made() or self._make()
        try:
            self._context.call("zeEventHostReset", event.handle)
        except BaseException:
            self.unused(event)
            raise
        return event

    def _take_made(self) -> Event | None:
        for attempt in range(2):
            for pool in self._pools:
                if pool.free:
                    return pool.free.pop()
            if not attempt:
                self._sweep(len(self._retired))
        return None

    def _make(self) -> Event:
        pool = next((pool for pool in self._pools if len(pool.made) < POOL_EVENTS), None)
        pool = pool or self._new_pool()
        event = Event(create_event(self._context, pool.handle, len(pool.made), wait=SCOPE_DEVICE), pool)
        pool.made.append(event)
        return event

    def _new_pool(self) -> _Pool:
        pool = _Pool(create_pool(self._context, flags=HOST_VISIBLE, count=POOL_EVENTS))
        self._pools.append(pool)
        return pool

    def unused(self, event: Event) -> None:
        """Take back an event that no list has been given."""
        with self._lock:
            self._give(event)

    def retire(self, event: Event, *, after: Event | None = None) -> None:
        """Take back an event that a list sets; with ``after``, behind its wait for that one."""
        with self._lock:
            if after is not None:
                after.waits += 1
                event.parent = after
            self._retired.append(event)
            self._sweep(_MISSES)

    def wait(self, event: Event, timeout_ns: int) -> bool:
        """Block until the event is set, at most ``timeout_ns``; return whether it is."""
        status = driver.attempt("zeEventHostSynchronize", event.handle, timeout_ns)
        if status not in (0, NOT_READY):
            raise error_for("zeEventHostSynchronize", status, device=self._context.uuid)
        return status == 0

    def _sweep(self, misses: int) -> None:
        """Free retired ones that nothing can touch any more, until so many are at work; the lock is held."""
        for _ in range(len(self._retired)):
            if not misses:
                return
            event = self._retired.popleft()
            if event.waits or not self._settled(event):
                self._retired.append(event)
                misses -= 1
                continue
            if event.parent is not None:
                event.parent.waits -= 1
                event.parent = None
            self._give(event)

    def _give(self, event: Event) -> None:
        """Make an event free, and let go of a pool of which all are, unless it is the last; the lock is held."""
        pool = event.pool
        pool.free.append(event)
        if pool.idle and len(self._pools) > 1:
            self._pools.remove(pool)
            driver.quietly(self._destroy, pool)

    def _destroy(self, pool: _Pool) -> None:
        for event in pool.made:
            driver.attempt("zeEventDestroy", event.handle)
        driver.attempt("zeEventPoolDestroy", pool.handle)

    def _settled(self, event: Event) -> bool:
        try:
            return is_set(self._context, event.handle)
        except DevIPCError:  # no proof that the list has let go of it
            return False

    def close(self) -> bool:
        """Destroy pools of which nothing is at work; return whether that was all. The others stay with the process."""
        with self._lock:
            pools, self._pools = self._pools, []
            self._retired.clear()
        busy = [pool for pool in pools if any(self._at_work(event) for event in pool.made if event not in pool.free)]
        for pool in pools:
            if pool not in busy:
                self._destroy(pool)
        return not busy

    @staticmethod
    def _at_work(event: Event) -> bool:
        return driver.attempt("zeEventQueryStatus", event.handle) == NOT_READY
