"""Handle kind ``legacy``: memory of ``cuMemAlloc`` by a 64-byte handle.

Owns allocating, exporting, opening and closing of that kind. All functions expect the context to be current.

The driver packs small allocations into common 2 MiB blocks and a handle opens the block: at its beginning, or at the
allocation inside of it, which differs between drivers and is in no document. So the distance travels twice, and the
importer looks at what its own driver opened.
"""

from __future__ import annotations

import itertools
import os
import struct
from dataclasses import dataclass

from devipc.spi import (
    AllocationInfo,
    BoundsError,
    Chunk,
    ExportedExtent,
    HandleError,
    HandleKind,
    OpenedExtent,
    Turns,
    check_chunk,
    undo,
)
from devipc_cuda import driver, payload
from devipc_cuda.memory_query import Mapping

__all__ = ["BLOCK_NBYTES", "LegacyExports", "LegacyMappings"]

BLOCK_NBYTES = 2 * 2**20
"""Size of the blocks from which the driver serves small allocations (CUDA programming guide, interprocess
communication); whole blocks have no neighbours."""

_LAZY_ENABLE_PEER_ACCESS = 1
_BLOCK = struct.Struct("<8sQQQ")  # process, block's id, allocation's offset in the block, block's size


class LegacyExports:
    """Exports of this process, with an identity for each block: a handle's bytes are none."""

    def __init__(self) -> None:
        self._process = os.urandom(8)
        self._fresh_ids = itertools.count(2**63)

    def export(self, ptr: int, nbytes: int, *, info: AllocationInfo) -> ExportedExtent:
        """Export ``[ptr, ptr + nbytes)``. The driver is always given the base: what it makes of others differs."""
        base = info.base
        handle = driver.handle_bytes(driver.call("cuIpcGetMemHandle", base))
        block_base = driver.pointer_attribute("MAPPING_BASE_ADDR", base)
        block_nbytes = driver.pointer_attribute("MAPPING_SIZE", base)
        block_id = driver.pointer_attribute("MEMORY_BLOCK_ID", base) or next(self._fresh_ids)
        if not block_base or not block_nbytes:
            block_base, block_nbytes = base, info.nbytes
        block = _BLOCK.pack(self._process, block_id, base - block_base, block_nbytes)
        chunk = Chunk(info.nbytes, ptr - base, nbytes, payload.pack(handle, block))
        return ExportedExtent(HandleKind.LEGACY, (chunk,))


@dataclass(slots=True, eq=False)
class _Mapped:
    block: bytes
    key: bytes
    ptr: int
    opened: Mapping
    origin: int
    users: int = 0


class LegacyMappings:
    """Mappings of this process made from legacy handles.

    Several exports may lie in one block. Drivers either count the opens of it, refuse the second, or unmap for all at
    the first close: so a block is opened once, and closed with its last user. Where a driver opens no more than the
    allocation, each allocation of the block is opened, once. Calls about one block come one after the other, since a
    driver that refuses would also refuse what overlaps; those about others are not held up.
    """

    def __init__(self) -> None:
        self._turns = Turns()
        self._mapped: dict[bytes, _Mapped] = {}

    def open(self, extent: ExportedExtent) -> OpenedExtent:
        """Map a checked extent and compare it with the size that this driver reports."""
        (chunk,) = extent.chunks
        body = payload.unpack(chunk)
        handle, block = body[: driver.HANDLE_NBYTES], body[driver.HANDLE_NBYTES :]
        _, _, block_offset, block_nbytes = _BLOCK.unpack(block)
        identity, allocation = block[:16], block[:24]
        with self._turns.of(identity):
            mapped = self._mapped.get(identity) or self._mapped.get(allocation)
            if mapped is None:
                mapped = _open(handle, allocation, block_offset=block_offset, block_nbytes=block_nbytes)
                self._mapped[mapped.key] = mapped
            mapped.users += 1
            try:
                ptr = _locate(mapped, chunk, block_offset=block_offset)
            except BaseException:
                undo(self._drop, mapped)
                raise
        return OpenedExtent(ptr, chunk.nbytes, mapped)

    def close(self, token: _Mapped) -> None:
        """Unmap when the last user of the block closes it."""
        with self._turns.of(token.block):
            self._drop(token)

    def _drop(self, token: _Mapped) -> None:
        token.users -= 1
        if not token.users:
            del self._mapped[token.key]
            driver.call("cuIpcCloseMemHandle", token.ptr)


def _open(handle: bytes, allocation: bytes, *, block_offset: int, block_nbytes: int) -> _Mapped:
    """Open a handle, and find out from what this driver reports whether that is the block or the allocation in it."""
    native = driver.handle_from_bytes("CUipcMemHandle", handle)
    ptr = int(driver.call("cuIpcOpenMemHandle", native, _LAZY_ENABLE_PEER_ACCESS))
    try:
        opened = Mapping(*(int(value) for value in driver.call("cuMemGetAddressRange", ptr)))
        if opened.nbytes < block_nbytes:
            return _Mapped(allocation[:16], allocation, ptr, opened, origin=ptr - block_offset)
        if ptr - opened.base not in (0, block_offset):
            raise HandleError(
                f"the driver opened the handle {ptr - opened.base} bytes into the block, neither at its beginning nor"
                f" at the allocation ({block_offset})",
                code="unknown_place",
                remedy="export memory of whole 2 MiB blocks, or use kind 'vmm_fd'",
            )
    except BaseException:
        undo(driver.call, "cuIpcCloseMemHandle", ptr)
        raise
    return _Mapped(allocation[:16], allocation[:16], ptr, opened, origin=opened.base)


def _locate(mapped: _Mapped, chunk: Chunk, *, block_offset: int) -> int:
    """Return the address of the first shared byte, from what this driver reported about what it opened."""
    base = mapped.origin + block_offset
    if base < mapped.opened.base:
        raise BoundsError(
            f"the allocation begins in front of the {mapped.opened.nbytes} bytes that the driver opened",
            remedy="the exporter's handle is wrong or was changed on the way; export again",
        )
    check_chunk(chunk, driver_nbytes=mapped.opened.end - base)
    return base + chunk.offset
