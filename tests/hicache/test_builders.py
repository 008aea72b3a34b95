"""Builders describe real arrays: the bytes that a plan would move are the arrays' own elements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from devipc.errors import CapabilityError, UsageError
from devipc.hicache.builders import BuiltPool, TensorView, block_pool, mla_token_pool, plain_pool, token_pool
from devipc.hicache.layout import Rule
from devipc.hicache.planning.planner import Direction, HostPages, Planner
from devipc.types import AllocationInfo, HandleKind, MemoryKind

Array = npt.NDArray[np.uint16]


def view(array: Array) -> TensorView:
    return TensorView(array.ctypes.data, array.shape, array.strides, array.itemsize)


def allocation(array: Array, kind: HandleKind | None = HandleKind.LEGACY) -> AllocationInfo:
    exportable = () if kind is None else (kind,)
    return AllocationInfo(array.ctypes.data, array.nbytes, MemoryKind.DEVICE, 1, exportable, "" if kind else "because")


def numbered(*shape: int) -> Array:
    return np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)


def backed_up(built: BuiltPool, memory: Sequence[Array], page: int) -> bytes:
    """Plan one page's backup, and do its copies on the arrays themselves."""
    host, start = bytearray(built.layout.page_nbytes), 1 << 50
    planner = Planner(built.layout, [ptr for ptr, _ in built.exports], arena=(start, len(host)))
    plan = planner.plan(Direction.BACKUP, np.array([page]), HostPages.blocks(np.array([start])))
    copies = [
        (dst + row * dst_pitch - start, src + row * src_pitch, width)
        for dst, src, dst_pitch, src_pitch, width, height in plan.groups[0].strided.tolist()
        for row in range(height)
    ]
    group = plan.groups[0]
    entries = zip(group.dst.tolist(), group.src.tolist(), group.nbytes.tolist(), strict=True)
    copies += [(dst - start, src, nbytes) for dst, src, nbytes in entries]
    for dst, src, nbytes in copies:
        (home,) = [a for a in memory if a.ctypes.data <= src and src + nbytes <= a.ctypes.data + a.nbytes]
        offset = src - home.ctypes.data
        host[dst : dst + nbytes] = home.tobytes()[offset : offset + nbytes]
    return bytes(host)


def test_k_and_v_of_a_layer_in_one_allocation() -> None:
    layers = [numbered(2, 20, 2, 3) + 1000 * layer for layer in range(3)]
    built = token_pool(
        [view(layer[0]) for layer in layers],
        [view(layer[1]) for layer in layers],
        page_tokens=4,
        allocations=[allocation(layer) for layer in layers for _ in range(2)],
    )
    assert len(built.exports) == len(layers)
    assert built.layout.page_count == 5
    assert built.layout.first_page == 1
    expected = b"".join(layer[part, 8:12].tobytes() for layer in layers for part in range(2))
    assert backed_up(built, layers, 2) == expected
    assert [advice.code for advice in built.layout.advice()] == ["separate_allocations"]


def test_k_and_v_apart_and_rows_with_gaps() -> None:
    whole = numbered(18, 8)
    k, v = whole[:, :3], numbered(18, 3)
    built = token_pool([view(k)], [view(v)], page_tokens=4, allocations=[allocation(whole), allocation(v)])
    assert built.layout.page_count == 4
    assert backed_up(built, [whole, v], 3) == k[12:16].tobytes() + v[12:16].tobytes()
    assert [advice.code for advice in built.layout.advice()] == ["separate_allocations", "padded_rows"]


def test_latent_rows() -> None:
    whole = numbered(2, 12, 1, 5)
    built = mla_token_pool([view(layer) for layer in whole], page_tokens=1, allocations=[allocation(whole)])
    assert built.layout.components[0].rule is Rule.MLA
    assert backed_up(built, [whole], 7) == whole[:, 7].tobytes()
    assert [advice.code for advice in built.layout.advice()] == ["one_token_pages"]


