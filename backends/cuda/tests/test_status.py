"""Every status becomes the right class of error, with the vendor's number kept and something to do about it."""

from __future__ import annotations

import pytest
from devipc_cuda.status import error_for

from devipc.spi import (
    CapabilityError,
    DeviceLostError,
    DevIPCError,
    DriverError,
    ResourceExhausted,
)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        *((value, CapabilityError) for value in (34, 36, 46, 100, 102, 217, 800, 801, 802, 803, 804, 805)),
        *((value, DriverError) for value in (1, 3, 4, 101, 201, 205, 208, 304, 400, 712, 713, 900, 999, 12345)),
        *((value, DeviceLostError) for value in (214, 220, 700, 702, 709, 710, 716, 719, 810)),
        *((value, ResourceExhausted) for value in (2, 711, 808)),
    ],
)
def test_class_and_status(value: int, error: type[DevIPCError]) -> None:
    made = error_for("cuCall", value, "NAME", device="GPU-1")
    assert type(made) is error
    assert made.status is not None
    assert (made.status.call, made.status.value, made.status.name) == ("cuCall", value, "NAME")
    assert made.backend == "cuda"
    assert made.device == "GPU-1"
    assert made.message
    assert made.code


@pytest.mark.parametrize("value", [34, 46, 100, 101, 201, 205, 208, 400, 700, 719, 800, 801, 802, 803, 804, 999])
def test_well_known_ones_say_what_to_do(value: int) -> None:
    assert error_for("cuCall", value).remedy


@pytest.mark.parametrize(
    ("call", "value", "words"),
    [
        ("cuIpcOpenMemHandle", 1, "exporter"),
        ("cuIpcOpenMemHandle", 201, "own process"),
        ("cuIpcOpenMemHandle", 101, "one device"),
        ("cuIpcOpenMemHandle", 400, "WSL"),
        ("cuIpcOpenEventHandle", 205, "/dev/shm"),
        ("cuMemPoolImportFromShareableHandle", 999, "no exported pool"),
        ("cuMemExportToShareableHandle", 1, "handle type"),
        ("cuInit", 34, "stubs"),
        ("cuDevicePrimaryCtxRetain", 46, "compute mode"),
        ("cuInit", 803, "compare the driver version"),
    ],
)
def test_the_causes_that_users_met_are_named(call: str, value: int, words: str) -> None:
    assert words in str(error_for(call, value))


def test_only_what_may_pass_is_retryable() -> None:
    assert error_for("cuMemAlloc", 2).retryable
    assert error_for("cuInit", 802).retryable
    assert not error_for("cuInit", 100).retryable
    assert not error_for("cuMemcpyAsync", 700).retryable
