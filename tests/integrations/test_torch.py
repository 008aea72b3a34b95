"""Tensors both ways: every view that has strides, none that has not, and no copy in between."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from devipc.errors import CapabilityError, UsageError
from devipc.integrations import check_device, describe, torch_view
from tests.integrations.conftest import CARD, HOST, NAMELESS, Mapped

torch = pytest.importorskip("torch")

DTYPES = ["bool", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
DTYPES += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
DTYPES += ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_type_goes_both_ways(mapped: Mapped, dtype: str) -> None:
    tensor = mapped.buffer(dtype, (3, 4), strides=(8, 2), at=64).to_torch()
    assert str(tensor.dtype) == f"torch.{dtype}"
    assert (tuple(tensor.shape), tensor.stride()) == ((3, 4), (8, 2))
    assert tensor.data_ptr() == mapped.map.address + 64
    view = describe(tensor)
    assert (view.dtype, view.shape, view.strides, view.ptr) == (dtype, (3, 4), (8, 2), tensor.data_ptr())
    assert (view.device_type, view.device_index, view.protocol) == ("cpu", 0, "torch")
    assert view.itemsize == tensor.element_size()
    check_device(view, HOST)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_way_by_dlpack_gives_the_same(mapped: Mapped, dtype: str) -> None:
    """What device memory takes, tried on host memory, where it can be."""
    tensor = torch_view._from_device(mapped.buffer(dtype, (3, 4), strides=(8, 2), at=64), getattr(torch, dtype))
    assert str(tensor.dtype) == f"torch.{dtype}"
    assert (tuple(tensor.shape), tensor.stride()) == ((3, 4), (8, 2))
    assert tensor.data_ptr() == mapped.map.address + 64
    del tensor
    gc.collect()
    assert mapped.views == 0


TAKE: dict[str, Callable[[Any], Any]] = {
    "by_buffer": lambda buffer: buffer.to_torch(),
    "by_dlpack": lambda buffer: torch.from_dlpack(buffer),
    "by_device_path": lambda buffer: torch_view._from_device(buffer, torch.float32),
}


@pytest.mark.parametrize("how", TAKE)
def test_a_tensor_is_the_memory_itself_and_keeps_it(mapped: Mapped, how: str) -> None:
    tensor = TAKE[how](mapped.buffer())
    tensor[1, 1] = 7
    assert mapped.buffer().to_numpy()[1, 1] == 7
    mapped.map.view[0:4] = b"\0\0\x80\x3f"
    assert tensor[0, 0] == 1
    parts = [tensor.T, tensor[1:], tensor.view(-1), tensor.numpy(), tensor.detach(), torch.nn.Parameter(tensor)]
    del tensor
    mapped.keeper.release()
    for _ in range(len(parts)):
        gc.collect()
        assert mapped.ends == 0
        parts.pop()
    gc.collect()
    assert mapped.ends == 1


@pytest.mark.parametrize("how", TAKE)
def test_an_error_is_not_lost_when_the_last_tensor_dies_on_its_way(mapped: Mapped, how: str) -> None:
    with pytest.raises(RuntimeError, match="is invalid for input of size 16"):
        TAKE[how](mapped.buffer()).reshape(7)
    with pytest.raises(RuntimeError, match="must match"):
        torch.add(TAKE[how](mapped.buffer()), torch.ones(5))
    gc.collect()
    assert mapped.views == 0


def test_sixty_layers_cut_from_one_pool() -> None:
    pool = torch.zeros(60 * 1000 + 8640, dtype=torch.uint8)
    for layer in range(60):
        part = pool[8640 + layer * 1000 :][:1000].view(10, 100)
        view = describe(part)
        assert view.ptr - pool.data_ptr() == 8640 + layer * 1000 == part.storage_offset()
        assert view.span_nbytes == 1000
    assert view.ptr + view.span_nbytes == pool.data_ptr() + pool.nbytes


def test_views_of_all_kinds() -> None:
    base = torch.arange(120, dtype=torch.int16).view(4, 5, 6)
    parts = [base, base[1:3, ::2], base.permute(2, 0, 1), base[3, 4, 5:], base[2, 2, 2], base.unfold(2, 3, 1)]
    parts += [base.expand(7, 4, 5, 6), base.view(torch.uint8), base.as_strided((2, 2), (1, 1), 3)]
    for part in parts:
        view = describe(part)
        assert view.ptr == part.data_ptr()
        assert (view.shape, view.strides) == (tuple(part.shape), part.stride())
        inside = view.span_ptr - base.data_ptr()
        assert inside >= 0
        assert inside + view.span_nbytes <= base.nbytes
    assert describe(parts[6]).span_nbytes == base.nbytes


def test_a_resized_storage_is_noticed() -> None:
    tensor = torch.zeros(100)
    kept = tensor[50:]
    tensor.untyped_storage().resize_(4 * 99)
    with pytest.raises(UsageError, match="storage has 396"):
        describe(tensor)
    tensor.untyped_storage().resize_(0)
    for gone in (tensor, kept):
        with pytest.raises(UsageError):
            describe(gone)


def test_memory_is_kept_when_the_tensor_is_pointed_elsewhere() -> None:
    memory = numpy.zeros(64, numpy.uint8)
    kept = weakref.ref(memory)
    tensor = torch.from_numpy(memory)
    view = describe(tensor)
    del memory
    tensor.data = torch.zeros(8, dtype=torch.uint8)
    gc.collect()
    assert kept() is not None
    del view
    gc.collect()
    assert kept() is None


def test_a_gradient_is_left_behind_and_that_is_said() -> None:
    leaf = torch.nn.Parameter(torch.zeros(4))
    for tensor in (leaf, leaf * 2):
        view = describe(tensor)
        assert view.ptr == tensor.data_ptr()
        assert "autograd" in view.notes[0]
        assert isinstance(view.owner, torch.Tensor)
        assert not view.owner.requires_grad
    assert describe(leaf.detach()).notes == ()


class Computed(torch.Tensor):  # type: ignore[misc,name-defined]
    """A tensor subclass that has no memory of its own, as fake, distributed and quantised ones have not."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError

    @staticmethod
    def make() -> Any:
        return torch.Tensor._make_wrapper_subclass(Computed, (3,), dtype=torch.float32)


