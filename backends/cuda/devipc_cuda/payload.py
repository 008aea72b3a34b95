"""The bytes that travel for one chunk, one format for each handle kind: version, then what the driver needs.

Owns encoding and the checks that come before any driver call: exact size, version. Bytes come from another process
and are not trusted. Knows no driver.
"""

from __future__ import annotations

from devipc.spi import Chunk, ExportedExtent, HandleError, HandleKind

__all__ = ["LEGACY_NBYTES", "POOL_NBYTES", "VMM_NBYTES", "check_extent", "pack", "unpack"]

VERSION = 1
_HANDLE = 64

LEGACY_NBYTES = 1 + _HANDLE + 32
"""Version, memory handle, the block that it opens."""
VMM_NBYTES = 1
"""Version; the descriptor is the handle."""
POOL_NBYTES = 1 + 16 + 16 + _HANDLE
"""Version, identity of the pool, identity of the allocation, pointer data."""

_NBYTES = {HandleKind.LEGACY: LEGACY_NBYTES, HandleKind.VMM_FD: VMM_NBYTES, HandleKind.POOL: POOL_NBYTES}
_HAS_FD = {HandleKind.LEGACY: False, HandleKind.VMM_FD: True, HandleKind.POOL: True}


def pack(*parts: bytes) -> bytes:
    """Return the payload made of ``parts``."""
    return b"".join((bytes([VERSION]), *parts))


def unpack(chunk: Chunk) -> bytes:
    """Return a checked payload without its version."""
    return chunk.payload[1:]


def check_extent(extent: ExportedExtent) -> None:
    """Check shape, sizes and versions of a received extent.

    Raises
    ------
    HandleError
        For anything that an exporter of this package does not make.
    """
    nbytes = _NBYTES.get(extent.kind)
    if nbytes is None:
        raise _wrong(f"kind {extent.kind} is not one of this backend: {', '.join(_NBYTES)}")
    has_fd = _HAS_FD[extent.kind]
    chunks = extent.chunks
    if not chunks or (len(chunks) > 1 and extent.kind is not HandleKind.VMM_FD):
        raise _wrong(f"{extent.kind} extent with {len(chunks)} chunks")
    if len(extent.fds) != (len(chunks) if has_fd else 0):
        raise _wrong(f"{extent.kind} extent of {len(chunks)} chunks with {len(extent.fds)} descriptors")
    for index, chunk in enumerate(chunks):
        if len(chunk.payload) != nbytes:
            raise _wrong(f"{extent.kind} payload of {len(chunk.payload)} bytes, expected {nbytes}")
        if chunk.payload[0] != VERSION:
            raise _wrong(f"{extent.kind} payload of version {chunk.payload[0]}, this package reads {VERSION}")
        if chunk.has_fd is not has_fd:
            raise _wrong(f"chunk {index} of a {extent.kind} extent {'with' if chunk.has_fd else 'without'} descriptor")
        _check_side_by_side(chunk, first=index == 0, last=index == len(chunks) - 1)


def _check_side_by_side(chunk: Chunk, *, first: bool, last: bool) -> None:
    """Chunks are mapped whole, one after the other: only the outer ends of the range may lie inside of a chunk."""
    if min(chunk.offset, chunk.nbytes - 1, chunk.allocation_nbytes - 1) < 0:
        raise _wrong(f"chunk of {chunk.nbytes} bytes at {chunk.offset} in {chunk.allocation_nbytes}")
    if not first and chunk.offset:
        raise _wrong("a later chunk of a grown range does not start at its beginning")
    if not last and chunk.offset + chunk.nbytes != chunk.allocation_nbytes:
        raise _wrong("an earlier chunk of a grown range does not reach its end")


def _wrong(text: str) -> HandleError:
    return HandleError(
        text,
        code="malformed",
        remedy="both sides must run one version of devipc-cuda",
        backend="cuda",
    )
