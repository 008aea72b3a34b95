"""Streams, made here or borrowed, and the question whether one records a graph.

Owns the stream object that sync and transfer share. Submits nothing.
"""

from __future__ import annotations

from devipc.spi import Stream, UsageError
from devipc_hip import driver
from devipc_hip.status import error_for

__all__ = ["HipStream", "is_capturing", "native", "refuse_capture", "wrap"]

_CAPTURE_NONE = 0
_CAPTURE_IMPLICIT = 906  # asked of the default stream while another stream is captured


class HipStream:
    """A stream of the runtime.

    Parameters
    ----------
    handle : int
        The runtime's handle; 0, 1 and 2 are the default streams.
    owner : object
        What keeps a borrowed stream alive; None for a handle without owner.
    made_here : bool
        True when this package destroys it.
    """

    __slots__ = ("_handle", "destroyed", "made_here", "owner")

    def __init__(self, handle: int, *, owner: object = None, made_here: bool = False) -> None:
        self._handle = handle
        self.destroyed = False
        self.owner = owner
        self.made_here = made_here

    @property
    def handle(self) -> int:
        """The runtime's stream handle as an integer."""
        return self._handle

    @property
    def is_default(self) -> bool:
        """True for the default streams, which some calls refuse."""
        return self._handle <= 2


def wrap(handle: object) -> HipStream:
    """Borrow a stream: an integer, or a torch stream, whose ROCm build calls it ``cuda_stream``; it is kept alive."""
    if isinstance(handle, HipStream):
        return handle
    if isinstance(handle, int) and not isinstance(handle, bool) and handle >= 0:
        return HipStream(handle)
    value = getattr(handle, "hip_stream", getattr(handle, "cuda_stream", None))
    if isinstance(value, int):
        return HipStream(value, owner=handle)
    raise UsageError(
        f"{type(handle).__name__} carries no HIP stream",
        remedy="pass an integer handle or a torch stream",
        backend="hip",
    )


def native(stream: Stream) -> int:
    """Return the handle of ``stream``."""
    if isinstance(stream, HipStream):
        if stream.destroyed:
            raise UsageError("the stream was destroyed", remedy="use a live stream", backend="hip")
        return stream.handle
    raise UsageError(
        f"{type(stream).__name__} is not a stream of this backend", remedy="use wrap_stream()", backend="hip"
    )


def is_capturing(stream: Stream) -> bool:
    """Return True while ``stream`` records a graph, or must not be used because another one does."""
    status, value = driver.attempt("hipStreamIsCapturing", native(stream))
    if status == _CAPTURE_IMPLICIT:
        return True
    if status:
        raise error_for("hipStreamIsCapturing", status, driver.name_of(status))
    return int(value) != _CAPTURE_NONE


def refuse_capture(stream: Stream, what: str) -> None:
    """Raise :class:`UsageError` when ``stream`` records a graph: a value would be baked in and replayed."""
    if is_capturing(stream):
        raise UsageError(
            f"{what} on a stream that captures a graph",
            code="capturing",
            remedy="do it on the stream before or after capture, or around the graph's launch",
            backend="hip",
        )
