"""Where the bytes of a page lie: the geometry of a registered pool, its checks, and its form on the wire.

Owns the description and the refusal of what it cannot express. It knows no address: a plane lies at an offset in one
of the pool's chunks, and where a chunk is mapped is the business of whoever maps it. It plans no copy.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from devipc.errors import UsageError, WireError
from devipc.types import HandleKind
from devipc.wire import Reader, Writer

__all__ = [
    "LAYOUT_VERSION",
    "Advice",
    "Component",
    "Plane",
    "PoolChunk",
    "PoolLayout",
    "Rule",
    "decode_layout",
    "encode_layout",
]

LAYOUT_VERSION = 1
"""Version of the encoding, and of the order in which a page's planes stand in host memory."""

MAX_COMPONENTS = 64
MAX_PLANES = 4096
MAX_CHUNKS = 4096
MAX_CELLS = 64 * 1024
MAX_NBYTES = 2**56
MAX_PAGES = 2**32
MAX_PAGE_TOKENS = 2**20
MAX_NAME_NBYTES = 64

_E = TypeVar("_E", bound=enum.StrEnum)

# A copy engine pays for a row about what 2 to 3.5 KiB cost on a PCIe 5 x16 wire (H200, 2026-11-29: 30 to 65 ns).
SMALL_PIECE_NBYTES = 8 * 1024


class Rule(enum.StrEnum):
    """Which pages of a component a prefix needs, and whether ranks hold the same bytes."""

    FULL_ATTENTION = "full_attention"
    """Every page of the prefix; each rank has its own share."""
    MLA = "mla"
    """Every page of the prefix; all ranks hold equal bytes, so that one of them stores for all."""


@dataclass(frozen=True, slots=True)
class Plane:
    """One layer's K, V or other part, in all pages.

    Row ``r`` of page ``p`` starts ``offset + p * page_stride_nbytes + r * row_stride_nbytes`` bytes into the chunk.

    Parameters
    ----------
    layer : int
        Layer that needs it; decides how early a restore must deliver it.
    chunk : int
        Index into the pool's chunks.
    offset : int
        Bytes from the start of the chunk to row 0 of page 0.
    row_nbytes : int
        Bytes of one row that mean something.
    row_stride_nbytes, page_stride_nbytes : int
        Distance from a row, or a page, to the next one; what lies between is never touched.
    """

    layer: int
    chunk: int
    offset: int
    row_nbytes: int
    row_stride_nbytes: int
    page_stride_nbytes: int


@dataclass(frozen=True, slots=True)
class Component:
    """Planes that live and die together under one rule.

    Parameters
    ----------
    name : str
        Unique in the pool, at most 64 bytes of UTF-8.
    rule : Rule
        What a hit needs.
    page_tokens : int
        Tokens in a page; equal in all components of a pool.
    page_rows : int
        Rows in a page of each plane: ``page_tokens`` where a row is a token, 1 where a page is one piece.
    planes : tuple of Plane
        In the order in which host memory holds them.
    """

    name: str
    rule: Rule
    page_tokens: int
    page_rows: int
    planes: tuple[Plane, ...]


@dataclass(frozen=True, slots=True)
class PoolChunk:
    """One shared allocation of a pool: its shared length in bytes, and the kind of handle it travels as."""

    nbytes: int
    kind: HandleKind


