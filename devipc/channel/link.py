"""Questions and answers between two processes, and the other's state.

Owns the connection after the greeting: pairing answers with requests, serving the peer's requests, telling an orderly
end from a death, and ending every wait when the peer is no more. It knows no memory, fence or device.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from devipc.channel.calls import Calls, Inbox
from devipc.channel.datagram import Deadline, close_all
from devipc.channel.hello import FIRST_FREE_KIND, Greeted, Kind, PeerIdentity, decode_error, encode_error, greet
from devipc.channel.listener import connect
from devipc.channel.liveness import PeerWatch
from devipc.channel.peerstate import PeerState, StateListeners
from devipc.channel.seqpacket import Channel, LostMessage, Message
from devipc.deadline import start_thread
from devipc.errors import (
    CapabilityError,
    ClosedError,
    DevIPCError,
    ForkError,
    HandleError,
    PeerError,
    PeerGone,
    ProtocolError,
    ResourceExhausted,
    UsageError,
)

__all__ = ["FIRST_FREE_KIND", "Handler", "Link", "PeerIdentity", "PeerState", "Reply"]

_log = logging.getLogger(__name__)

Reply = tuple[bytes, Sequence[int]]
"""Body and descriptors of an answer; the descriptors stay the handler's, who keeps them open while the link is."""
Handler = Callable[[Message], Reply | None]
"""Answers one message; None is an empty answer."""

_REPLY_S, _FAREWELL_S = 5.0, 0.1
_JOIN_S, _LAST_WORDS_S = 2.0, 0.05