@pytest.mark.parametrize("block_dim", [0, 1])
def test_blocks(block_dim: int) -> None:
    layers = [numbered(*((2, 6) if block_dim else (6, 2)), 4, 2, 3) + 1000 * layer for layer in range(2)]
    built = block_pool(
        [view(layer) for layer in layers],
        page_tokens=4,
        block_dim=block_dim,
        allocations=[allocation(layer) for layer in layers],
    )
    assert built.layout.page_count == 6
    pages = [layer[:, 5] if block_dim else layer[5] for layer in layers]
    assert backed_up(built, layers, 5) == b"".join(page.tobytes() for page in pages)


def test_plain_tensors_of_any_stride() -> None:
    whole = numbered(5, 2, 3, 4)  # pages, layers, rows, row: page first
    tensors = [(layer, view(whole[:, layer])) for layer in range(2)]
    built = plain_pool(tensors, page_tokens=3, allocations=[allocation(whole)])
    assert built.exports == ((whole.ctypes.data, whole.nbytes),)
    assert backed_up(built, [whole], 4) == whole[4].tobytes()
    woven = numbered(5, 3, 2, 4)  # rows of both layers alternate
    tensors = [(layer, view(woven[:, :, layer])) for layer in range(2)]
    built = plain_pool(tensors, page_tokens=3, allocations=[allocation(woven)])
    assert backed_up(built, [woven], 1) == woven[1, :, 0].tobytes() + woven[1, :, 1].tobytes()


def test_the_stride_of_a_single_row_means_nothing() -> None:
    tensor = TensorView(4096, (6, 1, 8), (16, 0, 2), 2)
    home = AllocationInfo(4096, 96, MemoryKind.DEVICE, 1, (HandleKind.LEGACY,))
    plane = plain_pool([(0, tensor)], page_tokens=1, allocations=[home]).layout.components[0].planes[0]
    assert (plane.row_nbytes, plane.row_stride_nbytes, plane.page_stride_nbytes) == (16, 16, 16)


def test_only_the_used_range_is_exported() -> None:
    segment = numbered(100, 4)
    k, v = segment[10:50], segment[50:90]
    built = token_pool([view(k)], [view(v)], page_tokens=4, allocations=[allocation(segment)])
    assert built.exports == ((k.ctypes.data, 80 * 8),)
    assert backed_up(built, [segment], 1) == k[4:8].tobytes() + v[4:8].tobytes()


def test_contiguous_views_match_numpy() -> None:
    array = numbered(3, 4, 5)
    assert TensorView.contiguous(array.ctypes.data, array.shape, 2) == view(array)
    assert view(array).span_nbytes == array.nbytes
    with pytest.raises(IndexError):
        view(array)[3]


def test_what_cannot_be_described_is_refused() -> None:
    array = numbered(8, 4)
    one = view(array)
    for kwargs, error, code in [
        ({"k": [one], "v": []}, UsageError, "layers"),
        ({"k": [], "v": []}, UsageError, "usage"),
        ({"k": [view(array[:, ::2])], "v": [one]}, UsageError, "row_order"),
        ({"k": [one], "v": [one]}, UsageError, "overlap"),
        ({"k": [one], "v": [one], "allocations": []}, UsageError, "allocation"),
        ({"k": [one], "v": [one], "allocations": [allocation(array, None)]}, CapabilityError, "not_exportable"),
        ({"k": [one], "v": [one], "page_tokens": 0}, UsageError, "usage"),
        ({"k": [one], "v": [one], "page_tokens": 16}, UsageError, "range"),
    ]:
        options = {"page_tokens": 2, "allocations": [allocation(array)], **kwargs}  # type: ignore[dict-item]
        with pytest.raises(error) as caught:
            token_pool(**options)  # type: ignore[arg-type]
        assert caught.value.code == code
        assert caught.value.remedy
    with pytest.raises(UsageError):
        block_pool([one], page_tokens=1, block_dim=2, allocations=[allocation(array)])
    with pytest.raises(UsageError):
        plain_pool([(0, one), (1, view(numbered(8, 3)))], page_tokens=1, allocations=[allocation(array)])
