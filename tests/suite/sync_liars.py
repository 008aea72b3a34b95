"""Backends that lie once about words, events, markers, streams or registered memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from devipc.errors import HandleError, UsageError
from devipc.spi import Backend, Capability, HostRegistration, Mechanism
from tests.suite.lying import LIARS, SOON, Disguise, LyingBackend, SyncDisguise, caught_by, store_word

__all__ = ["LIARS"]


def with_sync(**parts: type[Disguise]) -> Backend:
    return LyingBackend(sync=type("Sync", (SyncDisguise,), parts))


# --- words ----------------------------------------------------------------------------------------------------------


class Early(Disguise):
    """Stores a word when it is asked to, not when the stream gets there."""

    def write(self, stream: Any, device_ptr: int, value: int) -> None:
        if device_ptr % 8:
            raise UsageError("alignment")
        store_word(device_ptr, value)


class Never(Disguise):
    """Drops word writes."""

    def write(self, stream: Any, device_ptr: int, value: int) -> None:
        pass


@caught_by("SYNC-067")
def fence_too_early() -> Backend:
    return with_sync(words=Early)


@caught_by("SYNC-068", "CRASH-061", "SYNC-072", "SYNC-075", "SYNC-076", "SYNC-097", options=SOON)
def fence_never_done() -> Backend:
    return with_sync(words=Never)


@caught_by("SYNC-208")
def word_before_data() -> Backend:
    return with_sync(words=Early)


@caught_by("SYNC-201")
def torn_word() -> Backend:
    class Words(Disguise):
        """Stores 32 of the 64 bits."""

        def write(self, stream: Any, device_ptr: int, value: int) -> None:
            self.inner.write(stream, device_ptr, value & 0xFFFFFFFF)

    return with_sync(words=Words)


@caught_by("SYNC-201")
def wide_word() -> Backend:
    class Words(Disguise):
        """Stores the next word too."""

        def write(self, stream: Any, device_ptr: int, value: int) -> None:
            self.inner.write(stream, device_ptr, value)
            self.inner.write(stream, device_ptr + 8, value)

    return with_sync(words=Words)


@caught_by("SYNC-209")
def rounds_addresses() -> Backend:
    class Words(Disguise):
        """Takes a word off its alignment for the one below."""

        def write(self, stream: Any, device_ptr: int, value: int) -> None:
            self.inner.write(stream, device_ptr & ~7, value)

    return with_sync(words=Words)


@caught_by("ORD-082")
def words_of_32_bits() -> Backend:
    class Words(Disguise):
        """Stores 32 of the 64 bits."""

        def write(self, stream: Any, device_ptr: int, value: int) -> None:
            self.inner.write(stream, device_ptr, value & 0xFFFFFFFF)

    return with_sync(words=Words)


@caught_by("SYNC-202")
def wait_does_not_wait() -> Backend:
    class Waits(Disguise):
        """Lets every wait pass."""

        def wait(self, stream: Any, device_ptr: int, value: int) -> None:
            pass

    return with_sync(waits=Waits)


@caught_by("SYNC-202")
def wait_is_exact() -> Backend:
    class Waits(Disguise):
        """Waits until the word is equal; a larger one passes unseen. Modelled by waiting for the poison range only."""

        def wait(self, stream: Any, device_ptr: int, value: int) -> None:
            self.inner.wait(stream, device_ptr, 2**62 if value == 1000 else value)

    return with_sync(waits=Waits)


@caught_by("CRASH-060", "SYNC-095")
def wait_ignores_poison() -> Backend:
    class Waits(Disguise):
        """A wait that poison does not end: stands behind a second one that nobody satisfies."""

        def wait(self, stream: Any, device_ptr: int, value: int) -> None:
            self.inner.wait(stream, device_ptr, value)
            if (
                value and device_ptr % 4096 == 0
            ):  # fences keep their word at the start of a page; latches of the suite do not
                self.inner.wait(stream, device_ptr, 2**63 - 1)

    return with_sync(waits=Waits)


# --- events ---------------------------------------------------------------------------------------------------------


@caught_by("SYNC-205", "SYNC-078")
def event_always_done() -> Backend:
    class Events(Disguise):
        """Calls every event done."""

        def query(self, event: Any) -> bool:
            return True

    return with_sync(event_form=Events)


@caught_by("SYNC-087")
def event_forgets_records() -> Backend:
    class Events(Disguise):
        """Takes 32 records of an event and drops the later ones."""

        def record(self, event: Any, stream: Any) -> None:
            counts = self.device.__dict__.setdefault("record_counts", {})
            counts[id(event)] = counts.get(id(event), 0) + 1
            if counts[id(event)] <= 32:
                self.inner.record(event, stream)

    return with_sync(event_form=Events)


@caught_by("SYNC-071")
def bogus_event_is_done() -> Backend:
    class Events(Disguise):
        """Opens what it does not know as an event that is done."""

        def open(self, payload: bytes) -> Any:
            try:
                return self.inner.open(payload)
            except HandleError:
                if len(payload) != 48 and len(payload) < 40:
                    raise
                return self.inner.create()

    return with_sync(event_form=Events)


# --- markers, streams, copies ---------------------------------------------------------------------------------------


@caught_by("SYNC-203")
def marker_always_done() -> Backend:
    class Transfer(Disguise):
        """Calls every marker done."""

        def query_marker(self, marker: Any) -> bool:
            return True

    return LyingBackend(transfer=Transfer)


@caught_by("SYNC-203")
def new_marker_is_done() -> Backend:
    class Transfer(Disguise):
        """Calls a marker done that was never recorded."""

        def query_marker(self, marker: Any) -> bool:
            return marker.point is None or bool(self.inner.query_marker(marker))

    return LyingBackend(transfer=Transfer)


@caught_by("SYNC-204")
def wait_marker_does_nothing() -> Backend:
    class Transfer(Disguise):
        """Lets streams pass markers."""

        def wait_marker(self, stream: Any, marker: Any) -> None:
            pass

    return LyingBackend(transfer=Transfer)


@caught_by("SYNC-066")
def copies_overtake() -> Backend:
    class Transfer(Disguise):
        """Copies on a stream of its own, so that copies pass waits and each other."""

        def copy(self, stream: Any, dst: int, src: int, nbytes: int) -> None:
            timer = threading.Timer(0.05, self.inner.copy, (stream, dst, src, nbytes))
            timer.daemon = True
            timer.start()

    return LyingBackend(transfer=Transfer)


@caught_by("SYNC-110")
def one_thread_only() -> Backend:
    owner = threading.get_ident()

    class Transfer(Disguise):
        """Knows its device on the thread that opened it."""

        def create_stream(self, **options: Any) -> Any:
            if threading.get_ident() != owner:
                raise RuntimeError("no current context")
            return self.inner.create_stream(**options)

    return LyingBackend(transfer=Transfer)


@caught_by("LIFE-056")
def streams_leave_threads() -> Backend:
    class Transfer(Disguise):
        """Starts a thread with each stream that is never ended."""

        def create_stream(self, **options: Any) -> Any:
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
            return self.inner.create_stream(**options)

    return LyingBackend(transfer=Transfer)


@caught_by("SYNC-213")
def registers_anything() -> Backend:
    class Transfer(Disguise):
        """Takes registrations that it should refuse."""

        def register_host(self, address: int, nbytes: int) -> Any:
            try:
                return self.inner.register_host(address, nbytes)
            except UsageError:
                return HostRegistration(address, nbytes, address, None)

        def unregister_host(self, registration: HostRegistration) -> None:
            if registration.token is not None:
                self.inner.unregister_host(registration)

    return LyingBackend(transfer=Transfer)


def stuck() -> Backend:
    """Never return from a call of this process; not in the list, for the watchdog ends it."""

    class Transfer(Disguise):
        def create_marker(self) -> Any:
            if "DEVIPC_STUCK_PID" not in os.environ:
                os.environ["DEVIPC_STUCK_PID"] = str(os.getpid())
            if os.environ["DEVIPC_STUCK_PID"] == str(os.getpid()):
                time.sleep(600)
            return self.inner.create_marker()

    return LyingBackend(transfer=Transfer)


def without_sync() -> Backend:
    """Is honest about having no words and no events."""

    class Sync(SyncDisguise):
        word_writes = None
        word_waits = None
        events = None

        def mechanisms(self) -> Mapping[Mechanism, Capability]:
            absent = Capability.no("left out")
            return {**self.inner.mechanisms(), Mechanism.STREAM_MEMOP: absent, Mechanism.EVENT: absent}

    return LyingBackend(sync=Sync)
