"""From mapped memory to arrays: the same bytes, kept as long as anything looks at them."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from devipc.errors import CapabilityError, ClosedError, UsageError
from devipc.integrations import ForeignBuffer, describe
from tests.integrations.conftest import CARD, HOST, NAMELESS, PINNED, Mapped


def test_an_array_is_the_memory_itself(mapped: Mapped) -> None:
    source = mapped.buffer("int32", (3, 4), at=64, strides=(8, 2)).to_numpy()
    assert (source.shape, source.strides, source.dtype, source.flags.writeable) == ((3, 4), (32, 8), np.int32, True)
    source[2, 3] = 77
    assert int.from_bytes(mapped.map.view[64 + 88 : 64 + 92], "little") == 77
    mapped.map.view[64:68] = (99).to_bytes(4, "little")
    assert source[0, 0] == 99


def test_an_array_can_run_backwards_and_start_anywhere(mapped: Mapped) -> None:
    whole = mapped.buffer("uint16", (10,), at=1).to_numpy()
    whole[:] = range(10)
    back = mapped.buffer("uint16", (5,), strides=(-2,), at=1 + 18).to_numpy()
    assert back.tolist() == [9, 7, 5, 3, 1]


@pytest.mark.parametrize("take", [ForeignBuffer.to_numpy, np.from_dlpack, np.asarray])
def test_the_mapping_lives_until_the_last_view_died(mapped: Mapped, take: Any) -> None:
    first = take(mapped.buffer())
    second = first[1:][0]
    third = second.view("uint8")
    del first, second
    mapped.keeper.release()
    gc.collect()
    assert (mapped.keeper.count, mapped.ends) == (1, 0)
    third[0] = 5
    del third
    gc.collect()
    assert (mapped.keeper.count, mapped.ends) == (0, 1)
    with pytest.raises(ClosedError):
        mapped.buffer()


def test_an_unused_capsule_gives_its_count_back(mapped: Mapped) -> None:
    capsule = mapped.buffer().__dlpack__()
    assert mapped.views == 1
    del capsule
    assert mapped.views == 0
    for _ in range(1000):
        mapped.buffer("bfloat16").__dlpack__(max_version=(1, 0))
    assert mapped.views == 0


@pytest.mark.parametrize("take", [ForeignBuffer.to_numpy, np.from_dlpack])
def test_an_error_is_not_lost_when_the_last_view_dies_on_its_way(mapped: Mapped, take: Any) -> None:
    """A deleter written in Python would replace it by a SystemError."""
    with pytest.raises(ValueError, match="cannot reshape"):
        take(mapped.buffer()).reshape(7)
    gc.collect()
    assert mapped.views == 0


def test_a_consumer_that_refuses_gives_its_own_reason(mapped: Mapped) -> None:
    with pytest.raises((RuntimeError, BufferError), match="Unsupported device"):
        np.from_dlpack(mapped.buffer(device=CARD))
    gc.collect()
    assert mapped.views == 0


def test_read_only_memory_stays_read_only(mapped: Mapped) -> None:
    buffer = mapped.buffer(readonly=True)
    for take in (ForeignBuffer.to_numpy, np.from_dlpack, np.asarray):
        source: Any = take(buffer)
        with pytest.raises(ValueError, match="read-only"):
            source[0, 0] = 1
    assert describe(buffer).readonly
    with pytest.raises(CapabilityError) as caught:
        buffer.__dlpack__()
    assert caught.value.code == "readonly"


def test_protocols_are_offered_only_where_they_fit(mapped: Mapped) -> None:
    host, pinned, card = (mapped.buffer(device=device) for device in (HOST, PINNED, CARD))
    assert [hasattr(buffer, "__array_interface__") for buffer in (host, pinned, card)] == [True, True, False]
    assert [hasattr(buffer, "__cuda_array_interface__") for buffer in (host, pinned, card)] == [False, False, True]
    assert [buffer.__dlpack_device__() for buffer in (host, pinned, card)] == [(1, 0), (3, 0), (2, 1)]
    assert card.__cuda_array_interface__ == {
        "data": (mapped.map.address, False),
        "shape": (4, 4),
        "strides": (16, 4),
        "typestr": "<f4",
        "version": 3,
        "stream": None,
    }
    for device in (HOST, CARD):
        buffer = mapped.buffer("bfloat16", device=device)
        assert not hasattr(buffer, "__array_interface__")
        assert not hasattr(buffer, "__cuda_array_interface__")
    pinned.to_numpy()[0, 0] = 3
    assert host.to_numpy()[0, 0] == 3


def test_a_capsule_of_device_memory_says_all_of_it(mapped: Mapped) -> None:
    for dtype in ("float32", "bfloat16", "float8_e4m3fn", "bool", "complex64"):
        buffer = mapped.buffer(dtype, (3, 2), strides=(4, 2), at=256, device=CARD, readonly=True)
        view = describe(buffer)
        assert (view.device_type, view.device_index, view.readonly) == ("cuda", 1, True)
        assert (view.dtype, view.shape, view.strides, view.ptr) == (dtype, (3, 2), (4, 2), mapped.map.address + 256)
    del view, buffer
    gc.collect()
    assert mapped.views == 0


def test_what_the_host_cannot_reach_is_no_array(mapped: Mapped) -> None:
    with pytest.raises(CapabilityError, match="not addressable by the host"):
        mapped.buffer(device=CARD).to_numpy()
    with pytest.raises(CapabilityError, match="numpy has no bfloat16") as caught:
        mapped.buffer("bfloat16").to_numpy()
    assert "uint16" in caught.value.remedy


def test_a_device_without_a_name_among_array_libraries_is_refused(mapped: Mapped) -> None:
    buffer = mapped.buffer(device=NAMELESS)
    for ask in (buffer.__dlpack_device__, buffer.__dlpack__, buffer.to_numpy):
        with pytest.raises(CapabilityError, match="a new kind of card"):
            ask()


def test_nothing_is_ever_copied_on_request(mapped: Mapped) -> None:
    buffer = mapped.buffer()
    for options in ({"copy": True}, {"dl_device": (2, 0)}, {"dl_device": (1, 1)}):
        with pytest.raises(CapabilityError) as caught:
            buffer.__dlpack__(**options)
        assert caught.value.code == "copy"
    buffer.__dlpack__(copy=False, dl_device=(1, 0), stream=None, max_version=(1, 0))
    with pytest.raises(CapabilityError):
        np.from_dlpack(buffer, copy=True)


def test_what_consumers_take_for_granted_is_checked(mapped: Mapped) -> None:
    with pytest.raises(UsageError, match="negative strides"):
        mapped.buffer("uint8", (4,), strides=(-1,), at=8).__dlpack__()
    with pytest.raises(UsageError, match="no multiple"):
        mapped.buffer("float32", (4,), at=2).__dlpack__()
    mapped.buffer("complex128", (4,), at=8).__dlpack__()


@pytest.mark.parametrize(
    ("dtype", "shape", "strides"),
    [("float4", (1,), None), ("uint8", (-1,), None), ("uint8", (2, 2), (1,)), ("", (1,), None)],
)
def test_a_description_that_is_none_is_refused_and_takes_no_count(
    mapped: Mapped, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...] | None
) -> None:
    with pytest.raises(UsageError):
        mapped.buffer(dtype, shape, strides=strides)
    with pytest.raises(UsageError):
        ForeignBuffer(ptr=0, dtype="uint8", shape=(1,), device=HOST, keeper=mapped.keeper)
    assert mapped.views == 0


def test_an_empty_view_is_possible_on_the_way_back(mapped: Mapped) -> None:
    assert mapped.buffer("float32", (0, 3)).to_numpy().shape == (0, 3)
    assert mapped.buffer("float32", ()).to_numpy().shape == ()


def test_there_and_back(mapped: Mapped) -> None:
    source = mapped.buffer("float32", (8, 8)).to_numpy()
    source[:] = np.arange(64).reshape(8, 8)
    for part in (source, source[2:5, 1::3], source.T, source[::-1], source[3], source[1, 1:2], source[..., None]):
        view = describe(part)
        again = mapped.buffer(view.dtype, view.shape, strides=view.strides, at=view.ptr - mapped.map.address).to_numpy()
        assert np.array_equal(again, part)
        again += 1
        assert np.array_equal(again, part)
