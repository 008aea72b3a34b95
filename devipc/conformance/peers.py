"""Peers: real processes that a case asks to do things, under deadlines, and that it may stop or kill.

Owns the parent's end: starting, asking, killing, and the pool that lets healthy peers serve many cases. A peer that
hangs, dies or raises ends the case that asked it, with the peer's own traceback in the failure.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devipc.channel import Channel
from devipc.channel.message import Message
from devipc.conformance.peer_main import ANSWER, FAILURE, REQUEST
from devipc.conformance.profile import BackendProfile
from devipc.conformance.results import SuiteError
from devipc.conformance.staging import Unavailable, until
from devipc.conformance.worker import Role, role_name
from devipc.errors import CompletionTimeout, DevIPCError, PeerGone

__all__ = ["Answer", "Peer", "PeerCrashed", "PeerFailed", "PeerHung", "Peers", "Refusal"]


class PeerFailed(AssertionError):
    """A role raised in a peer, and the backend is to blame."""


class PeerHung(AssertionError):
    """A role did not return before its deadline; the peer was killed."""


class PeerCrashed(AssertionError):
    """A peer ended that nobody had killed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a role returned. The caller owns ``fds``."""

    body: dict[str, Any]
    fds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """A typed error that a role raised, as it should."""

    types: tuple[str, ...]
    message: str
    code: str
    remedy: str


class Peer:
    """One process. Not for several threads at once.

    Parameters
    ----------
    profile : BackendProfile
        Which backend and device it uses, and its environment.
    device : str
        UUID.
    environment : mapping of str to str, optional
        Set besides the profile's.
    """

    def __init__(self, profile: BackendProfile, device: str, *, environment: Mapping[str, str] | None = None) -> None:
        self._deadline_s = profile.deadline_s
        self._requests = itertools.count(1)
        self._pending = ""
        self.killed = False
        self.broken = False
        self.once = False  # True: not to be used by another case
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the peer
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel_fd = left.fileno()
        self._channel = Channel(left)
        settings = {"backend": profile.backend, "device": device, "deadline_s": profile.deadline_s}
        command = [sys.executable, "-m", "devipc.conformance.peer_main", str(right.fileno()), str(os.getpid())]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        try:
            self._process = subprocess.Popen(
                [*command, json.dumps(settings)],
                env={**os.environ, "PYTHONPATH": path, **profile.environment, **(environment or {})},
                pass_fds=(right.fileno(),),
                stdin=subprocess.DEVNULL,
                stderr=self._stderr,
            )
        except OSError as error:
            self._channel.close()
            self._stderr.close()
            raise SuiteError(f"a peer could not be started: {error}") from error
        finally:
            right.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def fds(self) -> frozenset[int]:
        """Descriptors of this process that belong to the peer's connection."""
        return frozenset() if self._stderr.closed else frozenset((self._channel_fd, self._stderr.fileno()))

    @property
    def usable(self) -> bool:
        """True while it answers, as far as is known."""
        return not (self.killed or self.broken) and self._process.poll() is None

    # --- asking ------------------------------------------------------------------------------------------------------

    def call(self, role: Role, *, fds: Sequence[int] = (), timeout_s: float | None = None, **arguments: Any) -> Answer:
        """Let the peer run ``role``; return its answer.

        Raises
        ------
        PeerFailed, PeerHung, PeerCrashed
            These speak against the backend and fail the case.
        SuiteError
            When the role itself is broken.
        Unavailable
            When the peer's device lacks what the role needs.
        """
        self.start(role, fds=fds, **arguments)
        return self.result(timeout_s=timeout_s)

    def refusal(
        self, role: Role, *, fds: Sequence[int] = (), timeout_s: float | None = None, **arguments: Any
    ) -> Refusal:
        """Let the peer run ``role``, which must raise a typed error; return that."""
        self.start(role, fds=fds, **arguments)
        message = self._receive(timeout_s)
        body = json.loads(message.body)
        message.close_fds()
        if message.kind == ANSWER:
            raise AssertionError(f"{role.__name__} was accepted and answered {body}")
        if not body["typed"]:
            self._raise(body)
        return Refusal(tuple(body["types"]), body["message"], body["code"], body["remedy"])

    def start(self, role: Role, *, fds: Sequence[int] = (), **arguments: Any) -> None:
        """Let the peer begin with ``role``; :meth:`result` waits for the answer."""
        if self._pending:
            raise SuiteError(f"the peer is still busy with {self._pending}")
        self._pending = role.__name__
        body = json.dumps({"role": role_name(role), "arguments": arguments}).encode()
        try:
            self._channel.send(REQUEST, body, request=next(self._requests), fds=fds, timeout_s=self._deadline_s)
        except (PeerGone, CompletionTimeout) as error:
            raise self._ended(error) from error

    def result(self, *, timeout_s: float | None = None) -> Answer:
        """Wait for the answer of the role that was started; see :meth:`call`."""
        message = self._receive(timeout_s)
        body = json.loads(message.body)
        if message.kind == FAILURE:
            message.close_fds()
            self._raise(body)
        return Answer(body, message.take_fds())

    def _receive(self, timeout_s: float | None) -> Message:
        limit = 2 * self._deadline_s if timeout_s is None else timeout_s
        try:
            message = self._channel.receive(limit)
        except CompletionTimeout as error:
            self.broken = True
            self.kill()
            raise PeerHung(f"{self._pending} did not return within {limit:g} s{self._last_words()}") from error
        except DevIPCError as error:
            raise self._ended(error) from error
        self._pending = ""
        return message

    def _raise(self, body: dict[str, Any]) -> None:
        if "Unavailable" in body["types"]:
            raise Unavailable(body["message"])
        text = f"in the peer:\n{body['traceback']}"
        raise PeerFailed(text) if body["backend"] else SuiteError(text)

    def _ended(self, error: Exception) -> AssertionError:
        self.broken = True
        try:
            code = self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            return PeerCrashed(f"the peer hung up during {self._pending}: {error}")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
        return PeerCrashed(f"the peer ended with {how} during {self._pending}{self._last_words()}")

    def _last_words(self) -> str:
        size = os.fstat(self._stderr.fileno()).st_size
        words = os.pread(self._stderr.fileno(), 4000, max(0, size - 4000)).decode(errors="replace").strip()
        return f"; its last words:\n{words}" if words else ""

    # --- harming -----------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """SIGKILL it and wait for its end."""
        self.killed = True
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """SIGSTOP it, and wait until it stands still."""
        self._process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        if not until(lambda: stat.read_text().rpartition(") ")[2].startswith("T"), self._deadline_s):
            raise SuiteError("a peer could not be stopped")

    def resume(self) -> None:
        """SIGCONT it."""
        self._process.send_signal(signal.SIGCONT)

    def wait_exit(self, timeout_s: float) -> int:
        """Wait until it ends by itself; return the status, negative for a signal.

        Raises
        ------
        PeerHung
            When it does not.
        """
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            self.kill()
            raise PeerHung(f"the peer did not exit within {timeout_s:g} s{self._last_words()}") from error
        self.killed = True
        return code

    def close(self) -> None:
        """End it, by force."""
        self.kill()
        self._channel.close()
        self._stderr.close()


