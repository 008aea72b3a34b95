"""The error tree: blame is visible, nothing of a vendor's answer is lost, and it survives a trip to another process."""

from __future__ import annotations

import copy
import inspect
import json
import pickle

import pytest

from devipc import errors
from devipc.errors import CompletionTimeout, DevIPCError, DriverError, ResourceExhausted, UsageError, VendorStatus

ALL = [
    value
    for name in errors.__all__
    if inspect.isclass(value := getattr(errors, name)) and issubclass(value, DevIPCError)
]
STATUS = VendorStatus("vendorOpen", 201, "INVALID_CONTEXT")


@pytest.mark.parametrize("kind", ALL)
def test_every_error_carries_all_that_a_reader_needs(kind: type[DevIPCError]) -> None:
    error = kind("broken", remedy="mend it", backend="x", device="x-0", status=STATUS)
    text = str(error)
    for part in ("[x/x-0] broken", "vendorOpen -> 201 INVALID_CONTEXT", "remedy: mend it"):
        assert part in text
    assert error.code == kind.default_code != ""
    assert kind("m", code="own").code == "own"
    fields = json.loads(json.dumps(error.to_json()))
    assert fields["type"] == kind.__name__
    assert (fields["message"], fields["remedy"], fields["backend"]) == ("broken", "mend it", "x")
    assert isinstance(error.retryable, bool)


@pytest.mark.parametrize("kind", ALL)
def test_every_error_survives_a_copy(kind: type[DevIPCError]) -> None:
    error = kind("broken", remedy="mend it", retryable=True, status=STATUS)
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(other) is kind
        assert other.to_json() == error.to_json()


def test_the_tree_has_at_most_three_levels_and_no_two_codes_alike() -> None:
    assert max(kind.__mro__.index(DevIPCError) for kind in ALL) == 2
    codes = [kind.default_code for kind in ALL]
    assert len(set(codes)) == len(codes)
    assert set(errors.__all__) - {kind.__name__ for kind in ALL} == {"VendorStatus"}


def test_plain_text_without_extras() -> None:
    assert str(UsageError("wrong")) == "wrong"
    assert str(DriverError("refused", status=VendorStatus("f", -3))) == "refused (f -> -3)"
    assert str(DriverError("refused", device="d")) == "[d] refused"


def test_what_was_not_undone_is_said_in_every_spelling() -> None:
    error = DriverError("full")
    error.left = (DriverError("refused", status=STATUS), OSError("no close"))
    kept = ["vendorOpen -> 201 INVALID_CONTEXT", "no close"]
    assert error.to_json()["left"] == kept
    assert str(error) == f"full; not undone until this process ends: {', '.join(kept)}"
    assert copy.copy(error).to_json() == error.to_json()


def test_what_can_succeed_later_says_so() -> None:
    assert [kind.__name__ for kind in ALL if kind("m").retryable] == ["CompletionTimeout", "ResourceExhausted"]
    assert not CompletionTimeout("m", retryable=False).retryable
    assert not ResourceExhausted("m", retryable=False).retryable
