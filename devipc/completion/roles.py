"""The two sides of a live trial: one that signals and one that watches, each doing what it is told step by step.

Owns the device objects of a trial and their end. It decides nothing: the order of steps and the verdict are in
:mod:`devipc.completion.trial`, and the other side may be in another process.
"""

from __future__ import annotations

import enum
import logging
import os
import time
from typing import Protocol

from devipc.absence import need_transfer
from devipc.completion.factory import create_fence, open_fence
from devipc.completion.half import Drain, give_back
from devipc.completion.handle import FenceHandle
from devipc.completion.scratch import Scratch
from devipc.errors import CapabilityError, DevIPCError, FencePoisoned, ResourceExhausted, UsageError
from devipc.interfaces.backend import Device
from devipc.interfaces.transfer import HostRegistration, Stream
from devipc.memfd import SharedMap, create_memfd, validate_memfd
from devipc.types import PoisonReason, Strategy

__all__ = ["DATA_NBYTES", "ConsumerRole", "Op", "ProducerRole", "Role", "Seen"]

DATA_NBYTES = 4096
"""Shared data of a trial: filled with the number that is signalled behind it."""
TORN = 2**63
"""What a consumer reads when the data is not one number."""
MAX_VALUE = 64
_LOAD_NBYTES = 2 << 20
_LOAD_OFFSET = MAX_VALUE * DATA_NBYTES
_CLOSE_TIMEOUT_S = 1.0
_log = logging.getLogger("devipc.completion")


class Op(enum.IntEnum):
    """One step. Each takes two numbers and answers with two."""

    ANNOUNCE = 1
    """Producer: publish ``a`` as issued though nothing will signal it yet."""
    SIGNAL = 2
    """Producer: ``b`` large copies, then the number ``a`` into the data, then signal ``a``; answers (data written)."""
    LOOK = 3
    """Consumer: watch for ``a`` up to ``b`` milliseconds; answers (Seen, number in the data)."""
    ENQUEUE = 4
    """Consumer: let a stream wait for ``a`` and then copy the data."""
    PASSED = 5
    """Consumer: up to ``b`` milliseconds; answers (whether the stream has passed the wait, number it has copied)."""
    POISON = 6
    """Either: poison the fence."""


class Seen(enum.IntEnum):
    """What LOOK found."""

    PENDING = 0
    REACHED = 1
    POISONED = 2
    BACKWARDS = 3


