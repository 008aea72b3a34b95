"""Making fences: which half belongs to which strategy.

Owns that table and the clean-up when a half cannot be made. It chooses nothing: see the chooser.
"""

from __future__ import annotations

import os

from devipc.absence import need_transfer
from devipc.completion.consumer import ConsumerFence
from devipc.completion.event import DEFAULT_RING, EventConsumer, EventProducer
from devipc.completion.half import WORD_PAUSE_S, ConsumerHalf, LookingConsumer, ProducerHalf
from devipc.completion.handle import FenceHandle
from devipc.completion.host_flag import flag_producer
from devipc.completion.page import FencePage, LineState
from devipc.completion.polling import KICKED_PAUSE_S, PollingProducer
from devipc.completion.producer import ProducerFence, process_token
from devipc.completion.stream_memop import MemopConsumer, MemopProducer
from devipc.errors import HandleError
from devipc.interfaces.backend import Device
from devipc.types import Strategy

__all__ = ["create_fence", "open_fence"]


def create_fence(
    device: Device,
    strategy: Strategy,
    *,
    ring: int = DEFAULT_RING,
    page_fd: int | None = None,
) -> ProducerFence:
    """Make a fence that this process signals.

    Parameters
    ----------
    device : Device
        Whose streams will signal it.
    strategy : Strategy
        As chosen by :func:`devipc.completion.choose`.
    ring : int
        Events of an ``event`` fence: so many signals may be unseen by a consumer before ``signal`` blocks.
    page_fd : int, optional
        A zero-filled sealed memory file of 4096 bytes to use instead of a new one; it stays the caller's.

    Raises
    ------
    CapabilityError
        When the device lacks a primitive of the strategy.
    ResourceExhausted
        When memory, descriptors, pinned memory or events ran out.
    """
    need_transfer(device)
    page, fd = FencePage.create(fd=page_fd)
    try:
        half = _producer_half(device, Strategy(strategy), page, ring)
    except BaseException:
        page.close()
        os.close(fd)
        raise
    return ProducerFence(Strategy(strategy), page, half, device, fd=fd)


def open_fence(device: Device, handle: FenceHandle) -> ConsumerFence:
    """Open a fence that another process signals. The handle keeps its descriptor; it opens only once.

    Raises
    ------
    HandleError
        When the memory file or the bytes cannot be trusted; ``StaleError`` for a used or withdrawn handle.
    CapabilityError
        When this device lacks a primitive of the strategy.
    """
    need_transfer(device)
    if len(handle.fds) != 1:
        raise HandleError("the handle has lost its descriptor", remedy="open it before its descriptor is closed")
    page = FencePage.open(handle.fds[0], line=handle.line, ticket=handle.ticket)
    try:
        half = _consumer_half(device, handle, page)
    except BaseException:
        page.set_line_state(handle.line, LineState.CLOSED)
        page.close()
        raise
    return ConsumerFence(
        handle.strategy,
        page,
        half,
        device,
        line=handle.line,
        in_producer=handle.producer == process_token(),
    )


def _producer_half(device: Device, strategy: Strategy, page: FencePage, ring: int) -> ProducerHalf:
    if strategy is Strategy.STREAM_MEMOP:
        return MemopProducer(device, page)
    if strategy is Strategy.HOST_FLAG:
        return flag_producer(device, page)
    if strategy is Strategy.POLLING:
        return PollingProducer(device, page)
    return EventProducer(device, page, ring=ring)


def _consumer_half(device: Device, handle: FenceHandle, page: FencePage) -> ConsumerHalf:
    if handle.strategy is Strategy.STREAM_MEMOP:
        return MemopConsumer(device, page)
    if handle.strategy is Strategy.EVENT:
        return EventConsumer(device, page, line=handle.line, payloads=handle.payloads)
    return LookingConsumer(page, pause_s=KICKED_PAUSE_S if handle.strategy is Strategy.POLLING else WORD_PAUSE_S)
