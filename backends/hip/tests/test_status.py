"""Every status becomes a typed error that keeps its number and says what to do."""

from __future__ import annotations

import pytest
from devipc_hip import driver
from devipc_hip.status import error_for

from devipc.spi import CapabilityError, DeviceLostError, DriverError, ResourceExhausted


@pytest.mark.parametrize(
    ("value", "kind", "code"),
    [
        (1, DriverError, "invalid_value"),
        (2, ResourceExhausted, "device_memory"),
        (17, DriverError, "invalid_pointer"),
        (100, CapabilityError, "no_device"),
        (201, DriverError, "invalid_context"),
        (217, CapabilityError, "no_peer_access"),
        (700, DeviceLostError, "device_lost"),
        (709, DriverError, "invalid_stream"),
        (719, DeviceLostError, "device_lost"),
        (801, CapabilityError, "not_supported"),
        (901, DriverError, "capture"),
        (4711, DriverError, "driver"),
    ],
)
def test_a_status_is_typed(value: int, kind: type[Exception], code: str) -> None:
    error = error_for("hipCall", value, "hipName", device="GPU-1")
    assert type(error) is kind
    assert (error.code, error.backend, error.device) == (code, "hip", "GPU-1")
    assert error.status is not None
    assert (error.status.call, error.status.value, error.status.name) == ("hipCall", value, "hipName")


def test_equal_process_numbers_have_a_remedy() -> None:
    assert "pid namespace" in error_for("hipIpcOpenMemHandle", 201).remedy


def test_calls_have_remedies_of_their_own() -> None:
    assert "exporter" in error_for("hipIpcOpenMemHandle", 17).remedy
    assert "HSA_ENABLE_IPC_MODE_LEGACY" in error_for("hipIpcGetMemHandle", 1).remedy


def test_names_are_the_bindings_own() -> None:
    assert driver.name_of(719) == "hipErrorLaunchFailure"
    assert driver.name_of(4711) == ""


def test_versions_as_people_write_them() -> None:
    assert driver.version_text(60_443_484) == "6.4"
    assert driver.version_text(71_526_105) == "7.15"
