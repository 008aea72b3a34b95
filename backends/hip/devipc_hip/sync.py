"""Sync primitives of one device: stream writes and waits on 64-bit words, and interprocess events.

Owns the driver calls behind them and the refusal of capturing streams. What a fence is, which waits are legal, and
poison are the core's; whether this runtime's events can be trusted is :mod:`devipc_hip.event_proof`'s to find out.

Sources: the store of ``hipStreamWriteValue64`` makes no promise about the visibility of the stream's earlier work, and
an event made with ``hipEventReleaseToSystem`` releases it to the whole system when it is recorded (HIP runtime API,
event and stream memory operations), so one is recorded in front of each store; a wait compares with mask, and with
registered host memory it works unless ``GPU_STREAMOPS_CP_WAIT`` is set; before the runtime used signals for events
(7.3) a query of an imported event always said done (ROCm/hip 3778), an open of a stale one made a new one, and an open
could block for ever (LMCache 4419).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

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
from devipc_hip import driver
from devipc_hip.context import Context
from devipc_hip.event_proof import EventProof
from devipc_hip.opening import open_in_time
from devipc_hip.payload import HANDLE_NBYTES
from devipc_hip.status import NOT_READY, NOT_SUPPORTED, error_for
from devipc_hip.streams import native, refuse_capture

__all__ = ["HipEvent", "HipEvents", "HipSync", "HipWordWaits", "HipWordWrites", "query"]

_WAIT_GEQ = 0
_ALL_BITS = 2**64 - 1
_EVENT_FLAGS = 4 | 2  # interprocess, which is only allowed without timing
_RELEASE_TO_SYSTEM = 2 | 0x80000000  # without timing; a negative number in the bindings
_PAYLOAD_VERSION = b"\x01"
_WORDS = "CanUseStreamWaitValue"


def _check_word(device_ptr: int, value: int) -> None:
    if device_ptr <= 0 or device_ptr % 8:
        raise UsageError(
            "the word's device address is not 8-byte aligned", remedy="use a word of a registered map", backend="hip"
        )
    if not 0 <= value < 2**63:
        raise UsageError(f"word value {value} is outside of 0 .. 2**63-1", remedy="waits compare signed", backend="hip")


class HipWordWrites:
    """Stream stores on registered words, each behind a release of the stream's work to the whole system."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._release = 0

    def write(self, stream: Stream, device_ptr: int, value: int) -> None:
        """Enqueue the store of ``value`` at ``device_ptr`` behind all work of ``stream``. Does not wait."""
        _check_word(device_ptr, value)
        with self._context.enqueueing:
            refuse_capture(stream, "a word write")
            handle = native(stream)
            driver.call("hipEventRecord", self._event(), handle)
            driver.call("hipStreamWriteValue64", handle, device_ptr, value, 0)

    def _event(self) -> int:
        with self._lock:
            if not self._release:
                self._release = driver.call("hipEventCreateWithFlags", _RELEASE_TO_SYSTEM)
            return self._release

    def close(self) -> None:
        """Give the event back."""
        with self._lock:
            release, self._release = self._release, 0
        if release:
            with self._context.enqueueing:
                driver.attempt("hipEventDestroy", release)


class HipWordWaits:
    """Stream waits on registered words."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def wait(self, stream: Stream, device_ptr: int, value: int) -> None:
        """Enqueue a wait until the word at ``device_ptr`` is ``>= value``. Does not wait itself."""
        _check_word(device_ptr, value)
        with self._context.enqueueing:
            refuse_capture(stream, "a word wait")
            driver.call("hipStreamWaitValue64", native(stream), device_ptr, value, _WAIT_GEQ, _ALL_BITS)


class HipEvent:
    """One interprocess event, made here or opened from a peer."""

    __slots__ = ("native", "opened")

    def __init__(self, native: int, *, opened: bool) -> None:
        self.native: int | None = native
        self.opened = opened


class HipEvents:
    """Interprocess events, of a runtime whose events have proven themselves at the first use."""

    def __init__(self, context: Context, proof: EventProof) -> None:
        self._context = context
        self._proof = proof
        self._lock = threading.Lock()

    def create(self) -> HipEvent:
        """Make an exportable event, without timing. The first call blocks while child processes try events."""
        self._proof.demand()
        with self._context:
            return HipEvent(driver.call("hipEventCreateWithFlags", _EVENT_FLAGS), opened=False)

    def export(self, event: InterprocessEvent) -> bytes:
        """Return the bytes by which a peer opens ``event``; it must live until every peer has closed it."""
        own = _live(event)
        if own.opened:
            raise UsageError("an opened event cannot be exported again", remedy="its maker exports it", backend="hip")
        with self._context:
            handle: bytes = driver.call("hipIpcGetEventHandle", own.native)
            return _PAYLOAD_VERSION + handle

    def open(self, payload: bytes) -> HipEvent:
        """Open a peer's event, within a deadline. The first call blocks while child processes try events."""
        if len(payload) != 1 + HANDLE_NBYTES or payload[:1] != _PAYLOAD_VERSION:
            raise HandleError(
                f"event payload of {len(payload)} bytes, expected {1 + HANDLE_NBYTES} of version 1",
                code="malformed",
                remedy="both sides must run the same version of devipc-hip",
                backend="hip",
            )
        self._proof.demand()
        opened = open_in_time(
            self._context,
            lambda: int(driver.call("hipIpcOpenEventHandle", payload[1:])),
            lambda event: driver.call("hipEventDestroy", event),
            "hipIpcOpenEventHandle",
        )
        return HipEvent(opened, opened=True)

    def record(self, event: InterprocessEvent, stream: Stream) -> None:
        """Set the event behind all work of ``stream`` so far. Only its maker records it."""
        own = _live(event)
        if own.opened:
            raise UsageError("an opened event is only queried", remedy="its maker records it", backend="hip")
        with self._context.enqueueing:
            refuse_capture(stream, "the record of an interprocess event")
            driver.call("hipEventRecord", own.native, native(stream))

    def query(self, event: InterprocessEvent) -> bool:
        """Return the runtime's answer, which is True for an event that was never recorded."""
        own = _live(event)
        assert own.native is not None
        with self._context:
            return query(own.native)

    def destroy(self, event: InterprocessEvent) -> None:
        """Give an event back, made or opened."""
        own = _live(event)
        with self._lock:
            found, own.native = own.native, None
        if found is not None:
            with self._context:
                driver.call("hipEventDestroy", found)


