"""The "driver" of the host backend: queues of work, each run in order, and the state of the device.

Owns what a vendor's library owns elsewhere: streams, the sticky error, fork and close checks, and the report of every
call. Knows no wire form and no fence.

Rules
-----
- A call of this process that finds an error before it is enqueued raises; work that fails *inside* a queue loses the
  device: every later call raises :class:`~devipc.spi.DeviceLostError`, but calls that give something back still work.
- Closing or losing the device ends pending waits and drops queued work, which then never counts as done.
- Work runs on its queue's thread. What is brief, and finds nothing before it, runs in the call that submits it: two
  changes of threads cost more. Not on the main thread, whose work an interrupt could break off.
- Threads are daemons: an interpreter that exits with work queued does not wait for it.
"""

from __future__ import annotations

import itertools
import operator
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import SupportsIndex, cast

from devipc.host.ranges import Range, Ranges
from devipc.spi import (
    ClosedError,
    DeviceLostError,
    ForkError,
    ResourceExhausted,
    UsageError,
    VendorStatus,
    report,
    undo,
)

__all__ = ["BACKEND", "HostDriver", "Queue", "whole"]

BACKEND = "host"
"""Name of the backend, in its entry point and in its errors."""

_handles = itertools.count(1)
_SPINS = 64
_LONGEST_NAP_S = 0.0002
_JOIN_S = 10.0
_MAIN = threading.main_thread().ident


def whole(name: str, value: object, *, low: int = 0, high: int = 2**64 - 1) -> int:
    """Return ``value`` as an int; raise UsageError when it is none, or not in ``[low, high]``."""
    try:
        number = operator.index(cast("SupportsIndex", value))
    except TypeError:
        raise UsageError(f"{name} is a {type(value).__name__}", remedy="pass an integer") from None
    if not low <= number <= high:
        raise UsageError(f"{name} = {number} is not in [{low}, {high}]", remedy="check the value")
    return number


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """One piece of queued work: ``run`` answers False when it was given up because the queue stops."""

    run: Callable[[], bool | None]
    held: tuple[Range, ...]


