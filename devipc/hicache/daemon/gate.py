"""Where the daemon is entered: connections are accepted, greeted, given handlers, and closed when nobody needs them.

Owns the listener, one greeting thread for each newcomer, and the bound on how many there are. It knows no request.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Collection

from devipc.channel.link import Link, PeerState
from devipc.channel.listener import Listener
from devipc.channel.seqpacket import Channel
from devipc.deadline import start_thread
from devipc.errors import ClosedError, CompletionTimeout, DevIPCError, ResourceExhausted, UsageError

__all__ = ["Gate"]

_MAX_GREETINGS = 32
_GREETING_S = 5.0
_UNUSED_S = 10.0
_QUIET_S = 10.0
_LOOK_S = 0.1
_log = logging.getLogger("devipc.hicache")


class Gate:
    """See the module. Any thread.

    Parameters
    ----------
    path : str
        Of the socket. Its directory must be this user's alone; with ``allowed_uids`` others may enter, and not write.
    allowed_uids : collection of int
        Users beside this one who may connect.
    max_links : int
        Connections at a time.
    prepare : callable
        Gives a link its handlers, before it is started.

    Raises
    ------
    UsageError, PeerRefused
        As :class:`~devipc.channel.listener.Listener`; also for a directory that others can enter.
    """

    def __init__(
        self, path: str, *, allowed_uids: Collection[int], max_links: int, prepare: Callable[[Link], None]
    ) -> None:
        self._listener = Listener(path, allowed_uids=allowed_uids)
        self._max_links = max_links
        self._prepare = prepare
        self._lock = threading.Lock()
        self._links: dict[Link, float] = {}  # unused ones: since when; used ones: 0
        self._greetings = threading.BoundedSemaphore(_MAX_GREETINGS)
        self._closing = False
        self._warned = float("-inf")
        self._thread = threading.Thread(target=self._accept_all, name="devipc-hicache-accept", daemon=True)
        try:
            _check_directory(path, others=bool(allowed_uids))
        except BaseException:
            self._listener.close()
            raise

    @property
    def path(self) -> str:
        """Where clients connect."""
        return self._listener.path

    def open(self) -> None:
        """Begin to accept."""
        start_thread(self._thread, "accept clients")

    def used(self, link: Link) -> None:
        """Keep a link, however long it is silent."""
        with self._lock:
            if link in self._links:
                self._links[link] = 0.0

    def sweep(self) -> None:
        """Close links that nobody uses: a peer that never asks must not keep others out. Called now and then."""
        old = time.monotonic() - _UNUSED_S
        with self._lock:
            unused = [link for link, since in self._links.items() if since and since < old]
        for link in unused:
            self._drop(link)

    # --- the threads -------------------------------------------------------------------------------------------------

    def _accept_all(self) -> None:
        while not self._closing:
            try:
                channel = self._listener.accept(timeout_s=None)
            except ClosedError:
                return
            except CompletionTimeout:
                continue
            except DevIPCError as error:  # another user, or no descriptor left: the listener paused for a moment
                self._warn("a connection was refused: %s", error)
                continue
            if not self._may_greet():
                channel.close()
                return
            try:
                threading.Thread(target=self._greet, args=(channel,), name="devipc-greet", daemon=True).start()
            except RuntimeError as error:  # the next one may have better luck
                self._greetings.release()
                channel.close()
                self._warn("no thread to greet a client with: %s", error)

    def _may_greet(self) -> bool:
        """Wait for one of those who are greeting; False at the end."""
        while not self._greetings.acquire(timeout=_LOOK_S):
            if self._closing:
                return False
        return True

    def _greet(self, channel: Channel) -> None:
        try:
            link = Link.accept(channel, facts={}, timeout_s=_GREETING_S)
        except Exception as error:
            channel.close()
            self._warn("a peer did not greet: %s", error)
            return
        finally:
            self._greetings.release()
        try:
            self._enter(link)
            self._prepare(link)
            link.on_state(lambda state: self._on_state(link, state))
            link.start()
        except DevIPCError as error:
            self._warn("a client was turned away: %s", error)
            self._drop(link)

    def _enter(self, link: Link) -> None:
        with self._lock:
            if self._closing:
                raise ClosedError("the daemon ends")
            if len(self._links) >= self._max_links:
                raise ResourceExhausted(f"{self._max_links} connections are open", code="busy")
            self._links[link] = time.monotonic()

    def _on_state(self, link: Link, state: PeerState) -> None:
        with self._lock:
            unused = self._links.get(link)
        if unused and state is not PeerState.CONNECTED:
            self._drop(link)

    def _drop(self, link: Link) -> None:
        self.forget(link)
        link.close()

    def forget(self, link: Link) -> None:
        """Note that a link was closed by somebody else."""
        with self._lock:
            self._links.pop(link, None)

    def _warn(self, text: str, error: Exception) -> None:
        """Log at most now and then: whoever makes the trouble must not fill the disk."""
        now = time.monotonic()
        if now - self._warned > _QUIET_S:
            self._warned = now
            _log.warning(text, error)

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Accept nothing more, and close all links. Blocks for a moment; again does nothing."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._listener.close()
        if self._thread.ident is not None:
            self._thread.join()
        with self._lock:
            links, self._links = list(self._links), {}
        for link in links:
            link.close()


def _check_directory(path: str, *, others: bool) -> None:
    directory = os.path.dirname(path) or "."
    mode = stat.S_IMODE(os.stat(directory).st_mode)
    if mode & 0o077 and not others:
        raise UsageError(
            f"directory {directory!r} can be entered by other users (mode {mode:04o})",
            code="directory",
            remedy="`chmod 0700` it, choose a directory of your own, or name the users in allow_uids",
        )
