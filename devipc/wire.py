"""Bytes that travel: the frame header, bounded readers and writers, and the memory handle.

Owns every binary layout of the core protocol. All numbers are little-endian; every length is checked before it is
used; nothing is ever unpickled or evaluated. It does no I/O: descriptors travel beside the bytes, by the channel.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from devipc.errors import WireError
from devipc.types import Chunk, ExportedExtent, HandleKind

__all__ = [
    "HEADER_NBYTES",
    "MAX_BODY_NBYTES",
    "MAX_FRAME_NBYTES",
    "MAX_MESSAGE_FDS",
    "MAX_MESSAGE_NBYTES",
    "WIRE_VERSION",
    "Header",
    "MemoryHandle",
    "Reader",
    "Writer",
    "decode_header",
    "decode_memory_handle",
    "encode_header",
    "encode_memory_handle",
]

MAGIC = b"dIPC"
WIRE_VERSION = 1
"""Version in every frame; both sides must speak the same."""

_HEADER = struct.Struct("<4sHHIQHH")

HEADER_NBYTES = _HEADER.size
"""Size of the head of a frame in bytes."""

MAX_FRAME_NBYTES = 64 * 1024
"""Size of the largest frame in bytes, its head included."""

MAX_BODY_NBYTES = MAX_FRAME_NBYTES - HEADER_NBYTES
"""Size of the largest body of one frame in bytes."""

MAX_MESSAGE_NBYTES = 16 * 1024 * 1024
"""A message of several frames never grows beyond this."""
MAX_MESSAGE_FDS = 16 * 1024
"""Most descriptors that one message may carry."""

MAX_PAYLOAD_NBYTES = 512
MAX_CHUNKS = 64 * 1024
MAX_EXTENT_NBYTES = 2**56
FLAG_MORE = 1
"""Another frame of the same message follows."""


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed head of one frame.

    Parameters
    ----------
    kind : int
        What the message is; the layer above numbers them.
    request : int
        Pairs an answer with its question; 0 for messages that need no answer.
    body_nbytes : int
        Length of the body behind the header.
    fd_count : int
        Descriptors that travel with *this* frame.
    more : bool
        True when another frame of the same message follows.
    """

    kind: int
    request: int
    body_nbytes: int
    fd_count: int = 0
    more: bool = False


def encode_header(header: Header) -> bytes:
    """Return the 24 bytes of ``header``.

    Raises
    ------
    WireError
        For a number that does not fit its field, or a body that does not fit a frame.
    """
    if header.body_nbytes > MAX_BODY_NBYTES:
        raise WireError(f"body of {header.body_nbytes} bytes, at most {MAX_BODY_NBYTES} fit a frame", code="length")
    flags = FLAG_MORE if header.more else 0
    try:
        return _HEADER.pack(
            MAGIC, WIRE_VERSION, header.kind, header.body_nbytes, header.request, header.fd_count, flags
        )
    except struct.error as error:
        raise WireError(f"a number of {header} does not fit its field", code="range") from error


def decode_header(frame: bytes | memoryview) -> Header:
    """Decode the head of a received frame, and check it against the frame's real length.

    Raises
    ------
    WireError
        For a short or oversized frame, foreign magic, another wire version, unknown flags or a lying length.
    """
    if len(frame) < HEADER_NBYTES:
        raise WireError(f"frame of {len(frame)} bytes is shorter than its header", code="short_frame")
    if len(frame) > MAX_FRAME_NBYTES:
        raise WireError(f"frame of {len(frame)} bytes, at most {MAX_FRAME_NBYTES} are allowed", code="length")
    magic, version, kind, body_nbytes, request, fd_count, flags = _HEADER.unpack_from(frame)
    if magic != MAGIC:
        raise WireError(
            "frame does not begin with the devipc magic", code="magic", remedy="the peer is no devipc process"
        )
    if version != WIRE_VERSION:
        raise WireError(
            f"wire version {version}, this side speaks {WIRE_VERSION}",
            code="version",
            remedy="run the same devipc version on both sides",
        )
    if flags & ~FLAG_MORE:
        raise WireError(f"unknown frame flags {flags:#x}", code="flags")
    if body_nbytes != len(frame) - HEADER_NBYTES:
        raise WireError(
            f"header announces {body_nbytes} bytes of body, {len(frame) - HEADER_NBYTES} came", code="length"
        )
    return Header(kind, request, body_nbytes, fd_count, bool(flags & FLAG_MORE))


