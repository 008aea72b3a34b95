"""Pool layouts from tensors: what serving systems allocate, described as the planes of a pool.

Owns the reading of shapes and strides, and the resolution of tensors to the allocations that they lie in. It touches
no tensor: a caller gives address, shape and strides, and what the driver says about its allocations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from devipc.errors import CapabilityError, UsageError
from devipc.hicache.layout import Component, Plane, PoolChunk, PoolLayout, Rule
from devipc.types import AllocationInfo

__all__ = ["BuiltPool", "TensorView", "block_pool", "mla_token_pool", "plain_pool", "token_pool"]


@dataclass(frozen=True, slots=True)
class TensorView:
    """Address, shape and strides of a tensor, in elements and bytes as its framework reports them.

    Parameters
    ----------
    ptr : int
        Device address of element 0.
    shape : tuple of int
        Elements in each dimension.
    strides_nbytes : tuple of int
        Bytes from one index to the next, in each dimension.
    item_nbytes : int
        Bytes of one element.
    """

    ptr: int
    shape: tuple[int, ...]
    strides_nbytes: tuple[int, ...]
    item_nbytes: int

    @classmethod
    def contiguous(cls, ptr: int, shape: Sequence[int], item_nbytes: int) -> TensorView:
        """Describe a C-contiguous tensor."""
        strides, step = [], item_nbytes
        for extent in reversed(shape):
            strides.append(step)
            step *= extent
        return cls(ptr, tuple(shape), tuple(reversed(strides)), item_nbytes)

    @property
    def span_nbytes(self) -> int:
        """Bytes from ``ptr`` to the end of the last element."""
        steps = zip(self.shape, self.strides_nbytes, strict=True)
        return sum((extent - 1) * stride for extent, stride in steps) + self.item_nbytes

    def __getitem__(self, index: int) -> TensorView:
        """Return the view at ``index`` of the first dimension."""
        if not 0 <= index < self.shape[0]:
            raise IndexError(f"index {index} of a dimension of {self.shape[0]}")
        ptr = self.ptr + index * self.strides_nbytes[0]
        return TensorView(ptr, self.shape[1:], self.strides_nbytes[1:], self.item_nbytes)

    def packed_nbytes(self, first: int) -> int:
        """Return the bytes of the dimensions from ``first`` on, which must lie without gaps and in order."""
        expected = self.item_nbytes
        for extent, stride in zip(reversed(self.shape[first:]), reversed(self.strides_nbytes[first:]), strict=True):
            if stride != expected and extent != 1:
                raise UsageError(
                    f"tensor of shape {self.shape} has gaps, or another order, inside a row",
                    code="row_order",
                    remedy="pass a view whose dimensions from the row on are contiguous",
                )
            expected *= extent
        return expected


@dataclass(frozen=True, slots=True)
class BuiltPool:
    """A layout, and the ranges to export for it.

    Parameters
    ----------
    layout : PoolLayout
        What to register.
    exports : tuple of (int, int)
        Address and length in bytes of the range behind each chunk, in chunk order.
    """

    layout: PoolLayout
    exports: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A plane that still has an address instead of chunk and offset."""

    layer: int
    ptr: int
    span_nbytes: int
    row_nbytes: int
    row_stride_nbytes: int
    page_stride_nbytes: int


def token_pool(
    k: Sequence[TensorView],
    v: Sequence[TensorView],
    *,
    page_tokens: int,
    allocations: Iterable[AllocationInfo],
    name: str = "kv",
    first_page: int = 1,
) -> BuiltPool:
    """Describe K and V of each layer with one row per token: the pools of SGLang's token allocators.

    K and V of a layer may be views of one allocation or have one each; rows may have gaps between them.

    Parameters
    ----------
    k, v : sequence of TensorView
        One a layer, of shape ``(rows, ...)``; a row is one token. Trailing rows that fill no page are left out.
    page_tokens : int
        Tokens in a page: page ``p`` is rows ``p * page_tokens`` and following.
    allocations : iterable of AllocationInfo
        What the driver said about every tensor's allocation; repetitions do no harm.
    name : str
        Name of the component.
    first_page : int
        1 where page 0 absorbs padding writes, as in SGLang.

    Raises
    ------
    UsageError
        For tensors that cannot be expressed or lie in none of ``allocations``.
    CapabilityError
        For an allocation that cannot be exported, with the driver's reason.
    """
    if len(k) != len(v):
        raise UsageError(f"{len(k)} K and {len(v)} V tensors", code="layers", remedy="pass one of each a layer")
    tensors = [(layer, tensor) for layer, pair in enumerate(zip(k, v, strict=True)) for tensor in pair]
    return _rows_pool(tensors, Rule.FULL_ATTENTION, page_tokens, allocations, name, first_page)


def mla_token_pool(
    kv: Sequence[TensorView],
    *,
    page_tokens: int,
    allocations: Iterable[AllocationInfo],
    name: str = "kv",
    first_page: int = 1,
) -> BuiltPool:
    """Describe one latent row per token and layer, which all ranks hold alike. Parameters as :func:`token_pool`."""
    return _rows_pool(list(enumerate(kv)), Rule.MLA, page_tokens, allocations, name, first_page)