class Link:
    """A connection to one peer: made by :meth:`connect`, :meth:`accept` or :meth:`over`, given handlers, then started.

    :meth:`call`, :meth:`notify` and :meth:`close` may be used from any thread, handlers included. Handlers run one at a
    time on the link's worker thread, state callbacks on one of its threads. In a forked child every use raises
    :class:`ForkError`; the parent's connection is not touched.
    """

    def __init__(self, channel: Channel, greeted: Greeted) -> None:
        self._channel = channel
        self._peer = greeted.peer
        self._life = [greeted.life_fd, greeted.pidfd]
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._state = PeerState.CONNECTED
        self._closing = self._heard = False
        self._until_gone: Callable[[], None] | None = None
        self._calls = Calls()
        self._handlers: dict[int, Handler] = {}
        self._listeners = StateListeners()
        self._changed = threading.Event()
        self._inbox = Inbox()
        self._threads: list[threading.Thread] = []
        self._watch: PeerWatch | None = None

    @classmethod
    def connect(
        cls,
        path: str | os.PathLike[str],
        *,
        facts: Mapping[str, str],
        timeout_s: float,
        allowed_uids: Collection[int] = (),
    ) -> Link:
        """Connect to the listener at ``path`` and exchange greetings. Blocks; raises as the two steps do."""
        deadline = Deadline(timeout_s)
        channel = connect(path, timeout_s=timeout_s, allowed_uids=allowed_uids)
        return cls.over(channel, facts=facts, timeout_s=deadline.left_s())

    @classmethod
    def over(cls, channel: Channel, *, facts: Mapping[str, str], timeout_s: float) -> Link:
        """Greet over a channel, as the side that speaks first. The channel is owned, also when this raises. Blocks."""
        return cls(channel, greet(channel, first=True, facts=facts, timeout_s=timeout_s))

    @classmethod
    def accept(cls, channel: Channel, *, facts: Mapping[str, str], timeout_s: float) -> Link:
        """Answer the greeting of a peer that connected. The channel is owned, also when this raises. Blocks.

        A silent client costs one thread for ``timeout_s``: servers call this on a thread of its own.
        """
        return cls(channel, greet(channel, first=False, facts=facts, timeout_s=timeout_s))

    @property
    def peer(self) -> PeerIdentity:
        """Who is at the other end."""
        return self._peer

    @property
    def state(self) -> PeerState:
        """What is known of the peer now."""
        return self._state

    def handle(self, kind: int, handler: Handler) -> None:
        """Have ``handler`` answer messages of ``kind``; only before :meth:`start`.

        The message's descriptors are closed when the handler returns or raises, but for those that it took with
        :meth:`Message.take_fds`. A devipc error that it raises reaches the peer as such; any other is logged here and
        reaches the peer as ``internal``. None as reply is an empty answer.
        """
        if self._threads or not FIRST_FREE_KIND <= kind < 2**16:
            raise UsageError(f"kind {kind} out of range, or the link is started")
        self._handlers[kind] = handler

    def on_state(self, callback: Callable[[PeerState], None]) -> None:
        """Call ``callback`` at each change of state, in order; register before :meth:`start` to miss none.

        What it raises is logged. It may close the link, but must not :meth:`call` the peer.
        """
        self._listeners.add(callback)

    def start(self) -> None:
        """Start to receive, to serve and to watch the peer (three threads). Never blocks; again does nothing.

        Raises
        ------
        ResourceExhausted
            When no thread or descriptor is left; close the link then.
        """
        self._check_process()
        with self._lock:
            if self._closing:
                raise ClosedError("the link is closed")
            if self._threads:
                return
            for target in (self._read, self._serve_all):
                thread = threading.Thread(target=target, name=f"devipc-link{target.__name__}", daemon=True)
                start_thread(thread, "talk to a peer")
                self._threads.append(thread)
            # Last, so that of a peer that has already left the goodbye is found before the death.
            (life_fd, pidfd), self._life = self._life, [None, None]
            self._watch = PeerWatch(life_fd, pidfd, on_dying=self._on_dying, on_gone=self._on_gone)

    # --- asking -------------------------------------------------------------------------------------------------------

    def call(self, kind: int, body: bytes | memoryview = b"", *, fds: Sequence[int] = (), timeout_s: float) -> Message:
        """Send a request and wait for its answer, whose descriptors are the caller's. ``fds`` stay the caller's.

        Raises
        ------
        CompletionTimeout
            When no answer came in time; a late one is dropped.
        PeerGone
            As soon as the peer closes, dies or breaks the connection, even while waiting.
        DevIPCError
            What the peer's handler raised, as the same class where it is known here, else :class:`PeerError`.
        """
        self._check_kind(kind)
        self._calls.check()
        if not self._threads:
            raise UsageError("the link is not started", remedy="call start() first")
        if threading.current_thread() is self._threads[0]:
            raise UsageError("a call from the receiving thread would wait for itself")
        deadline = Deadline(timeout_s)
        call = self._calls.begin()
        try:
            self._channel.send(kind, body, request=call.request, fds=fds, timeout_s=timeout_s)
            return self._calls.result(call, deadline, f"peer {self._peer.pid} did not answer request kind {kind}")
        except ClosedError:
            self._calls.check()  # the channel was closed because of what the peer did: say that
            raise
        finally:
            self._calls.forget(call)
            if call.answer is not None:  # it came, but the wait was interrupted
                call.answer.close_fds()

    def notify(
        self, kind: int, body: bytes | memoryview = b"", *, fds: Sequence[int] = (), timeout_s: float = 5.0
    ) -> None:
        """Send a message that needs no answer. ``fds`` stay the caller's. Blocks until the kernel took it."""
        self._check_kind(kind)
        self._calls.check()
        try:
            self._channel.send(kind, body, fds=fds, timeout_s=timeout_s)
        except ClosedError:
            self._calls.check()
            raise

    def _check_kind(self, kind: int) -> None:
        self._check_process()
        if self._closing:
            raise ClosedError("the link is closed")
        if not FIRST_FREE_KIND <= kind < 2**16:
            raise UsageError(f"kind {kind} is not one of the caller's own")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkError("this link belongs to the process that forked", remedy="connect again in the child")

    # --- receiving ----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while True:
                try:
                    message = self._channel.receive(None)
                except LostMessage as error:
                    self._lost(error)
                    continue
                if message.kind == Kind.BYE or (message.kind == Kind.ERROR and not (message.request or self._heard)):
                    message.close_fds()  # who could not greet has asked for nothing, and lives on without this link
                    return self._said_goodbye()
                self._heard = True
                self._dispatch(message)
        except ClosedError:
            pass  # this side closes
        except PeerGone as error:
            self._dying(error)
        except (HandleError, PeerError) as error:
            _log.warning("peer %d broke the protocol: %s", self._peer.pid, error)
            moved = self._move(PeerState.DYING, error)
            self._say(Kind.ERROR, encode_error(error))
            self._channel.close()
            if moved:
                self._listeners.tell(PeerState.DYING)
        except Exception as error:
            _log.exception("receiving from peer %d failed", self._peer.pid)
            self._dying(PeerGone(f"the connection was given up: {error!r}", code="internal"))
        return None

    def _dispatch(self, message: Message) -> None:
        if message.kind == Kind.ANSWER:
            self._calls.finish(message.request, message, None)
        elif message.kind == Kind.ERROR:
            message.close_fds()
            error = decode_error(message.body, f"peer {self._peer.pid}")
            if not message.request:
                raise ProtocolError(f"the peer gave up the connection: {error.message}", code="peer_complains")
            self._calls.finish(message.request, None, error)
        elif message.kind < FIRST_FREE_KIND:
            message.close_fds()
            raise ProtocolError(f"link message of kind {message.kind} out of place", code="kind")
        elif message.kind not in self._handlers:
            message.close_fds()
            self._refuse(
                message, CapabilityError(f"no handler for messages of kind {message.kind}", code="unknown_kind")
            )
        else:
            self._admit(message)

    def _admit(self, message: Message) -> None:
        if self._inbox.admit(message):
            return
        message.close_fds()
        if self._closing:
            return  # the goodbye, which is under way, answers everything
        if not message.request:
            raise ProtocolError("the peer floods this side with messages that it cannot refuse", code="flood")
        self._refuse(message, ResourceExhausted("too many requests are waiting", code="busy", remedy="try again later"))

    def _refuse(self, message: Message, error: DevIPCError) -> None:
        if message.request:
            self._say(Kind.ERROR, encode_error(error), request=message.request)
        else:
            _log.warning("message of kind %d from peer %d dropped: %s", message.kind, self._peer.pid, error)

    def _lost(self, lost: LostMessage) -> None:
        if lost.kind in (Kind.ANSWER, Kind.ERROR):
            self._calls.finish(lost.request, None, lost)
        else:
            self._refuse(Message(lost.kind, lost.request), lost)

    def _say(self, kind: Kind, body: bytes = b"", *, request: int = 0) -> None:
        """Send something small if there is room for it; the receiving thread never waits for the peer to read."""
        try:
            self._channel.send(kind, body, request=request, timeout_s=_FAREWELL_S)
        except DevIPCError as error:
            _log.debug("peer %d was not told %s: %s", self._peer.pid, kind.name, error)

    # --- serving ------------------------------------------------------------------------------------------------------

    def _serve_all(self) -> None:
        while (item := self._inbox.take()) is not None:
            if isinstance(item, PeerState):
                self._listeners.tell(item)
                continue
            serve = not self._closing and self._state in (PeerState.CONNECTED, PeerState.CLOSED)
            try:
                if serve:
                    self._serve(item)
            finally:
                item.close_fds()

    def _serve(self, message: Message) -> None:
        try:
            body, fds = self._handlers[message.kind](message) or (b"", ())
        except DevIPCError as error:
            return self._refuse(message, error)
        except BaseException as error:  # also an exit: the thread has to go on for others
            _log.exception("the handler of kind %d failed", message.kind)
            text = f"the handler of kind {message.kind} failed ({type(error).__name__})"
            return self._refuse(message, PeerError(text, code="internal"))
        if not message.request:
            return None
        try:
            self._channel.send(Kind.ANSWER, body, request=message.request, fds=fds, timeout_s=_REPLY_S)
        except (PeerGone, ClosedError):
            pass
        except DevIPCError as error:
            self._refuse(message, error)
        return None

    # --- the peer's state ---------------------------------------------------------------------------------------------

    def _on_dying(self) -> None:
        # A peer that said goodbye may be over before its last message is read: leave the reading thread time for it.
        patience = Deadline(_LAST_WORDS_S)
        while patience.left_s() and not self._channel.is_quiet() and not self._changed.wait(_LAST_WORDS_S / 10):
            pass
        self._dying(PeerGone(f"peer {self._peer.pid} is dying or dead", remedy="connect again"))

    def _dying(self, error: DevIPCError) -> None:
        # Whoever is told goodbye hangs up, perhaps before this side has gone on: that is no death.
        if not self._closing and self._move(PeerState.DYING, error):
            self._listeners.tell(PeerState.DYING)

    # The final states are told by the worker, behind all that the peer had asked for: nothing is granted after them.

    def _on_gone(self) -> None:
        if self._move(PeerState.GONE, PeerGone(f"peer {self._peer.pid} is dead", remedy="connect again")):
            self._inbox.put(PeerState.GONE)
        elif self._until_gone is not None:
            self._until_gone()

    def _said_goodbye(self) -> None:
        error = PeerGone(f"peer {self._peer.pid} closed the connection", code="closed", remedy="connect again")
        if self._move(PeerState.CLOSED, error):
            self._inbox.put(PeerState.CLOSED)

    def _move(self, state: PeerState, error: DevIPCError) -> bool:
        """Go from connected to any state, or from dying to gone; end all calls; return whether anything changed."""
        with self._lock:
            legal = self._state is PeerState.CONNECTED or (self._state, state) == (PeerState.DYING, PeerState.GONE)
            if legal:
                self._state = state
        if legal:
            self._calls.end(error)
            self._changed.set()
        return legal

    # --- end ----------------------------------------------------------------------------------------------------------

    def close(self, *, until_gone: Callable[[], None] | None = None) -> None:
        """Say goodbye, end all calls, and wait up to two seconds for the link's threads; from one of those not for it.

        ``until_gone`` is called when the peer's process is over; closing again without it ends that. Not after a fork.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            first, self._closing, self._until_gone = not self._closing, True, until_gone
        if first:
            if self._state is PeerState.CONNECTED:
                self._say(Kind.BYE)
            self._move(PeerState.CLOSED, ClosedError("the link is closed"))
            self._listeners.close()
            self._channel.close()
            self._inbox.close()
            close_all(fd for fd in self._life if fd is not None)
            self._life = [None, None]
        if self._watch is not None and until_gone is None:
            self._watch.close()
        if first:
            self._join(time.monotonic() + _JOIN_S)

    def _join(self, deadline: float) -> None:
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(deadline - time.monotonic(), 0))
        if self._watch is not None and self._until_gone is None:
            self._watch.join(max(deadline - time.monotonic(), 0))
        stuck = [thread.name for thread in others if thread.is_alive()]
        if stuck:
            _log.warning("threads %s still run: a handler or callback has not returned", ", ".join(stuck))

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
