"""FenceHandle: what one consumer needs to open a fence, and its bytes.

Owns the layout of those bytes. Descriptors travel beside them. It opens nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from devipc.completion.page import MAX_CONSUMERS, RING_SLOTS
from devipc.errors import WireError
from devipc.types import Strategy
from devipc.wire import MAX_PAYLOAD_NBYTES, Reader, Writer

__all__ = ["FenceHandle", "decode_fence_handle", "encode_fence_handle"]


@dataclass(frozen=True, slots=True)
class FenceHandle:
    """One consumer's way into a fence. It opens once.

    Owns ``fds``: whoever holds the handle last closes them (:func:`devipc.spi.close_fds`); sending duplicates them,
    opening leaves them alone.

    Parameters
    ----------
    strategy : Strategy
        How the value is learnt.
    producer : bytes
        16 random bytes: the producing process.
    line : int
        The consumer's line in the page, 1 .. 32.
    ticket : int
        Number of the export, so that a line which is given away again does not open for an old handle.
    payloads : tuple of bytes
        Vendor bytes of the events of the ring; empty for other strategies. Never printed.
    fds : tuple of int
        The page.
    """

    strategy: Strategy
    producer: bytes
    line: int
    ticket: int
    payloads: tuple[bytes, ...]
    fds: tuple[int, ...]

    def __repr__(self) -> str:
        return f"FenceHandle(strategy={self.strategy.value!r}, line={self.line}, ring={len(self.payloads)})"


def encode_fence_handle(handle: FenceHandle) -> bytes:
    """Return the bytes of ``handle``; its one descriptor travels beside them."""
    writer = Writer().text(handle.strategy.value, limit=32).raw(handle.producer, 16)
    writer.u32(handle.line).u64(handle.ticket).u32(len(handle.payloads))
    for payload in handle.payloads:
        writer.blob(payload, limit=MAX_PAYLOAD_NBYTES)
    return writer.done()


def decode_fence_handle(reader: Reader, fds: Sequence[int]) -> FenceHandle:
    """Decode a handle and give it the descriptor that came with it; on error that stays the caller's.

    Raises
    ------
    WireError
        For an unknown strategy, a line or ring out of bounds, or another number of descriptors than one.
    """
    name = reader.text(limit=32)
    try:
        strategy = Strategy(name)
    except ValueError as error:
        raise WireError(f"unknown completion strategy {name!r}", code="strategy") from error
    producer, line, ticket = reader.raw(16), reader.u32(), reader.u64()
    payloads = tuple(reader.blob(limit=MAX_PAYLOAD_NBYTES) for _ in range(reader.count(limit=RING_SLOTS)))
    if not 1 <= line <= MAX_CONSUMERS:
        raise WireError(f"line {line} of a fence", code="line")
    if bool(payloads) != (strategy is Strategy.EVENT):
        raise WireError(f"{len(payloads)} events for strategy {strategy.value}", code="ring")
    if len(fds) != 1:
        raise WireError(f"{len(fds)} descriptors came, a fence needs one", code="fd_count")
    return FenceHandle(strategy, producer, line, ticket, payloads, tuple(fds))