def _rows_pool(
    tensors: list[tuple[int, TensorView]],
    rule: Rule,
    page_tokens: int,
    allocations: Iterable[AllocationInfo],
    name: str,
    first_page: int,
) -> BuiltPool:
    if page_tokens < 1 or not tensors:
        raise UsageError(f"{len(tensors)} tensors in pages of {page_tokens} tokens", remedy="pass at least one of each")
    placed = []
    for layer, tensor in tensors:
        row, stride = tensor.packed_nbytes(1), tensor.strides_nbytes[0]
        placed.append(_Placed(layer, tensor.ptr, tensor.span_nbytes, row, stride, page_tokens * stride))
    page_count = min(tensor.shape[0] for _, tensor in tensors) // page_tokens
    return _build(placed, rule, page_tokens, page_tokens, page_count, allocations, name, first_page)


def block_pool(
    layers: Sequence[TensorView],
    *,
    page_tokens: int,
    allocations: Iterable[AllocationInfo],
    block_dim: int,
    rule: Rule = Rule.FULL_ATTENTION,
    name: str = "kv",
    first_page: int = 0,
) -> BuiltPool:
    """Describe pools of blocks, one tensor a layer: the caches of vLLM and its like. A page is a block.

    Parameters
    ----------
    layers : sequence of TensorView
        ``(2, blocks, ...)`` with ``block_dim=1``, ``(blocks, 2, ...)`` or ``(blocks, ...)`` with ``block_dim=0``.
        What follows the block dimension must lie without gaps and in order, and moves as one piece.
    block_dim : int
        Which dimension counts blocks. With 1, dimension 0 counts the parts (K, V) of a layer.
    page_tokens, allocations, rule, name, first_page
        As :func:`token_pool`.
    """
    if block_dim not in (0, 1) or not layers:
        raise UsageError("blocks are counted by dimension 0 or 1 of at least one tensor", remedy="permute the view")
    parts = [
        (layer, part)
        for layer, tensor in enumerate(layers)
        for part in ([tensor] if block_dim == 0 else [tensor[index] for index in range(tensor.shape[0])])
    ]
    placed = []
    for layer, part in parts:
        piece = part.packed_nbytes(1)
        placed.append(_Placed(layer, part.ptr, part.span_nbytes, piece, piece, part.strides_nbytes[0]))
    page_count = min(part.shape[0] for _, part in parts)
    return _build(placed, rule, page_tokens, 1, page_count, allocations, name, first_page)


def plain_pool(
    tensors: Sequence[tuple[int, TensorView]],
    *,
    page_tokens: int,
    allocations: Iterable[AllocationInfo],
    rule: Rule = Rule.FULL_ATTENTION,
    name: str = "kv",
    first_page: int = 0,
) -> BuiltPool:
    """Describe any tensors of shape ``(pages, rows, ...)``, each with the layer that needs it.

    Page and row strides may be anything that leaves no plane overlapping; all tensors have the same number of rows.
    Parameters as :func:`token_pool`.
    """
    rows = {tensor.shape[1] for _, tensor in tensors if len(tensor.shape) > 1}
    if len(rows) != 1 or any(len(tensor.shape) < 2 for _, tensor in tensors):
        raise UsageError("tensors of unequal rows in a page", code="rows", remedy="pass views (pages, rows, ...)")
    placed = []
    for layer, tensor in tensors:
        page, row = tensor.strides_nbytes[0], tensor.packed_nbytes(2)
        stride = tensor.strides_nbytes[1] if tensor.shape[1] > 1 else row
        placed.append(_Placed(layer, tensor.ptr, tensor.span_nbytes, row, stride, page))
    page_count = min(tensor.shape[0] for _, tensor in tensors)
    return _build(placed, rule, page_tokens, rows.pop(), page_count, allocations, name, first_page)


def _build(
    placed: list[_Placed],
    rule: Rule,
    page_tokens: int,
    page_rows: int,
    page_count: int,
    allocations: Iterable[AllocationInfo],
    name: str,
    first_page: int,
) -> BuiltPool:
    """Give each plane its chunk: one chunk an allocation, shared from its first used byte to its last."""
    known = sorted({allocation.base: allocation for allocation in allocations}.values(), key=lambda a: a.base)
    homes = [_home(plane, known) for plane in placed]
    used = list(dict.fromkeys(homes))
    starts = {home: min(p.ptr for p, h in zip(placed, homes, strict=True) if h == home) for home in used}
    ends = {home: max(p.ptr + p.span_nbytes for p, h in zip(placed, homes, strict=True) if h == home) for home in used}
    chunks = tuple(PoolChunk(ends[home] - starts[home], known[home].exportable[0]) for home in used)
    planes = tuple(
        Plane(
            plane.layer,
            used.index(home),
            plane.ptr - starts[home],
            plane.row_nbytes,
            plane.row_stride_nbytes,
            plane.page_stride_nbytes,
        )
        for plane, home in zip(placed, homes, strict=True)
    )
    component = Component(name, rule, page_tokens, page_rows, planes)
    layout = PoolLayout(page_count, chunks, (component,), first_page)
    return BuiltPool(layout, tuple((starts[home], ends[home] - starts[home]) for home in used))


def _home(plane: _Placed, known: list[AllocationInfo]) -> int:
    for index, allocation in enumerate(known):
        if allocation.base <= plane.ptr and plane.ptr + plane.span_nbytes <= allocation.base + allocation.nbytes:
            if not allocation.exportable:
                raise CapabilityError(
                    f"allocation of {allocation.nbytes} bytes ({allocation.kind.value}) cannot be shared:"
                    f" {allocation.reason}",
                    code="not_exportable",
                    remedy="allocate the pool so that it can be exported; the reason names the setting",
                )
            return index
    raise UsageError(
        f"tensor of layer {plane.layer} lies in none of the {len(known)} allocations",
        code="allocation",
        remedy="describe the address of every tensor and pass all answers",
    )
