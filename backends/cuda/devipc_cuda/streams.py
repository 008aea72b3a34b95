"""Streams, made here or borrowed, and the question whether one records a graph.

Owns the stream object that sync and transfer share. Submits nothing.
"""

from __future__ import annotations

from typing import Any

from devipc.spi import Stream, UsageError
from devipc_cuda import driver
from devipc_cuda.status import error_for

__all__ = ["CudaStream", "is_capturing", "native", "refuse_capture", "wrap"]

_CAPTURE_NONE = 0
_CAPTURE_IMPLICIT = 906  # asked of the default stream while another stream is captured


class CudaStream:
    """A driver stream.

    Parameters
    ----------
    handle : int
        The driver's handle; 0, 1 and 2 are the default streams.
    owner : object
        What keeps a borrowed stream alive; None for a handle without owner.
    made_here : bool
        True when this package destroys it.
    """

    __slots__ = ("_handle", "made_here", "native", "owner")

    def __init__(self, handle: int, *, owner: object = None, made_here: bool = False) -> None:
        self._handle = handle
        self.native: Any = driver.make("CUstream", handle)
        self.owner = owner
        self.made_here = made_here

    @property
    def handle(self) -> int:
        """The driver's stream handle as an integer."""
        return self._handle

    @property
    def is_default(self) -> bool:
        """True for the default streams, which some calls refuse."""
        return self._handle <= 2


def wrap(handle: object) -> CudaStream:
    """Borrow a stream: an integer, an object with ``__cuda_stream__``, or a torch stream; it is kept alive."""
    if isinstance(handle, CudaStream):
        return handle
    if isinstance(handle, int) and not isinstance(handle, bool) and handle >= 0:
        return CudaStream(handle)
    protocol = getattr(handle, "__cuda_stream__", None)
    if protocol is not None:
        version, value = protocol() if callable(protocol) else protocol
        if version != 0:
            raise UsageError(
                f"__cuda_stream__ of version {version} is not known",
                remedy="pass the stream's integer handle",
                backend="cuda",
            )
        return CudaStream(int(value), owner=handle)
    value = getattr(handle, "cuda_stream", None)
    if isinstance(value, int):
        return CudaStream(value, owner=handle)
    raise UsageError(
        f"{type(handle).__name__} carries no CUDA stream",
        remedy="pass an integer handle, a torch stream, or an object with __cuda_stream__",
        backend="cuda",
    )


def native(stream: Stream) -> Any:
    """Return the binding's object for ``stream``."""
    if isinstance(stream, CudaStream):
        if stream.native is None:
            raise UsageError("the stream was destroyed", remedy="use a live stream", backend="cuda")
        return stream.native
    raise UsageError(
        f"{type(stream).__name__} is not a stream of this backend", remedy="use wrap_stream()", backend="cuda"
    )


def is_capturing(stream: Stream) -> bool:
    """Return True while ``stream`` records a graph, or must not be used because another one does."""
    status, value = driver.attempt("cuStreamIsCapturing", native(stream))
    if status == _CAPTURE_IMPLICIT:
        return True
    if status:
        raise error_for("cuStreamIsCapturing", status, driver.name_of(status))
    return int(value) != _CAPTURE_NONE


def refuse_capture(stream: Stream, what: str) -> None:
    """Raise :class:`UsageError` when ``stream`` records a graph: a value would be baked in and replayed."""
    if is_capturing(stream):
        raise UsageError(
            f"{what} on a stream that captures a graph",
            code="capturing",
            remedy="do it on the stream before or after capture, or around the graph's launch",
            backend="cuda",
        )
