"""How a process shows that it lives, and how a peer's death is noticed: first "dying", then "gone".

Owns two signs of life. A robust mutex in a sealed page, held by a parked thread, is released by the kernel as the
first thing of a death, whatever memory the process has; it means *dying*. A pidfd becomes readable when nothing of
the process is left; it means *gone*. Knows no socket and no message.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import select
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from devipc.calltrace import report
from devipc.capabilities import Capability
from devipc.channel.datagram import close_all, no_descriptors
from devipc.channel.identity import close_in_child
from devipc.deadline import no_thread
from devipc.errors import CapabilityError, HandleError, ResourceExhausted
from devipc.futex import OWNER_DIED, TID_MASK, WAITERS, futex_wait, futex_wake
from devipc.memfd import PAGE_NBYTES, SharedMap, create_memfd, validate_memfd

__all__ = ["Life", "PeerWatch", "own_life", "pid_of_pidfd"]

_log = logging.getLogger(__name__)

_RECHECK_S = 0.05
"""A death whose one wake-up went to another watcher, itself stopped or dead, is noticed after this."""

_PARK_TIMEOUT_S = 5.0
_MUTEX_NBYTES = 64
_SHARED = 1  # PTHREAD_PROCESS_SHARED
_ROBUST = 1  # PTHREAD_MUTEX_ROBUST


@dataclass(slots=True, weakref_slot=True, eq=False)
class Life:
    """This process's signs of life; they stay until it ends.

    Peers get duplicates of both descriptors, which stay this object's.

    Parameters
    ----------
    memfd : int or None
        Sealed page whose first 32-bit word is the lock; None where the platform has no robust mutex.
    pidfd : int or None
        Refers to this process; None where the kernel has none.
    robust, exit : Capability
        Whether "dying" and "gone" can be told by them, with the reason when not.
    """

    memfd: int | None
    pidfd: int | None
    robust: Capability
    exit: Capability
    _page: SharedMap | None = field(default=None, repr=False)

    def close_in_child(self) -> None:
        """Close a forked child's copies; it makes a life of its own on demand."""
        close_all(fd for fd in (self.memfd, self.pidfd) if fd is not None)


_life: Life | None = None
_life_pid = 0
_making = threading.Lock()


def _forget() -> None:
    global _life, _making
    _life = None
    _making = threading.Lock()


os.register_at_fork(after_in_child=_forget)


def own_life() -> Life:
    """Return this process's life, made at the first call (one thread, one page, two descriptors).

    Any thread; a forked child gets its own. A platform that lacks a part is no error: see the capabilities.

    Raises
    ------
    ResourceExhausted
        When no descriptor or memory is left; the next call tries again.
    """
    global _life, _life_pid
    with _making:
        if _life is None or _life_pid != os.getpid():
            _life = _make_life()
            _life_pid = os.getpid()
            close_in_child(_life)
        return _life


def _make_life() -> Life:
    try:
        pidfd: int | None = os.pidfd_open(os.getpid())
        exit_proof = Capability.yes("pidfd_open of this process worked")
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise no_descriptors("pidfd_open", error) from error
        pidfd = None
        exit_proof = Capability.no(f"pidfd_open: {error.strerror}", remedy="use Linux 5.3 or newer")
    try:
        memfd, page = _held_page()
    except ResourceExhausted:
        if pidfd is not None:
            os.close(pidfd)
        raise
    except (CapabilityError, OSError, AttributeError, RuntimeError) as error:
        robust = Capability.no(
            f"no robust mutex ({error})", remedy="peers learn of this process's death from its socket and pidfd, later"
        )
        _log.warning("liveness is degraded: %s; %s", robust.reason, robust.remedy)
        return Life(None, pidfd, robust, exit_proof)
    return Life(memfd, pidfd, Capability.yes("lock word holds the parked thread's id"), exit_proof, page)


def _held_page() -> tuple[int, SharedMap]:
    """Make the page and start the thread that locks its mutex and then sleeps until the process ends."""
    fd = create_memfd("devipc-life", PAGE_NBYTES)
    page = None
    try:
        page = SharedMap(fd, PAGE_NBYTES)
        parked = threading.Event()
        failure: list[BaseException] = []
        threading.Thread(target=_park, args=(page.address, parked, failure), name="devipc-life", daemon=True).start()
        if not parked.wait(_PARK_TIMEOUT_S):
            raise RuntimeError("the thread that holds it did not start")
        if failure:
            raise RuntimeError(str(failure[0]))
        futex_wake(page.address)  # a machine whose watchers cannot wait must not promise them anything
    except BaseException:
        # The page stays mapped: a late thread may still lock it.
        os.close(fd)
        raise
    return fd, page


def _park(address: int, parked: threading.Event, failure: list[BaseException]) -> None:
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        libc = ctypes.CDLL(None, use_errno=True)
        _lock_robust(libc, address)
    except (OSError, AttributeError, RuntimeError) as error:
        failure.append(error)
        parked.set()
        return
    parked.set()
    while True:
        libc.pause()  # without the interpreter lock; signals are blocked, so it does not return


def _lock_robust(libc: ctypes.CDLL, address: int) -> None:
    attributes = ctypes.create_string_buffer(_MUTEX_NBYTES)
    mutex = ctypes.c_void_p(address)
    report("life_lock")
    for call, arguments in (
        (libc.pthread_mutexattr_init, (attributes,)),
        (libc.pthread_mutexattr_setpshared, (attributes, _SHARED)),
        (libc.pthread_mutexattr_setrobust, (attributes, _ROBUST)),
        (libc.pthread_mutex_init, (mutex, attributes)),
        (libc.pthread_mutex_lock, (mutex,)),
    ):
        status = call(*arguments)
        if status:
            raise OSError(status, f"{call.__name__}: {os.strerror(status)}")
    word = ctypes.c_uint32.from_address(address)
    if word.value & TID_MASK != threading.get_native_id():
        raise RuntimeError("this C library keeps the lock word elsewhere")
    # The kernel wakes a waiter at the owner's death only if this bit is set, and watchers never write to the page.
    word.value |= WAITERS


