"""Exporter: the end that listens.

Owns the listening socket and the threads that greet new peers. A silent or hostile client costs one greeting thread
until its deadline, and nobody else anything.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import weakref
from collections.abc import Collection
from os import PathLike

from devipc.channel import Channel
from devipc.channel.link import Link
from devipc.channel.listener import Listener, default_directory, remove_leftovers
from devipc.completion import Decision
from devipc.deadline import no_thread
from devipc.errors import ClosedError, CompletionTimeout, DevIPCError, PeerGone
from devipc.interfaces.backend import Backend
from devipc.session.endpoint import DECIDE_TIMEOUT_S, DEFAULT_TIMEOUT_S, Endpoint
from devipc.session.peer import Peer
from devipc.types import Strategy

__all__ = ["Exporter"]

_log = logging.getLogger("devipc.session")
_MAX_GREETINGS = 32
_HELLO_TIMEOUT_S = 5.0


class Exporter(Endpoint):
    """Share memory and fences with every process that connects.

    Parameters
    ----------
    path : path-like, optional
        Socket to listen on, at most 107 bytes, in a directory that only this user may change (made if absent). A
        private path of its own when None; read it from :attr:`path`.
    backend, device, strategy, timeout_s
        See :class:`~devipc.session.Endpoint`.
    allow_uids : collection of int
        Further users whose processes may connect, for containers; the own user always may. They need a directory that
        they can enter, and have to name this user in turn: see :class:`~devipc.session.Importer`.

    Raises
    ------
    UsageError
        For a path that is too long, unsafe, or in use by a living process.
    """

    drives_trials = False

    def __init__(
        self,
        path: str | PathLike[str] | None = None,
        *,
        backend: str | Backend = "host",
        device: str | None = None,
        strategy: Strategy | str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        allow_uids: Collection[int] = (),
    ) -> None:
        super().__init__(backend=backend, device=device, strategy=strategy, timeout_s=timeout_s)
        self._listener = Listener(_own_path() if path is None else path, allowed_uids=allow_uids)
        weakref.finalize(self, self._listener.close)  # the socket goes also when a program just ends
        self._greetings = threading.BoundedSemaphore(_MAX_GREETINGS)
        self._acceptor = threading.Thread(target=self._accept, name="devipc-accept", daemon=True)
        try:
            self._acceptor.start()
        except RuntimeError as error:
            self._listener.close()
            raise no_thread("accept peers", error) from error

    @property
    def path(self) -> str:
        """Where peers connect."""
        return self._listener.path

    def decide(self, peer: Peer) -> Decision:
        """Ask the connecting side for the decision; it drives the trial."""
        return peer.ask_decision(timeout_s=DECIDE_TIMEOUT_S)

    def _accept(self) -> None:
        while not self._closed:
            try:
                channel = self._listener.accept(timeout_s=0.5)
            except CompletionTimeout:
                continue
            except ClosedError:
                return
            except DevIPCError as error:
                _log.warning("a connection was refused: %s", error)
                continue
            self._greetings.acquire()
            try:
                threading.Thread(target=self._greet, args=(channel,), name="devipc-greet", daemon=True).start()
            except RuntimeError as error:  # the next client may have better luck
                _log.warning("no thread to greet a client with: %s", error)
                self._greetings.release()
                channel.close()

    def _greet(self, channel: Channel) -> None:
        try:
            link = Link.accept(channel, facts=self.facts(), timeout_s=_HELLO_TIMEOUT_S)
        except Exception as error:
            level = logging.INFO if isinstance(error, PeerGone) else logging.WARNING  # it may leave as it likes
            _log.log(level, "a client did not say hello: %s", error)
            channel.close()
            return
        finally:
            self._greetings.release()
        peer: Peer | None = None
        try:
            peer = Peer(self, link)
            with self._lock:
                self._check_open()
                link.start()  # under the lock: whoever waits for a peer gets one that answers
                self._joined(peer)
        except DevIPCError as error:
            _log.warning("a client was turned away: %s", error)
            (peer or link).close()  # also what it was lent by then
            return
        self._events.tell()

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Listen no more, then give everything back; see :meth:`devipc.session.Endpoint.close`."""
        self._listener.close()
        super().close(timeout_s=timeout_s)
        if threading.current_thread() is not self._acceptor and os.getpid() == self._pid:
            self._acceptor.join(timeout=2.0)


def _own_path() -> str:
    directory = default_directory()
    remove_leftovers(directory)  # these names never come again, so that nobody else would
    return os.path.join(directory, f"{os.getpid()}-{secrets.token_hex(4)}.sock")