def quantised() -> Any:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


REFUSED: dict[str, Callable[[], Any]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantised": quantised,
    "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "meta": lambda: torch.ones(3, device="meta"),
    "half_complex": lambda: torch.zeros(3, dtype=torch.complex32),
    "computed": Computed.make,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.filterwarnings("ignore")  # torch warns about each of these being young or old
def test_what_is_more_or_less_than_its_bytes_is_refused(kind: str) -> None:
    with pytest.raises(UsageError) as caught:
        describe(REFUSED[kind]())
    assert caught.value.code in {"view", "dtype"}
    assert caught.value.remedy


def test_a_batched_tensor_has_no_memory_to_share() -> None:
    def inside(tensor: Any) -> Any:
        with pytest.raises(UsageError):
            describe(tensor)
        return tensor

    torch.vmap(inside)(torch.ones(2, 3))


def test_no_element_is_one_clear_refusal() -> None:
    for tensor in (torch.empty(0), torch.empty(3, 0), torch.ones(5)[5:]):
        with pytest.raises(UsageError) as caught:
            describe(tensor)
        assert caught.value.code == "empty"


def test_read_only_memory_is_a_tensor_only_by_promise(mapped: Mapped) -> None:
    buffer = mapped.buffer(readonly=True)
    with pytest.raises(CapabilityError) as caught:
        buffer.to_torch()
    assert caught.value.code == "readonly"
    assert mapped.views == 1
    assert buffer.to_torch(allow_readonly=True).data_ptr() == buffer.ptr


def test_what_torch_cannot_express_is_refused(mapped: Mapped) -> None:
    with pytest.raises(UsageError):
        mapped.buffer("uint8", (4,), strides=(-1,), at=8).to_torch()
    with pytest.raises(UsageError):
        mapped.buffer("float32", (4,), at=2).to_torch()
    assert mapped.buffer("float32", (0, 3)).to_torch().shape == (0, 3)
    assert mapped.buffer("float32", ()).to_torch().shape == ()


def test_a_device_that_this_build_lacks_is_named(mapped: Mapped) -> None:
    if torch.cuda.is_available():
        pytest.skip("this build has the device")
    with pytest.raises(CapabilityError, match="does not take memory of a card"):
        mapped.buffer(device=CARD).to_torch()
    with pytest.raises(CapabilityError, match="a new kind of card"):
        mapped.buffer(device=NAMELESS).to_torch()
    gc.collect()
    assert mapped.views == 0


def test_the_vendor_comes_from_the_build_not_from_the_device_string(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor: Any = types.SimpleNamespace(device=types.SimpleNamespace(type="cuda"))
    monkeypatch.setattr(torch.version, "hip", None)
    assert torch_view._device_type(tensor) == "cuda"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert torch_view._device_type(tensor) == "rocm"
    tensor.device.type = "xpu"
    assert torch_view._device_type(tensor) == "oneapi"


def test_there_and_back(mapped: Mapped) -> None:
    source = mapped.buffer("bfloat16", (8, 8)).to_torch()
    source.copy_(torch.arange(64).view(8, 8))
    for part in (source, source[2:5, 1::3], source.T, source[3], source.unfold(1, 3, 2), source[0].expand(5, 8)):
        view = describe(part)
        again = mapped.buffer(view.dtype, view.shape, strides=view.strides, at=view.ptr - mapped.map.address)
        assert torch.equal(again.to_torch(), part)
