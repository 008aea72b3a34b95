"""Transfer checks: copies bring the bytes, markers keep the order, registered host memory is shared memory.

Owns the checks of :class:`~devipc.interfaces.transfer.DeviceTransfer`. Only host registration needs the importer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from devipc.absence import need_transfer
from devipc.errors import CapabilityError
from devipc.integrations.numpy_view import u64_array
from devipc.interfaces.backend import Device
from devipc.memfd import create_memfd
from devipc.probe.load import Load, loads
from devipc.probe.memory import need_memory, need_stage
from devipc.probe.partner import CheckFailed, NotTried, Partner
from devipc.probe.stage import Stage

__all__ = ["TRANSFER_CHECKS", "SharedHost", "check_transfer"]

_NBYTES = 1 << 20
_SHARED_NBYTES = 64 * 1024
_REPORT = "report it with `devipc env` and the driver's version"


def check_transfer(device: Device, partner: Partner, name: str) -> str:
    """Run the check called ``name`` and return what was seen.

    Raises
    ------
    CheckFailed
        When bytes or order are wrong.
    NotTried
        When there is no device memory, registered memory or numpy to try it with.
    """
    return TRANSFER_CHECKS[name](device, partner)


class _Buffer:
    """Device memory beside a stage of the same size; what is in it is known."""

    def __init__(self, device: Device) -> None:
        self._memory = need_memory(device)
        self.stage: Stage = need_stage(device, _NBYTES)
        self._allocation = self._memory.allocate(_NBYTES)
        self.ptr = self._allocation.ptr
        self.content = os.urandom(_NBYTES)
        self.stage.put(self.ptr, self.content)

    def expect(self, content: bytes, what: str) -> None:
        seen = self.stage.get(self.ptr, _NBYTES)
        if seen != content:
            wrong = sum(one != other for one, other in zip(seen, content, strict=True))
            raise CheckFailed(f"{what}: {wrong} of {_NBYTES} bytes are wrong", remedy=_REPORT)

    def close(self) -> None:
        self._memory.free(self._allocation)
        self.stage.close()


def _copy(device: Device, _: Partner) -> str:
    """Copies of odd sizes at odd places, there and back."""
    buffer = _Buffer(device)
    content = bytearray(buffer.content)
    for at, nbytes in ((1, 1), (4099, 4093), (70_001, 300_007)):
        part = os.urandom(nbytes)
        buffer.stage.put(buffer.ptr + at, part)
        content[at : at + nbytes] = part
    buffer.expect(bytes(content), "copies of odd sizes")
    buffer.close()
    return f"{_NBYTES} random bytes there and back, with copies of 1, 4093 and 300007 bytes at odd places"


def _need_arrays() -> None:
    try:
        u64_array([0])
    except CapabilityError as error:
        raise NotTried(f"descriptors of copies are arrays, and {error.message}", remedy=error.remedy) from error


def _batch(device: Device, _: Partner) -> str:
    """One batch of many ranges."""
    _need_arrays()
    shapes = [_Shape(to=at, source=at + 999, width=385) for at in range(1, _NBYTES - 4096, 4096)]

    def submit(buffer: _Buffer) -> None:
        need_transfer(device).copy_batch(
            buffer.stage.stream,
            u64_array([buffer.ptr + s.to for s in shapes]),
            u64_array([buffer.stage.ptr + s.source for s in shapes]),
            u64_array([s.width for s in shapes]),
        )

    return _rearranged(device, shapes, submit, "a batch")


def _strided(device: Device, _: Partner) -> str:
    """Rectangles, each with two different pitches."""
    _need_arrays()
    shapes = [
        _Shape(to=at, source=at + 8192, width=1000, to_pitch=2048, source_pitch=4096, height=4)
        for at in range(0, _NBYTES - 65536, 65536)
    ]

    def submit(buffer: _Buffer) -> None:
        rows = [
            (buffer.ptr + s.to, buffer.stage.ptr + s.source, s.to_pitch, s.source_pitch, s.width, s.height)
            for s in shapes
        ]
        need_transfer(device).copy_strided(buffer.stage.stream, u64_array(rows))

    return _rearranged(device, shapes, submit, "strided copies")


@dataclass(frozen=True, slots=True)
class _Shape:
    """One rectangle; offsets, pitches and width in bytes, height in rows."""

    to: int
    source: int
    width: int
    to_pitch: int = 0
    source_pitch: int = 0
    height: int = 1


def _rearranged(device: Device, shapes: Sequence[_Shape], submit: Callable[[_Buffer], None], what: str) -> str:
    """Bring pieces of the stage into device memory, and compare with the same done by hand."""
    buffer = _Buffer(device)
    expected, pieces = bytearray(buffer.content), os.urandom(_NBYTES)
    buffer.stage.view[:_NBYTES] = pieces
    for s in shapes:
        for row in range(s.height):
            to, source = s.to + row * s.to_pitch, s.source + row * s.source_pitch
            expected[to : to + s.width] = pieces[source : source + s.width]
    submit(buffer)
    buffer.stage.synchronize()
    buffer.expect(bytes(expected), what)
    buffer.close()
    return f"{what}: {len(shapes)} pieces in their places, all {_NBYTES} bytes compared"


def _order(device: Device, _: Partner) -> str:
    """Markers: never recorded is not done, pending is not done, and another stream can wait for one."""
    transfer = need_transfer(device)
    buffer, load = _Buffer(device), Load(device)
    first, last = transfer.create_marker(), transfer.create_marker()
    if transfer.query_marker(first):
        raise CheckFailed("a marker that was never recorded is done", remedy=_REPORT)
    pending = 0
    for number, copies in enumerate(loads(), 1):
        content = os.urandom(_NBYTES)
        buffer.stage.view[:_NBYTES] = content
        transfer.copy(load.stream, buffer.ptr, buffer.stage.ptr, _NBYTES)
        load.submit(copies, number)
        transfer.record(first, load.stream)
        transfer.wait_marker(buffer.stage.stream, first)
        transfer.record(last, buffer.stage.stream)
        for marker in (last, first):
            if transfer.query_marker(marker) and load.arrived != number:
                raise CheckFailed("a marker is done before the work in front of it", remedy=_REPORT)
        pending = 0 if transfer.query_marker(first) else copies
        buffer.expect(content, "a stream that waited for a marker")
        if load.arrived != number:
            raise CheckFailed("a stream went past a marker that it had to wait for", remedy=_REPORT)
        if not (transfer.query_marker(first) and transfer.query_marker(last)):
            raise CheckFailed("a marker is not done after its work was waited for", remedy=_REPORT)
        if pending:
            break
    transfer.destroy_marker(first)
    transfer.destroy_marker(last)
    load.close()
    buffer.close()
    return "a second stream waited for the first's copies; " + (
        f"the marker was pending behind {pending} copies" if pending else "the work was too short to see it pending"
    )


# --- host registration ----------------------------------------------------------------------------------------------


class SharedHost:
    """Host memory that both processes map and register, and device memory to carry it through.

    Parameters
    ----------
    device : Device
        The device of this process.
    fd : int
        The shared memory; it stays the caller's.
    """

    def __init__(self, device: Device, fd: int) -> None:
        self._memory = need_memory(device)
        self._shared = need_stage(device, _SHARED_NBYTES, fd=fd)
        self._private = need_stage(device, _SHARED_NBYTES)
        self._allocation = self._memory.allocate(_SHARED_NBYTES)

    def push(self, content: bytes) -> None:
        """Let this process's device write ``content`` into the shared memory."""
        self._private.put(self._allocation.ptr, content)
        self._shared.load(self._allocation.ptr, len(content))
        self._shared.synchronize()

    def pull(self) -> tuple[bytes, bytes]:
        """Return what this process's host sees in the shared memory, and what its device does."""
        host = bytes(self._shared.view[:_SHARED_NBYTES])
        self._shared.store(self._allocation.ptr, _SHARED_NBYTES)
        self._shared.synchronize()
        return host, self._private.get(self._allocation.ptr, _SHARED_NBYTES)

    def close(self) -> None:
        """Give everything back."""
        self._memory.free(self._allocation)
        self._private.close()
        self._shared.close()


