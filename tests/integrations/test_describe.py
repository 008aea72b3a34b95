"""From numpy arrays, buffers, capsules and addresses to a description, with nothing lost and nothing copied."""

from __future__ import annotations

import array
import ctypes
import gc
import itertools
import mmap
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devipc.errors import DevIPCError, UsageError
from devipc.integrations import BufferView, check_device, describe, itemsize_of
from devipc.interfaces.memory import Allocation
from devipc.types import DeviceInfo, HandleKind
from tests.integrations.conftest import CARD, HOST, NAMELESS

NUMBERS = ["bool", "float16", "float32", "float64", "complex64", "complex128"]
NUMBERS += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]


def touched(view: BufferView) -> set[int]:
    """All bytes that elements lie in, one by one."""
    return {
        view.ptr + view.itemsize * sum(i * stride for i, stride in zip(index, view.strides, strict=True)) + byte
        for index in itertools.product(*map(range, view.shape))
        for byte in range(view.itemsize)
    }


@pytest.mark.parametrize("dtype", NUMBERS)
def test_every_plain_number_is_known(dtype: str) -> None:
    source = np.zeros((3, 5), dtype)
    view = describe(source)
    assert (view.dtype, view.itemsize, view.shape, view.strides) == (dtype, source.itemsize, (3, 5), (5, 1))
    assert (view.ptr, view.span_ptr, view.span_nbytes) == (source.ctypes.data, source.ctypes.data, source.nbytes)
    assert (view.device_type, view.device_index, view.readonly) == ("cpu", 0, False)
    assert view.owner is source
    assert view.protocol == "array_interface 3"
    assert itemsize_of(dtype) == source.itemsize
    assert describe(view) is view


SLICES = st.tuples(st.integers(0, 3), st.integers(1, 4), st.sampled_from([1, 2, 3, -1, -2]))


@given(st.lists(SLICES, min_size=0, max_size=3), st.sampled_from(["uint8", "int32", "float64"]), st.booleans())
def test_the_span_is_exactly_what_the_elements_touch(cuts: list[tuple[int, int, int]], dtype: str, turn: bool) -> None:
    source = np.zeros((8,) * len(cuts), dtype)
    index = tuple(
        slice(start, start + length) if step > 0 else slice(start + length, start, step) for start, length, step in cuts
    )
    part = source[index] if cuts else source
    part = part.T if turn else part
    view = describe(part)
    bytes_ = touched(view)
    assert view.span_ptr == min(bytes_)
    assert view.span_ptr + view.span_nbytes == max(bytes_) + 1
    assert source.ctypes.data <= view.span_ptr
    assert view.span_ptr + view.span_nbytes <= source.ctypes.data + source.nbytes


def test_one_element_may_be_seen_many_times() -> None:
    view = describe(np.broadcast_to(np.zeros(3, "int16"), (1000, 3)))
    assert (view.shape, view.strides, view.span_nbytes, view.readonly) == ((1000, 3), (0, 1), 6, True)


def test_views_at_an_odd_offset_and_up_to_the_last_byte() -> None:
    pool = np.zeros(10_000, "uint8")
    for start, stop in ((8640, 9000), (9999, 10_000), (0, 10_000)):
        view = describe(pool[start:stop])
        assert view.ptr - pool.ctypes.data == start
        assert view.span_nbytes == stop - start


