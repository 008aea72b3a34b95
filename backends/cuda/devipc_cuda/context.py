"""The device's primary context: taken once, made current around every call, given back at the end.

Owns the promise that the caller's current context is the same before and after each call, on every thread, also on
threads that have none, and the promise that no call of ours breaks a graph that another thread captures. Frameworks use
the primary context too, so pointers are valid on both sides.

Sources: while any thread captures in global mode, which is what frameworks do, "potentially unsafe" calls (event
queries, allocation, synchronisation) of all threads fail with 900 and invalidate that capture, unless the calling
thread is in relaxed mode (CUDA driver API, cuThreadExchangeStreamCaptureMode; seen so on an H200, driver 580).
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from devipc.spi import ClosedError, DevIPCError
from devipc_cuda import driver

__all__ = ["Context"]


class Context:
    """One device's primary context, to be entered around driver calls: ``with context: ...``.

    Entering may be nested and used from any thread. It costs four small driver calls; ``with context.enqueueing`` costs
    two, for calls that only put work on a stream and that no capture forbids.

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
        self._device = driver.call("cuDeviceGet", ordinal)
        self._stream: Any = None
        self._modes = threading.local()
        self.enqueueing = _Enqueueing(self)
        try:
            self._context = driver.call("cuDevicePrimaryCtxRetain", self._device)
        except DevIPCError as error:
            error.device = uuid
            raise

    @property
    def device(self) -> Any:
        """The driver's device object."""
        return self._device

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self._context is None

    def __enter__(self) -> None:
        self.push()
        modes: list[Any] = self._modes.__dict__.setdefault("stack", [])
        try:
            status, before = driver.attempt("cuThreadExchangeStreamCaptureMode", driver.relaxed_capture())
        except BaseException as error:
            self.pop(error)
            raise
        modes.append(None if status else before)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        before = self._modes.stack.pop()
        if before is not None:
            driver.quietly(driver.attempt, "cuThreadExchangeStreamCaptureMode", before)
        self.pop(error)

    def push(self) -> None:
        """Make the context current; every call of this is followed by one of :meth:`pop`."""
        context = self._context
        if context is None:
            raise ClosedError(
                "the device was closed", remedy="open it again with open_device()", backend="cuda", device=self.uuid
            )
        driver.call("cuCtxPushCurrent", context)

    def pop(self, error: BaseException | None) -> None:
        """Make the earlier context current again, and say in ``error`` which device it is about."""
        # Never hides what went wrong inside; at interpreter exit the driver may be gone already.
        driver.quietly(driver.attempt, "cuCtxPopCurrent")
        if isinstance(error, DevIPCError) and not error.device:
            error.backend, error.device = "cuda", self.uuid

    def internal_stream(self) -> Any:
        """Return the stream for this package's own work (zero fill, pool calls); the context is current."""
        with self._lock:
            if self._stream is None:
                self._stream = driver.call("cuStreamCreate", 1)
            return self._stream

    def check_alive(self) -> None:
        """Raise when the device is lost; the context is current. Cheap.

        Some calls do not ask: after a fault an H200 (driver 580) still creates, maps and exports physical memory.

        Raises
        ------
        DeviceLostError
            When a fault has ended the context.
        """
        driver.call("cuStreamIsCapturing", self.internal_stream())

    def close(self) -> None:
        """Give the context back. Idempotent; never raises, since it may run at interpreter exit or in a fork."""
        with self._lock:
            context, self._context = self._context, None
            stream, self._stream = self._stream, None
        if context is None:
            return
        try:
            if stream is not None and driver.attempt("cuCtxPushCurrent", context)[0] == 0:
                driver.attempt("cuStreamDestroy", stream)
                driver.attempt("cuCtxPopCurrent")
            driver.attempt("cuDevicePrimaryCtxRelease", self._device)
        except DevIPCError:
            pass


class _Enqueueing:
    """The context without its guard of captures: see :class:`Context`."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._context.push()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.pop(error)
