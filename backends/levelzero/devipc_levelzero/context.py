"""One device opened in this process: its driver, its context, and the engine that copies.

Owns the ``ze_context_handle_t`` that all memory, events and lists of the device belong to, and the choice of the engine
group. An imported address is valid in this context only, so it is no framework's.

Sources: groups that only copy have the flag COPY without COMPUTE; their queues are separate engines, so streams go
round over them (Level Zero core specification, command queue groups). What a list was given is ordered by nothing but
barriers and events, so submitters end with a barrier (same, command lists).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from devipc.spi import (
    CapabilityError,
    ClosedError,
    DeviceLostError,
    DevIPCError,
    DriverError,
    note_left,
    try_each,
    undo,
)
from devipc_levelzero import driver
from devipc_levelzero.abi import ContextDesc, QueueDesc, QueueGroup, make
from devipc_levelzero.events import EventArena
from devipc_levelzero.status import UNSUPPORTED_FEATURE, error_for

__all__ = ["BLOCK_NBYTES", "Context", "LevelZeroStream"]

BLOCK_NBYTES = 2 * 2**20
"""Allocations are rounded up to this: drivers serve smaller ones from pools, and export a pool whole."""

_COMPUTE, _COPY = 1, 2
_ASYNCHRONOUS = 2
_NORMAL, _LOW, _HIGH = 0, 1, 2
_SLICE_NS = 200_000_000


class LevelZeroStream:
    """An immediate command list. Level Zero forbids two threads in one list at once: ``lock`` is held around each call.

    Parameters
    ----------
    handle : int
        The list.
    made_here : bool
        True when this package destroys it.
    """

    __slots__ = ("__weakref__", "_handle", "live", "lock", "made_here")

    def __init__(self, handle: int, *, made_here: bool) -> None:
        self._handle = handle
        self.made_here = made_here
        self.live = True
        self.lock = threading.RLock()

    @property
    def handle(self) -> int:
        """The ``ze_command_list_handle_t`` as an integer."""
        return self._handle


class Context:
    """One device with a context of its own. May be used from any thread.

    Parameters
    ----------
    driver_handle, device : int
        Handles of driver and device.
    uuid : str
        Identity put into errors.
    """

    def __init__(self, driver_handle: int, device: int, uuid: str) -> None:
        self.driver = driver_handle
        self.device = device
        self.uuid = uuid
        self._lock = threading.Lock()
        made = ctypes.c_void_p()
        driver.call("zeContextCreate", driver_handle, self.ref(make(ContextDesc)), self.ref(made), device=uuid)
        self._context: int | None = int(made.value or 0)
        self.events = EventArena(self)
        try:
            self.events.prepare()
            self.ordinal, queues, self.copies_only = self._pick_group()
        except BaseException:
            self.close()
            raise
        self._next_queue = itertools.cycle(range(queues))

    @staticmethod
    def ref(value: Any) -> Any:
        """Return a reference to pass a structure or an out-parameter by."""
        return ctypes.byref(value)

    @property
    def handle(self) -> int:
        """The context's handle.

        Raises
        ------
        ClosedError
            After :meth:`close`.
        """
        context = self._context
        if context is None:
            raise ClosedError(
                "the device was closed",
                remedy="open it again with open_device()",
                backend="levelzero",
                device=self.uuid,
            )
        return context

    def check_open(self) -> None:
        """Raise :class:`ClosedError` after :meth:`close`."""
        _ = self.handle

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self._context is None

    def call(self, name: str, *args: Any) -> None:
        """Call as :func:`devipc_levelzero.driver.call`, refusing a closed device and naming this one in errors."""
        self.check_open()
        driver.call(name, *args, device=self.uuid)

    def check_alive(self) -> None:
        """Raise when the device is lost; some calls do not ask. Cheap."""
        self.check_open()
        status = driver.attempt("zeDeviceGetStatus", self.device)
        if status and status != UNSUPPORTED_FEATURE:  # an old driver may lack the call
            raise error_for("zeDeviceGetStatus", status, device=self.uuid)

    def _pick_group(self) -> tuple[int, int, bool]:
        """Return ordinal and engines of the first group that only copies, else of the first that can copy."""
        count = ctypes.c_uint32(0)
        self.call("zeDeviceGetCommandQueueGroupProperties", self.device, self.ref(count), None)
        groups = (QueueGroup * count.value)(*(make(QueueGroup) for _ in range(count.value)))
        if count.value:
            self.call("zeDeviceGetCommandQueueGroupProperties", self.device, self.ref(count), groups)
        able = [(at, group) for at, group in enumerate(groups) if group.flags & _COPY or group.flags & _COMPUTE]
        if not able:
            raise CapabilityError(
                "this device has no engine that copies",
                code="no_engine",
                remedy="open another device, or update the GPU driver",
                backend="levelzero",
                device=self.uuid,
            )
        for at, group in able:
            if not group.flags & _COMPUTE:
                return at, max(1, int(group.queues)), True
        at, group = able[0]
        return at, max(1, int(group.queues)), False

    def new_list(self, priority: int = 0) -> LevelZeroStream:
        """Make an immediate command list on the next copy engine; a priority below 0 is high, above 0 low."""
        desc = make(
            QueueDesc,
            ordinal=self.ordinal,
            index=next(self._next_queue),
            mode=_ASYNCHRONOUS,
            priority=_HIGH if priority < 0 else _LOW if priority > 0 else _NORMAL,
        )
        made = ctypes.c_void_p()
        self.call("zeCommandListCreateImmediate", self.handle, self.device, self.ref(desc), self.ref(made))
        return LevelZeroStream(int(made.value or 0), made_here=True)

    def fill_zero(self, ptr: int, nbytes: int) -> None:
        """Fill memory that was just allocated with zeros and wait for it; when that fails, free the memory.

        What may still be written stays, and the list that writes it too: that is noted at the error.
        """
        free, zero = partial(self.call, "zeMemFree", self.handle, ptr), ctypes.c_uint8(0)
        try:
            stream = self.new_list()
        except BaseException:
            undo(free)
            raise
        try:
            self.call("zeCommandListAppendMemoryFill", stream.handle, ptr, self.ref(zero), 1, nbytes, None, 0, None)
            self.synchronize(stream)
        except BaseException:
            undo(self._end, stream, free)
            raise
        try:
            self.destroy(stream)
        except DevIPCError as error:
            undo(free)
            raise self._not_let_go(error) from error
        except BaseException:
            undo(free)
            raise

    def _not_let_go(self, error: DevIPCError) -> DriverError:
        refused = DriverError(
            "the driver does not let go of a list whose work is done",
            code="not_let_go",
            remedy="end this process when it happens again",
            backend="levelzero",
            device=self.uuid,
            status=error.status,
        )
        note_left(refused, error)
        return refused

    def synchronize(self, stream: LevelZeroStream) -> None:
        """Block until all that ``stream`` holds is done, in slices, so that a lost device is noticed.

        By an event: lists of loaders below 1.20 cannot be waited for.
        """
        event = self.events.take()
        try:
            with stream.lock:
                self.call("zeCommandListAppendBarrier", stream.handle, event.handle, 0, None)
        except BaseException:
            self.events.unused(event)
            raise
        try:
            while not self.events.wait(event, _SLICE_NS):
                self.check_alive()
        finally:
            self.events.retire(event)

    def finish(self, stream: LevelZeroStream) -> None:
        """Wait for all work of a list and destroy it. A wait that fails is tried again: a list that may run stays."""
        try:
            self.synchronize(stream)
        except BaseException:
            undo(self._end, stream)
            raise
        self.destroy(stream)

    def _end(self, stream: LevelZeroStream, *then: Callable[[], object]) -> None:
        """Destroy a list once nothing of it can run: its work is over or its device lost; ``then`` follows."""
        with contextlib.suppress(DeviceLostError):
            self.synchronize(stream)
        try_each([partial(self.destroy, stream), *then])

    def destroy(self, stream: LevelZeroStream) -> None:
        """Destroy a list whose work is done."""
        self.call("zeCommandListDestroy", stream.handle)

    def close(self, *, keep: bool = False) -> None:
        """Give everything back. Idempotent; never raises, since it may run at interpreter exit or in a fork.

        The context stays with the process where a list may still set an event of it: one of ours, or with ``keep`` one
        of somebody else's.
        """
        with self._lock:
            context, self._context = self._context, None
        if context is None:
            return
        try:
            if self.events.close() and not keep:
                driver.attempt("zeContextDestroy", context)
        except DevIPCError:
            pass
