"""Streams: immediate command lists, made here or borrowed.

Owns the check that a stream is one of ours and the wrapping of others. Submits nothing.
"""

from __future__ import annotations

import threading
from weakref import WeakValueDictionary

from devipc.spi import Stream, UsageError
from devipc_levelzero.context import LevelZeroStream

__all__ = ["native", "wrap"]

_borrowed: WeakValueDictionary[int, LevelZeroStream] = WeakValueDictionary()
_lock = threading.Lock()


def wrap(handle: object) -> LevelZeroStream:
    """Borrow an immediate command list by its integer handle; the same list again gives the same object.

    Its owner must not append to it at the same time: Level Zero allows one thread in a list. A list that captures a
    graph, which is an extension of version 1.17, is not to be borrowed.
    """
    if isinstance(handle, LevelZeroStream):
        return handle
    if not isinstance(handle, int) or isinstance(handle, bool) or not 0 < handle < 2**64:
        raise UsageError(
            f"{type(handle).__name__} is no command list",
            remedy="pass the integer handle of an immediate command list",
            backend="levelzero",
        )
    with _lock:
        stream = _borrowed.get(handle)
        if stream is None or not stream.live:
            stream = _borrowed[handle] = LevelZeroStream(handle, made_here=False)
        return stream


def native(stream: Stream) -> LevelZeroStream:
    """Return ``stream`` as one of ours.

    Raises
    ------
    UsageError
        For others, and for one that was destroyed.
    """
    if not isinstance(stream, LevelZeroStream):
        raise UsageError(
            f"{type(stream).__name__} is not a stream of this backend",
            remedy="use wrap_stream()",
            backend="levelzero",
        )
    if not stream.live:
        raise UsageError("the stream was destroyed", remedy="use a live stream", backend="levelzero")
    return stream
