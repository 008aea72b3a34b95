"""Completion checks: each mechanism by its own primitives, and each strategy as a fence.

Owns both sides of these checks. A value must not be seen before the work in front of it is done, must be seen soon
after, and a stream's wait must be releasable by the host. Fences are tried by :mod:`devipc.completion.trial`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from functools import partial

from devipc.completion.half import need_transfer
from devipc.completion.roles import DATA_NBYTES, ProducerRole
from devipc.completion.trial import RemoteRole, run_trial
from devipc.errors import CapabilityError
from devipc.interfaces.backend import Device
from devipc.interfaces.sync import DeviceSyncIPC, InterprocessEvents, WordWaits
from devipc.memfd import PAGE_NBYTES, create_memfd
from devipc.probe.load import Load, loads
from devipc.probe.memory import need_stage
from devipc.probe.partner import CheckFailed, Partner
from devipc.probe.stage import Stage
from devipc.types import POISON_BASE, Mechanism, Strategy

__all__ = ["OpenedEvent", "SharedPage", "check_mechanism", "check_strategy"]

_HOLD_S = 0.02
_PAUSE_S = 0.5e-3
_LATE_S = 5e-3
"""How late a marker may be that lies in front of what was seen already."""
_ANOTHER = "use another completion strategy here; report it with `devipc env` and the driver's version"


def check_strategy(device: Device, partner: Partner, strategy: Strategy, *, limit_s: float) -> str:
    """Make a fence here, open it in the importer, run the trial and return what was seen."""
    data_fd = create_memfd("devipc-probe", DATA_NBYTES)
    try:
        producer = ProducerRole(device, strategy, data_fd=data_fd)
        with contextlib.closing(producer):
            consumer = RemoteRole.opened(partner.call, producer, data_fd, timeout_s=limit_s)
            with contextlib.closing(consumer):
                return run_trial(strategy, producer, consumer, deadline_s=limit_s)
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
    if mechanism is Mechanism.EVENT:
        return _events(device, partner, limit_s)
    page_fd = create_memfd("devipc-probe", PAGE_NBYTES)
    try:
        partner.ask("page.open", fds=[page_fd])
        page = SharedPage(device, page_fd)
    finally:
        os.close(page_fd)
    seen = _host(device, partner, page) if mechanism is Mechanism.HOST else _words(device, partner, page, limit_s)
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

    @property
    def word(self) -> int:
        """The word, as the host sees it now."""
        return self._words[0]

    @word.setter
    def word(self, value: int) -> None:
        self._words[0] = value

    def wait(self, value: int) -> None:
        """Let this process's stream wait until the word is at least ``value``."""
        _waits(self._device).wait(self._stage.stream, self.ptr, value)
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


def _sync(device: Device) -> DeviceSyncIPC:
    if device.sync is None:
        answer = device.capabilities().get("sync")
        raise CapabilityError(answer.reason if answer is not None else "the device has no sync interface")
    return device.sync


def _absent(device: Device, mechanism: Mechanism, what: str) -> CapabilityError:
    answer = _sync(device).mechanisms().get(mechanism)
    return CapabilityError(
        answer.reason if answer is not None and answer.reason else f"the device has no {what}",
        remedy=answer.remedy if answer is not None else "",
    )


def _waits(device: Device) -> WordWaits:
    waits = _sync(device).word_waits
    if waits is None:
        raise _absent(device, Mechanism.STREAM_MEMOP, "word waits")
    return waits


def _words(device: Device, partner: Partner, page: SharedPage, limit_s: float) -> str:
    """Stores by a stream, seen by the other process's host; waits by its stream, released by device and host."""
    writes = _sync(device).word_writes
    if writes is None:
        raise _absent(device, Mechanism.STREAM_MEMOP, "word writes")
    _waits(device)
    load = Load(device)

    def signal(value: int) -> None:
        writes.write(load.stream, page.ptr, value)

    def reached(value: int) -> bool:
        return bool(partner.ask("page.word")["word"] >= value)

    seen, value = _behind_work(device, load, signal, reached, limit_s)
    value += 1
    _hold(partner, value)
    writes.write(load.stream, page.ptr, value)
    _released(partner, limit_s, "by the other process's stream")
    _hold(partner, value + 1)
    page.word = POISON_BASE + 1
    _released(partner, limit_s, "by the host: a dead peer would block it for ever")
    load.close()
    return f"a stream's store: {seen}; a stream's wait held, and was released by the other device and by the host"


