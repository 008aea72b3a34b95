"""The wire format: what is written is read back, what is longer or lying is refused on both sides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devipc import wire
from devipc.errors import WireError
from devipc.types import Chunk, ExportedExtent, HandleKind
from devipc.wire import (
    HEADER_NBYTES,
    MAX_BODY_NBYTES,
    MAX_FRAME_NBYTES,
    MAX_MESSAGE_FDS,
    MAX_MESSAGE_NBYTES,
    Header,
    MemoryHandle,
    Reader,
    Writer,
    decode_header,
    decode_memory_handle,
    encode_header,
    encode_memory_handle,
)

U16, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=16)


@st.composite
def chunks(draw: st.DrawFn) -> Chunk:
    allocation = draw(st.integers(1, 2**40))
    offset = draw(st.integers(0, allocation - 1))
    nbytes = draw(st.integers(1, allocation - offset))
    return Chunk(allocation, offset, nbytes, draw(st.binary(max_size=512)), draw(st.booleans()))


@st.composite
def handles(draw: st.DrawFn) -> MemoryHandle:
    parts = tuple(draw(st.lists(chunks(), min_size=1, max_size=8)))
    fds = tuple(range(100, 100 + sum(chunk.has_fd for chunk in parts)))
    extent = ExportedExtent(draw(st.sampled_from(HandleKind)), parts, fds)
    instance, export_id = (draw(st.binary(min_size=16, max_size=16)) for _ in range(2))
    return MemoryHandle(draw(TEXT), draw(TEXT), instance, draw(U64), export_id, extent)


def handle(*parts: Chunk, fds: tuple[int, ...] = ()) -> MemoryHandle:
    return MemoryHandle("host", "host-1", bytes(16), 1, bytes(16), ExportedExtent(HandleKind.MEMFD, parts, fds))


# --- header ---------------------------------------------------------------------------------------------------------


@given(kind=U16, request=U64, nbytes=st.integers(0, MAX_BODY_NBYTES), fds=U16, more=st.booleans())
def test_a_header_comes_back(kind: int, request: int, nbytes: int, fds: int, *, more: bool) -> None:
    header = Header(kind, request, nbytes, fds, more)
    frame = encode_header(header) + bytes(nbytes)
    assert decode_header(frame) == decode_header(memoryview(frame)) == header


def test_the_header_has_the_layout_that_other_versions_must_recognise() -> None:
    frame = encode_header(Header(7, 9, 0, 3, more=True))
    assert frame == b"dIPC" + b"\1\0" + b"\7\0" + b"\0\0\0\0" + b"\x09" + bytes(7) + b"\3\0" + b"\1\0"
    assert len(frame) == HEADER_NBYTES == 24


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"", "short_frame"),
        (encode_header(Header(1, 1, 0))[:-1], "short_frame"),
        (b"DIPC" + encode_header(Header(1, 1, 0))[4:], "magic"),
        (b"dIPC\2\0" + encode_header(Header(1, 1, 0))[6:], "version"),
        (encode_header(Header(1, 1, 0))[:-2] + b"\2\0", "flags"),
        (encode_header(Header(1, 1, 0))[:-2] + b"\1\x80", "flags"),
        (encode_header(Header(1, 1, 1)), "length"),
        (encode_header(Header(1, 1, 0)) + b"x", "length"),
        (encode_header(Header(1, 1, 0)) + bytes(MAX_FRAME_NBYTES), "length"),
    ],
)
def test_a_bad_header_is_refused(frame: bytes, code: str) -> None:
    with pytest.raises(WireError) as caught:
        decode_header(frame)
    assert caught.value.code == code


@pytest.mark.parametrize(
    "header",
    [
        Header(2**16, 0, 0),
        Header(-1, 0, 0),
        Header(0, 2**64, 0),
        Header(0, 0, 0, 2**16),
        Header(0, 0, MAX_BODY_NBYTES + 1),
        Header(0, 0, -1),
        Header("1", 0, 0),  # type: ignore[arg-type]
    ],
)
def test_a_header_that_does_not_fit_is_not_written(header: Header) -> None:
    with pytest.raises(WireError):
        encode_header(header)


# --- fields ---------------------------------------------------------------------------------------------------------


@given(a=st.integers(0, 255), b=U16, c=U32, d=U64, e=st.integers(-(2**63), 2**63 - 1), f=st.binary(), g=TEXT)
def test_fields_come_back(a: int, b: int, c: int, d: int, e: int, f: bytes, g: str) -> None:
    body = Writer().u8(a).u16(b).u32(c).u64(d).i64(e).blob(f, limit=len(f)).text(g).raw(f, len(f)).done()
    reader = Reader(body)
    assert [reader.u8(), reader.u16(), reader.u32(), reader.u64(), reader.i64()] == [a, b, c, d, e]
    assert [reader.blob(limit=len(f)), reader.text(), reader.raw(len(f))] == [f, g, f]
    reader.end()
    for field in (reader.u8, reader.u64, reader.text):
        with pytest.raises(WireError, match="ends"):
            field()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("u8", 256),
        ("u8", -1),
        ("u16", 2**16),
        ("u32", 2**32),
        ("u64", 2**64),
        ("i64", 2**63),
        ("u8", 1.5),
        ("u8", None),
    ],
)
def test_a_number_that_does_not_fit_is_not_written(name: str, value: object) -> None:
    with pytest.raises(WireError) as caught:
        getattr(Writer(), name)(value)
    assert caught.value.code == "range"


def test_lengths_are_kept_on_both_sides() -> None:
    with pytest.raises(WireError):
        Writer().blob(b"12345", limit=4)
    with pytest.raises(WireError):
        Writer().raw(b"12345", 4)
    with pytest.raises(WireError, match="at most 4"):
        Reader(Writer().blob(b"12345", limit=5).done()).blob(limit=4)
    with pytest.raises(WireError, match="at most 3"):
        Reader(Writer().u32(4).done()).count(limit=3)
    with pytest.raises(WireError):
        Reader(b"123").raw(-1)
    with pytest.raises(WireError, match="1 bytes too many"):
        Reader(b"1").end()


def test_text_is_unicode_on_both_sides() -> None:
    with pytest.raises(WireError) as caught:
        Writer().text("file\udcff")
    assert caught.value.code == "text"
    with pytest.raises(WireError) as caught:
        Reader(Writer().blob(b"\xff", limit=1).done()).text()
    assert caught.value.code == "text"


# --- memory handles -------------------------------------------------------------------------------------------------


@given(handles())
def test_a_handle_comes_back(original: MemoryHandle) -> None:
    reader = Reader(encode_memory_handle(original))
    assert decode_memory_handle(reader, original.extent.fds) == original
    reader.end()


@given(handles(), st.integers(-8, 8).filter(bool))
def test_another_number_of_descriptors_is_refused(original: MemoryHandle, difference: int) -> None:
    count = max(0, len(original.extent.fds) + difference)
    if count == len(original.extent.fds):
        return
    with pytest.raises(WireError) as caught:
        decode_memory_handle(Reader(encode_memory_handle(original)), range(count))
    assert caught.value.code == "fd_count"


@pytest.mark.parametrize("offset", [0, 1, 4 * 2**30 + 1, 2**33 - 1])
def test_offset_and_bounds_travel(offset: int) -> None:
    original = handle(Chunk(2**33, offset, 2**33 - offset, b"v"))
    assert decode_memory_handle(Reader(encode_memory_handle(original)), ()).extent.chunks[0].offset == offset


def test_a_range_that_was_grown_ten_thousand_times_travels() -> None:
    original = handle(
        *(Chunk(2**21, 0, 2**21, bytes(64), has_fd=True) for _ in range(10_000)), fds=tuple(range(10_000))
    )
    encoded = encode_memory_handle(original)
    assert MAX_FRAME_NBYTES < len(encoded) < MAX_MESSAGE_NBYTES
    assert decode_memory_handle(Reader(encoded), range(10_000)) == original


GOOD = Chunk(4096, 0, 4096)


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ((), "empty"),
        ((Chunk(4096, 0, 0),), "bounds"),
        ((Chunk(4096, 1, 4096),), "bounds"),
        ((Chunk(4096, 4096, 1),), "bounds"),
        ((Chunk(4096, 2**64 - 1, 4096),), "bounds"),
        ((Chunk(2**57, 0, 1),), "bounds"),
        ((Chunk(2**56, 0, 2**56),) * 2, "bounds"),
        ((GOOD,) * (wire.MAX_CHUNKS + 1), "count"),
        ((Chunk(4096, 0, 4096, has_fd=True),), "fd_count"),
    ],
)
def test_what_a_reader_refuses_a_writer_does_not_write(parts: tuple[Chunk, ...], code: str) -> None:
    with pytest.raises(WireError) as caught:
        encode_memory_handle(handle(*parts))
    assert caught.value.code == code


def test_what_no_message_can_carry_is_not_written() -> None:
    with pytest.raises(WireError, match="descriptors, a message carries at most"):
        encode_memory_handle(handle(*[Chunk(1, 0, 1, has_fd=True)] * (MAX_MESSAGE_FDS + 1), fds=(0,) * (2**14 + 1)))
    with pytest.raises(WireError, match="bytes, a message carries at most"):
        encode_memory_handle(handle(*[Chunk(1, 0, 1, bytes(512))] * wire.MAX_CHUNKS))
    with pytest.raises(WireError, match="at most 512"):
        encode_memory_handle(handle(Chunk(1, 0, 1, bytes(513))))


def test_a_handle_never_shows_its_vendor_bytes() -> None:
    shown = repr(handle(Chunk(4096, 0, 4096, b"secret-payload")))
    assert "secret" not in shown
    assert "nbytes=4096" in shown
