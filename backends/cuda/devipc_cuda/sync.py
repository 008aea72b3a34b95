"""Sync primitives of one device: stream writes and waits on 64-bit words, and interprocess events.

Owns the driver calls behind them and the refusal of capturing streams. What a fence is, which waits are legal, and
poison are the core's.

Sources: default write flags order the store behind the stream's earlier writes, visible system-wide, and the default
wait compares ``(int64)(*addr - value) >= 0`` (CUDA driver API, stream memory operations). A pending wait blocks module
loading, ``cuMemFree`` and ``cuMemHostUnregister`` of its process.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from devipc.spi import (
    Capability,
    CapabilityError,
    DevIPCError,
    HandleError,
    InterprocessEvent,
    Mechanism,
    Stream,
    UsageError,
    Verdict,
)
from devipc_cuda import driver
from devipc_cuda.context import Context
from devipc_cuda.status import NOT_READY, NOT_SUPPORTED, error_for
from devipc_cuda.streams import native, refuse_capture

__all__ = ["CudaEvent", "CudaEvents", "CudaSync", "CudaWordWaits", "CudaWordWrites"]

_WRITE_DEFAULT = 0  # with a memory barrier
_WAIT_GEQ = 0
_EVENT_FLAGS = 4 | 2  # interprocess, which is only allowed without timing
_PAYLOAD_VERSION = b"\x01"
_WORDS = "CAN_USE_64_BIT_STREAM_MEM_OPS"


def _check_word(device_ptr: int, value: int) -> None:
    if device_ptr <= 0 or device_ptr % 8:
        raise UsageError(
            "the word's device address is not 8-byte aligned", remedy="use a word of a registered map", backend="cuda"
        )
    if not 0 <= value < 2**63:
        raise UsageError(
            f"word value {value} is outside of 0 .. 2**63-1", remedy="waits compare signed", backend="cuda"
        )


class CudaWordWrites:
    """Stream stores on registered words."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def write(self, stream: Stream, device_ptr: int, value: int) -> None:
        """Enqueue the store of ``value`` at ``device_ptr`` behind all work of ``stream``. Does not wait."""
        _check_word(device_ptr, value)
        with self._context.enqueueing:
            refuse_capture(stream, "a word write")
            driver.call("cuStreamWriteValue64", native(stream), device_ptr, value, _WRITE_DEFAULT)


class CudaWordWaits:
    """Stream waits on registered words."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def wait(self, stream: Stream, device_ptr: int, value: int) -> None:
        """Enqueue a wait until the word at ``device_ptr`` is ``>= value``. Does not wait itself."""
        _check_word(device_ptr, value)
        with self._context.enqueueing:
            refuse_capture(stream, "a word wait")
            driver.call("cuStreamWaitValue64", native(stream), device_ptr, value, _WAIT_GEQ)


class CudaEvent:
    """One interprocess event, made here or opened from a peer."""

    __slots__ = ("native", "opened")

    def __init__(self, native: Any, *, opened: bool) -> None:
        self.native = native
        self.opened = opened


class CudaEvents:
    """Interprocess events."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = threading.Lock()

    def create(self) -> CudaEvent:
        """Make an exportable event, without timing."""
        with self._context:
            return CudaEvent(driver.call("cuEventCreate", _EVENT_FLAGS), opened=False)

    def export(self, event: InterprocessEvent) -> bytes:
        """Return the bytes by which a peer opens ``event``; it must live until every peer has closed it."""
        own = _live(event)
        if own.opened:
            raise UsageError("an opened event cannot be exported again", remedy="its maker exports it", backend="cuda")
        with self._context:
            return _PAYLOAD_VERSION + driver.handle_bytes(driver.call("cuIpcGetEventHandle", own.native))

    def open(self, payload: bytes) -> CudaEvent:
        """Open a peer's event; may block in the driver."""
        if len(payload) != 1 + driver.HANDLE_NBYTES or payload[:1] != _PAYLOAD_VERSION:
            raise HandleError(
                f"event payload of {len(payload)} bytes, expected {1 + driver.HANDLE_NBYTES} of version 1",
                code="malformed",
                remedy="both sides must run the same version of devipc-cuda",
                backend="cuda",
            )
        with self._context:
            handle = driver.handle_from_bytes("CUipcEventHandle", payload[1:])
            return CudaEvent(driver.call("cuIpcOpenEventHandle", handle), opened=True)

    def record(self, event: InterprocessEvent, stream: Stream) -> None:
        """Set the event behind all work of ``stream`` so far. Only its maker records it."""
        own = _live(event)
        if own.opened:
            raise UsageError("an opened event is only queried", remedy="its maker records it", backend="cuda")
        with self._context.enqueueing:
            refuse_capture(stream, "the record of an interprocess event")
            driver.call("cuEventRecord", own.native, native(stream))

    def query(self, event: InterprocessEvent) -> bool:
        """Return the driver's answer, which is True for an event that was never recorded."""
        own = _live(event)
        with self._context:
            return query(own.native)

    def destroy(self, event: InterprocessEvent) -> None:
        """Give an event back, made or opened."""
        own = _live(event)
        with self._lock:
            found, own.native = own.native, None
        if found is not None:
            with self._context:
                driver.call("cuEventDestroy", found)


