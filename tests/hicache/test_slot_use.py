"""Slots as a client uses them: fences that keep what they said, cancel words, and slots that are used again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from devipc.errors import CompletionTimeout, FencePoisoned, ProtocolError, ResourceExhausted
from devipc.hicache.client import slotuse
from devipc.hicache.client.slotuse import SlotFence, SlotTable, SlotWord
from devipc.hicache.operations import Kind
from devipc.hicache.wire import slots as wire_slots
from devipc.hicache.wire.slots import Slots
from devipc.types import PoisonReason
from tests.host.test_interrupts import interrupt_at


class Timeline:
    """Values that are reached when the test says so."""

    def __init__(self) -> None:
        self.value = 0
        self.waited: list[int] = []

    def query(self, n: int) -> bool:
        return self.value >= n

    def wait(self, stream: Any, n: int, *, timeout_s: float) -> None:
        self.waited.append(n)


class Setting:
    def __init__(self, count: int = 2) -> None:
        self.slots = Slots.create(count)
        self.timeline = Timeline()
        timelines: Any = {Kind.BACKUP: self.timeline, Kind.RESTORE: self.timeline}
        self.table = SlotTable(self.slots, timelines)
        self.lock = threading.Lock()
        self.ops = 0

    def begin(self) -> tuple[SlotFence, int]:
        self.ops += 1
        fence = SlotFence(SlotWord(self.lock))
        return fence, self.table.begin(self.ops, Kind.RESTORE, fence)


@pytest.fixture
def it() -> Iterator[Setting]:
    made = Setting()
    yield made
    made.slots.close()


def test_groups_are_reached_from_where_the_copies_begin(it: Setting) -> None:
    fence, slot = it.begin()
    it.timeline.value = 100
    assert not fence.query(1)  # nothing was submitted, whatever the timeline says
    with pytest.raises(CompletionTimeout, match="not submitted"):
        fence.wait(None, 1, timeout_s=0.02)  # type: ignore[arg-type]
    it.slots.submit(slot, 101)
    assert not fence.query(1)
    fence.wait(None, 3, timeout_s=1)  # type: ignore[arg-type]
    assert it.timeline.waited == [103]
    it.timeline.value = 102
    assert fence.query(2)
    assert not fence.query(3)
    it.slots.settle(slot)
    assert fence.query(3)


def test_a_slot_is_used_again_when_both_sides_are_done(it: Setting) -> None:
    first, slot = it.begin()
    second, other = it.begin()
    with pytest.raises(ResourceExhausted):
        it.begin()
    it.table.leave(slot)  # the client's operation has ended, the supervisor has not said so
    with pytest.raises(ResourceExhausted):
        it.begin()
    it.slots.poison(slot, PoisonReason.TIMEOUT)
    third, again = it.begin()
    assert again == slot
    with pytest.raises(FencePoisoned) as caught:
        first.query(1)
    assert caught.value.code == "timeout"
    assert not third.query(1)
    it.slots.settle(other)
    it.table.leave(other)
    it.table.leave(other)
    assert second.query(9)
    it.begin()
    with pytest.raises(ResourceExhausted):
        it.begin()


def test_a_word_that_is_set_late_belongs_to_nobody_else(it: Setting) -> None:
    fence, slot = it.begin()
    fence.word.set()
    assert it.slots.cancelled(slot)
    it.slots.settle(slot)
    it.table.leave(slot)
    following = [it.begin() for _ in range(2)]
    fence.word.set()
    assert not any(it.slots.cancelled(one) for _, one in following)
    early = SlotFence(SlotWord(it.lock))
    early.word.set()
    it.slots.settle(slot)
    it.table.leave(slot)
    assert it.slots.cancelled(it.table.begin(99, Kind.BACKUP, early))


def test_a_death_is_final_but_for_what_was_settled(it: Setting) -> None:
    settled, slot = it.begin()
    lost, other = it.begin()
    it.slots.settle(slot)
    it.table.end(PoisonReason.PEER_DIED)
    it.slots.settle(other)  # nobody believes it any more
    assert settled.query(1)
    with pytest.raises(FencePoisoned) as caught:
        lost.synchronize(1, timeout_s=5)
    assert caught.value.code == "peer_died"
    with pytest.raises(FencePoisoned):
        lost.wait(None, 1, timeout_s=1)  # type: ignore[arg-type]
    with pytest.raises(FencePoisoned):
        it.begin()
    it.slots.close()
    assert settled.query(1)
    with pytest.raises(FencePoisoned):
        lost.query(1)


def test_words_that_no_engine_writes(it: Setting) -> None:
    fence, slot = it.begin()
    it.slots.submit(slot, 2**63)
    with pytest.raises(ProtocolError):
        fence.query(1)
    it.slots._store(slot, 4, 2**64 - 1)
    with pytest.raises(FencePoisoned) as caught:
        fence.query(1)
    assert caught.value.code == "protocol"


def test_a_slot_of_which_nobody_was_told_is_free(it: Setting) -> None:
    fences = [it.begin() for _ in range(2)]
    for fence, _ in fences:
        it.table.unused(fence)
        with pytest.raises(FencePoisoned):
            fence.query(1)
    assert [it.begin()[1] for _ in range(2)] == [slot for _, slot in fences]


def test_a_slot_that_an_interrupt_found_anywhere_is_in_use_or_free(it: Setting) -> None:
    """Whether it was given, taken back, left or recycled: none is lost, and none is given twice."""
    files = (str(slotuse.__file__), str(wire_slots.__file__))
    point = places = 0
    for call in ("begin", "unused", "leave", "recycle"):
        point, hit = 0, True
        while hit:
            point += 1
            places += 1
            fence = SlotFence(SlotWord(it.lock))
            it.ops += 1
            if call == "begin":
                hit = interrupt_at(point, partial(it.table.begin, it.ops, Kind.RESTORE, fence), files)
                it.table.unused(fence)
            elif call == "unused":
                it.table.begin(it.ops, Kind.RESTORE, fence)
                hit = interrupt_at(point, partial(it.table.unused, fence), files)
                it.table.unused(fence)
            else:
                slot = it.table.begin(it.ops, Kind.RESTORE, fence)
                if call == "recycle":
                    it.table.leave(slot)
                it.slots.settle(slot)
                work = it.table._recycle if call == "recycle" else partial(it.table.leave, slot)
                hit = interrupt_at(point, work, files)
                it.table.leave(slot)
                it.table._recycle()
            assert sorted(it.table._free) == [0, 1], f"after an interrupt at place {point} of {call}"
            assert not it.table._used
    assert places > 40


class Overtaken(SlotFence):
    """Ends behind the first question."""

    def query(self, n: int) -> bool:
        reached = super().query(n)
        if reached is False and self._slots is not None:
            self.end(self._slots, self._slot)
        return reached

    def end(self, slots: Slots, slot: int) -> None:
        slots.settle(slot)


class Failed(Overtaken):
    def end(self, slots: Slots, slot: int) -> None:
        slots.poison(slot, PoisonReason.CANCELLED)


def test_what_ends_while_it_is_waited_for_has_ended(it: Setting) -> None:
    settled, failed = Overtaken(SlotWord(it.lock)), Failed(SlotWord(it.lock))
    for op, fence in enumerate((settled, failed), 1):
        it.table.begin(op, Kind.RESTORE, fence)
    settled.wait(None, 1, timeout_s=0.0)  # type: ignore[arg-type]
    with pytest.raises(FencePoisoned):
        failed.wait(None, 1, timeout_s=0.0)  # type: ignore[arg-type]
