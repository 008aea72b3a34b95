"""Memory IPC of one device: which kind a pointer is, and who handles that kind.

Owns the dispatch over kinds, the list of what this process allocated and opened, and double-free checks. How a kind
is exported and mapped is in its own file; identity, generations and leases are the core's.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from devipc.spi import (
    Allocation,
    AllocationInfo,
    Capability,
    CapabilityError,
    ClosedError,
    DeviceLostError,
    ExportedExtent,
    HandleKind,
    MemoryKind,
    OpenedExtent,
    UsageError,
    Verdict,
    close_fds,
    round_up,
    undo,
)
from devipc_cuda import driver, memory_query, payload
from devipc_cuda.context import Context
from devipc_cuda.memory_legacy import BLOCK_NBYTES, LegacyExports, LegacyMappings
from devipc_cuda.memory_pool import PoolExports, PoolImports, allocate_from_pool, free_with_pool
from devipc_cuda.memory_vmm import allocate_vmm, export_vmm, open_vmm

__all__ = ["CudaMemory"]

_NEIGHBOURS = (
    "the driver packs small allocations into common 2 MiB blocks and exports a block whole, so a peer reaches the"
    " neighbours of memory that was allocated elsewhere; memory.allocate() rounds up to whole blocks"
)


@dataclass(slots=True, eq=False)
class _Opened:
    kind: HandleKind
    base: int
    nbytes: int
    inner: Any
    serial: int


class CudaMemory:
    """Memory IPC over the driver API: kinds ``legacy``, ``vmm_fd`` and ``pool``.

    Parameters
    ----------
    context : Context
        The device's context.
    wsl : bool
        True on WSL, whose driver has no legacy IPC; only used for words.
    """

    def __init__(self, context: Context, *, wsl: bool) -> None:
        self._context = context
        self._wsl = wsl
        self._lock = threading.Lock()
        self._owned: dict[int, Allocation] = {}
        self._opened: dict[int, _Opened] = {}
        self._serials = itertools.count(2**62)
        self._legacy_exports = LegacyExports()
        self._legacy_mappings = LegacyMappings()
        self._pools = PoolExports()
        self._pool_imports = PoolImports(context)
        self._no_vmm: CapabilityError | None = None

    def kinds(self) -> Mapping[HandleKind, Capability]:
        """Return the three kinds. Attributes are claims, wrong in both directions somewhere: never a verdict."""
        device = self._context.device
        vmm = driver.device_attribute("VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED", device)
        fd = driver.device_attribute("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", device)
        pool = driver.device_attribute("MEMPOOL_SUPPORTED_HANDLE_TYPES", device)
        offered = "offered by the driver; a live check decides"
        absent = "the driver's attribute says no; a live check decides"
        kinds = {
            HandleKind.VMM_FD: Capability(
                Verdict.UNTESTED,
                f"attributes: virtual address management {vmm}, file-descriptor handles {fd}",
                offered if vmm and fd else absent,
            ),
            HandleKind.LEGACY: Capability(
                Verdict.UNTESTED,
                _NEIGHBOURS,
                "WSL has no legacy IPC as far as is known; a live check decides" if self._wsl else offered,
            ),
            HandleKind.POOL: Capability(
                Verdict.UNTESTED,
                f"attribute: pool handle types {pool}; a pool is shared whole",
                offered if pool is not None and pool & memory_query.FD_TYPE else absent,
            ),
        }
        if self._no_vmm is not None:
            kinds[HandleKind.VMM_FD] = Capability.no(
                self._no_vmm.message, remedy=self._no_vmm.remedy, evidence=str(self._no_vmm.status or "")
            )
        return kinds

    def allocate(self, nbytes: int, *, kind: HandleKind | None = None, zero: bool = False) -> Allocation:
        """Allocate whole blocks that can be exported; ``vmm_fd`` when None, ``legacy`` where that cannot be had.

        Blocks while ``zero`` fills. The caller frees with :meth:`free`.
        """
        if nbytes <= 0:
            raise UsageError(f"allocation of {nbytes} bytes", remedy="ask for at least one byte", backend="cuda")
        with self._context:
            stream = self._context.internal_stream() if zero else None
            allocation = self._allocate_best(nbytes) if kind is None else self._allocate(nbytes, kind)
            try:
                if stream is not None:
                    driver.call("cuMemsetD8Async", allocation.ptr, 0, allocation.nbytes, stream)
                    driver.call("cuStreamSynchronize", stream)
            except BaseException:
                undo(self._give_back_behind, allocation, stream)
                raise
            with self._lock:
                self._owned[allocation.ptr] = allocation
            return allocation

    def allocate_grown(self, sizes: Sequence[int]) -> Allocation:
        """Allocate blocks of at least these sizes, side by side: one range, exported as one chunk for each block.

        As memory looks that a framework has grown (torch's expandable segments). The caller frees with :meth:`free`.
        """
        if not sizes or min(sizes) <= 0:
            raise UsageError("blocks of no size", remedy="ask for at least one byte in each", backend="cuda")
        with self._context:
            self._context.check_alive()
            reservation = allocate_vmm(sizes, ordinal=self._context.ordinal)
        allocation = Allocation(reservation.base, reservation.nbytes, HandleKind.VMM_FD, reservation)
        with self._lock:
            self._owned[allocation.ptr] = allocation
        return allocation

    def _allocate_best(self, nbytes: int) -> Allocation:
        if self._no_vmm is None:
            try:
                return self._allocate(nbytes, HandleKind.VMM_FD)
            except CapabilityError as error:
                if error.retryable or error.left:  # what stays of it is said, not passed over
                    raise
                self._no_vmm = error
        return self._allocate(nbytes, HandleKind.LEGACY)

    def _allocate(self, nbytes: int, kind: HandleKind) -> Allocation:
        self._context.check_alive()
        if kind is HandleKind.VMM_FD:
            reservation = allocate_vmm((nbytes,), ordinal=self._context.ordinal)
            return Allocation(reservation.base, reservation.nbytes, kind, reservation)
        if kind is HandleKind.LEGACY:
            nbytes = round_up(nbytes, BLOCK_NBYTES)
            return Allocation(int(driver.call("cuMemAlloc", nbytes)), nbytes, kind, None)
        if kind is HandleKind.POOL:
            ptr, nbytes, pool = allocate_from_pool(
                nbytes, ordinal=self._context.ordinal, stream=self._context.internal_stream()
            )
            return Allocation(ptr, nbytes, kind, pool)
        raise CapabilityError(
            f"this backend cannot allocate memory of kind {kind}",
            code="kind",
            remedy="use vmm_fd, legacy or pool",
            backend="cuda",
            device=self._context.uuid,
        )

    def free(self, allocation: Allocation) -> None:
        """Give an allocation back. The caller guarantees that no queued work uses it and that every peer closed it.

        Raises
        ------
        UsageError
            When it was freed before, or comes from elsewhere.
        """
        with self._lock:
            if self._owned.get(allocation.ptr) is not allocation:
                raise UsageError(
                    "the allocation was freed before, or was not made by this device",
                    remedy="free each allocation once, on the device that made it",
                    backend="cuda",
                    device=self._context.uuid,
                )
            del self._owned[allocation.ptr]
        with self._context:
            self._give_back(allocation)

    def _give_back_behind(self, allocation: Allocation, stream: Any) -> None:
        """Give memory back once nothing of a stream can touch it: its work is over or the device lost."""
        if stream is not None:
            with contextlib.suppress(DeviceLostError):
                driver.call("cuStreamSynchronize", stream)
        self._give_back(allocation)

    def _give_back(self, allocation: Allocation) -> None:
        if allocation.kind is HandleKind.VMM_FD:
            allocation.token.release()  # type: ignore[attr-defined]
        elif allocation.kind is HandleKind.LEGACY:
            driver.call("cuMemFree", allocation.ptr)
        else:
            free_with_pool(allocation.ptr, allocation.token, stream=self._context.internal_stream())

    def describe(self, ptr: int) -> AllocationInfo:
        """Ask the driver what ``ptr`` points into; see :mod:`devipc_cuda.memory_query`."""
        with self._lock:
            opened = next((o for o in self._opened.values() if o.base <= ptr < o.base + o.nbytes), None)
        if opened is not None:
            reason = memory_query.REASONS["imported"]
            return AllocationInfo(opened.base, opened.nbytes, MemoryKind.IMPORTED, opened.serial, (), reason)
        with self._context:
            self._context.check_alive()
            return memory_query.inspect(ptr, ordinal=self._context.ordinal)

    def export(self, ptr: int, nbytes: int, *, kind: HandleKind | None = None) -> ExportedExtent:
        """Export ``[ptr, ptr + nbytes)`` as the kind that its memory is; see the interface for the rules."""
        if nbytes <= 0:
            raise UsageError(
                f"export of {nbytes} bytes", remedy="there is no handle for nothing; skip empty ranges", backend="cuda"
            )
        info = self.describe(ptr)
        if not info.exportable:
            raise self._not_exportable(info.kind.value, info.reason)
        if kind not in (None, *info.exportable):
            raise self._not_exportable(
                info.kind.value, f"it can be exported as {', '.join(info.exportable)}, not as {kind}"
            )
        if ptr + nbytes > info.base + info.nbytes:
            raise UsageError(
                f"the range ends {ptr + nbytes - info.base - info.nbytes} bytes behind its allocation",
                remedy="export only the part that was allocated",
                backend="cuda",
                device=self._context.uuid,
            )
        with self._context:
            if info.kind is MemoryKind.VMM:
                return export_vmm(ptr, nbytes)
            if info.kind is MemoryKind.POOL:
                return self._pools.export(ptr, nbytes, info=info)
            return self._legacy_exports.export(ptr, nbytes, info=info)

    def _not_exportable(self, kind: str, reason: str) -> CapabilityError:
        reason, _, remedy = reason.partition(": ")
        return CapabilityError(
            f"{kind} memory cannot be exported: {reason}",
            code="not_exportable",
            remedy=remedy,
            backend="cuda",
            device=self._context.uuid,
        )

    def release(self, extent: ExportedExtent) -> None:
        """Close the extent's descriptors; the driver keeps nothing else for an export. Does not free the memory."""
        close_fds(extent.fds)
        if extent.kind is HandleKind.POOL:
            self._pools.release(extent)

    def open(self, extent: ExportedExtent) -> OpenedExtent:
        """Map an extent of another process. May block in the driver; descriptors stay the caller's."""
        payload.check_extent(extent)
        with self._context:
            self._context.check_alive()
            if extent.kind is HandleKind.VMM_FD:
                (opened,) = open_vmm((extent,), ordinal=self._context.ordinal)
            elif extent.kind is HandleKind.POOL:
                opened = self._pool_imports.open(extent)
            else:
                opened = self._legacy_mappings.open(extent)
        return self._remember(extent, opened, region=0)

    def side_by_side(self, kind: HandleKind) -> Capability:
        """Answer for one kind: only physical memory of its own is mapped where this process says."""
        if kind is HandleKind.VMM_FD:
            return Capability.untested("the driver maps imported physical memory at reserved addresses")
        return Capability.no(
            f"the driver chooses the address at which it maps {kind} memory, and one copy may not span two mappings",
            remedy="allocate the memory as vmm_fd (torch: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)",
        )

    def open_side_by_side(self, extents: Sequence[ExportedExtent]) -> tuple[OpenedExtent, ...]:
        """Map extents of kind ``vmm_fd`` in one reserved range; an H200 (driver 580) copies across their borders."""
        for extent in extents:
            payload.check_extent(extent)
            if extent.kind is not HandleKind.VMM_FD:
                answer = self.side_by_side(extent.kind)
                raise CapabilityError(
                    answer.reason, code="side_by_side", remedy=answer.remedy, backend="cuda", device=self._context.uuid
                )
        if not extents:
            return ()
        with self._context:
            self._context.check_alive()
            opened = open_vmm(extents, ordinal=self._context.ordinal)
        region = next(self._serials)
        return tuple(self._remember(*pair, region=region) for pair in zip(extents, opened, strict=True))

    def _remember(self, extent: ExportedExtent, opened: OpenedExtent, *, region: int) -> OpenedExtent:
        first = extent.chunks[0]
        mapped = sum(chunk.allocation_nbytes for chunk in extent.chunks)
        token = _Opened(extent.kind, opened.ptr - first.offset, mapped, opened.token, next(self._serials))
        with self._lock:
            self._opened[token.serial] = token
        return OpenedExtent(opened.ptr, opened.nbytes, token, region)

    def close(self, opened: OpenedExtent) -> None:
        """Unmap; the caller guarantees that no queued work of this process still uses the range.

        Raises
        ------
        ClosedError
            When it was closed before.
        """
        token = opened.token
        with self._lock:
            if not isinstance(token, _Opened) or self._opened.pop(token.serial, None) is not token:
                raise ClosedError(
                    "the mapping was closed before, or was not opened by this device",
                    remedy="close each mapping once",
                    backend="cuda",
                    device=self._context.uuid,
                )
        with self._context:
            if token.kind is HandleKind.VMM_FD:
                token.inner.release()
            elif token.kind is HandleKind.POOL:
                self._pool_imports.close(token.inner)
            else:
                self._legacy_mappings.close(token.inner)
