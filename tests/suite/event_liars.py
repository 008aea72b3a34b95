"""Backends that lie once about words and events that several fences or processes use."""

from __future__ import annotations

from typing import Any

from devipc.errors import ResourceExhausted, UsageError
from devipc.spi import Backend, HostRegistration
from tests.suite.lying import LIARS, Disguise, LyingBackend, SyncDisguise, caught_by, store_word

__all__ = ["LIARS"]

PAGE = 4096


def with_sync(**parts: type[Disguise]) -> Backend:
    return LyingBackend(sync=type("Sync", (SyncDisguise,), parts))


class Marking(Disguise):
    """Leaves a mark in the first line of each page that it registers."""

    place = 0
    mark = 1

    def register_host(self, address: int, nbytes: int) -> HostRegistration:
        made: HostRegistration = self.inner.register_host(address, nbytes)
        if nbytes == PAGE:
            store_word(address + self.place, self.mark)
        return made


@caught_by("SYNC-069")
def registering_sets_the_value() -> Backend:
    """Leaves the mark where a fence keeps its value."""
    return LyingBackend(transfer=Marking)


@caught_by("SYNC-077")
def registering_sets_what_was_issued() -> Backend:
    """Leaves the mark where a fence keeps what was issued."""
    return LyingBackend(transfer=type("Transfer", (Marking,), {"place": 16}))


@caught_by("SYNC-207")
def registering_sets_the_status() -> Backend:
    """Leaves the mark where a fence keeps its failure."""
    return LyingBackend(transfer=type("Transfer", (Marking,), {"place": 8, "mark": 5}))


@caught_by("ORD-081", "ORD-084")
def values_go_back() -> Backend:
    class Words(Disguise):
        """Stores each value, and the one before it once more."""

        def write(self, stream: Any, device_ptr: int, value: int) -> None:
            self.inner.write(stream, device_ptr, value)
            if value > 1:
                self.inner.write(stream, device_ptr, value - 1)

    return with_sync(words=Words)


@caught_by("ORD-201")
def one_word_for_all_fences() -> Backend:
    class Words(Disguise):
        """Stores every value of every fence where the first one is."""

        def write(self, stream: Any, device_ptr: int, value: int) -> None:
            first = self.device.__dict__.setdefault("first_word", device_ptr)
            self.inner.write(stream, first if device_ptr % PAGE == 0 and value else device_ptr, value)

    return with_sync(words=Words)


@caught_by("ORD-202", "STATE-202")
def one_more_than_was_signalled() -> Backend:
    class Words(Disguise):
        """Stores the next value."""

        def write(self, stream: Any, device_ptr: int, value: int) -> None:
            self.inner.write(stream, device_ptr, value + 1 if value and device_ptr % PAGE == 0 else value)

    return with_sync(words=Words)


@caught_by("SYNC-210")
def wait_is_for_more() -> Backend:
    class Waits(Disguise):
        """Waits until a word is larger, not equal."""

        def wait(self, stream: Any, device_ptr: int, value: int) -> None:
            self.inner.wait(stream, device_ptr, value + 1 if value == 7 else value)

    return with_sync(waits=Waits)


@caught_by("SYNC-211")
def waits_see_host_stores_alone() -> Backend:
    class Words(Disguise):
        """Stores that waits of other streams never see: they go to a place beside it."""

        def write(self, stream: Any, device_ptr: int, value: int) -> None:
            self.inner.write(stream, device_ptr + 8 if 0 < value <= 20 else device_ptr, value)

    return with_sync(words=Words)


@caught_by("SYNC-215")
def wait_rounds_addresses() -> Backend:
    class Waits(Disguise):
        """Waits for the word below one off its alignment."""

        def wait(self, stream: Any, device_ptr: int, value: int) -> None:
            self.inner.wait(stream, device_ptr & ~7, value)

    return with_sync(waits=Waits)


@caught_by("SYNC-214")
def words_of_62_bits() -> Backend:
    class Words(Disguise):
        """Keeps 62 bits of a value."""

        def write(self, stream: Any, device_ptr: int, value: int) -> None:
            self.inner.write(stream, device_ptr, value & (2**62 - 1))

    return with_sync(words=Words)


@caught_by("SYNC-096")
def registers_memory_that_is_not_there() -> Backend:
    class Transfer(Disguise):
        """Takes a registration of memory that is not mapped."""

        def register_host(self, address: int, nbytes: int) -> Any:
            try:
                return self.inner.register_host(address, nbytes)
            except UsageError as error:
                if error.code != "not_mapped":
                    raise
                return HostRegistration(address, nbytes, address, None)

        def unregister_host(self, registration: HostRegistration) -> None:
            if registration.token is not None:
                self.inner.unregister_host(registration)

    return LyingBackend(transfer=Transfer)


@caught_by("SYNC-116")
def destroyed_events_stay() -> Backend:
    class Events(Disguise):
        """Counts events that were destroyed."""

        def create(self) -> Any:
            count = self.device.__dict__["made_events"] = self.device.__dict__.get("made_events", 0) + 1
            if count > 512:
                raise ResourceExhausted("all events are in use", remedy="use fewer")
            return self.inner.create()

    return with_sync(event_form=Events)


@caught_by("SYNC-216")
def exports_another_event() -> Backend:
    class Events(Disguise):
        """Makes a new event for every export but the first."""

        def export(self, event: Any) -> bytes:
            known = self.device.__dict__.setdefault("exported_events", set())
            if id(event) in known:
                event = self.inner.create()
            known.add(id(event))
            payload: bytes = self.inner.export(event)
            return payload

    return with_sync(event_form=Events)


@caught_by("SYNC-218")
def the_first_destroys_for_all() -> Backend:
    class Events(Disguise):
        """Gives one object to all who open an event, and destroys it with the first."""

        def open(self, payload: bytes) -> Any:
            known = self.device.__dict__.setdefault("opened_events", {})
            if payload not in known or known[payload].closed:
                known[payload] = self.inner.open(payload)
            return known[payload]

        def destroy(self, event: Any) -> None:
            if not event.closed:
                self.inner.destroy(event)

    return with_sync(event_form=Events)
