"""Inter-process events of the host backend, with the manners of a vendor's events, traps included.

Owns the page of event slots of one device in this process and the form in which a slot is named to a peer. A handle
is bytes alone, so a peer reaches the page through ``/proc/<pid>/fd``: like elsewhere, a handle stops resolving when
its maker is gone or lives in another pid namespace. Opened events stay readable after that.

Semantics: ``record`` counts a slot's ``recorded`` up at once, the stream sets ``done`` when it gets there, and
``query`` compares the two. So a never-recorded event answers True, and a query speaks of the latest record.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import struct
import threading
from dataclasses import dataclass

from devipc.host.driver import HostDriver
from devipc.host.transfer import queue_of
from devipc.spi import (
    ClosedError,
    DevIPCError,
    HandleError,
    InterprocessEvent,
    ResourceExhausted,
    SharedMap,
    Stream,
    UsageError,
    create_memfd,
    validate_memfd,
)

__all__ = ["EVENT_LIMIT", "HostEvents"]

EVENT_LIMIT = 1024
"""Events that one process can have made and not destroyed, per device."""

_SLOT_WORDS = 8
_NONCE, _RECORDED, _DONE = range(3)
_PAGES_NBYTES = EVENT_LIMIT * _SLOT_WORDS * 8
_PAYLOAD = struct.Struct("<4sIIIIQQQ")
"""Magic, version, pid, descriptor, slot, inode of the pid namespace, inode of the page, nonce of the slot."""
_MAGIC = b"DHE\0"
_VERSION = 1


@dataclass(slots=True, eq=False)
class HostEvent:
    """One slot, ours or a peer's. Fulfils :class:`devipc.spi.InterprocessEvent`."""

    driver: HostDriver
    pages: _Pages
    slot: int
    nonce: int
    owned: bool
    closed: bool = False

    @property
    def gone(self) -> bool:
        """True when the slot can no longer be read: look under ``pages.lock``."""
        return self.closed or self.pages.map.closed

    def word(self, index: int) -> int:
        """Read one word of the slot."""
        return int(self.pages.words[self.slot * _SLOT_WORDS + index])

    def set_word(self, index: int, value: int) -> None:
        """Store one word of the slot."""
        self.pages.words[self.slot * _SLOT_WORDS + index] = value


class _Pages:
    """Mapped pages of slots. ``lock`` orders destruction against the stream's stores and against readers.

    ``number`` is the descriptor, which the maker keeps open and an opener does not.
    """

    def __init__(self, fd: int, *, writable: bool) -> None:
        self.map = SharedMap(fd, _PAGES_NBYTES, writable=writable)
        self.words = self.map.view.cast("Q")
        self.number = fd
        self.inode = os.fstat(fd).st_ino
        self.lock = threading.Lock()