def _behind_work(
    device: Device, load: Load, signal: Callable[[int], None], reached: Callable[[int], bool], limit_s: float
) -> tuple[str, int]:
    """Signal behind ever more work until it is seen pending; return words for it and the last number."""
    transfer = need_transfer(device)
    marker = transfer.create_marker()
    number, words = 0, "seen; the work was too short to see it pending"
    for copies in loads():
        number += 1
        load.submit(copies)
        transfer.record(marker, load.stream)
        signal(number)
        if not reached(number):
            if not _within(limit_s, partial(reached, number)):
                raise CheckFailed(f"it was not seen within {limit_s:g} s", remedy=_ANOTHER)
            words = f"pending behind {copies} copies, then seen"
            break
        if not _within(_LATE_S, lambda: transfer.query_marker(marker)):
            raise CheckFailed("it is reported before the work in front of it is done", remedy=_ANOTHER)
    transfer.destroy_marker(marker)
    return words, number


def _hold(partner: Partner, value: int) -> None:
    partner.ask("page.wait", value=value)
    if partner.ask("page.passed", limit_s=_HOLD_S)["passed"]:
        raise CheckFailed("a stream's wait does not hold the stream", remedy=_ANOTHER)


def _released(partner: Partner, limit_s: float, by: str) -> None:
    if not partner.ask("page.passed", limit_s=limit_s)["passed"]:
        raise CheckFailed(f"a stream's wait was not released {by}", remedy=_ANOTHER)


def _host(device: Device, partner: Partner, page: SharedPage) -> str:
    """Numbers that the host publishes once its own marker is done; the other host sees every one of them."""
    transfer = need_transfer(device)
    load = Load(device)
    marker = transfer.create_marker()
    if transfer.query_marker(marker):
        raise CheckFailed("a marker that was never recorded is done", remedy=_ANOTHER)
    pending = 0
    for number in range(1, 9):
        load.submit(2)
        transfer.record(marker, load.stream)
        while not transfer.query_marker(marker):
            pending += 1
            time.sleep(_PAUSE_S)
        page.word = number
        if partner.ask("page.word")["word"] != number:
            raise CheckFailed("the other process's host does not see a word that this host stored", remedy=_ANOTHER)
    transfer.destroy_marker(marker)
    load.close()
    return f"8 numbers published behind markers, each seen by the other host; pending at {pending} looks"


# --- events ---------------------------------------------------------------------------------------------------------


class OpenedEvent:
    """The importer's side: one event of the exporter."""

    def __init__(self, device: Device, payload: bytes) -> None:
        self._events = _need_events(device)
        self._event = self._events.open(payload)

    def query(self) -> bool:
        """Return the vendor's answer."""
        return self._events.query(self._event)

    def close(self) -> None:
        """Give it back."""
        self._events.destroy(self._event)


def _need_events(device: Device) -> InterprocessEvents:
    events = _sync(device).events
    if events is None:
        raise _absent(device, Mechanism.EVENT, "inter-process events")
    return events


def _events(device: Device, partner: Partner, limit_s: float) -> str:
    events = _need_events(device)
    load = Load(device)
    event = events.create()
    partner.ask("event.open", events.export(event))
    before = partner.ask("event.query")["done"]

    def signal(_: int) -> None:
        events.record(event, load.stream)

    def reached(_: int) -> bool:
        return bool(partner.ask("event.query")["done"])

    seen, _ = _behind_work(device, load, signal, reached, limit_s)
    partner.ask("event.close")
    events.destroy(event)
    load.close()
    never = "done" if before else "not done"
    return f"recorded by one process, asked by the other: {seen}; one that was never recorded is called {never}"
