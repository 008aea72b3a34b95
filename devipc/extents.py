"""What every backend checks of an extent from another process before its driver sees it.

Owns shape, sizes and versions of payloads, and where a chunk must lie. Knows no payload's meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from devipc.errors import BoundsError, HandleError
from devipc.types import Chunk, ExportedExtent, HandleKind

__all__ = ["PayloadShape", "check_chunk", "check_payloads"]


@dataclass(frozen=True, slots=True)
class PayloadShape:
    """What an extent of one kind looks like.

    Parameters
    ----------
    nbytes : int
        Exact size of each chunk's payload, whose first byte is the version.
    has_fd : bool
        Each chunk comes with one descriptor; else none does.
    grows : bool
        Several chunks, mapped side by side, are allowed.
    """

    nbytes: int
    has_fd: bool
    grows: bool = False


def check_payloads(
    extent: ExportedExtent, shapes: Mapping[HandleKind, PayloadShape], *, version: int, package: str, backend: str
) -> None:
    """Check shape, sizes and versions of a received extent.

    Parameters
    ----------
    extent : ExportedExtent
        What came; not trusted.
    shapes : mapping of HandleKind to PayloadShape
        The kinds that the backend reads.
    version : int
        First byte of every payload.
    package, backend : str
        Names put into errors.

    Raises
    ------
    HandleError
        For anything that an exporter of the same package does not make.
    """
    wrong = _Wrong(package, backend)
    shape = shapes.get(extent.kind)
    if shape is None:
        raise wrong(f"kind {extent.kind} is not one of this backend: {', '.join(shapes)}")
    chunks = extent.chunks
    if not chunks or (len(chunks) > 1 and not shape.grows):
        raise wrong(f"{extent.kind} extent with {len(chunks)} chunks")
    if len(extent.fds) != (len(chunks) if shape.has_fd else 0):
        raise wrong(f"{extent.kind} extent of {len(chunks)} chunks with {len(extent.fds)} descriptors")
    for index, chunk in enumerate(chunks):
        if len(chunk.payload) != shape.nbytes:
            raise wrong(f"{extent.kind} payload of {len(chunk.payload)} bytes, expected {shape.nbytes}")
        if chunk.payload[0] != version:
            raise wrong(f"{extent.kind} payload of version {chunk.payload[0]}, this package reads {version}")
        if chunk.has_fd is not shape.has_fd:
            raise wrong(f"chunk {index} of a {extent.kind} extent {'with' if chunk.has_fd else 'without'} descriptor")
        _check_side_by_side(chunk, wrong, first=index == 0, last=index == len(chunks) - 1)


class _Wrong:
    def __init__(self, package: str, backend: str) -> None:
        self._package = package
        self._backend = backend

    def __call__(self, text: str) -> HandleError:
        return HandleError(
            text,
            code="malformed",
            remedy=f"both sides must run one version of {self._package}",
            backend=self._backend,
        )


def _check_side_by_side(chunk: Chunk, wrong: _Wrong, *, first: bool, last: bool) -> None:
    """Chunks are mapped whole, one after the other: only the outer ends of the range may lie inside of a chunk."""
    if min(chunk.offset, chunk.nbytes - 1, chunk.allocation_nbytes - 1) < 0:
        raise wrong(f"chunk of {chunk.nbytes} bytes at {chunk.offset} in {chunk.allocation_nbytes}")
    if not first and chunk.offset:
        raise wrong("a later chunk of a grown range does not start at its beginning")
    if not last and chunk.offset + chunk.nbytes != chunk.allocation_nbytes:
        raise wrong("an earlier chunk of a grown range does not reach its end")


def check_chunk(chunk: Chunk, *, driver_nbytes: int) -> None:
    """Check one chunk against the allocation size that the importing driver reports.

    Raises
    ------
    BoundsError
        When the shared part does not lie inside the allocation, or that is announced larger than ``driver_nbytes``.
    """
    if chunk.allocation_nbytes > driver_nbytes:
        raise BoundsError(
            f"the driver reports an allocation of {driver_nbytes} bytes, the exporter announced"
            f" {chunk.allocation_nbytes}",
            remedy="the exporter's handle is wrong or was changed on the way; export again",
        )
    if chunk.offset < 0 or chunk.nbytes <= 0 or chunk.offset + chunk.nbytes > chunk.allocation_nbytes:
        raise BoundsError(
            f"shared range [{chunk.offset}, {chunk.offset + chunk.nbytes}) leaves the allocation of"
            f" {chunk.allocation_nbytes} bytes",
            remedy="the exporter's handle is wrong or was changed on the way; export again",
        )