class HostEvents:
    """Events of one device. Fulfils :class:`devipc.spi.InterprocessEvents`."""

    def __init__(self, driver: HostDriver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._fd = -1
        self._pages: _Pages | None = None
        self._free: list[int] = []
        self._opened: set[HostEvent] = set()

    def create(self) -> HostEvent:
        """Make an event. The first one makes the page, which stays until the device is closed."""
        self._driver.enter("host_event_create")
        with self._lock:
            self._driver.check()
            if self._pages is None:
                self._fd = create_memfd("devipc-host-events", _PAGES_NBYTES)
                try:
                    self._pages = _Pages(self._fd, writable=True)
                except BaseException:
                    os.close(self._fd)
                    raise
                self._free = list(range(EVENT_LIMIT - 1, -1, -1))
            if not self._free:
                raise ResourceExhausted(
                    f"all {EVENT_LIMIT} events of this device are in use",
                    code="events",
                    remedy="destroy events, or keep a ring of them",
                )
            event = HostEvent(self._driver, self._pages, self._free.pop(), 1 + secrets.randbits(62), owned=True)
        with event.pages.lock:
            if event.gone:
                raise _destroyed()
            event.set_word(_RECORDED, 0)
            event.set_word(_DONE, 0)
            event.set_word(_NONCE, event.nonce)
        return event

    def export(self, event: InterprocessEvent) -> bytes:
        """Name an event that was made here; 44 bytes."""
        ours = self._own(event, "export")
        self._driver.enter("host_event_export")
        pages = ours.pages
        return _PAYLOAD.pack(
            _MAGIC, _VERSION, os.getpid(), pages.number, ours.slot, _pid_namespace(), pages.inode, ours.nonce
        )

    def open(self, payload: object) -> HostEvent:
        """Open a peer's event.

        Raises
        ------
        HandleError
            ``code`` tells why: ``handle`` (not such a payload), ``pid_namespace``, ``exporter_gone``, ``no_access``,
            ``stale_event`` (destroyed meanwhile), or what :func:`devipc.spi.validate_memfd` found.
        """
        if not isinstance(payload, bytes) or len(payload) != _PAYLOAD.size:
            raise HandleError(f"an event handle has {_PAYLOAD.size} bytes", remedy="pass what `export` returned")
        magic, version, pid, number, slot, namespace, inode, nonce = _PAYLOAD.unpack(payload)
        if (magic, version) != (_MAGIC, _VERSION) or slot >= EVENT_LIMIT or nonce == 0:
            raise HandleError("not an event handle of this backend", remedy="both sides need the same version")
        if namespace != _pid_namespace():
            raise HandleError(
                "the event was made in another pid namespace, where its number means another process",
                code="pid_namespace",
                remedy="run both processes in one pid namespace, or choose another strategy",
            )
        self._driver.enter("host_event_open")
        fd = _open_page(pid, number, inode)
        try:
            event = HostEvent(self._driver, _Pages(fd, writable=False), slot, nonce, owned=False)
        finally:
            os.close(fd)
        if event.word(_NONCE) != nonce:
            event.pages.map.close()
            raise _stale()
        with self._lock:
            self._opened.add(event)
        return event

    def record(self, event: InterprocessEvent, stream: Stream) -> None:
        """Set the event behind all work of ``stream`` so far."""
        ours = self._own(event, "record")
        queue = queue_of(self._driver, stream)
        self._driver.enter("host_event_record")

        def run() -> None:
            with ours.pages.lock:
                # A slot that was destroyed may be another event by now.
                if not ours.gone:
                    ours.set_word(_DONE, max(ours.word(_DONE), number))

        with ours.pages.lock:
            if ours.gone:
                raise _destroyed()
            number = ours.word(_RECORDED) + 1
            ours.set_word(_RECORDED, number)  # first: the number of work that an interrupt leaves queued is used up
            try:
                queue.submit(run)
            except DevIPCError:
                ours.set_word(_RECORDED, number - 1)
                raise

    def query(self, event: InterprocessEvent) -> bool:
        """Return True when the latest record was passed, or there was none.

        Raises
        ------
        HandleError
            With code ``stale_event``, when its maker destroyed it.
        """
        ours = self._event(event)
        self._driver.enter("host_event_query")
        with ours.pages.lock:
            if ours.gone:
                raise _destroyed()
            recorded = ours.word(_RECORDED)
            done = ours.word(_DONE) >= recorded
            # Last, so that words of a slot's next life are never taken for ours.
            if ours.word(_NONCE) != ours.nonce:
                raise _stale()
        return done

    def destroy(self, event: InterprocessEvent) -> None:
        """Give an event back; queued records of it do nothing then."""
        ours = self._event(event)
        self._driver.enter("host_event_destroy", giving_back=True)
        with ours.pages.lock:
            if ours.gone:
                raise _destroyed()
            ours.closed = True
            if ours.owned:
                ours.set_word(_NONCE, 0)
            else:
                ours.pages.map.close()
        with self._lock:
            if ours.owned:
                self._free.append(ours.slot)
            self._opened.discard(ours)

    def close_all(self) -> None:
        """Give back the page and what was opened, when the device is closed and its threads have ended."""
        with self._lock:
            opened, pages, fd = list(self._opened), self._pages, self._fd
            self._opened.clear()
            self._pages, self._fd = None, -1
        for event in opened:
            with event.pages.lock:
                event.closed = True
                event.pages.map.close()
        if pages is not None:
            with pages.lock:
                for slot in range(EVENT_LIMIT):
                    pages.words[slot * _SLOT_WORDS + _NONCE] = 0
                pages.map.close()
            os.close(fd)

    def _event(self, event: object) -> HostEvent:
        if not isinstance(event, HostEvent) or event.driver is not self._driver:
            raise UsageError(f"this {type(event).__name__} is no event of this device", remedy="use create or open")
        return event

    def _own(self, event: object, verb: str) -> HostEvent:
        ours = self._event(event)
        if not ours.owned:
            raise UsageError(f"only its maker can {verb} an event", remedy=f"{verb} it in the process that made it")
        if ours.gone:
            raise _destroyed()
        return ours


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _destroyed() -> ClosedError:
    return ClosedError("the event is destroyed", remedy="make or open a new one")


def _stale() -> HandleError:
    return HandleError(
        "the event was destroyed by its maker", code="stale_event", remedy="keep it until every peer has closed it"
    )


def _open_page(pid: int, number: int, inode: int) -> int:
    """Open a peer's page by pid and descriptor number; what is found there is looked at before it is opened."""
    try:
        found = os.open(f"/proc/{pid}/fd/{number}", os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise _not_opened(pid, error) from error
    try:
        info = os.fstat(found)
        if not stat.S_ISREG(info.st_mode) or info.st_ino != inode:
            raise _gone(pid)
        fd = os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _not_opened(pid, error) from error
    finally:
        os.close(found)
    try:
        validate_memfd(fd, min_nbytes=_PAGES_NBYTES)
    except HandleError:
        os.close(fd)
        raise
    return fd


def _not_opened(pid: int, error: OSError) -> DevIPCError:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ResourceExhausted(f"no descriptor left ({error.strerror})", code="fds", remedy="raise `ulimit -n`")
    if error.errno in (errno.EACCES, errno.EPERM):
        return HandleError(
            f"no access to the descriptors of process {pid}",
            code="no_access",
            remedy="run both as the same user, dumpable and in one user namespace, or choose another strategy",
        )
    return _gone(pid)


def _gone(pid: int) -> HandleError:
    return HandleError(
        f"process {pid} no longer has this event",
        code="exporter_gone",
        remedy="its maker must stay alive; export again",
    )