def _host_registration(device: Device, partner: Partner) -> str:
    """Memory registered in both processes: what one device writes, the other's host and device see."""
    fd = create_memfd("devipc-probe", _SHARED_NBYTES)
    try:
        shared = SharedHost(device, fd)
        partner.ask("host.open", fds=[fd])
    finally:
        os.close(fd)
    content = os.urandom(_SHARED_NBYTES)
    shared.push(content)
    seen = partner.ask("host.pull")["data"]
    for who, at in (("host", 0), ("device", _SHARED_NBYTES)):
        if seen[at : at + _SHARED_NBYTES] != content:
            raise CheckFailed(f"the importer's {who} does not see what the exporter's device wrote", remedy=_REPORT)
    content = os.urandom(_SHARED_NBYTES)
    partner.ask("host.push", content)
    for who, view in zip(("host", "device"), shared.pull(), strict=True):
        if view != content:
            raise CheckFailed(f"the exporter's {who} does not see what the importer's device wrote", remedy=_REPORT)
    partner.ask("host.close")
    shared.close()
    return f"{_SHARED_NBYTES} bytes registered in both processes, written by each device and seen by the other's"


TRANSFER_CHECKS: dict[str, Callable[[Device, Partner], str]] = {
    "copy": _copy,
    "batch": _batch,
    "strided": _strided,
    "order": _order,
    "host_registration": _host_registration,
}
"""The checks by name."""
