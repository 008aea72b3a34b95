"""Completion checks: each mechanism by its own primitives, and each strategy as a fence.

Owns both sides of these checks. A value must not be seen before the work in front of it is done, must be seen soon
after, and a stream's wait must be releasable by the host. Fences are tried by :mod:`devipc.completion.trial`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from devipc.absence import need_events, need_transfer, need_word_waits, need_word_writes
from devipc.completion.roles import DATA_NBYTES, ProducerRole
from devipc.completion.trial import RemoteRole, run_trial
from devipc.interfaces.backend import Device
from devipc.memfd import PAGE_NBYTES, create_memfd
from devipc.probe.load import Load, loads
from devipc.probe.memory import need_stage
from devipc.probe.partner import CheckFailed, Partner
from devipc.probe.stage import Stage
from devipc.types import POISON_BASE, Mechanism, Strategy

__all__ = ["OpenedEvent", "SharedPage", "check_mechanism", "check_strategy"]

_HOLD_S = 0.02
_OUTLAST_MS = 20
_DATA = 8  # a line of its own
_PAUSE_S = 0.5e-3
_ANOTHER = "use another completion strategy here; report it with `devipc env` and the driver's version"

_NEEDS: dict[Mechanism, tuple[Callable[[Device], object], ...]] = {
    Mechanism.STREAM_MEMOP: (need_word_writes, need_word_waits),
    Mechanism.EVENT: (need_events,),
}


def check_strategy(device: Device, partner: Partner, strategy: Strategy, *, limit_s: float) -> str:
    """Make a fence here, open it in the importer, run the trial and return what was seen."""
    data_fd = create_memfd("devipc-probe", DATA_NBYTES)
    try:
        producer = ProducerRole(device, strategy, data_fd=data_fd)
        with contextlib.closing(producer):
            consumer = RemoteRole.opened(partner.call, producer, data_fd, timeout_s=limit_s)
            with contextlib.closing(consumer):
                return run_trial(strategy, producer, consumer, deadline_s=limit_s, outlast_ms=_OUTLAST_MS)
    finally:
        os.close(data_fd)


def check_mechanism(device: Device, partner: Partner, mechanism: Mechanism, *, limit_s: float) -> str:
    """Try the primitives of one mechanism between the two processes and return what was seen.

    Raises
    ------
    CapabilityError
        When a primitive is absent.
    CheckFailed
        When one does the wrong thing, or nothing within ``limit_s``.
    """
    for need in _NEEDS.get(mechanism, ()):
        need(device)  # what is absent is a "no", whatever else may be missing too
    page_fd = create_memfd("devipc-probe", PAGE_NBYTES)
    try:
        partner.ask("page.open", fds=[page_fd])
        page = SharedPage(device, page_fd)
    finally:
        os.close(page_fd)
    tried = {Mechanism.HOST: _host, Mechanism.EVENT: _events, Mechanism.STREAM_MEMOP: _words}
    seen = tried[mechanism](device, partner, page, limit_s)
    partner.ask("page.close")
    page.close()
    return seen


# --- words ----------------------------------------------------------------------------------------------------------


class SharedPage:
    """One registered page of memory that both processes map; words and a stream that can wait for one.

    Parameters
    ----------
    device : Device
        The device of this process.
    fd : int
        The page; it stays the caller's.
    """

    def __init__(self, device: Device, fd: int) -> None:
        self._stage: Stage = need_stage(device, PAGE_NBYTES, fd=fd)
        self._device = device
        self._words = self._stage.view.cast("Q")
        self._marker = self._stage.transfer.create_marker()
        self.ptr = self._stage.ptr
        """Where a device stores the word."""
        self.data_ptr = self._stage.ptr + 8 * _DATA
        """Where a device puts the data that a word stands for."""

    def look(self) -> tuple[int, int]:
        """Return the word and then the data, as the host sees them now."""
        return self._words[0], self._words[_DATA]

    def store(self, value: int) -> None:
        """Let the host store the word."""
        self._words[0] = value

    def wait(self, value: int) -> None:
        """Let this process's stream wait until the word is at least ``value``."""
        need_word_waits(self._device).wait(self._stage.stream, self.ptr, value)
        self._stage.transfer.record(self._marker, self._stage.stream)

    def passed(self, limit_s: float) -> bool:
        """Return whether the stream went past the last wait within ``limit_s`` seconds."""
        return _within(limit_s, lambda: self._stage.transfer.query_marker(self._marker))

    def close(self) -> None:
        """Give everything back; no wait is pending."""
        self._stage.transfer.destroy_marker(self._marker)
        self._words.release()
        self._stage.close()