@pytest.mark.parametrize(
    "refused",
    [
        np.array(["text"]),
        np.array([b"text"]),
        np.array([object()]),
        np.array(["2026-01-01"], "datetime64[D]"),
        np.array([3], "timedelta64[s]"),
        np.zeros(3, "f4,i4"),
        np.zeros(3, "f8,i4")["f0"],
        np.zeros(3, np.longdouble),
        np.zeros(3, ">f4"),
        np.zeros(3, ">i2"),
        np.float32(3),
        np.ma.masked_array([1, 2], [True, False]),
        [1, 2],
        "text",
        3,
        None,
        object(),
        (1, 2, 3),
        (1.0, 2),
        (True, True),
        (0, 16),
        (-1, 16),
        (2**64, 16),
        (2**64 - 8, 16),
        (4096, -1),
        memoryview(array.array("u", "x")),
        (ctypes.c_void_p * 2)(),
        np.zeros(3, ">f4").data,
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", repr(value)),
)
def test_what_is_no_plain_memory_is_refused(refused: object) -> None:
    with pytest.raises(UsageError) as caught:
        describe(refused)
    assert caught.value.remedy
    assert caught.value.code in {"view", "dtype"}


@pytest.mark.parametrize(
    "empty",
    [np.zeros((0,)), np.zeros((3, 0, 2)), b"", bytearray(), (4096, 0), np.zeros(5)[5:]],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", repr(value)),
)
def test_no_element_is_one_clear_refusal(empty: object) -> None:
    with pytest.raises(UsageError) as caught:
        describe(empty)
    assert caught.value.code == "empty"


def test_the_other_byte_order_is_named_as_such() -> None:
    with pytest.raises(UsageError, match="byte order"):
        describe(np.zeros(3, ">f8"))


def test_buffers_of_the_interpreter() -> None:
    anonymous = mmap.mmap(-1, 4096)
    floats = (ctypes.c_float * 6)()
    sources: list[tuple[Any, str, int, bool]] = [
        (bytearray(10), "uint8", 10, False),
        (bytes(10), "uint8", 10, True),
        (anonymous, "uint8", 4096, False),
        (array.array("d", [1, 2]), "float64", 16, False),
        (array.array("l", [1]), "int64", 8, False),
        (floats, "float32", 24, False),
        (memoryview(bytearray(16)).cast("B", (4, 4))[1:3], "uint8", 8, False),
        (memoryview(bytearray(9))[::-2], "uint8", 9, False),
    ]
    for source, dtype, nbytes, readonly in sources:
        view = describe(source)
        assert (view.dtype, view.span_nbytes, view.readonly, view.protocol) == (dtype, nbytes, readonly, "buffer")
    assert describe(floats).ptr == ctypes.addressof(floats)
    assert describe(sources[-1][0]).strides == (-2,)
    anonymous.close()


def test_a_described_buffer_cannot_be_moved_or_closed() -> None:
    data = bytearray(16)
    view = describe(data)
    ctypes.memset(view.ptr, 7, 16)
    assert data == b"\7" * 16
    with pytest.raises(BufferError):
        data.extend(bytes(10_000))
    del view
    data.extend(bytes(10_000))


def test_addresses_and_allocations() -> None:
    view = describe((4096, 100))
    assert (view.ptr, view.shape, view.dtype, view.device_type, view.device_index) == (4096, (100,), "uint8", "", None)
    allocation = Allocation(2**40, 2**21, HandleKind.VMM_FD, None)
    view = describe(allocation)
    assert (view.span_ptr, view.span_nbytes, view.protocol) == (2**40, 2**21, "allocation")
    assert view.owner is allocation


# --- protocols of other libraries -----------------------------------------------------------------------------------


class DeviceArray:
    """What numba's and older libraries' arrays look like from outside."""

    def __init__(self, **changes: Any) -> None:
        interface = {"data": (2**40, False), "shape": (4, 6), "typestr": "<f2", "version": 3, "strides": None}
        self.__cuda_array_interface__ = {
            key: value for key, value in {**interface, **changes}.items() if value != "absent"
        }


def test_a_device_array_is_described_without_its_library() -> None:
    source = DeviceArray(strides=(32, 2), stream=7, data=(2**40, True))
    view = describe(source)
    assert (view.dtype, view.shape, view.strides, view.ptr) == ("float16", (4, 6), (16, 1), 2**40)
    assert (view.device_type, view.device_index, view.readonly) == ("cuda", None, True)
    assert view.span_nbytes == (3 * 16 + 6) * 2
    assert view.notes
    assert describe(DeviceArray(strides="absent")).strides == (6, 1)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"data": "absent"}, "view"),
        ({"data": None}, "view"),
        ({"data": (0, False)}, "view"),
        ({"data": (None, False)}, "view"),
        ({"shape": "absent"}, "view"),
        ({"shape": (4, -6)}, "view"),
        ({"shape": (0,)}, "empty"),
        ({"strides": (3, 2)}, "view"),
        ({"strides": (2,)}, "view"),
        ({"typestr": "|O"}, "dtype"),
        ({"typestr": ">f4"}, "dtype"),
        ({"typestr": ""}, "dtype"),
        ({"mask": object()}, "view"),
        ({"version": "absent"}, "view"),
    ],
)
def test_a_lying_device_array_is_refused(changes: dict[str, Any], code: str) -> None:
    with pytest.raises(UsageError) as caught:
        describe(DeviceArray(**changes))
    assert caught.value.code == code


