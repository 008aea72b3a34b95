"""The bytes that travel for one chunk, one format for each handle kind: version, then what the runtime needs.

Owns the formats; the checks that come before any driver call are the core's. Knows no driver.
"""

from __future__ import annotations

from devipc.spi import Chunk, ExportedExtent, HandleKind, PayloadShape, check_payloads

__all__ = ["CANARY_NBYTES", "HANDLE_NBYTES", "IDENTITY_NBYTES", "check_extent", "pack", "unpack"]

VERSION = 1
HANDLE_NBYTES = 64
"""Size of every opaque handle of the runtime: memory, event, pool pointer."""
IDENTITY_NBYTES = 16
"""Random number that names one exported allocation."""
CANARY_NBYTES = 64
"""Random bytes behind memory that this package allocated; all zeros for memory from elsewhere, which has none."""

_SHAPES = {
    # Version, identity, canary, handle.
    HandleKind.LEGACY: PayloadShape(1 + IDENTITY_NBYTES + CANARY_NBYTES + HANDLE_NBYTES, has_fd=False),
    # Version; the descriptor is the handle.
    HandleKind.VMM_FD: PayloadShape(1, has_fd=True, grows=True),
    # Version, identity of the pool, identity of the allocation, pointer data.
    HandleKind.POOL: PayloadShape(1 + 2 * IDENTITY_NBYTES + HANDLE_NBYTES, has_fd=True),
    # Version, canary; the descriptor is the handle.
    HandleKind.DMABUF: PayloadShape(1 + CANARY_NBYTES, has_fd=True),
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
    check_payloads(extent, _SHAPES, version=VERSION, package="devipc-hip", backend="hip")
