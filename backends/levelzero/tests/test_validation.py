"""The loader's parameter validation is on for everything here; it is loaded, and would speak."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from .peers import simulated

REFUSALS = {"null description": 0x78000007, "null handle": 0x78000005, "alignment of 3": 0x7800000A}


def bad_calls(device: Any) -> dict[str, int]:
    """Make three calls that are wrong in ways which a driver need not notice; return what came back."""
    from devipc_levelzero import driver
    from devipc_levelzero.abi import DeviceMemoryDesc, make

    context, handle, out = device.context.handle, device.context.device, ctypes.c_void_p()
    desc = ctypes.byref(make(DeviceMemoryDesc))
    return {
        "null description": driver.attempt("zeMemAllocDevice", context, None, 64, 0, handle, ctypes.byref(out)),
        "null handle": driver.attempt("zeMemAllocDevice", context, desc, 64, 0, None, ctypes.byref(out)),
        "alignment of 3": driver.attempt("zeMemAllocDevice", context, desc, 64, 3, handle, ctypes.byref(out)),
    }


@simulated(bare=True, quick=True)
def test_the_layer_is_loaded_and_speaks(sim: Any) -> None:
    from devipc_levelzero.backend import LevelZeroBackend

    with open("/proc/self/maps", encoding="utf-8") as maps:
        assert "libze_validation_layer" not in maps.read()
    device = LevelZeroBackend().open_device()
    with open("/proc/self/maps", encoding="utf-8") as maps:
        assert "libze_validation_layer" in maps.read()
    assert bad_calls(device) == REFUSALS
    assert sim.calls("zeMemAllocDevice") == 0  # none of them came to the driver
    device.close()


@simulated(bare=True, wild_crash=0, ZE_ENABLE_VALIDATION_LAYER="0")
def test_without_it_the_driver_gets_them(sim: Any) -> None:
    from devipc_levelzero.backend import LevelZeroBackend

    device = LevelZeroBackend().open_device()
    answers = bad_calls(device)
    assert sim.calls("zeMemAllocDevice") == 3
    assert answers != REFUSALS


@simulated(bare=True)
def test_a_refused_call_fails_a_test(sim: Any) -> None:
    """What every test of this package checks at its end: each call that was made came to the driver."""
    from devipc_levelzero.backend import LevelZeroBackend

    from devipc.calltrace import observe

    from .peers import Counted

    counted = Counted(sim)
    with observe(counted.note):
        device = LevelZeroBackend().open_device()
        device.memory.free(device.memory.allocate(1, zero=True))
        counted.check()
        bad_calls(device)
        with pytest.raises(AssertionError, match="zeMemAllocDevice"):
            counted.check()
    device.close()
