"""The bytes that travel for one chunk, one format for each handle kind: version, then what the driver needs.

Owns the formats; the checks that come before any driver call are the core's. Knows no driver.
"""

from __future__ import annotations

from devipc.spi import Chunk, ExportedExtent, HandleKind, PayloadShape, check_payloads

__all__ = ["LEGACY_NBYTES", "POOL_NBYTES", "VMM_NBYTES", "check_extent", "pack", "unpack"]

VERSION = 1
_HANDLE = 64

LEGACY_NBYTES = 1 + _HANDLE + 32
"""Version, memory handle, the block that it opens."""
VMM_NBYTES = 1
"""Version; the descriptor is the handle."""
POOL_NBYTES = 1 + 16 + 16 + _HANDLE
"""Version, identity of the pool, identity of the allocation, pointer data."""

_SHAPES = {
    HandleKind.LEGACY: PayloadShape(LEGACY_NBYTES, has_fd=False),
    HandleKind.VMM_FD: PayloadShape(VMM_NBYTES, has_fd=True, grows=True),
    HandleKind.POOL: PayloadShape(POOL_NBYTES, has_fd=True),
}


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
    check_payloads(extent, _SHAPES, version=VERSION, package="devipc-cuda", backend="cuda")