class Writer:
    """Builds a body field by field; refuses what :class:`Reader` would refuse."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def u8(self, value: int) -> Writer:
        """Append one byte."""
        return self._pack("<B", value)

    def u16(self, value: int) -> Writer:
        """Append 16 bits."""
        return self._pack("<H", value)

    def u32(self, value: int) -> Writer:
        """Append 32 bits."""
        return self._pack("<I", value)

    def u64(self, value: int) -> Writer:
        """Append 64 bits."""
        return self._pack("<Q", value)

    def i64(self, value: int) -> Writer:
        """Append 64 bits, signed."""
        return self._pack("<q", value)

    def raw(self, value: bytes, nbytes: int) -> Writer:
        """Append exactly ``nbytes`` bytes without a length."""
        if len(value) != nbytes:
            raise WireError(f"field of {len(value)} bytes where {nbytes} belong", code="length")
        self._parts.append(bytes(value))
        return self

    def blob(self, value: bytes, *, limit: int) -> Writer:
        """Append a 32-bit length and at most ``limit`` bytes."""
        if len(value) > limit:
            raise WireError(f"field of {len(value)} bytes, at most {limit} fit", code="length")
        self._pack("<I", len(value))
        self._parts.append(bytes(value))
        return self

    def text(self, value: str, *, limit: int = 1024) -> Writer:
        """Append a string as a blob of UTF-8."""
        try:
            return self.blob(value.encode(), limit=limit)
        except UnicodeEncodeError as error:  # a lone surrogate, as undecodable file names have
            raise WireError("text field cannot be written as UTF-8", code="text") from error

    def done(self) -> bytes:
        """Return everything appended so far."""
        return b"".join(self._parts)

    def _pack(self, layout: str, value: int) -> Writer:
        try:
            self._parts.append(struct.pack(layout, value))
        except struct.error as error:
            raise WireError(f"value {value} does not fit its field ({layout})", code="range") from error
        return self


class Reader:
    """Takes a body apart field by field; never reads past its end, never allocates by an unchecked length."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = bytes(data)
        self._at = 0

    def u8(self) -> int:
        """Take one byte."""
        return self._unpack("<B", 1)

    def u16(self) -> int:
        """Take 16 bits."""
        return self._unpack("<H", 2)

    def u32(self) -> int:
        """Take 32 bits."""
        return self._unpack("<I", 4)

    def u64(self) -> int:
        """Take 64 bits."""
        return self._unpack("<Q", 8)

    def i64(self) -> int:
        """Take 64 bits, signed."""
        return self._unpack("<q", 8)

    def raw(self, nbytes: int) -> bytes:
        """Take exactly ``nbytes`` bytes."""
        end = self._at + nbytes
        if nbytes < 0 or end > len(self._data):
            raise WireError(f"message ends {end - len(self._data)} bytes inside a field of {nbytes}", code="truncated")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def blob(self, *, limit: int) -> bytes:
        """Take a 32-bit length and that many bytes; a length over ``limit`` is refused before anything is taken."""
        nbytes = self.u32()
        if nbytes > limit:
            raise WireError(f"field announces {nbytes} bytes, at most {limit} are allowed", code="length")
        return self.raw(nbytes)

    def text(self, *, limit: int = 1024) -> str:
        """Take a UTF-8 string."""
        raw = self.blob(limit=limit)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise WireError("text field is not UTF-8", code="text") from error

    def count(self, *, limit: int) -> int:
        """Take a 32-bit count of things that follow, at most ``limit``."""
        count = self.u32()
        if count > limit:
            raise WireError(f"announces {count} entries, at most {limit} are allowed", code="count")
        return count

    def end(self) -> None:
        """Demand that nothing is left."""
        if self._at != len(self._data):
            raise WireError(f"{len(self._data) - self._at} bytes too many in message", code="trailing")

    def _unpack(self, layout: str, nbytes: int) -> int:
        value: int = struct.unpack(layout, self.raw(nbytes))[0]
        return value


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """An exported extent with the identity that makes it checkable.

    The handle owns the descriptors of ``extent``. Its vendor bytes are never printed, logged or compared.

    Parameters
    ----------
    backend : str
        Name of the backend that exported it.
    device_uuid : str
        Identity of the device whose memory it is.
    instance : bytes
        16 random bytes: the exporter's life.
    generation : int
        The exporter's layout counter at export; an older one is stale.
    export_id : bytes
        16 random bytes, never used twice; the key of every cache.
    extent : ExportedExtent
        The shared range.
    """

    backend: str
    device_uuid: str
    instance: bytes
    generation: int
    export_id: bytes
    extent: ExportedExtent

    def __repr__(self) -> str:
        return (
            f"MemoryHandle(backend={self.backend!r}, kind={self.extent.kind.value!r}, nbytes={self.extent.nbytes},"
            f" chunks={len(self.extent.chunks)}, export_id={self.export_id.hex()[:8]}...)"
        )


