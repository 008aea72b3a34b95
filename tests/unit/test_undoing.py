"""Undoing: the cause is never hidden, every step is tried, and what stays is said at the cause."""

from __future__ import annotations

import copy

import pytest

from devipc.errors import BoundsError, DevIPCError, DriverError, ResourceExhausted, VendorStatus
from devipc.undoing import gather_left, note_left, raise_first, try_each, undo, what_is_left

KEPT = DriverError("refused", status=VendorStatus("vendorUnmap", 7, "BUSY"))


def refuse(error: Exception = KEPT) -> None:
    raise error


def failing(cause: BaseException, *kept: Exception) -> None:
    """Fail with ``cause``, of which as much is not undone."""
    try:
        raise cause
    except BaseException:
        for one in kept:
            undo(refuse, one)
        undo(lambda: None)
        raise


def explained(cause: DevIPCError, *kept: Exception) -> None:
    try:
        failing(cause, *kept)
    except DevIPCError as error:
        raise BoundsError("too large", retryable=True) from error


def test_the_cause_is_raised_and_says_what_stays() -> None:
    text = "full; not undone until this process ends: vendorUnmap -> 7 BUSY; remedy: wait"
    with pytest.raises(ResourceExhausted, match=text) as caught:
        failing(ResourceExhausted("full", remedy="wait"), KEPT)
    assert what_is_left(caught.value) == caught.value.left == (KEPT,)
    assert not caught.value.retryable, "the same again would leave more"
    assert str(copy.copy(caught.value)) == str(caught.value)


def test_it_is_found_behind_an_error_that_was_made_from_the_cause() -> None:
    with pytest.raises(BoundsError) as caught:
        explained(DriverError("cannot map"), KEPT)
    assert what_is_left(caught.value) == (KEPT,)
    assert what_is_left(DriverError("alone")) == ()


def test_a_cause_of_another_kind_carries_it_too() -> None:
    with pytest.raises(KeyError) as caught:
        failing(KeyError("defect"), KEPT)
    assert what_is_left(caught.value) == (KEPT,)
    assert "vendorUnmap" in caught.value.__notes__[0]


def test_without_a_cause_it_is_an_error_of_its_own() -> None:
    with pytest.raises(DriverError) as caught:
        undo(refuse)
    assert caught.value is KEPT


def test_every_step_is_taken() -> None:
    taken: list[int] = []
    first, second = DriverError("first"), OSError("second")
    with pytest.raises(DriverError) as caught:
        try_each([lambda: taken.append(1), lambda: refuse(first), lambda: refuse(second), lambda: taken.append(2)])
    assert (caught.value, taken, first.left) == (first, [1, 2], (second,))
    try_each([])
    raise_first([])
    with pytest.raises(DevIPCError) as caught_all:
        failing(DevIPCError("cause"), first)
    assert caught_all.value.left == (first, second), "those behind the first are not lost"


def test_an_interrupt_skips_no_step_and_is_raised_last() -> None:
    taken: list[int] = []
    failed, stop = DriverError("first"), KeyboardInterrupt()

    def interrupted() -> None:
        raise stop

    with pytest.raises(KeyboardInterrupt) as caught:
        try_each([interrupted, lambda: refuse(failed), lambda: taken.append(1)])
    assert (caught.value, taken) == (stop, [1])
    assert what_is_left(stop) == (failed,)


def test_what_is_noted_twice_is_said_once() -> None:
    with pytest.raises(BoundsError) as caught:
        explained(DriverError("cannot map"), KEPT)
    note_left(caught.value, KEPT)
    assert what_is_left(caught.value) == (KEPT,)


def test_an_error_that_goes_without_its_cause_takes_along_what_is_left() -> None:
    with pytest.raises(BoundsError) as caught:
        explained(DriverError("cannot map"), KEPT)
    assert gather_left(caught.value) == caught.value.left == what_is_left(caught.value) == (KEPT,)
    assert not caught.value.retryable
    alone = ResourceExhausted("full")
    assert gather_left(alone) == ()
    assert alone.retryable
