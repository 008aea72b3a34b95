"""Values: enums equal their JSON spelling, results are true only for "yes", and records cannot be changed."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields

import pytest

from devipc import types
from devipc.capabilities import Capability, Verdict
from devipc.types import MAX_FENCE_VALUE, POISON_BASE, Chunk, DeviceInfo, ExportedExtent, HandleKind, PoisonReason

ENUMS = [types.HandleKind, types.MemoryKind, types.Mechanism, types.Strategy, Verdict]


@pytest.mark.parametrize("enum", ENUMS)
def test_enum_values_equal_their_json_spelling(enum: type[HandleKind]) -> None:
    for member in enum:
        assert member.value == member.name.lower()
        assert json.loads(json.dumps(member)) == member.value
        assert enum(member.value) is member


def test_strategies_are_listed_in_the_order_in_which_they_are_tried() -> None:
    assert list(types.Strategy) == ["stream_memop", "host_flag", "polling", "event"]


def test_a_poisoned_word_ends_signed_and_unsigned_waits_for_every_value() -> None:
    for reason in PoisonReason:
        word = POISON_BASE + reason
        for wanted in (1, MAX_FENCE_VALUE):
            assert word >= wanted
            assert (word - wanted) % 2**64 < 2**63  # the cyclic compare: the signed difference is not negative
        assert word < 2**63
        assert word - POISON_BASE in set(PoisonReason)


def test_an_extent_is_as_long_as_its_chunks() -> None:
    extent = ExportedExtent(HandleKind.VMM_FD, (Chunk(4096, 96, 4000), Chunk(4096, 0, 100)))
    assert extent.nbytes == 4100
    assert extent.fds == ()


def test_records_cannot_be_changed() -> None:
    for record in (Chunk(1, 0, 1), DeviceInfo("u", 0, "n"), Capability.yes("seen")):
        for field in fields(record):
            with pytest.raises(FrozenInstanceError):
                setattr(record, field.name, None)
        assert not hasattr(record, "__dict__")


def test_only_yes_is_true_and_everything_else_says_why() -> None:
    assert Capability.yes("seen")
    for answer in (Capability.no("r", remedy="m"), Capability.broken("r", remedy="m"), Capability.untested("r")):
        assert not answer
        assert answer.reason == "r"
    assert Capability.no("r", remedy="m", evidence="e").to_json() == {
        "verdict": "no",
        "evidence": "e",
        "reason": "r",
        "remedy": "m",
    }
    assert Capability.yes("e").to_json()["verdict"] == "yes"