def encode_memory_handle(handle: MemoryHandle) -> bytes:
    """Return the bytes of ``handle``; its descriptors travel beside them, in chunk order.

    Raises
    ------
    WireError
        For whatever :func:`decode_memory_handle` would refuse, and for a handle that no message can carry.
    """
    extent = handle.extent
    _check_extent(extent)
    writer = Writer()
    writer.text(handle.backend, limit=64).text(handle.device_uuid, limit=128)
    writer.raw(handle.instance, 16).u64(handle.generation).raw(handle.export_id, 16)
    writer.text(extent.kind.value, limit=32).u32(len(extent.chunks))
    for chunk in extent.chunks:
        writer.u64(chunk.allocation_nbytes).u64(chunk.offset).u64(chunk.nbytes).u8(int(chunk.has_fd))
        writer.blob(chunk.payload, limit=MAX_PAYLOAD_NBYTES)
    encoded = writer.done()
    if len(encoded) > MAX_MESSAGE_NBYTES:
        raise WireError(
            f"handle of {len(encoded)} bytes, a message carries at most {MAX_MESSAGE_NBYTES}",
            code="length",
            remedy="share the range in several parts",
        )
    return encoded


def decode_memory_handle(reader: Reader, fds: Sequence[int]) -> MemoryHandle:
    """Decode a handle and give it the descriptors that came with it.

    On error the descriptors stay the caller's, who closes them.

    Raises
    ------
    WireError
        For anything that is not exactly a handle: unknown kind, no chunk, a range that leaves its allocation, an
        overflowing sum, or another number of descriptors than the chunks need.
    """
    backend, device_uuid = reader.text(limit=64), reader.text(limit=128)
    instance, generation, export_id = reader.raw(16), reader.u64(), reader.raw(16)
    kind_text = reader.text(limit=32)
    try:
        kind = HandleKind(kind_text)
    except ValueError as error:
        raise WireError(f"unknown handle kind {kind_text!r}", code="kind") from error
    count = reader.count(limit=MAX_CHUNKS)
    extent = ExportedExtent(kind, tuple(_decode_chunk(reader) for _ in range(count)), tuple(fds))
    _check_extent(extent)
    return MemoryHandle(backend, device_uuid, instance, generation, export_id, extent)


def _decode_chunk(reader: Reader) -> Chunk:
    allocation_nbytes, offset, nbytes, has_fd = reader.u64(), reader.u64(), reader.u64(), reader.u8()
    payload = reader.blob(limit=MAX_PAYLOAD_NBYTES)
    if has_fd > 1:
        raise WireError(f"descriptor flag {has_fd}", code="flags")
    return Chunk(allocation_nbytes, offset, nbytes, payload, bool(has_fd))


def _check_extent(extent: ExportedExtent) -> None:
    """Check what both sides demand of an extent. The numbers are Python's: no sum overflows on the way."""
    if not extent.chunks:
        raise WireError("handle without a chunk", code="empty")
    if len(extent.chunks) > MAX_CHUNKS:
        raise WireError(f"handle of {len(extent.chunks)} chunks, at most {MAX_CHUNKS} are allowed", code="count")
    for chunk in extent.chunks:
        if chunk.nbytes <= 0 or chunk.offset < 0 or chunk.offset + chunk.nbytes > chunk.allocation_nbytes:
            raise WireError("chunk leaves its own allocation", code="bounds")
        if chunk.allocation_nbytes > MAX_EXTENT_NBYTES:
            raise WireError(f"allocation of {chunk.allocation_nbytes} bytes", code="bounds")
    if extent.nbytes > MAX_EXTENT_NBYTES:
        raise WireError("sum of all chunks is no possible size", code="bounds")
    needed = sum(chunk.has_fd for chunk in extent.chunks)
    if needed != len(extent.fds):
        raise WireError(f"{len(extent.fds)} descriptors beside chunks that need {needed}", code="fd_count")
    if needed > MAX_MESSAGE_FDS:
        raise WireError(f"{needed} descriptors, a message carries at most {MAX_MESSAGE_FDS}", code="fd_count")