@dataclass(frozen=True, slots=True)
class Advice:
    """Something that works and will be slow: a stable ``code``, what it is, and what to change."""

    code: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """A registered pool. A page is a bundle: its rows in all planes of all components.

    Checked when it is made, so that every instance can be planned for.

    Parameters
    ----------
    page_count : int
        Pages in every plane, reserved ones included.
    chunks : tuple of PoolChunk
        The shared allocations, in the order of their handles.
    components : tuple of Component
        At least one.
    first_page : int
        Smallest page id that may be moved; pages below absorb padding writes and are never copied.

    Raises
    ------
    UsageError
        For what cannot be expressed: a plane that leaves its chunk, planes that overlap, unequal page sizes, no
        planes, or more of anything than a message may announce. ``code`` tells which.
    """

    page_count: int
    chunks: tuple[PoolChunk, ...]
    components: tuple[Component, ...]
    first_page: int = 0

    def __post_init__(self) -> None:
        _check_pool(self)
        for component in self.components:
            _check_component(self, component)
        _check_overlap(self)

    @property
    def page_tokens(self) -> int:
        """Tokens in a page."""
        return self.components[0].page_tokens

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page over all planes, without padding: its size in host memory."""
        return sum(c.page_rows * plane.row_nbytes for c, plane in self.planes())

    @property
    def layers(self) -> tuple[int, ...]:
        """The distinct layers, ascending."""
        return tuple(sorted({plane.layer for _, plane in self.planes()}))

    def planes(self) -> Iterator[tuple[Component, Plane]]:
        """Yield every plane with its component, in the order of host memory."""
        for component in self.components:
            for plane in component.planes:
                yield component, plane

    def content_bytes(self) -> bytes:
        """Return what a page's bytes in host memory mean, canonically: equal for pools that may share pages.

        Offsets, strides, chunks and the number of pages are left out: they say where, not what.
        """
        writer = Writer().u16(LAYOUT_VERSION).u32(len(self.components))
        for component in self.components:
            writer.text(component.name, limit=MAX_NAME_NBYTES).text(component.rule.value, limit=MAX_NAME_NBYTES)
            writer.u32(component.page_tokens).u32(component.page_rows).u32(len(component.planes))
            for plane in component.planes:
                writer.u32(plane.layer).u64(plane.row_nbytes)
        return writer.done()

    def advice(self) -> list[Advice]:
        """Return what will be slow and what to do about it; empty when nothing is known to be."""
        return [found for check in (_many_legacy, _small_pages, _padded_rows) if (found := check(self)) is not None]


def _check_range(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UsageError(f"{what} is {value}, not within {low} .. {high}", code="range", remedy=f"correct {what}")


def _check_pool(pool: PoolLayout) -> None:
    _check_range("page_count", pool.page_count, 1, MAX_PAGES)
    _check_range("first_page", pool.first_page, 0, pool.page_count - 1)
    _check_range("number of chunks", len(pool.chunks), 1, MAX_CHUNKS)
    _check_range("number of components", len(pool.components), 1, MAX_COMPONENTS)
    for chunk in pool.chunks:
        _check_range("size of a chunk", chunk.nbytes, 1, MAX_NBYTES)
    if len({component.name for component in pool.components}) != len(pool.components):
        raise UsageError("two components have one name", code="name", remedy="name each component once")
    sizes = sorted({component.page_tokens for component in pool.components})
    if len(sizes) > 1:
        raise UsageError(
            f"components with pages of {sizes} tokens in one pool",
            code="page_tokens",
            remedy="a page is one bundle: register components of another page size as a pool of their own",
        )
    _check_range("number of planes", sum(len(c.planes) for c in pool.components), 1, MAX_PLANES)
    cells = sum(c.page_rows for c, plane in pool.planes() if plane.row_stride_nbytes != plane.row_nbytes)
    if cells > MAX_CELLS:
        raise UsageError(
            f"{cells} separate pieces in a page, at most {MAX_CELLS} are moved",
            code="cells",
            remedy="remove the padding between rows, or use smaller pages",
        )
    _check_range("bytes of a page", pool.page_nbytes, 1, MAX_NBYTES)


def _check_component(pool: PoolLayout, component: Component) -> None:
    _check_range("length of a component's name", len(component.name.encode()), 1, MAX_NAME_NBYTES)
    _check_range("page_tokens", component.page_tokens, 1, MAX_PAGE_TOKENS)
    _check_range("page_rows", component.page_rows, 1, MAX_PAGE_TOKENS)
    _check_range(f"number of planes of component {component.name!r}", len(component.planes), 1, MAX_PLANES)
    for plane in component.planes:
        _check_range("layer", plane.layer, 0, 2**32 - 1)
        _check_range("chunk", plane.chunk, 0, len(pool.chunks) - 1)
        _check_range("offset", plane.offset, 0, MAX_NBYTES)
        _check_range("row_nbytes", plane.row_nbytes, 1, MAX_NBYTES)
        _check_range("row_stride_nbytes", plane.row_stride_nbytes, plane.row_nbytes, MAX_NBYTES)
        span = (component.page_rows - 1) * plane.row_stride_nbytes + plane.row_nbytes
        _check_range("page_stride_nbytes", plane.page_stride_nbytes, span, MAX_NBYTES)
        end = plane.offset + (pool.page_count - 1) * plane.page_stride_nbytes + span
        if end > pool.chunks[plane.chunk].nbytes:
            raise UsageError(
                f"plane of layer {plane.layer} in component {component.name!r} ends at byte {end} of a chunk of"
                f" {pool.chunks[plane.chunk].nbytes} bytes",
                code="bounds",
                remedy="share the whole allocation, or correct offset, strides and page_count",
            )


@dataclass(frozen=True, slots=True)
class _Footprint:
    """Bytes that a plane occupies: ``width`` bytes every ``period``, from ``start`` to ``end``."""

    start: int
    end: int
    period: int
    width: int


def _footprint(pool: PoolLayout, component: Component, plane: Plane) -> _Footprint:
    rows, stride, page = component.page_rows, plane.row_stride_nbytes, plane.page_stride_nbytes
    span = (rows - 1) * stride + plane.row_nbytes
    end = plane.offset + (pool.page_count - 1) * page + span
    if page == rows * stride:
        return _Footprint(plane.offset, end, stride, plane.row_nbytes)
    return _Footprint(plane.offset, end, page, span)


def _check_overlap(pool: PoolLayout) -> None:
    """Prove that no byte belongs to two planes: ranges apart, or interleaved with one period at disjoint residues."""
    by_chunk: dict[int, list[_Footprint]] = {}
    for component, plane in pool.planes():
        by_chunk.setdefault(plane.chunk, []).append(_footprint(pool, component, plane))
    for footprints in by_chunk.values():
        footprints.sort(key=lambda footprint: footprint.start)
        cluster, end = [footprints[0]], footprints[0].end
        for footprint in footprints[1:]:
            if footprint.start >= end:
                _check_cluster(cluster)
                cluster = []
            cluster.append(footprint)
            end = max(end, footprint.end)
        _check_cluster(cluster)


def _check_cluster(cluster: list[_Footprint]) -> None:
    if len(cluster) == 1:
        return
    period = cluster[0].period
    arcs = sorted((footprint.start % period, footprint.width) for footprint in cluster)
    arcs.append((arcs[0][0] + period, arcs[0][1]))
    apart = all(start + width <= following for (start, width), (following, _) in pairwise(arcs))
    if any(footprint.period != period for footprint in cluster) or not apart:
        raise UsageError(
            f"{len(cluster)} planes share bytes, or are interleaved in a way that cannot be checked",
            code="overlap",
            remedy="give interleaved planes equal strides and disjoint offsets, and others ranges of their own",
        )


def _many_legacy(pool: PoolLayout) -> Advice | None:
    used = {plane.chunk for _, plane in pool.planes()}
    legacy = sum(pool.chunks[index].kind is HandleKind.LEGACY for index in used)
    if legacy < 2:
        return None
    return Advice(
        "separate_allocations",
        f"planes lie in {legacy} classic allocations, which one strided copy cannot span: each page costs at least"
        f" {legacy} copies",
        "allocate the pool as one allocation, or as VMM allocations, which an importer maps side by side",
    )


def _small_pages(pool: PoolLayout) -> Advice | None:
    pieces = [c.page_rows * p.row_nbytes for c, p in pool.planes() if p.row_stride_nbytes == p.row_nbytes]
    if pool.page_tokens > 1 or not pieces or min(pieces) >= SMALL_PIECE_NBYTES:
        return None
    return Advice(
        "one_token_pages",
        f"pages of one token leave pieces of {min(pieces)} bytes, whose cost is the piece and not its bytes",
        "use pages of 16 tokens or more; back up runs of neighbouring pages, which are moved as one",
    )


def _padded_rows(pool: PoolLayout) -> Advice | None:
    padded = sum(p.row_stride_nbytes != p.row_nbytes and c.page_rows > 1 for c, p in pool.planes())
    if not padded:
        return None
    return Advice(
        "padded_rows",
        f"{padded} planes have gaps between rows: a page moves row by row there",
        "store rows without padding, or keep the padding at the end of a page",
    )


def encode_layout(layout: PoolLayout) -> bytes:
    """Return the bytes of ``layout``, little-endian and self-contained."""
    writer = Writer().u16(LAYOUT_VERSION).u64(layout.page_count).u64(layout.first_page).u32(len(layout.chunks))
    for chunk in layout.chunks:
        writer.u64(chunk.nbytes).text(chunk.kind.value, limit=MAX_NAME_NBYTES)
    writer.u32(len(layout.components))
    for component in layout.components:
        writer.text(component.name, limit=MAX_NAME_NBYTES).text(component.rule.value, limit=MAX_NAME_NBYTES)
        writer.u32(component.page_tokens).u32(component.page_rows).u32(len(component.planes))
        for plane in component.planes:
            writer.u32(plane.layer).u32(plane.chunk).u64(plane.offset).u64(plane.row_nbytes)
            writer.u64(plane.row_stride_nbytes).u64(plane.page_stride_nbytes)
    return writer.done()


def decode_layout(reader: Reader) -> PoolLayout:
    """Take a layout from ``reader``, and check all of it as if it had been made here.

    Raises
    ------
    WireError
        For bytes that are no layout, a version, rule or handle kind that is unknown here, or a layout that
        :class:`PoolLayout` refuses; ``code`` is the refusal's.
    """
    version = reader.u16()
    if version != LAYOUT_VERSION:
        raise WireError(f"layout version {version}, {LAYOUT_VERSION} is spoken here", code="version")
    page_count, first_page = reader.u64(), reader.u64()
    chunks = tuple(
        PoolChunk(reader.u64(), _member(HandleKind, reader, "kind")) for _ in range(reader.count(limit=MAX_CHUNKS))
    )
    components = tuple(_decode_component(reader) for _ in range(reader.count(limit=MAX_COMPONENTS)))
    try:
        return PoolLayout(page_count, chunks, components, first_page)
    except UsageError as error:
        raise WireError(error.message, code=error.code, remedy=error.remedy) from error


def _decode_component(reader: Reader) -> Component:
    name, rule = reader.text(limit=MAX_NAME_NBYTES), _member(Rule, reader, "rule")
    page_tokens, page_rows = reader.u32(), reader.u32()
    planes = tuple(
        Plane(reader.u32(), reader.u32(), reader.u64(), reader.u64(), reader.u64(), reader.u64())
        for _ in range(reader.count(limit=MAX_PLANES))
    )
    return Component(name, rule, page_tokens, page_rows, planes)


def _member(kinds: type[_E], reader: Reader, code: str) -> _E:
    text = reader.text(limit=MAX_NAME_NBYTES)
    try:
        return kinds(text)
    except ValueError as error:
        known = ", ".join(member.value for member in kinds)
        raise WireError(f"unknown {code} {text!r}; known here: {known}", code=code) from error