def query(event: int) -> bool:
    """Return whether the event is complete; the device is current."""
    status, _ = driver.attempt("hipEventQuery", event)
    if status not in (0, NOT_READY):
        raise error_for("hipEventQuery", status, driver.name_of(status))
    return status == 0


def _live(event: InterprocessEvent) -> HipEvent:
    if not isinstance(event, HipEvent) or event.native is None:
        raise UsageError("no live event of this backend", remedy="use an event before it is destroyed", backend="hip")
    return event


class HipSync:
    """Sync IPC over the HIP runtime."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._no_words = _why_no_words(context)
        absent = self._no_words is not None
        self._word_writes = None if absent else HipWordWrites(context)
        self._word_waits = None if absent else HipWordWaits(context)
        self._proof = EventProof(context.ordinal, driver.runtime_version())
        self._events = HipEvents(context, self._proof)

    @property
    def word_writes(self) -> HipWordWrites | None:
        """Stream stores on registered words; None where attribute and runtime both refuse them."""
        return self._word_writes

    @property
    def word_waits(self) -> HipWordWaits | None:
        """Stream waits on registered words; None where :attr:`word_writes` is."""
        return self._word_waits

    @property
    def events(self) -> HipEvents | None:
        """Interprocess events; None where the runtime is too old for them, or they were tried and failed."""
        return None if self._proof.refusal() else self._events

    def mechanisms(self) -> Mapping[Mechanism, Capability]:
        """Return the runtime's claims; attributes were seen wrong in both directions, so none alone is a verdict."""
        words = self._no_words
        if words is None:
            claimed = driver.device_attribute(_WORDS, self._context.ordinal)
            said = {None: "is not known", 0: "says no"}.get(claimed, "says yes")
            words = Capability(
                Verdict.UNTESTED, f"attribute {_WORDS}: {claimed}", f"the attribute {said}; a live check decides"
            )
        return {
            Mechanism.STREAM_MEMOP: words,
            Mechanism.EVENT: self._proof.capability(),
            Mechanism.HOST: Capability.untested("needs local markers and host memory only; a live check decides"),
        }

    def close(self) -> None:
        """Give back what words need."""
        if self._word_writes is not None:
            self._word_writes.close()


def _why_no_words(context: Context) -> Capability | None:
    """Return the refusal of words, which needs two witnesses: the attribute, and a real store. None is an offer."""
    claimed = driver.device_attribute(_WORDS, context.ordinal)
    if claimed:
        return None
    try:
        with context:
            status = _try_store(context)
    except CapabilityError as error:  # the runtime does not have the call
        return _no_words(claimed, str(error))
    except DevIPCError:  # a failure of another kind proves nothing; whoever uses a word will meet it
        return None
    return _no_words(claimed, f"hipStreamWriteValue64 -> {status}") if status == NOT_SUPPORTED else None


def _try_store(context: Context) -> int:
    """Return the runtime's answer to one store into host memory of its own; the device is current."""
    address = int(driver.call("hipHostMalloc", 8, 0))
    try:
        stream = context.internal_stream()
        status, _ = driver.attempt("hipStreamWriteValue64", stream, address, 0, 0)
        if status == 0:
            driver.call("hipStreamSynchronize", stream)
    finally:
        driver.quietly(driver.call, "hipHostFree", address)
    return status


def _no_words(claimed: int | None, evidence: str) -> Capability:
    return Capability.no(
        "this runtime has no 64-bit stream memory operations here: its attribute and a live call both say so",
        remedy="use host_flag, which copies the word, or polling",
        evidence=f"attribute {_WORDS}: {claimed}; {evidence}",
    )
