"""Every result becomes the right class of error, with the vendor's number kept and something to do about it."""

from __future__ import annotations

import pytest
from devipc_levelzero.status import NAMES, error_for

from devipc.spi import CapabilityError, DeviceLostError, DevIPCError, DriverError, ResourceExhausted


@pytest.mark.parametrize(
    ("value", "error"),
    [
        *((value, CapabilityError) for value in (0x70000007, 0x70010000, 0x70010001, 0x70020000, 0x78000001)),
        *((value, CapabilityError) for value in (0x78000002, 0x78000003)),
        *((value, DriverError) for value in (0x78000004, 0x78000005, 0x78000006, 0x78000021, 0x7FFFFFFE, 0x12345)),
        *((value, DeviceLostError) for value in (0x70000001, 0x70000006, 0x78000020)),
        *((value, ResourceExhausted) for value in (0x70000002, 0x70000003, 0x78000009)),
    ],
)
def test_class_and_status(value: int, error: type[DevIPCError]) -> None:
    made = error_for("zeCall", value, device="GPU-1")
    assert type(made) is error
    assert made.status is not None
    assert (made.status.call, made.status.value, made.status.name) == ("zeCall", value, NAMES.get(value, ""))
    assert (made.backend, made.device) == ("levelzero", "GPU-1")
    assert made.message
    assert made.code


@pytest.mark.parametrize("value", [v for v in NAMES if v >= 0x70000000 and v not in range(0x78000004, 0x78000009)])
def test_well_known_ones_say_what_to_do(value: int) -> None:
    if value not in (0x7800000A, 0x7800000C, 0x7800000D, 0x78000021):
        assert error_for("zeCall", value).remedy


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("zeMemOpenIpcHandle", "exporter"),
        ("zeMemGetIpcHandle", "zeMemAllocDevice"),
        ("zeEventPoolOpenIpcHandle", "gone"),
        ("zexDriverImportExternalPointer", "page-aligned"),
    ],
)
def test_the_causes_that_users_met_are_named(call: str, words: str) -> None:
    assert words in str(error_for(call, 0x78000004))


def test_only_what_may_pass_is_retryable() -> None:
    assert error_for("zeMemAllocDevice", 0x70000003).retryable
    assert not error_for("zeMemOpenIpcHandle", 0x78000004).retryable
    assert not error_for("zeInit", 0x78000001).retryable
