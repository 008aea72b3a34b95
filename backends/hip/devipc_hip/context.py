"""The device as a thread's current one: set around every call, put back behind it.

Owns the promise that the caller's current device is the same before and after each call, on every thread, and the
promise that no call of ours breaks a graph that another thread captures. The runtime makes a device's context at its
first use and keeps it until the process ends; frameworks use the same one, so pointers are valid on both sides.

Sources: the current device belongs to a thread and is 0 on a fresh one (HIP runtime API, hipSetDevice); while any
thread captures in global mode, unsafe calls of all threads invalidate that capture, unless the calling thread is in
relaxed mode (hipThreadExchangeStreamCaptureMode).
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from devipc.spi import ClosedError, DeviceLostError, DevIPCError
from devipc_hip import driver
from devipc_hip.status import INVALID_STREAM, error_for

__all__ = ["Context"]

_RELAXED = 2
_NON_BLOCKING = 1


class Context:
    """One device, to be entered around driver calls: ``with context: ...``.

    Entering may be nested and used from any thread. ``with context.enqueueing`` costs less, for calls that only put
    work on a stream and that no capture forbids.

    Parameters
    ----------
    ordinal : int
        The device's position in this process.
    uuid : str
        Identity put into errors.
    """

    def __init__(self, ordinal: int, uuid: str) -> None:
        self.ordinal = ordinal
        self.uuid = uuid
        self._lock = threading.Lock()
        self._closed = False
        self._stream = 0
        self._before = threading.local()
        self.enqueueing = _Enqueueing(self)
        with self:
            driver.call("hipMemGetInfo")  # makes the device's context, or says why there is none

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self._closed

    def __enter__(self) -> None:
        self.push()
        try:
            self._stack("modes").append(driver.exchange_capture_mode(_RELAXED))
        except BaseException as error:
            self.pop(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        before = self._stack("modes").pop()
        if before is not None:
            driver.quietly(driver.exchange_capture_mode, before)
        self.pop(error)

    def _stack(self, name: str) -> list[Any]:
        found: list[Any] = self._before.__dict__.setdefault(name, [])
        return found

    def push(self) -> None:
        """Make the device current; every call of this is followed by one of :meth:`pop`."""
        if self._closed:
            raise ClosedError(
                "the device was closed", remedy="open it again with open_device()", backend="hip", device=self.uuid
            )
        before = int(driver.call("hipGetDevice"))
        if before != self.ordinal:
            driver.call("hipSetDevice", self.ordinal)
        self._stack("devices").append(before)

    def pop(self, error: BaseException | None) -> None:
        """Make the earlier device current again, and say in ``error`` which device it is about."""
        before = self._stack("devices").pop()
        if before != self.ordinal:
            # Never hides what went wrong inside; at interpreter exit the runtime may be gone already.
            driver.quietly(driver.attempt, "hipSetDevice", before)
        if isinstance(error, DevIPCError) and not error.device:
            error.backend, error.device = "hip", self.uuid

    def internal_stream(self) -> int:
        """Return the stream for this package's own work (zero fill, canaries, pools); the device is current."""
        with self._lock:
            if not self._stream:
                self._stream = driver.call("hipStreamCreateWithFlags", _NON_BLOCKING)
            return self._stream

    def check_alive(self) -> None:
        """Raise when the device is lost; the device is current. Cheap.

        Raises
        ------
        DeviceLostError
            When a fault has ended the device, or somebody has reset it, which takes this package's own stream away.
        """
        status, _ = driver.attempt("hipStreamIsCapturing", self.internal_stream())
        if status:
            error = error_for("hipStreamIsCapturing", status, driver.name_of(status), device=self.uuid)
            if status == INVALID_STREAM:
                raise DeviceLostError(
                    "the device was reset, and all memory and streams on it are gone",
                    code="device_lost",
                    remedy="end this process; nothing in it may call hipDeviceReset",
                    backend="hip",
                    device=self.uuid,
                    status=error.status,
                )
            raise error

    def close(self) -> None:
        """Give the internal stream back. Idempotent; never raises: it may run at interpreter exit or in a fork."""
        with self._lock:
            if self._closed:
                return
            stream, self._stream = self._stream, 0
        if stream:
            try:
                with self.enqueueing:
                    driver.attempt("hipStreamDestroy", stream)
            except DevIPCError:
                pass
        self._closed = True


class _Enqueueing:
    """The device without its guard of captures: see :class:`Context`."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._context.push()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.pop(error)