def pid_of_pidfd(fd: int) -> int:
    """Return the process id behind a received pidfd: 0 if it is not visible from here, -1 if the process has ended.

    A ``/proc`` that was mounted for another pid namespace shows that one's numbers, which mean nothing here: 0.

    Raises
    ------
    HandleError
        When the descriptor is no pidfd.
    ResourceExhausted
        When no descriptor is left to look it up.
    """
    try:
        own = os.readlink("/proc/self")
        link = os.readlink(f"/proc/self/fd/{fd}")
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii", errors="replace") as file:
            found = re.search(r"^Pid:\s*(-?\d+)\s*$", file.read(), re.MULTILINE)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise no_descriptors("open", error) from error
        raise HandleError(f"received pidfd cannot be checked ({error.strerror})", code="not_a_pidfd") from error
    if "pidfd" not in link or found is None:
        raise HandleError(
            "received descriptor is no pidfd",
            code="not_a_pidfd",
            remedy="the peer must send what pidfd_open returned for itself",
        )
    pid = int(found[1])
    return pid if pid < 0 or own == str(os.getpid()) else 0


class PeerWatch:
    """Watches one peer's signs of life on a thread of its own and tells of "dying", then of "gone", once each.

    Both callbacks run on that thread; what they raise is logged. "gone" always comes after "dying". Without a life
    page both come with the pidfd; without a pidfd "gone" never comes, since nothing proves it.

    Parameters
    ----------
    life_fd : int or None
        The peer's page; owned, also when this raises.
    pidfd : int or None
        The peer's pidfd, checked by the caller; owned, also when this raises.
    on_dying, on_gone : callable
        Called without arguments.

    Raises
    ------
    HandleError
        When the page is not a sealed memfd.
    """

    def __init__(
        self,
        life_fd: int | None,
        pidfd: int | None,
        *,
        on_dying: Callable[[], None],
        on_gone: Callable[[], None],
    ) -> None:
        self._on_dying = on_dying
        self._on_gone = on_gone
        self._closed = False
        self._guard = threading.Lock()
        self._page: SharedMap | None = None
        self._fds: list[int] = [] if pidfd is None else [pidfd]
        self._pidfd = pidfd
        try:
            if life_fd is not None:
                validate_memfd(life_fd, min_nbytes=PAGE_NBYTES)
                self._page = SharedMap(life_fd, PAGE_NBYTES, writable=False)
            self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._fds.append(self._stop)
            self._thread = threading.Thread(target=self._run, name="devipc-watch", daemon=True)
            self._thread.start()
        except OSError as error:
            self._release()
            raise no_descriptors("eventfd", error) from error
        except RuntimeError as error:
            self._release()
            raise no_thread("watch a peer", error) from error
        except BaseException:
            self._release()
            raise
        finally:
            if life_fd is not None:
                os.close(life_fd)
        close_in_child(self)

    def _run(self) -> None:
        told = False
        try:
            if self._page is not None and self._until_word_changes(self._page):
                told = True
                self._tell(self._on_dying)
            if self._until_exit():
                if not told:
                    told = True
                    self._tell(self._on_dying)
                self._tell(self._on_gone)
        except Exception:
            _log.exception("the watch of a peer failed; the peer is taken for dying")
            if not told:
                self._tell(self._on_dying)
        finally:
            self._release()

    def _until_word_changes(self, page: SharedMap) -> bool:
        """Return True once the peer's lock is not held as it was; False when the watch is closed or the pidfd tells."""
        word = ctypes.c_uint32.from_address(page.address)
        held = word.value
        if held & OWNER_DIED or not held & TID_MASK:
            return True
        while not self._closed:
            # Anything but the owner's untouched lock means death: a word that cannot be understood is no sign of life.
            if word.value != held:
                futex_wake(page.address)  # the kernel woke one watcher only; the others of all processes are told here
                return True
            if self._pidfd is not None and _readable([self._pidfd], 0):
                return False
            futex_wait(page.address, held, timeout_s=_RECHECK_S)
        return False

    def _until_exit(self) -> bool:
        if self._closed or self._pidfd is None:
            return False
        return self._pidfd in _readable([self._pidfd, self._stop], None) and not self._closed

    def _tell(self, callback: Callable[[], None]) -> None:
        if self._closed:
            return
        try:
            callback()
        except Exception:
            _log.exception("a callback about a peer's death failed")

    def close(self) -> None:
        """Stop watching; no callback begins after this. Never blocks; calling it again does nothing.

        The thread ends within 50 ms; :meth:`join` waits for it.
        """
        with self._guard:
            if self._closed:
                return
            self._closed = True
            if self._fds:
                os.eventfd_write(self._stop, 1)
            if self._page is not None:
                futex_wake(self._page.address)

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended and return whether it has; from one of the callbacks that is False."""
        if threading.current_thread() is self._thread:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _release(self) -> None:
        with self._guard:
            page, self._page = self._page, None
            fds, self._fds = self._fds, []
        if page is not None:
            page.close()
        close_all(fds)

    def close_in_child(self) -> None:
        """Close a forked child's copies of the descriptors; the thread did not come along."""
        fds, self._fds = self._fds, []
        close_all(fds)


def _readable(fds: list[int], timeout_ms: int | None) -> list[int]:
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return [fd for fd, _ in poller.poll(timeout_ms)]
