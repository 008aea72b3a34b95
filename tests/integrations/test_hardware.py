"""The device path with a real accelerator: tensors over device memory are that memory, and keep it."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from devipc.integrations import ForeignBuffer, ViewKeeper, check_device, describe
from devipc.types import DeviceInfo

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.hardware,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no accelerator here"),
]


@pytest.fixture(scope="module", autouse=True)
def _driver() -> None:
    """What the driver opens at its first use stays open: no test has left that behind."""
    torch.zeros(8, device="cuda").sum().item()


def device() -> DeviceInfo:
    return DeviceInfo("card", 0, "card", dlpack_type=10 if torch.version.hip else 2)


@pytest.mark.parametrize("dtype", ["uint8", "float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int64"])
def test_a_tensor_is_the_device_memory_itself(dtype: str) -> None:
    ends: list[int] = []
    keeper = ViewKeeper(lambda: ends.append(1))
    pool = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    view = describe(pool[8640:12_736])
    check_device(view, device())
    assert (view.ptr, view.span_nbytes) == (pool.data_ptr() + 8640, 4096)
    buffer = ForeignBuffer(
        ptr=pool.data_ptr() + 8640, dtype=dtype, shape=(4, 8), strides=(16, 1), device=device(), keeper=keeper
    )
    tensor = buffer.to_torch()
    assert (tensor.data_ptr(), tensor.stride(), str(tensor.dtype)) == (view.ptr, (16, 1), f"torch.{dtype}")
    assert describe(tensor).dtype == dtype
    tensor.view(torch.uint8).fill_(7)
    torch.cuda.synchronize()
    assert int(pool.sum()) == 7 * 4 * 8 * tensor.element_size()
    del buffer
    keeper.release()
    gc.collect()
    assert ends == []
    with pytest.raises(RuntimeError, match="is invalid for input"):
        tensor.reshape(7)
    del tensor
    gc.collect()
    assert ends == [1]


def test_other_libraries_see_the_same_memory() -> None:
    keeper = ViewKeeper(lambda: None)
    source = torch.arange(12, dtype=torch.float32, device="cuda").view(3, 4)
    buffer = ForeignBuffer(ptr=source.data_ptr(), dtype="float32", shape=(3, 4), device=device(), keeper=keeper)
    by_interface = torch.as_tensor(buffer, device="cuda")
    assert by_interface.data_ptr() == source.data_ptr()
    cupy: Any = pytest.importorskip("cupy")
    for array in (cupy.asarray(buffer), cupy.from_dlpack(buffer)):
        assert array.data.ptr == source.data_ptr()
        assert describe(array).ptr == source.data_ptr()
        array[0, 0] = 99
        cupy.cuda.runtime.deviceSynchronize()
        assert float(source[0, 0]) == 99
