"""An interrupt anywhere in a call that queues work: the work runs or it does not, and giving memory back still ends."""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

import pytest

from devipc.host import driver, ranges
from devipc.memfd import PAGE_NBYTES, SharedMap, create_memfd
from devipc.registry import load_backend
from devipc.spi import close_fds

TRACED = (driver.__file__, ranges.__file__)


def interrupt_at(point: int, call: Callable[[], object], files: Collection[str] = TRACED) -> bool:
    """Run ``call`` and raise KeyboardInterrupt at the ``point``-th place of ``files``; False when it has fewer.

    The interpreter looks for signals when a function begins and behind every call that it made.
    """
    seen = 0
    last: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal seen
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        before, last[frame] = last.get(frame, 0), frame.f_lasti
        if event == "call" or (event == "opcode" and dis.opname[frame.f_code.co_code[before]] == "CALL"):
            seen += 1
            if seen == point:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_an_interrupt_anywhere_in_a_copy_blocks_no_later_call() -> None:
    device = load_backend("host").open_device()
    transfer = device.transfer
    assert transfer is not None
    fd = create_memfd("devipc-test", 2 * PAGE_NBYTES)
    memory = SharedMap(fd, 2 * PAGE_NBYTES)
    close_fds([fd])
    stream = transfer.create_stream()
    point = interrupted = 0
    while True:
        point += 1
        registration = transfer.register_host(memory.address, 2 * PAGE_NBYTES)
        hit = interrupt_at(
            point, lambda: transfer.copy(stream, memory.address, memory.address + PAGE_NBYTES, PAGE_NBYTES)
        )
        interrupted += hit
        for end in (
            lambda: transfer.synchronize_stream(stream),
            lambda registration=registration: transfer.unregister_host(registration),
        ):
            thread = threading.Thread(target=end, daemon=True)
            thread.start()
            thread.join(5)
            assert not thread.is_alive(), f"blocked for ever after an interrupt at place {point}"
        if not hit:
            break
    assert interrupted > 10
    transfer.destroy_stream(stream)
    memory.close()


def test_work_is_not_queued_on_memory_that_is_being_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    device = load_backend("host").open_device()
    transfer = device.transfer
    assert transfer is not None
    fd = create_memfd("devipc-test", PAGE_NBYTES)
    memory = SharedMap(fd, PAGE_NBYTES)
    close_fds([fd])
    stream = transfer.create_stream()
    registration = transfer.register_host(memory.address, PAGE_NBYTES)
    submit = driver.Queue.submit

    def late(queue: driver.Queue, *arguments: Any, **options: Any) -> None:
        transfer.unregister_host(registration)
        submit(queue, *arguments, **options)

    monkeypatch.setattr(driver.Queue, "submit", late)
    with pytest.raises(Exception, match="given back"):
        transfer.copy(stream, memory.address, memory.address + 64, 64)
    monkeypatch.undo()
    transfer.destroy_stream(stream)
    memory.close()