class Peers:
    """The peers of a run: healthy ones are used again, because starting a process and a driver takes long."""

    def __init__(self, profile: BackendProfile, device: str) -> None:
        self._profile = profile
        self._device = device
        self._idle: list[Peer] = []
        self._all: list[Peer] = []
        self.ready: Any = lambda peer: None

    @property
    def fds(self) -> frozenset[int]:
        """Descriptors of this process that belong to peers."""
        return frozenset(fd for peer in self._all for fd in peer.fds)

    @property
    def pids(self) -> frozenset[int]:
        """Processes of all peers."""
        return frozenset(peer.pid for peer in self._all)

    def take(self) -> Peer:
        """Return a peer that has been warmed up."""
        while self._idle:
            peer = self._idle.pop()
            if peer.usable:
                return peer
            self.discard(peer)
        peer = self.take_bare()
        self.ready(peer)
        return peer if peer.usable else self.take_bare()

    def take_bare(self, *, environment: Mapping[str, str] | None = None) -> Peer:
        """Return a fresh peer that has opened no device; ``environment`` is set besides the profile's."""
        peer = Peer(self._profile, self._device, environment=environment)
        self._all.append(peer)
        return peer

    def give_back(self, peer: Peer) -> None:
        """Let another case use it."""
        self._idle.append(peer)

    def discard(self, peer: Peer) -> None:
        """End a peer."""
        peer.close()
        if peer in self._all:
            self._all.remove(peer)

    def close(self) -> None:
        """End all."""
        while self._all:
            self.discard(self._all[-1])
        self._idle.clear()
