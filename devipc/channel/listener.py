"""The place where processes meet: a private socket path, its one live owner, and connecting to it.

Owns directories, lock files and socket files, and who may use them. It moves no message.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Collection

from devipc.calltrace import report
from devipc.channel.datagram import Deadline, no_descriptors, wait_for
from devipc.channel.identity import close_in_child
from devipc.channel.seqpacket import Channel
from devipc.errors import ClosedError, DevIPCError, ForkError, PeerGone, PeerRefused, UsageError

__all__ = ["MAX_PATH_NBYTES", "Listener", "connect", "default_directory", "remove_leftovers"]

MAX_PATH_NBYTES = 107
"""The kernel's room for a socket path, without the final zero."""

_LOCK_SUFFIX = ".sock.lock"
_RETRY_S = 0.005
_PID_WAIT_S = 0.2
_NO_ROOM_S = 0.05


def default_directory() -> str:
    """Return the directory for this user's sockets; nothing is made.

    ``$XDG_RUNTIME_DIR/devipc`` where that is set and ours, else ``devipc-UID`` in the temporary folder.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    try:
        if os.path.isabs(runtime) and os.stat(runtime).st_uid == os.geteuid():
            return os.path.join(runtime, "devipc")
    except OSError:
        pass
    return os.path.join(tempfile.gettempdir(), f"devipc-{os.geteuid()}")


def _checked_path(path: str | os.PathLike[str]) -> str:
    name = os.fspath(path)
    nbytes = len(os.fsencode(name))
    if not name or "\0" in name:
        raise UsageError(f"{name!r} is no socket path", remedy="give the path of a file")
    if nbytes > MAX_PATH_NBYTES:
        raise UsageError(
            f"socket path {name!r} has {nbytes} bytes, at most {MAX_PATH_NBYTES} fit",
            code="path_length",
            remedy="choose a shorter directory, for instance by XDG_RUNTIME_DIR",
        )
    return name


def connect(path: str | os.PathLike[str], *, timeout_s: float, allowed_uids: Collection[int] = ()) -> Channel:
    """Connect to the listener at ``path``; blocks until the deadline.

    Raises
    ------
    PeerGone
        When nobody listens there (retryable).
    PeerRefused
        When the listener is another user's, or access is denied.
    CompletionTimeout
        When the listener's queue stays full.
    """
    name = _checked_path(path)
    deadline = Deadline(timeout_s)
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise no_descriptors("socket", error) from error
    try:
        sock.setblocking(False)
        while True:
            report("channel_connect")
            try:
                sock.connect(name)
                break
            except BlockingIOError:  # the queue is full, and poll does not tell when it no longer is
                if deadline.left_s() <= 0:
                    raise deadline.expired(f"the listener at {name!r} took no connection") from None
                time.sleep(min(_RETRY_S, deadline.left_s()))
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):
            raise _connect_error(name, error) from error
        raise
    return Channel(sock, allowed_uids=allowed_uids)


def _connect_error(name: str, error: OSError) -> DevIPCError:
    if error.errno in (errno.ENOENT, errno.ECONNREFUSED, errno.ECONNRESET):
        return PeerGone(
            f"nobody listens at {name!r} ({error.strerror})",
            code="no_listener",
            remedy="start the other side; between containers, share the directory of the socket",
            retryable=True,
        )
    return PeerRefused(
        f"cannot connect to {name!r} ({error.strerror})",
        code="connect",
        remedy="check the path and its owner: it must be a socket of this user, made by devipc",
    )


class Listener:
    """A listening socket with exactly one live owner.

    Missing directories are made with mode 0700, the socket gets mode 0600 before anybody can connect; 0666 with
    ``allowed_uids``, who also need a directory that they can enter. A leftover of a dead owner is replaced, a live
    owner never: an exclusive lock on ``path + ".lock"`` tells them apart, and the kernel drops it with its process.
    Any thread; a forked child's copies are closed at once.

    Parameters
    ----------
    path : path-like
        At most 107 bytes.
    allowed_uids : collection of int
        User ids other than our own that may connect.
    backlog : int
        Connections that wait for :meth:`accept`.

    Raises
    ------
    UsageError
        Path too long, directory open to others, path taken by another kind of file, or (code ``in_use``) a live
        listener there, whose process id is in the message.
    PeerRefused
        When the directory, lock or socket belongs to another user.
    """

    def __init__(self, path: str | os.PathLike[str], *, allowed_uids: Collection[int] = (), backlog: int = 128) -> None:
        self.path = _checked_path(path)
        self._pid = os.getpid()
        self._allowed = frozenset(allowed_uids)
        self._guard = threading.Lock()
        self._closed = False
        _private_directory(os.path.dirname(self.path) or ".")
        self._lock_fd = _take_lock(self.path + ".lock")
        self._sock: socket.socket | None = None
        self._file: tuple[int, int] | None = None
        try:
            self._bind(backlog)
        except BaseException:
            self._undo()
            raise
        close_in_child(self)

    def _bind(self, backlog: int) -> None:
        _remove_leftover(self.path)
        try:
            sock = self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise no_descriptors("socket", error) from error
        sock.setblocking(False)
        report("channel_bind")
        try:
            sock.bind(self.path)
            self._file = _file_of(self.path)
            # With a list of users the kernel's word about the peer decides. Nobody can connect before listen().
            os.chmod(self.path, 0o666 if self._allowed else 0o600)
            report("channel_listen")
            sock.listen(backlog)
        except OSError as error:
            raise UsageError(f"cannot listen at {self.path!r} ({error.strerror})", code="bind") from error

    def accept(self, timeout_s: float | None) -> Channel:
        """Wait for the next connection and return it, checked by its user id. Blocks until the deadline.

        Raises
        ------
        CompletionTimeout
            When nobody came.
        PeerRefused
            When another user came; the connection is closed, the next one can be accepted.
        ResourceExhausted
            When no descriptor is left; the connection waits for the next call.
        ClosedError
            When the listener is, or gets, closed.
        """
        if os.getpid() != self._pid:
            raise ForkError("this listener belongs to the process that forked")
        sock = self._sock
        deadline = Deadline(timeout_s)
        while sock is not None and not self._closed:
            try:
                wait_for(sock, select.POLLIN, deadline, "nobody connected")
                report("channel_accept")
                connection, _ = sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue
            except (OSError, ValueError) as error:
                if self.closed:
                    break
                if isinstance(error, OSError):
                    # The connection still waits: a caller that tries again at once must not spin.
                    time.sleep(min(_NO_ROOM_S, deadline.left_s()))
                    raise no_descriptors("accept", error) from error
                raise
            return Channel(connection, allowed_uids=self._allowed)
        raise ClosedError("the listener is closed")

    @property
    def closed(self) -> bool:
        """True once :meth:`close` was called."""
        return self._closed

    def close(self) -> None:
        """Stop listening and remove the socket, if it is still ours. Ends a waiting :meth:`accept`; never blocks."""
        if os.getpid() != self._pid:
            return
        with self._guard:
            if self._closed:
                return
            self._closed = True
            self._undo()

    def _undo(self) -> None:
        if self._sock is not None:
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            self._sock.close()
        if self._file is not None and _file_of(self.path) == self._file:
            _unlink(self.path)
        if self._lock_fd >= 0:
            # Whoever opened the old lock file meanwhile sees that its name is gone, and begins again.
            _unlink(self.path + ".lock")
            os.close(self._lock_fd)
            self._lock_fd = -1

    def close_in_child(self) -> None:
        """Close a forked child's copies; socket, lock and files stay the parent's."""
        if self._sock is not None and self._lock_fd >= 0:
            self._sock.close()
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_leftovers(directory: str) -> None:
    """Remove the sockets in ``directory`` whose owners died without closing them; those of living owners stay.

    Only sockets that have a lock file beside them are looked at, and only those whose lock is free. Never raises.
    """
    try:
        names = [name for name in os.listdir(directory) if name.endswith(_LOCK_SUFFIX)]
    except OSError:
        return
    for name in names:
        path = os.path.join(directory, name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            info = os.fstat(fd)
            if info.st_uid == os.geteuid() and _file_of(path) == (info.st_dev, info.st_ino):
                _unlink(path.removesuffix(".lock"))
                _unlink(path)
        except OSError:
            continue
        finally:
            os.close(fd)


def _file_of(path: str) -> tuple[int, int] | None:
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _private_directory(directory: str) -> None:
    """Make what is missing with mode 0700, and refuse what others could change under us."""
    missing = []
    at = os.path.abspath(directory)
    while not os.path.lexists(at):
        missing.append(at)
        at = os.path.dirname(at)
    try:
        for name in reversed(missing):
            try:
                os.mkdir(name, 0o700)
            except FileExistsError:  # somebody else was faster; the check below decides
                pass
        info = os.stat(directory)
    except OSError as error:
        raise UsageError(f"cannot use directory {directory!r} ({error.strerror})", code="directory") from error
    if not stat.S_ISDIR(info.st_mode):
        raise UsageError(f"{directory!r} is no directory", code="directory")
    _ours(directory, info)
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(
            f"directory {directory!r} can be changed by other users (mode {stat.S_IMODE(info.st_mode):04o})",
            code="directory",
            remedy="choose a directory of your own, or `chmod 0700` this one",
        )


def _ours(path: str, info: os.stat_result) -> None:
    if info.st_uid != os.geteuid():
        raise PeerRefused(
            f"{path!r} belongs to user {info.st_uid}, this process runs as {os.geteuid()}",
            code="owner",
            remedy="choose a path in a directory of your own",
        )


def _take_lock(path: str) -> int:
    """Return a descriptor that holds the exclusive lock and whose file is still the one at ``path``."""
    patience = Deadline(_PID_WAIT_S)
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise no_descriptors("open", error) from error
            raise UsageError(f"cannot open lock {path!r} ({error.strerror})", code="lock") from error
        try:
            info = os.fstat(fd)
            _ours(path, info)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _file_of(path) == (info.st_dev, info.st_ino):
                os.ftruncate(fd, 0)
                os.pwrite(fd, str(os.getpid()).encode(), 0)
                return fd
        except BlockingIOError as error:
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
            # The owner writes its id right after it got the lock, and removes the file before it gives the lock up.
            if owner or patience.left_s() <= 0:
                os.close(fd)
                raise UsageError(
                    f"process {owner or 'unknown'} already listens at {path.removesuffix('.lock')!r}",
                    code="in_use",
                    remedy=f"end process {owner or 'that holds the lock'}, or choose another path",
                ) from error
            time.sleep(_RETRY_S)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError):
                raise UsageError(f"cannot lock {path!r} ({error.strerror})", code="lock") from error
            raise
        os.close(fd)


def _remove_leftover(path: str) -> None:
    """Remove the socket of a dead owner; refuse to remove anything else."""
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return
    _ours(path, info)
    if not stat.S_ISSOCK(info.st_mode):
        raise UsageError(
            f"{path!r} exists and is no socket", code="not_a_socket", remedy="remove it or choose another path"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as trial:
        trial.setblocking(False)
        try:
            trial.connect(path)
        except ConnectionRefusedError:
            _unlink(path)
            return
        except OSError:  # a full queue or another socket type: somebody is there
            pass
    raise UsageError(
        f"a process without a lock already listens at {path!r}", code="in_use", remedy="end it, or choose another path"
    )