class Capsuled:
    """An object that speaks DLPack through numpy."""

    def __init__(self, source: np.ndarray[Any, Any], *, modern: bool = True, device: tuple[int, int] = (1, 0)) -> None:
        self.source = source
        self.modern = modern
        self.device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        if not self.modern and options:
            raise TypeError("__dlpack__() got an unexpected keyword argument")
        return self.source.__dlpack__(**options)


@pytest.mark.parametrize("modern", [True, False])
def test_a_capsule_is_read_and_kept(*, modern: bool) -> None:
    source = np.arange(24, dtype="int32").reshape(4, 6)[1:, ::2]
    view = describe(Capsuled(source, modern=modern))
    assert (view.ptr, view.dtype, view.shape, view.strides) == (source.ctypes.data, "int32", (3, 3), (6, 2))
    assert view.protocol.startswith("dlpack 1." if modern else "dlpack 0")
    assert (view.device_type, view.device_index) == ("cpu", 0)
    base = source.base
    assert base is not None
    first = int(source[0, 0])
    del source, base
    gc.collect()
    assert ctypes.c_int32.from_address(view.ptr).value == first


def test_a_read_only_capsule_says_so() -> None:
    source = np.zeros(3)
    source.flags.writeable = False
    assert describe(Capsuled(source)).readonly


def test_a_producer_that_copies_or_fails_or_lies_is_refused() -> None:
    class Copies(Capsuled):
        def __dlpack__(self, **options: Any) -> Any:
            return self.source.__dlpack__(max_version=(1, 0), copy=True)

    class Fails(Capsuled):
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("requires a gradient")

    class Lies(Capsuled):
        def __dlpack__(self, **options: Any) -> Any:
            return object()

    source = np.zeros(3)
    for refused in (Copies(source), Fails(source), Lies(source), Capsuled(source, device=(1, 1))):
        with pytest.raises(UsageError) as caught:
            describe(refused)
        assert caught.value.code == "view"


def test_the_object_must_lie_on_the_device() -> None:
    on_host, on_card, by_address = describe(np.zeros(3)), describe(DeviceArray()), describe((4096, 1))
    check_device(on_host, HOST)
    check_device(on_card, CARD)
    check_device(by_address, CARD)
    check_device(by_address, HOST)
    check_device(on_host, NAMELESS)
    check_device(on_card, DeviceInfo("r", 0, "the same interface of another vendor", dlpack_type=10))
    for view, device in ((on_host, CARD), (on_card, HOST)):
        with pytest.raises(DevIPCError) as caught:
            check_device(view, device)
        assert caught.value.code == "wrong_device"
        assert caught.value.device == device.uuid


def test_the_other_device_of_the_same_kind_is_the_wrong_one() -> None:
    class OnCard(Capsuled):
        def __dlpack__(self, **options: Any) -> Any:
            assert options.pop("stream") == -1, "nobody may be made to wait"
            from devipc.integrations.dlpack import _read

            capsule = self.source.__dlpack__(**options)
            tensor, _, _ = _read(capsule)
            tensor.device_type, tensor.device_id = self.device
            return capsule

    view = describe(OnCard(np.zeros(3), device=(2, 0)))
    assert (view.device_type, view.device_index) == ("cuda", 0)
    with pytest.raises(DevIPCError, match="lies on device 0, this is device 1"):
        check_device(view, CARD)