def _within(limit_s: float, done: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + limit_s
    while not (found := done()) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    return found


def _words(device: Device, partner: Partner, page: SharedPage, limit_s: float) -> str:
    """Stores by a stream, seen by the other process's host; waits by its stream, released by device and host."""
    writes, load = need_word_writes(device), Load(device)

    def signal(value: int) -> None:
        writes.write(load.stream, page.ptr, value)

    def look(value: int) -> tuple[bool, int]:
        seen = partner.ask("page.look")
        return seen["word"] >= value, seen["behind"]

    words, value = _behind_work(load, page, signal, look, limit_s)
    value += 1
    _hold(partner, value)
    writes.write(load.stream, page.ptr, value)
    _released(partner, limit_s, "by the other process's stream")
    _hold(partner, value + 1)
    page.store(POISON_BASE + 1)
    _released(partner, limit_s, "by the host: a dead peer would block it for ever")
    load.close()
    return f"a stream's store: {words}; a stream's wait held, and was released by the other device and by the host"


def _behind_work(
    load: Load, page: SharedPage, signal: Callable[[int], None], look: Callable[[int], tuple[bool, int]], limit_s: float
) -> tuple[str, int]:
    """Signal behind ever more work until it is seen pending; return words for it and the last number.

    ``look`` returns whether the other process sees the signal, and then the data in front of it.
    """
    number, seen = 0, False

    def reached() -> bool:
        done, data = look(number)
        if done and data != number:
            raise CheckFailed("it is reported before the work in front of it is done", remedy=_ANOTHER)
        return done

    for copies in loads():
        number += 1
        load.submit(copies, number, to=page.data_ptr)
        signal(number)
        if reached():
            continue
        if not (seen := _within(limit_s, reached)):
            raise CheckFailed(f"it was not seen within {limit_s:g} s", remedy=_ANOTHER)
        break
    return f"pending behind {copies} copies, then seen" if seen else "seen; the work was too short to wait for", number


def _hold(partner: Partner, value: int) -> None:
    partner.ask("page.wait", value=value)
    if partner.ask("page.passed", limit_s=_HOLD_S)["passed"]:
        raise CheckFailed("a stream's wait does not hold the stream", remedy=_ANOTHER)


def _released(partner: Partner, limit_s: float, by: str) -> None:
    if not partner.ask("page.passed", limit_s=limit_s)["passed"]:
        raise CheckFailed(f"a stream's wait was not released {by}", remedy=_ANOTHER)


def _host(device: Device, partner: Partner, page: SharedPage, limit_s: float) -> str:
    """Numbers that the host publishes once its own marker is done; the other host sees each with its data."""
    transfer = need_transfer(device)
    load = Load(device)
    marker = transfer.create_marker()
    if transfer.query_marker(marker):
        raise CheckFailed("a marker that was never recorded is done", remedy=_ANOTHER)
    pending = 0
    for number, copies in enumerate((2, 2, 2, *loads()), 1):
        load.submit(copies, number, to=page.data_ptr)
        transfer.record(marker, load.stream)
        pending += not transfer.query_marker(marker)
        if not _within(limit_s, lambda: transfer.query_marker(marker)):
            raise CheckFailed(f"a marker was not done within {limit_s:g} s", remedy=_ANOTHER)
        page.store(number)
        seen = partner.ask("page.look")
        if seen["word"] != number:
            raise CheckFailed("the other process's host does not see a word that this host stored", remedy=_ANOTHER)
        if seen["behind"] != number:
            raise CheckFailed("a marker is done before the work in front of it", remedy=_ANOTHER)
        if pending and number > 3:
            break
    transfer.destroy_marker(marker)
    load.close()
    return f"{number} numbers published behind markers, {pending} of them pending at first, each seen with its data"


# --- events ---------------------------------------------------------------------------------------------------------


class OpenedEvent:
    """The importer's side: one event of the exporter."""

    def __init__(self, device: Device, payload: bytes) -> None:
        self._events = need_events(device)
        self._event = self._events.open(payload)

    def query(self) -> bool:
        """Return the vendor's answer."""
        return self._events.query(self._event)

    def close(self) -> None:
        """Give it back."""
        self._events.destroy(self._event)


def _events(device: Device, partner: Partner, page: SharedPage, limit_s: float) -> str:
    events = need_events(device)
    load = Load(device)
    event = events.create()
    partner.ask("event.open", events.export(event))
    before = partner.ask("event.query")["done"]

    def signal(_: int) -> None:
        events.record(event, load.stream)

    def look(_: int) -> tuple[bool, int]:
        done = bool(partner.ask("event.query")["done"])
        return done, partner.ask("page.look")["behind"]

    seen, _ = _behind_work(load, page, signal, look, limit_s)
    partner.ask("event.close")
    events.destroy(event)
    load.close()
    never = "done" if before else "not done"
    return f"recorded by one process, asked by the other: {seen}; one that was never recorded is called {never}"
