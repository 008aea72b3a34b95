"""Layouts say where every byte of a page is, refuse what they cannot say, and survive hostile bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devipc.errors import UsageError, WireError
from devipc.hicache.layout import Component, Plane, PoolChunk, PoolLayout, Rule, decode_layout, encode_layout
from devipc.types import HandleKind
from devipc.wire import Reader
from tests.hicache.geometry import Pool, pools


def plane(**changes: int) -> Plane:
    return replace(Plane(0, 0, 0, 8, 8, 32), **changes)


def pool(*planes: Plane, nbytes: int = 4096, pages: int = 4, rows: int = 4, chunks: int = 1) -> PoolLayout:
    component = Component("kv", Rule.FULL_ATTENTION, 4, rows, planes or (plane(),))
    return PoolLayout(pages, (PoolChunk(nbytes, HandleKind.LEGACY),) * chunks, (component,))


@given(pools())
def test_a_layout_survives_the_wire(made: Pool) -> None:
    reader = Reader(encode_layout(made.layout))
    assert decode_layout(reader) == made.layout
    reader.end()


def owners(layout: PoolLayout) -> int:
    """Most planes that own one byte, counted byte by byte."""
    count: dict[tuple[int, int], int] = {}
    for component, part in layout.planes():
        for page in range(layout.page_count):
            for row in range(component.page_rows):
                start = part.offset + page * part.page_stride_nbytes + row * part.row_stride_nbytes
                for byte in range(start, start + part.row_nbytes):
                    count[part.chunk, byte] = count.get((part.chunk, byte), 0) + 1
    return max(count.values())


@settings(max_examples=400)
@given(st.data())
def test_no_accepted_layout_has_a_byte_in_two_planes(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 3))
    planes = []
    for _ in range(data.draw(st.integers(2, 3))):
        row, gap = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 3))
        span = (rows - 1) * (row + gap) + row
        offset, stride = data.draw(st.integers(0, 20)), span + data.draw(st.integers(0, 6))
        planes.append(Plane(0, 0, offset, row, row + gap, stride))
    try:
        layout = pool(*planes, rows=rows, pages=3, nbytes=1 << 20)
    except UsageError as error:
        assert error.code == "overlap"  # noqa: PT017 - nothing else may be wrong with these
        return
    assert owners(layout) == 1


@given(pools())
def test_what_is_known_to_be_apart_is_accepted(made: Pool) -> None:
    assert owners(made.layout) == 1


@pytest.mark.once
@settings(max_examples=400)
@given(pools(), st.data())
def test_damaged_bytes_are_refused_or_are_another_sound_layout(made: Pool, data: st.DataObject) -> None:
    raw = bytearray(encode_layout(made.layout))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw))) if data.draw(st.booleans()) else len(raw)
    try:
        decoded = decode_layout(Reader(bytes(raw[:cut])))
    except WireError:
        return
    for component, part in decoded.planes():
        span = (component.page_rows - 1) * part.row_stride_nbytes + part.row_nbytes
        last = part.offset + (decoded.page_count - 1) * part.page_stride_nbytes + span
        assert last <= decoded.chunks[part.chunk].nbytes


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(WireError):
        decode_layout(Reader(raw))


def test_counts_are_checked_before_anything_is_taken() -> None:
    raw = bytearray(encode_layout(pool()))
    raw[18:22] = (2**32 - 1).to_bytes(4, "little")  # version, page_count, first_page, then the chunks
    with pytest.raises(WireError) as caught:
        decode_layout(Reader(bytes(raw)))
    assert caught.value.code == "count"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"offset": 4096 - 127}, "bounds"),
        ({"page_stride_nbytes": 31}, "range"),
        ({"row_stride_nbytes": 7}, "range"),
        ({"row_nbytes": 0}, "range"),
        ({"chunk": 1}, "range"),
        ({"offset": -1}, "range"),
        ({"page_stride_nbytes": 2**57}, "range"),
        ({"layer": 2**32}, "range"),
    ],
)
def test_a_plane_that_cannot_be_is_refused(changes: dict[str, int], code: str) -> None:
    with pytest.raises(UsageError) as caught:
        pool(plane(**changes))
    assert caught.value.code == code
    assert caught.value.remedy


def test_the_last_byte_of_a_chunk_may_be_used() -> None:
    assert pool(plane(offset=4096 - 128)).page_nbytes == 32


def test_a_pool_that_cannot_be_is_refused() -> None:
    one = pool().components[0]
    chunk = (PoolChunk(4096, HandleKind.LEGACY),)
    for change, code in [
        ({"page_count": 0}, "range"),
        ({"first_page": 4}, "range"),
        ({"chunks": ()}, "range"),
        ({"components": ()}, "range"),
        ({"components": (one, one)}, "name"),
        ({"components": (one, replace(one, name="side", page_tokens=8))}, "page_tokens"),
        ({"components": (replace(one, planes=()),)}, "range"),
        ({"components": (replace(one, name=""),)}, "range"),
        ({"components": (replace(one, page_tokens=0),)}, "range"),
        ({"components": (one, replace(one, name="side"))}, "overlap"),
    ]:
        with pytest.raises(UsageError) as caught:
            replace(PoolLayout(4, chunk, (one,)), **change)  # type: ignore[arg-type]
        assert caught.value.code == code, change


def test_more_pieces_than_can_be_moved_are_refused() -> None:
    rows = 2**17
    padded = Plane(0, 0, 0, 1, 2, 2 * rows)
    with pytest.raises(UsageError, match="pieces"):
        pool(padded, rows=rows, nbytes=2**40)


def test_a_rule_that_is_unknown_here_is_refused_by_name() -> None:
    raw = encode_layout(pool()).replace(b"full_attention", b"some_attention")
    with pytest.raises(WireError, match=r"some_attention.*known here: full_attention, mla"):
        decode_layout(Reader(raw))


def test_content_says_what_and_not_where() -> None:
    base = pool(plane())
    assert pool(plane(offset=64, page_stride_nbytes=48), pages=3).content_bytes() == base.content_bytes()
    for other in (plane(layer=1), plane(row_nbytes=4)):
        assert pool(other).content_bytes() != base.content_bytes()
    assert pool(rows=1).content_bytes() != base.content_bytes()


def test_advice_names_what_is_slow() -> None:
    assert pool(plane(row_nbytes=8)).advice() == []
    apart = pool(plane(), plane(chunk=1, layer=1), chunks=2)
    assert [advice.code for advice in apart.advice()] == ["separate_allocations"]
    vmm = replace(apart, chunks=(PoolChunk(4096, HandleKind.VMM_FD),) * 2)
    assert vmm.advice() == []
    padded = pool(plane(row_nbytes=4))
    assert [advice.code for advice in padded.advice()] == ["padded_rows"]
    token = replace(pool(rows=1).components[0], page_tokens=1)
    assert [a.code for a in replace(pool(), components=(token,)).advice()] == ["one_token_pages"]
    assert all(advice.message and advice.remedy for advice in [*apart.advice(), *padded.advice()])