class Role(Protocol):
    """One side, here or in another process."""

    def do(self, op: Op, a: int, b: int = 0) -> tuple[int, int]:
        """Do one step."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class _Memory:
    """Host memory that the device of a role reaches."""

    def __init__(self, device: Device, fd: int, nbytes: int) -> None:
        self._transfer = need_transfer(device)
        self.map = SharedMap(fd, nbytes)
        try:
            self._registration: HostRegistration = self._transfer.register_host(self.map.address, nbytes)
        except BaseException:
            self.map.close()
            raise
        self.ptr = self._registration.device_ptr

    def fill(self, number: int, offset: int) -> None:
        self.map.view[offset : offset + DATA_NBYTES] = number.to_bytes(8, "little") * (DATA_NBYTES // 8)

    def number(self) -> int:
        return _number(self.map.view)

    def close(self) -> None:
        give_back(self._transfer.unregister_host, self._registration)
        self.map.close()


def _number(view: memoryview) -> int:
    content = bytes(view[:DATA_NBYTES])
    return int.from_bytes(content[:8], "little") if content == content[:8] * (DATA_NBYTES // 8) else TORN


class _Side:
    """What both roles have: a device, one stream, and its end."""

    def __init__(self, device: Device) -> None:
        self._transfer = need_transfer(device)
        self._stream: Stream = self._transfer.create_stream()

    def _end_stream(self) -> bool:
        """Destroy the stream when its work is over; one that is stuck is left alone, and so is what it can reach."""
        drain = Drain(self._transfer)
        try:
            drain.mark(self._stream)
        except DevIPCError as error:
            _log.warning("the stream of a trial cannot be asked any more: %s", error)
            return False
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        while not (done := drain.done()) and time.monotonic() < deadline:
            time.sleep(1e-3)
        drain.close()
        if done:
            give_back(self._transfer.destroy_stream, self._stream)
        return done


class ProducerRole(_Side):
    """Signals numbers behind data.

    Descriptors stay the caller's.
    """

    def __init__(
        self, device: Device, strategy: Strategy, *, data_fd: int, page_fd: int | None = None, ring: int = 4
    ) -> None:
        super().__init__(device)
        self._data: _Memory | None = None
        self._source: _Memory | None = None
        self._scratch: Scratch | None = None
        try:
            self._fence = create_fence(device, strategy, ring=ring, page_fd=page_fd)
        except BaseException:
            self._end_stream()
            raise
        try:
            self._map_data(device, data_fd)
        except BaseException:
            self.close()
            raise

    def _map_data(self, device: Device, data_fd: int) -> None:
        """Make room for data and for copies that keep the stream busy; none where it cannot be registered or had.

        Neither is a reason to fail: ``polling`` needs no registered memory, and works where little may be pinned.
        """
        fd = create_memfd("devipc-trial", _LOAD_OFFSET + 2 * _LOAD_NBYTES)
        try:
            self._source = _Memory(device, fd, _LOAD_OFFSET + 2 * _LOAD_NBYTES)
            self._data = _Memory(device, data_fd, DATA_NBYTES)
            self._scratch = Scratch(device, _LOAD_NBYTES)
        except (CapabilityError, ResourceExhausted):
            return
        finally:
            os.close(fd)

    def export(self) -> FenceHandle:
        """Return a handle for the other side."""
        return self._fence.export()

    def do(self, op: Op, a: int, b: int = 0) -> tuple[int, int]:
        """Do one step of a producer."""
        if op is Op.ANNOUNCE:
            self._fence.announce(a)
            return 0, 0
        if op is Op.SIGNAL:
            written = self._submit(a, b)
            self._fence.signal(self._stream, a)
            return written, 0
        if op is Op.POISON:
            self._fence.poison(PoisonReason.CANCELLED)
            return 0, 0
        raise UsageError(f"a producer does not {op.name.lower()}")

    def _submit(self, number: int, load: int) -> int:
        if self._source is None or self._data is None or self._scratch is None or not 1 <= number < MAX_VALUE:
            return 0
        offset = number * DATA_NBYTES
        self._source.fill(number, offset)
        large = self._source.ptr + _LOAD_OFFSET
        for _ in range(load):
            self._scratch.carry(self._stream, large, large + _LOAD_NBYTES, _LOAD_NBYTES)
        self._scratch.carry(self._stream, self._data.ptr, self._source.ptr + offset, DATA_NBYTES)
        return 1

    def close(self) -> None:
        """Give everything back that no stuck stream can reach."""
        self._fence.close(_CLOSE_TIMEOUT_S)
        if self._end_stream():
            for memory in (self._data, self._source, self._scratch):
                if memory is not None:
                    memory.close()


class ConsumerRole(_Side):
    """Watches a fence and the data in front of it. Descriptors stay the caller's."""

    def __init__(self, device: Device, handle: FenceHandle, data_fd: int) -> None:
        validate_memfd(data_fd, min_nbytes=DATA_NBYTES)
        data = SharedMap(data_fd, DATA_NBYTES)
        try:
            super().__init__(device)
        except BaseException:
            data.close()
            raise
        self._data = data
        self._copied: _Memory | None = None
        self._shared: _Memory | None = None
        self._scratch: Scratch | None = None
        self._device = device
        try:
            self._marker = self._transfer.create_marker()
        except BaseException:  # nothing is queued: the stream can go, and to ask whether it is done takes a marker
            give_back(self._transfer.destroy_stream, self._stream)
            data.close()
            raise
        self._largest = 0
        try:
            if handle.strategy is Strategy.STREAM_MEMOP:
                self._map_data(data_fd)
            self._fence = open_fence(device, handle)
        except BaseException:
            self._drop_memory()
            raise

    def _map_data(self, data_fd: int) -> None:
        fd = create_memfd("devipc-trial", DATA_NBYTES)
        try:
            self._copied = _Memory(self._device, fd, DATA_NBYTES)
            self._shared = _Memory(self._device, data_fd, DATA_NBYTES)
            if self._device.memory is not None:
                self._scratch = Scratch(self._device, DATA_NBYTES)
        finally:
            os.close(fd)

    def do(self, op: Op, a: int, b: int = 0) -> tuple[int, int]:
        """Do one step of a consumer."""
        if op is Op.LOOK:
            return self._look(a, b)
        if op is Op.ENQUEUE:
            self._fence.wait(self._stream, a)
            if self._copied is not None and self._shared is not None and self._scratch is not None:
                self._scratch.carry(self._stream, self._copied.ptr, self._shared.ptr, DATA_NBYTES)
            self._transfer.record(self._marker, self._stream)
            return 0, 0
        if op is Op.PASSED:
            return self._passed(b)
        if op is Op.POISON:
            self._fence.poison(PoisonReason.CANCELLED)
            return 0, 0
        raise UsageError(f"a consumer does not {op.name.lower()}")

    def _look(self, n: int, limit_ms: int) -> tuple[int, int]:
        deadline = time.monotonic() + limit_ms / 1e3
        while True:
            try:
                value = self._fence.value
                reached = self._fence.query(n)
            except FencePoisoned:
                return Seen.POISONED, 0
            if value < self._largest:
                return Seen.BACKWARDS, value
            self._largest = value
            if reached or time.monotonic() >= deadline:
                return (Seen.REACHED if reached else Seen.PENDING), _number(self._data.view)
            time.sleep(0.1e-3)

    def _passed(self, limit_ms: int) -> tuple[int, int]:
        deadline = time.monotonic() + limit_ms / 1e3
        while not (passed := self._transfer.query_marker(self._marker)) and time.monotonic() < deadline:
            time.sleep(0.5e-3)
        return int(passed), self._copied.number() if self._copied is not None else 0

    def close(self) -> None:
        """Give everything back that no stuck stream can reach."""
        self._fence.close(_CLOSE_TIMEOUT_S)
        self._drop_memory()

    def _drop_memory(self) -> None:
        if self._end_stream():
            give_back(self._transfer.destroy_marker, self._marker)
            for memory in (self._copied, self._shared, self._scratch):
                if memory is not None:
                    memory.close()
        self._data.close()