def query(event: Any) -> bool:
    """Return whether the driver event is complete; the context is current."""
    status, _ = driver.attempt("cuEventQuery", event)
    if status not in (0, NOT_READY):
        raise error_for("cuEventQuery", status, driver.name_of(status))
    return status == 0


def _live(event: InterprocessEvent) -> CudaEvent:
    if not isinstance(event, CudaEvent) or event.native is None:
        raise UsageError("no live event of this backend", remedy="use an event before it is destroyed", backend="cuda")
    return event


class CudaSync:
    """Sync IPC over the driver API."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._no_words = _why_no_words(context)
        absent = self._no_words is not None
        self._word_writes = None if absent else CudaWordWrites(context)
        self._word_waits = None if absent else CudaWordWaits(context)
        self._events = CudaEvents(context)

    @property
    def word_writes(self) -> CudaWordWrites | None:
        """Stream stores on registered words; None where attribute and driver both refuse them."""
        return self._word_writes

    @property
    def word_waits(self) -> CudaWordWaits | None:
        """Stream waits on registered words; None where :attr:`word_writes` is."""
        return self._word_waits

    @property
    def events(self) -> CudaEvents:
        """Interprocess events."""
        return self._events

    def mechanisms(self) -> Mapping[Mechanism, Capability]:
        """Return the driver's claims; attributes were seen wrong in both directions, so none alone is a verdict."""
        device = self._context.device
        events = driver.device_attribute("IPC_EVENT_SUPPORTED", device)
        words = self._no_words
        if words is None:
            words = _claim(_WORDS, driver.device_attribute(_WORDS, device))
        return {
            Mechanism.STREAM_MEMOP: words,
            Mechanism.EVENT: _claim("IPC_EVENT_SUPPORTED", events),
            Mechanism.HOST: Capability.untested("needs local markers and host memory only; a live check decides"),
        }


def _why_no_words(context: Context) -> Capability | None:
    """Return the refusal of words, which needs two witnesses: the attribute, and a real store. None is an offer."""
    claimed = driver.device_attribute(_WORDS, context.device)
    if claimed:
        return None
    try:
        with context:
            status = _try_store(context)
    except CapabilityError as error:  # the driver does not have the call
        return _no_words(claimed, str(error))
    except DevIPCError:  # a failure of another kind proves nothing; whoever uses a word will meet it
        return None
    return _no_words(claimed, f"cuStreamWriteValue64 -> {status}") if status == NOT_SUPPORTED else None


def _try_store(context: Context) -> int:
    """Return the driver's answer to one store into host memory of its own; the context is current."""
    address = driver.call("cuMemHostAlloc", 8, 0)
    try:
        stream = context.internal_stream()
        status, _ = driver.attempt("cuStreamWriteValue64", stream, int(address), 0, _WRITE_DEFAULT)
        if status == 0:
            driver.call("cuStreamSynchronize", stream)
    finally:
        driver.quietly(driver.call, "cuMemFreeHost", address)
    return status


def _no_words(claimed: int | None, evidence: str) -> Capability:
    return Capability.no(
        "this driver has no 64-bit stream memory operations here: its attribute and a live call both say so",
        remedy="use host_flag, which copies the word, or polling",
        evidence=f"attribute {_WORDS}: {claimed}; {evidence}",
    )


def _claim(attribute: str, value: int | None) -> Capability:
    said = {None: "is not known", 0: "says no"}.get(value, "says yes")
    return Capability(
        Verdict.UNTESTED, f"attribute {attribute}: {value}", f"the driver's attribute {said}; a live check decides"
    )
