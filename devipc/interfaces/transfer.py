"""DeviceTransfer: streams, copies, host registration and local completion markers of one device.

Owns the contract only. It exists so that no program above devipc ever imports a vendor's runtime. Nothing here
crosses a process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from devipc.types import MemoryInfo

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    U64Array = npt.NDArray[np.uint64]

__all__ = ["DeviceTransfer", "HostRegistration", "Marker", "Stream"]


@runtime_checkable
class Stream(Protocol):
    """A queue of device work, executed in order. Made or wrapped by the backend that will use it."""

    @property
    def handle(self) -> int:
        """The vendor's stream handle as an integer."""
        ...


class Marker(Protocol):
    """A point in a stream that this process can ask about. A marker that was never recorded is *not* done."""


@dataclass(frozen=True, slots=True)
class HostRegistration:
    """Host memory that the device may reach.

    Parameters
    ----------
    address : int
        Host address, page-aligned.
    nbytes : int
        Registered length.
    device_ptr : int
        Address by which device work (word writes, waits, copies) reaches ``address``.
    token : object
        What the backend needs to undo it.
    """

    address: int
    nbytes: int
    device_ptr: int
    token: object


@runtime_checkable
class DeviceTransfer(Protocol):
    """Move bytes with copy engines only; no kernel is ever launched.

    Addresses are device addresses, or host addresses inside a :class:`HostRegistration`. Submitting never waits for
    the work; everything may be called from any thread and releases the GIL while the driver blocks.
    """

    def create_stream(self, *, priority: int = 0) -> Stream:
        """Make a stream that does not synchronise with default streams; a lower ``priority`` number runs first."""
        ...

    def wrap_stream(self, handle: object) -> Stream:
        """Borrow a stream made elsewhere: an integer handle, or an object of a framework that carries one."""
        ...

    def destroy_stream(self, stream: Stream) -> None:
        """Destroy a stream made here, after its work is done (blocks until then); borrowed ones are only forgotten."""
        ...

    def synchronize_stream(self, stream: Stream) -> None:
        """Block until all work submitted to ``stream`` so far is done."""
        ...

    def is_capturing(self, stream: Stream) -> bool:
        """Return True while ``stream`` records a graph instead of executing."""
        ...

    def copy(self, stream: Stream, dst: int, src: int, nbytes: int) -> None:
        """Copy ``nbytes`` from ``src`` to ``dst``; zero bytes do nothing.

        At least one side is device memory. Between two places of host memory a driver may block the caller until the
        stream gets there, as one was seen to do, and a stream that waits for that caller never does. Go through device
        memory instead: two copies on one stream.
        """
        ...

    def copy_batch(self, stream: Stream, dst: U64Array, src: U64Array, nbytes: U64Array) -> None:
        """Copy ``n`` ranges; three C-contiguous uint64 arrays of shape ``(n,)``. No order among them.

        Of each range at least one side is device memory, as for :meth:`copy`.

        The arrays are snapshot before the call returns.
        """
        ...

    def copy_strided(self, stream: Stream, copies: U64Array) -> None:
        """Do ``n`` two-dimensional copies, with no order among them.

        Of each copy at least one side is device memory, as for :meth:`copy`. The array is snapshot before the call
        returns.

        Parameters
        ----------
        stream : Stream
            Where to enqueue.
        copies : numpy.ndarray
            C-contiguous uint64 of shape ``(n, 6)``: dst, src, dst_pitch, src_pitch, width, height. Addresses, and
            bytes for pitches and width; height in rows. ``width <= pitch`` where ``height > 1``.
        """
        ...

    def register_host(self, address: int, nbytes: int) -> HostRegistration:
        """Make page-aligned host memory reachable by the device and pinned.

        Raises
        ------
        CapabilityError
            When the platform does not offer it.
        ResourceExhausted
            When a limit on pinned memory was met; names it.
        """
        ...

    def unregister_host(self, registration: HostRegistration) -> None:
        """Undo :meth:`register_host`. May block while a device-side wait of this process is pending."""
        ...

    def create_marker(self) -> Marker:
        """Make a marker for :meth:`record`."""
        ...

    def record(self, marker: Marker, stream: Stream) -> None:
        """Set ``marker`` behind all work submitted to ``stream`` so far; recording again moves it."""
        ...

    def query_marker(self, marker: Marker) -> bool:
        """Return True when the work before the last :meth:`record` is done; False if never recorded."""
        ...

    def wait_marker(self, stream: Stream, marker: Marker) -> None:
        """Let later work of ``stream`` run after the recorded point (same process only)."""
        ...

    def destroy_marker(self, marker: Marker) -> None:
        """Give a marker back."""
        ...

    def memory_info(self) -> MemoryInfo:
        """Return free and total device memory."""
        ...
