"""Backends that lie once about copies and streams."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from devipc.errors import UsageError
from devipc.host.transfer import queue_of
from devipc.spi import Backend
from tests.suite.lying import LIARS, SOON, Disguise, LyingBackend, caught_by

__all__ = ["LIARS"]


@caught_by("XFER-201")
def copies_of_nothing_copy() -> Backend:
    class Transfer(Disguise):
        """Copies at least a word."""

        def copy(self, stream: Any, dst: int, src: int, nbytes: int) -> None:
            self.inner.copy(stream, dst, src, nbytes or 8)

    return LyingBackend(transfer=Transfer)


@caught_by("XFER-202", "OFF-044")
def copies_whole_words() -> Backend:
    class Transfer(Disguise):
        """Rounds lengths down to whole words, but for those below one."""

        def copy(self, stream: Any, dst: int, src: int, nbytes: int) -> None:
            self.inner.copy(stream, dst, src, nbytes // 4 * 4 or nbytes)

    return LyingBackend(transfer=Transfer)


@caught_by("SYNC-212")
def every_second_copy_is_late() -> Backend:
    class Transfer(Disguise):
        """Lets every second copy be overtaken by later ones."""

        def copy(self, stream: Any, dst: int, src: int, nbytes: int) -> None:
            count = self.__dict__["count"] = self.__dict__.get("count", 0) + 1
            if count % 2:
                self.inner.copy(stream, dst, src, nbytes)
            else:
                timer = threading.Timer(0.02, self.inner.copy, (stream, dst, src, nbytes))
                timer.daemon = True
                timer.start()

    return LyingBackend(transfer=Transfer)


@caught_by("XFER-203")
def batch_forgets_the_last() -> Backend:
    class Transfer(Disguise):
        """Leaves out the last range of a batch."""

        def copy_batch(self, stream: Any, dst: Any, src: Any, nbytes: Any) -> None:
            self.inner.copy_batch(stream, dst[:-1], src[:-1], nbytes[:-1])

    return LyingBackend(transfer=Transfer)


@caught_by("XFER-204")
def batch_reads_its_arrays_late() -> Backend:
    class Transfer(Disguise):
        """Looks at the arrays when the stream gets there."""

        def copy_batch(self, stream: Any, dst: Any, src: Any, nbytes: Any) -> None:
            late = self.inner.create_stream()
            stream.call(lambda: self.inner.copy_batch(late, dst, src, nbytes))

    return LyingBackend(transfer=Transfer)


@caught_by("XFER-205")
def one_pitch_for_both() -> Backend:
    class Transfer(Disguise):
        """Takes the distance of the rows at the source for that at the destination too."""

        def copy_strided(self, stream: Any, copies: Any) -> None:
            changed = np.array(copies)
            if changed.size:
                changed[:, 2] = changed[:, 3]
            self.inner.copy_strided(stream, changed)

    return LyingBackend(transfer=Transfer)


@caught_by("XFER-206")
def takes_any_array() -> Backend:
    class Transfer(Disguise):
        """Passes over arrays that it does not understand."""

        def copy_batch(self, stream: Any, dst: Any, src: Any, nbytes: Any) -> None:
            try:
                self.inner.copy_batch(stream, dst, src, nbytes)
            except UsageError:
                pass

    return LyingBackend(transfer=Transfer)


@caught_by("XFER-207")
def borrows_another_stream() -> Backend:
    class Transfer(Disguise):
        """Makes a new stream when one is borrowed, under the old number."""

        def wrap_stream(self, handle: Any) -> Any:
            made = self.inner.create_stream()
            made._queue.handle = int(handle)
            return made

    return LyingBackend(transfer=Transfer)


@caught_by("XFER-208")
def refuses_priorities() -> Backend:
    class Transfer(Disguise):
        """Knows two priorities only."""

        def create_stream(self, *, priority: int = 0) -> Any:
            if priority not in (0, 1):
                raise UsageError(f"priority {priority}", remedy="pass 0 or 1")
            return self.inner.create_stream(priority=priority)

    return LyingBackend(transfer=Transfer)


@caught_by("XFER-209")
def submitting_waits() -> Backend:
    class Transfer(Disguise):
        """Returns from a strided copy when it is done."""

        def copy_strided(self, stream: Any, copies: Any) -> None:
            self.inner.copy_strided(stream, copies)
            if len(copies):
                self.inner.synchronize_stream(stream)

    return LyingBackend(transfer=Transfer)


@caught_by("XFER-211")
def last_byte_is_not_reached() -> Backend:
    class Transfer(Disguise):
        """Leaves out the last byte of large copies."""

        def copy(self, stream: Any, dst: int, src: int, nbytes: int) -> None:
            self.inner.copy(stream, dst, src, nbytes - 1 if nbytes == 3 << 20 else nbytes)

    return LyingBackend(transfer=Transfer)


@caught_by("XFER-212")
def one_queue_for_all_streams() -> Backend:
    class Transfer(Disguise):
        """Puts the work of all streams on one queue."""

        def create_stream(self, **options: Any) -> Any:
            first = self.__dict__.setdefault("first", None)
            if first is None:
                self.__dict__["first"] = self.inner.create_stream(**options)
                return self.__dict__["first"]
            return self.inner.wrap_stream(first.handle)

    return LyingBackend(transfer=Transfer)


@caught_by("XFER-213")
def loses_copies_of_other_threads() -> Backend:
    class Transfer(Disguise):
        """Drops a copy while another thread submits one."""

        busy = threading.Lock()

        def copy(self, stream: Any, dst: int, src: int, nbytes: int) -> None:
            if self.busy.acquire(blocking=False):
                try:
                    time.sleep(0.001)
                    self.inner.copy(stream, dst, src, nbytes)
                finally:
                    self.busy.release()

    return LyingBackend(transfer=Transfer)


@caught_by("LIFE-051")
def streams_end_before_their_work() -> Backend:
    class Transfer(Disguise):
        """Forgets a stream instead of waiting for its work."""

        def destroy_stream(self, stream: Any) -> None:
            threading.Thread(target=self.inner.destroy_stream, args=(stream,), daemon=True).start()

    return LyingBackend(transfer=Transfer)


@caught_by("SYNC-080")
def waits_for_the_latest_record() -> Backend:
    class Transfer(Disguise):
        """Looks at a marker when the waiting stream gets there."""

        def wait_marker(self, stream: Any, marker: Any) -> None:
            queue = queue_of(self.device._driver, stream)
            queue.submit(lambda: queue.wait_until(lambda: marker.point[0].completed >= marker.point[1]))

    return LyingBackend(transfer=Transfer)


@caught_by("SYNC-088")
def never_says_that_it_captures() -> Backend:
    class Transfer(Disguise):
        """Calls no stream capturing."""

        def is_capturing(self, stream: Any) -> bool:
            return False

    return LyingBackend(transfer=Transfer)


@caught_by("SYNC-112")
def waiting_holds_the_interpreter() -> Backend:
    import ctypes

    held = ctypes.PyDLL(None)

    class Transfer(Disguise):
        """Waits for a stream with the interpreter's lock held."""

        def synchronize_stream(self, stream: Any) -> None:
            held.usleep(1_500_000)
            self.inner.synchronize_stream(stream)

    return LyingBackend(transfer=Transfer)


@caught_by("SYNC-090", "SYNC-074", options=SOON)
def markers_are_never_done() -> Backend:
    class Transfer(Disguise):
        """Calls every marker pending."""

        def query_marker(self, marker: Any) -> bool:
            return False

    return LyingBackend(transfer=Transfer)


@caught_by("ORD-083")
def pending_work_is_called_done() -> Backend:
    class Transfer(Disguise):
        """Calls every recorded marker done."""

        def query_marker(self, marker: Any) -> bool:
            return marker.point is not None

    return LyingBackend(transfer=Transfer)
