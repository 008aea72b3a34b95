"""When pages are written to the host tier, under each policy."""

from __future__ import annotations

import pytest

from devipc.errors import CapabilityError, UsageError
from devipc.hicache.policy import WritePolicy, Writer

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def test_write_through_writes_once_what_was_computed() -> None:
    writer = Writer(WritePolicy.WRITE_THROUGH)
    assert writer.computed([A, B]) == [A, B]
    assert writer.computed([A, C]) == [C]
    assert writer.hit([A, B]) == []
    assert writer.evicting([A, B, C]) == []


def test_selective_writes_what_is_hit_often_enough() -> None:
    writer = Writer(WritePolicy.WRITE_THROUGH_SELECTIVE, after_hits=2)
    assert writer.computed([A, B]) == []
    assert writer.hit([A]) == []
    assert writer.hit([A, B]) == [A]
    assert writer.hit([A]) == []
    assert writer.evicting([B]) == []
    assert writer.hit([B]) == [B]


def test_write_back_writes_before_the_page_goes() -> None:
    writer = Writer(WritePolicy.WRITE_BACK)
    assert writer.computed([A, B]) == []
    assert writer.hit([A, A, A]) == []
    assert writer.evicting([A]) == [A]
    assert writer.evicting([A, B]) == [B]


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_what_the_tier_lost_is_written_again(policy: WritePolicy) -> None:
    writer = Writer(policy, after_hits=1)

    def make_worth() -> list[bytes]:
        return writer.computed([A]) + writer.hit([A]) + writer.evicting([A])

    assert make_worth() == [A]
    assert make_worth() == []
    writer.lost([A, B])
    assert make_worth() == [A]


def test_hits_are_remembered_for_so_many_keys() -> None:
    writer = Writer(WritePolicy.WRITE_THROUGH_SELECTIVE, after_hits=2, remember=2)
    writer.hit([A])
    writer.hit([B])
    writer.hit([C])  # forgets A
    assert writer.hit([A]) == []
    assert writer.hit([C]) == [C]


def test_nonsense_is_refused() -> None:
    with pytest.raises(UsageError):
        Writer(WritePolicy.WRITE_BACK, after_hits=0)


def test_a_host_tier_that_is_only_a_buffer_is_refused_and_why_is_said() -> None:
    with pytest.raises(CapabilityError, match="storage tier") as caught:
        Writer("buffer_only")  # type: ignore[arg-type]
    assert caught.value.code == "no_storage"
    assert "write_back" in caught.value.remedy
    with pytest.raises(ValueError, match="never"):
        WritePolicy("never")
