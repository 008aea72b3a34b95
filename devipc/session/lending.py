"""Fences that one peer was given: which line of which fence is whose, and what is owed when it leaves.

Owns the handles on their way to a peer and the lines that it holds. It knows fences and tokens; it knows no connection.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from devipc.completion import FenceHandle, ProducerFence
from devipc.errors import ClosedError, UsageError
from devipc.spi import close_fds

__all__ = ["LentFences"]

_log = logging.getLogger("devipc.session")


class LentFences:
    """What one peer holds of this process's fences, by the tokens that it chose. Any thread.

    Parameters
    ----------
    lend : callable
        Returns the fence of a name and a new handle of it, whose descriptors pass to this object.
    """

    def __init__(self, lend: Callable[[str], tuple[ProducerFence, FenceHandle]]) -> None:
        self._lend = lend
        self._lock = threading.Lock()
        self._lent: dict[int, tuple[ProducerFence, FenceHandle]] = {}
        self._over = False

    def lend(self, token: int, name: str) -> FenceHandle:
        """Lend the fence ``name`` under ``token``; the handle's descriptors stay this object's.

        Raises
        ------
        UsageError
            When the token is in use: what it stands for must not be forgotten.
        ClosedError
            When this side has hung up meanwhile.
        """
        self._forget_left()
        with self._lock:
            if token in self._lent:
                raise UsageError("this fence token is in use", code="duplicate", remedy="count tokens up")
        fence, handle = self._lend(name)
        with self._lock:
            late = self._over
            if not late:
                self._lent[token] = (fence, handle)
        if late:  # nobody would drop it any more, and nobody ever gets it
            _drop(fence, handle, gone=True, close=True)
            raise ClosedError("this side has closed the connection", remedy="connect again")
        return handle

    def taken(self, token: int) -> None:
        """Note that the handle has arrived and is open: its descriptors are not needed any more."""
        with self._lock:
            if token in self._lent:
                fence, handle = self._lent[token]
                close_fds(handle.fds)
                self._lent[token] = (fence, replace(handle, fds=()))

    def give_back(self, token: int) -> None:
        """Take back a handle that was not, or will not be, opened. Unknown tokens are passed over."""
        with self._lock:
            lent = self._lent.pop(token, None)
        if lent is not None:
            _drop(*lent, gone=False, close=True)

    def drop_all(self, *, gone: bool, hung_up: bool) -> None:
        """Take everything back; ``gone`` when nothing of the peer's process is left. May be called again.

        Descriptors are closed only when this side has ``hung_up``: one may be on its way in an answer, and its number
        would be another file by then, which the peer would get. Lines are remembered until they can be given away.
        """
        with self._lock:
            lent = list(self._lent.values())
            self._over = self._over or hung_up
            if gone and hung_up:
                self._lent.clear()
            elif hung_up:
                self._lent = {token: (fence, replace(one, fds=())) for token, (fence, one) in self._lent.items()}
        for fence, handle in lent:
            _drop(fence, handle, gone=gone, close=hung_up)

    @property
    def owed(self) -> bool:
        """True while the peer may have a line of a fence."""
        with self._lock:
            return any(fence.serves(one.line, ticket=one.ticket, dropped=True) for fence, one in self._lent.values())

    def _forget_left(self) -> None:
        """Forget consumers that closed, and fences that did; a peer that opens ten thousand has only some of them."""
        with self._lock:
            left = [
                token
                for token, (fence, handle) in self._lent.items()
                if not fence.serves(handle.line, ticket=handle.ticket)
            ]
            handles = [self._lent.pop(token)[1] for token in left]
        for handle in handles:
            close_fds(handle.fds)


def _drop(fence: ProducerFence, handle: FenceHandle, *, gone: bool, close: bool) -> None:
    """Let ``fence`` go on without a consumer that is gone, or never came."""
    if close:
        close_fds(handle.fds)
    try:
        fence.drop_consumer(handle.line, ticket=handle.ticket, gone=gone)
    except UsageError:
        _log.debug("the fence was closed before its consumer was dropped")
