"""What the tests of this folder share: a device, streams that can be held, registered memory, fences that travel.

Knows the host backend: its streams have ``stall`` and ``resume``.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from typing import Any

from devipc.completion import ConsumerFence, Fence, FenceHandle, create_fence, decode_fence_handle, encode_fence_handle
from devipc.completion import open_fence as open_handle
from devipc.interfaces.backend import Device
from devipc.interfaces.transfer import DeviceTransfer, HostRegistration
from devipc.memfd import SharedMap, create_memfd
from devipc.registry import load_backend
from devipc.spi import close_fds
from devipc.types import Strategy
from devipc.wire import Reader
from tests.completion.peer import Pipe

ALL = tuple(Strategy)
MECHANISM = {
    Strategy.STREAM_MEMOP: ("host_write_word", "host_wait_word"),
    Strategy.HOST_FLAG: ("host_write_word", ""),
    Strategy.POLLING: ("host_record_marker", ""),
    Strategy.EVENT: ("host_event_record", "host_event_query"),
}
"""Calls of the driver that prove a strategy: the producer's and the consumer's."""


@contextlib.contextmanager
def host_device() -> Iterator[Device]:
    device = load_backend("host").open_device()
    try:
        yield device
    finally:
        device.close()


def transfer_of(device: Device) -> DeviceTransfer:
    assert device.transfer is not None
    return device.transfer


def stream_of(device: Device) -> Any:
    """A stream; typed Any because only the host backend's can be stalled."""
    return transfer_of(device).create_stream()


def hold(stream: Any) -> None:
    """Let the stream be behind: work is queued that does not begin before ``stream.resume()``."""
    stream.stall()
    stream.call(lambda: None)


class Buffer:
    """Shared memory that the device reaches, filled with one number at a time."""

    def __init__(self, device: Device, nbytes: int, fd: int | None = None) -> None:
        self.fd = create_memfd("test-data", nbytes) if fd is None else fd
        self.map = SharedMap(self.fd, nbytes)
        self.nbytes = nbytes
        self._transfer = transfer_of(device)
        self._registration: HostRegistration = self._transfer.register_host(self.map.address, nbytes)

    @property
    def ptr(self) -> int:
        return self._registration.device_ptr

    def fill(self, number: int, *, offset: int = 0, nbytes: int | None = None) -> None:
        length = self.nbytes - offset if nbytes is None else nbytes
        self.map.view[offset : offset + length] = struct.pack("<Q", number) * (length // 8)

    def holds(self, number: int, *, offset: int = 0, nbytes: int | None = None) -> bool:
        length = self.nbytes - offset if nbytes is None else nbytes
        return bool(self.map.view[offset : offset + length] == struct.pack("<Q", number) * (length // 8))

    def close(self) -> None:
        self._transfer.unregister_host(self._registration)
        self.map.close()
        os.close(self.fd)


def open_exported(device: Device, handle: FenceHandle) -> ConsumerFence:
    """Open a handle through its bytes, as a peer would, and close its descriptor."""
    try:
        return open_handle(device, decode_fence_handle(Reader(encode_fence_handle(handle)), handle.fds))
    finally:
        close_fds(handle.fds)


def send_fence(pipe: Pipe, fence: Fence) -> int:
    """Export to the other process; return the line that it got."""
    handle = fence.export()
    pipe.send(encode_fence_handle(handle).hex(), handle.fds)
    close_fds(handle.fds)
    return handle.line


def receive_fence(pipe: Pipe, device: Device) -> ConsumerFence:
    text, fds = pipe.receive()
    return open_exported(device, decode_fence_handle(Reader(bytes.fromhex(text)), fds))


@contextlib.contextmanager
def pair(device: Device, strategy: Strategy, **options: Any) -> Iterator[tuple[Any, ConsumerFence]]:
    """Both ends of a fence in this process, where a consumer may do all but wait on a stream."""
    with create_fence(device, strategy, **options) as producer:
        consumer = open_exported(device, producer.export())
        try:
            yield producer, consumer
        finally:
            consumer.close()
