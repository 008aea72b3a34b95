"""Awaiting a fence from coroutines."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from devipc.completion import Fence, create_fence
from devipc.errors import CompletionTimeout, FencePoisoned
from devipc.interfaces.backend import Device
from devipc.types import PoisonReason, Strategy
from tests.completion.rig import hold, pair, stream_of


def test_awaiting(device: Device) -> None:
    stream = stream_of(device)

    async def main(fence: Fence) -> None:
        task = asyncio.create_task(fence.reached(1, 5.0))
        await asyncio.sleep(0.02)
        assert not task.done()
        stream.resume()
        await task
        with pytest.raises(CompletionTimeout):
            await fence.reached(2, 0.01)

    with pair(device, Strategy.POLLING) as (producer, consumer):
        hold(stream)
        producer.signal(stream, 1)
        asyncio.run(main(consumer))


def test_hundreds_await_at_once_on_one_thread(device: Device) -> None:
    """The last value is awaited first, so that nobody may stand in the way of who comes later."""
    stream, count = stream_of(device), 200

    async def main(fence: Fence, other: Fence) -> None:
        before = threading.active_count()
        tasks = [asyncio.create_task(fence.reached(n, 20.0)) for n in range(count, 0, -1)]
        await asyncio.sleep(0.05)
        assert threading.active_count() <= before + 1
        assert not any(task.done() for task in tasks)
        stream.resume()
        await asyncio.gather(*tasks)
        lost = [asyncio.create_task(other.reached(1, 20.0)) for _ in range(count)]
        await asyncio.sleep(0.05)
        other.poison(PoisonReason.CANCELLED)
        answers = await asyncio.gather(*lost, return_exceptions=True)
        assert all(isinstance(answer, FencePoisoned) for answer in answers)

    with pair(device, Strategy.HOST_FLAG) as (producer, consumer), create_fence(device, Strategy.HOST_FLAG) as other:
        hold(stream)
        for n in range(1, count + 1):
            producer.signal(stream, n)
        asyncio.run(main(consumer, other))


def test_a_cancelled_await_leaves_no_thread(device: Device) -> None:
    async def main(fence: Fence) -> None:
        tasks = [asyncio.create_task(fence.reached(1, 60.0)) for _ in range(20)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(answer, asyncio.CancelledError) for answer in answers)

    with pair(device, Strategy.POLLING) as (_, consumer):
        before = threading.active_count()
        started = time.monotonic()
        asyncio.run(main(consumer))
        while threading.active_count() > before and time.monotonic() - started < 5.0:
            time.sleep(1e-3)
        assert time.monotonic() - started < 5.0