class Queue:
    """Work in order on one thread, started with the first piece. Every method may be called from any thread."""

    def __init__(self, driver: HostDriver, handle: int, priority: int) -> None:
        self.handle = handle
        self.priority = priority
        self.capturing = False
        self._driver = driver
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._finished = threading.Condition(self._lock)
        self._work: deque[_Work] = deque()
        self._thread: threading.Thread | None = None
        self._stalled = False
        self._closing = False
        self.stopping = False
        self._taken = 0
        self._current: _Work | None = None
        self.completed = 0

    def submit(self, run: Callable[[], bool | None], held: tuple[Range, ...] = (), *, brief: bool = False) -> None:
        """Append work that uses the ranges ``held``; they are dropped when it has run, or at once when this raises.

        ``brief`` work takes microseconds and waits for nothing: it may have run when this returns. A signal handler can
        raise anywhere in here, so one step decides whether work of the main thread will run: the append.
        """
        work = _Work(run, held)
        try:
            with self._lock:
                self._check()
                self._refuse_capture()
                if not all(one.live for one in held):
                    raise ClosedError("the memory is given back meanwhile", remedy="keep it until the work is queued")
                now = brief and self._current is None and not (self._work or self._stalled)
                if now and threading.get_ident() != _MAIN:
                    self._current = work
                    self._taken += 1
                else:
                    if self._thread is None:
                        self._thread = self._start()
                    self._work.append(work)
                    self._changed.notify()
                    return
        except BaseException:
            if not self._has(lambda one: one is work):
                undo(self._driver.ranges.drop, held)
            raise
        self._do(work)

    @property
    def submitted(self) -> int:
        """Pieces of work so far, those that wait included."""
        return self._taken + len(self._work)

    def uses(self, one: Range) -> bool:
        """Return True when work that waits or runs holds ``one``."""
        return self._has(lambda work: one in work.held)

    def _has(self, fits: Callable[[_Work], bool]) -> bool:
        with self._lock:
            return any(fits(work) for work in self._work) or (self._current is not None and fits(self._current))

    def mark(self) -> int:
        """Return the number that ``completed`` reaches when all work submitted so far is done."""
        with self._lock:
            self._check()
            self._refuse_capture()
            return self.submitted

    def _refuse_capture(self) -> None:
        if self.capturing:
            raise UsageError(
                "the stream is capturing, and this backend records no graphs",
                code="capturing",
                remedy="end the capture first, or use another stream",
            )

    def _check(self) -> None:
        if self._closing:
            raise ClosedError("the stream is destroyed", remedy="make a new stream")
        if self.stopping:
            self._driver.check()
            raise ClosedError("the device is being closed", remedy="open it again", backend=BACKEND)

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name=f"devipc-host-stream-{self.handle}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise ResourceExhausted(
                f"cannot start the thread of a stream ({error})", code="threads", remedy="raise `ulimit -u`"
            ) from error
        return thread

    def _run(self) -> None:
        while (work := self._next()) is not None:
            self._do(work)
        with self._lock:
            dropped = list(self._work)
            self._work.clear()
        for work in dropped:
            self._drop(work)

    def _do(self, work: _Work) -> None:
        """Run what is the current work."""
        finished = False
        try:
            finished = work.run() is not False
        except BaseException as error:
            self._driver.lose(error)
        finally:
            self._drop(work)
        with self._lock:
            self._current = None
            self.completed += finished
            self._finished.notify_all()
            if self._work:  # which came while this ran in the call that submitted it
                self._changed.notify()

    def _drop(self, work: _Work) -> None:
        """Let go of what work held; when memory that was given back is not unmapped then, the device is lost.

        Nobody else would hear of it.
        """
        try:
            self._driver.ranges.drop(work.held)
        except Exception as error:
            self._driver.lose(error)

    def _next(self) -> _Work | None:
        with self._lock:
            self._changed.wait_for(
                lambda: self.stopping or (self._work and not self._stalled and self._current is None)
            )
            if self.stopping:
                return None
            self._current = self._work.popleft()
            self._taken += 1
            return self._current

    def wait_until(self, ready: Callable[[], bool]) -> bool:
        """Poll ``ready`` on the queue's thread; False when the queue stops first."""
        for _ in range(_SPINS):
            if ready():
                return True
        nap_s = _LONGEST_NAP_S / 8
        while not ready():
            if self.stopping:
                return False
            time.sleep(nap_s)
            nap_s = min(nap_s * 2, _LONGEST_NAP_S)
        return True

    def synchronize(self) -> None:
        """Block until all work submitted so far is done; raise when the device is lost or closed meanwhile."""
        if self._thread is threading.current_thread():
            raise UsageError("a stream waits for itself", remedy="synchronise from another thread")
        with self._lock:
            self._check()
            target = self.submitted
            self._finished.wait_for(lambda: self.completed >= target or self.stopping)
            if self.completed < target:
                self._driver.check()
                raise ClosedError("the stream was stopped before its work was done", remedy="close the device last")

    def stall(self) -> None:
        """Start no further work until :meth:`resume`; a piece that runs already goes on."""
        with self._lock:
            self._stalled = True

    def resume(self) -> None:
        """Go on."""
        with self._lock:
            self._stalled = False
            self._changed.notify()

    def destroy(self) -> None:
        """Take no more work, wait until all is done, and end the thread."""
        if self._thread is threading.current_thread():
            raise UsageError("a stream destroys itself", remedy="destroy it from another thread")
        with self._lock:
            if self._closing:
                raise ClosedError("the stream is destroyed already", remedy="destroy a stream once")
            if self._stalled and self._work and not self.stopping:
                raise UsageError("the stream is stalled with work queued", remedy="resume it first")
            self._closing = True
            self._finished.wait_for(lambda: self.completed == self.submitted or self.stopping)
        self.stop()
        self.join()

    def stop(self) -> None:
        """Run nothing more. Does not wait."""
        with self._lock:
            self.stopping = True
            self._changed.notify_all()
            self._finished.notify_all()

    def join(self) -> None:
        """Wait for the end of the thread, unless it is the calling one, and of what runs in a call elsewhere."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)
        if thread is None or not thread.is_alive():
            with self._lock:
                self._finished.wait_for(lambda: self._current is None, timeout=_JOIN_S)


class HostDriver:
    """State of one opened device in this process.

    Parameters
    ----------
    device : str
        Identity, for messages.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.ranges = Ranges()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._queues: dict[int, Queue] = {}
        self._lost: BaseException | None = None
        self._closing = self._closed = False

    @property
    def closed(self) -> bool:
        """True once :meth:`close` has begun."""
        return self._closing

    def check(self, *, giving_back: bool = False) -> None:
        """Raise when this process was forked, or the device is closed or lost (not for calls that give back)."""
        if os.getpid() != self._pid:
            raise ForkError(
                "the device was opened before fork",
                remedy="open devices after fork, or start processes with spawn",
                backend=BACKEND,
                device=self.device,
            )
        if self._closed:
            raise ClosedError("the device is closed", remedy="open it again", backend=BACKEND, device=self.device)
        if self._lost is not None and not giving_back:
            raise DeviceLostError(
                f"the device is lost: {type(self._lost).__name__}: {self._lost}",
                remedy="close the device and open it again; work that was queued is gone",
                backend=BACKEND,
                device=self.device,
                status=VendorStatus("host_stream", 1, type(self._lost).__name__),
            ) from self._lost

    def enter(self, call: str, *, giving_back: bool = False) -> None:
        """Check, then report ``call``: in every call of this backend, behind its look at the arguments."""
        self.check(giving_back=giving_back)
        report(call)

    def create_queue(self, *, priority: int = 0, handle: int | None = None) -> Queue:
        """Make a queue, or return the one with the fixed ``handle``."""
        with self._lock:
            self.check()
            if self._closing:
                raise ClosedError("the device is being closed", remedy="open it again", backend=BACKEND)
            if handle is not None and handle in self._queues:
                return self._queues[handle]
            queue = Queue(self, next(_handles) if handle is None else handle, priority)
            self._queues[queue.handle] = queue
            return queue

    def find_queue(self, handle: int) -> Queue | None:
        """Return the queue with this handle."""
        with self._lock:
            return self._queues.get(handle)

    def uses(self, one: Range) -> bool:
        """Return True when work of any queue holds ``one``."""
        with self._lock:
            queues = list(self._queues.values())
        return any(queue.uses(one) for queue in queues)

    def destroy_queue(self, queue: Queue) -> None:
        """Wait for a queue's work and end it."""
        queue.destroy()
        with self._lock:
            self._queues.pop(queue.handle, None)

    def lose(self, cause: BaseException) -> None:
        """Make the device lost: the first cause stays, pending waits end, queued work is dropped."""
        with self._lock:
            if self._lost is None:
                self._lost = cause
            queues = list(self._queues.values())
        for queue in queues:
            queue.stop()

    def close(self) -> bool:
        """Stop all queues and end their threads; False when it was done, or begun, before.

        Only then do calls answer that the device is closed: whoever hears it may unmap memory that a queue reads.
        """
        if os.getpid() != self._pid:
            self.check()
        with self._lock:
            if self._closing:
                return False
            self._closing = True
            queues = list(self._queues.values())
        for queue in queues:
            queue.stop()
        for queue in queues:
            queue.join()
        with self._lock:
            self._closed = True
            self._queues.clear()
        return True
