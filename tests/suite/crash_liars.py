"""Backends that lie once about what becomes of memory and events when the other side dies or lets go."""

from __future__ import annotations

import atexit
import dataclasses
import os
import struct
import threading
from pathlib import Path
from typing import Any

from devipc.errors import DevIPCError, DriverError, HandleError, ResourceExhausted
from devipc.host.maps import move
from devipc.spi import Allocation, Backend, ExportedExtent, OpenedExtent
from tests.suite.lying import LIARS, Disguise, LyingBackend, SyncDisguise, caught_by

__all__ = ["LIARS"]

_OWNER = struct.Struct("<II")


def alive(pid: int) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


class Signed(Disguise):
    """Adds the exporter's pid and the number of its descriptor to each payload, and takes them off again."""

    def export(self, ptr: int, nbytes: int, **options: Any) -> ExportedExtent:
        extent = self.inner.export(ptr, nbytes, **options)
        chunks = tuple(
            dataclasses.replace(chunk, payload=chunk.payload + _OWNER.pack(os.getpid(), fd))
            for chunk, fd in zip(extent.chunks, extent.fds, strict=True)
        )
        return ExportedExtent(extent.kind, chunks, extent.fds)

    def open(self, extent: ExportedExtent) -> OpenedExtent:
        chunks = []
        owner = number = 0
        for chunk in extent.chunks:
            if len(chunk.payload) < 8 + _OWNER.size:
                raise HandleError("too short", remedy="export again")
            owner, number = _OWNER.unpack(chunk.payload[-_OWNER.size :])
            chunks.append(dataclasses.replace(chunk, payload=chunk.payload[: -_OWNER.size]))
        return self.open_of(ExportedExtent(extent.kind, tuple(chunks), extent.fds), owner, number)

    def open_of(self, extent: ExportedExtent, owner: int, number: int) -> OpenedExtent:
        opened: OpenedExtent = self.inner.open(extent)
        return opened

    def zeros(self, extent: ExportedExtent) -> OpenedExtent:
        """Map the extent, and hand out memory of our own for it; lost when it is closed."""
        opened = self.inner.open(extent)
        own = self.inner.allocate(extent.nbytes)
        return OpenedExtent(own.ptr, extent.nbytes, opened.token)


@caught_by("CRASH-058")
def takes_memory_of_the_dead() -> Backend:
    class Memory(Signed):
        """Notes whose memory is mapped where."""

        def open_of(self, extent: ExportedExtent, owner: int, number: int) -> OpenedExtent:
            opened: OpenedExtent = self.inner.open(extent)
            self.device.__dict__.setdefault("owners", {})[opened.ptr] = owner
            return opened

    class Transfer(Disguise):
        """Reads zeros from the memory of a process that has died."""

        def copy(self, stream: Any, dst: int, src: int, nbytes: int) -> None:
            owner = self.device.__dict__.setdefault("owners", {}).get(src)
            if owner is not None and not alive(owner):
                spare = self.device.memory.allocate(nbytes)
                self.inner.copy(stream, dst, spare.ptr, nbytes)
            else:
                self.inner.copy(stream, dst, src, nbytes)

    return LyingBackend(memory=Memory, transfer=Transfer)


@caught_by("CRASH-059", "CRASH-202")
def maps_zeros_of_the_dead() -> Backend:
    class Memory(Signed):
        """Opens a handle of a dead process as memory of nobody."""

        def open_of(self, extent: ExportedExtent, owner: int, number: int) -> OpenedExtent:
            opened: OpenedExtent = self.inner.open(extent)
            return opened if alive(owner) else self.zeros(extent)

    return LyingBackend(memory=Memory)


@caught_by("CRASH-064")
def never_forgives_a_death() -> Backend:
    class Memory(Signed):
        """Opens nothing any more once a process has died whose memory it had open."""

        def open_of(self, extent: ExportedExtent, owner: int, number: int) -> OpenedExtent:
            known: set[int] = self.__dict__.setdefault("known", set())
            if not all(alive(pid) for pid in known):
                raise DriverError("an earlier exporter has died", remedy="start again")
            known.add(owner)
            opened: OpenedExtent = self.inner.open(extent)
            return opened

    return LyingBackend(memory=Memory)


@caught_by("CRASH-057", "CRASH-203")
def leases_outlive_their_holder() -> Backend:
    class Memory(Disguise):
        """Lets one process open an extent until that ends; of one that is killed it does not hear."""

        def open(self, extent: ExportedExtent) -> Any:
            lease = f"lease-{os.fstat(extent.fds[0]).st_ino}"
            if os.path.exists(lease) and open(lease).read() != str(os.getpid()):  # noqa: SIM115
                raise DriverError("another process has it open", remedy="end that")
            with open(lease, "w") as file:
                file.write(str(os.getpid()))
            atexit.register(Path(lease).unlink, missing_ok=True)
            return self.inner.open(extent)

    return LyingBackend(memory=Memory)


LEFT_FILES = "/dev/shm/devipc-liar-"


@caught_by("CRASH-065")
def exports_through_a_file() -> Backend:
    class Memory(Disguise):
        """Keeps a file in shared memory while there are exports, and finds it by a name that all processes share."""

        def export(self, ptr: int, nbytes: int, **options: Any) -> Any:
            extent = self.inner.export(ptr, nbytes, **options)
            fd = os.open(f"{LEFT_FILES}{os.getppid()}", os.O_CREAT | os.O_RDWR, 0o600)
            self.__dict__.setdefault("files", {})[extent.fds] = fd
            return extent

        def release(self, extent: ExportedExtent) -> None:
            os.close(self.__dict__.setdefault("files", {}).pop(extent.fds))
            if not self.files:
                os.unlink(f"{LEFT_FILES}{os.getppid()}")
            self.inner.release(extent)

    return LyingBackend(memory=Memory)


@caught_by("CRASH-201")
def gone_events_without_a_type() -> Backend:
    class Events(Disguise):
        """Raises whatever comes along when the maker of an event is gone."""

        def query(self, event: Any) -> Any:
            try:
                done = self.inner.query(event)
            except HandleError as error:
                raise OSError(str(error)) from None
            maker = self.device.__dict__.setdefault("makers", {}).get(id(event))
            if maker is not None and not alive(maker):
                raise OSError("its maker is gone")
            return done

        def open(self, payload: bytes) -> Any:
            event = self.inner.open(payload)
            self.device.__dict__.setdefault("makers", {})[id(event)] = struct.unpack_from("<I", payload, 8)[0]
            return event

    return LyingBackend(sync=type("Sync", (SyncDisguise,), {"event_form": Events}))


# --- letting go -----------------------------------------------------------------------------------------------------


@caught_by("LIFE-049", "LIFE-050")
def scribbles_on_freed_memory() -> Backend:
    class Memory(Disguise):
        """Overwrites memory when it is freed, whoever has it open."""

        def free(self, allocation: Allocation) -> None:
            if self.inner.describe(allocation.ptr).nbytes:
                move(allocation.ptr, allocation.ptr + allocation.nbytes // 2, allocation.nbytes // 2)
            self.inner.free(allocation)

    return LyingBackend(memory=Memory)


@caught_by("LIFE-052", "LIFE-203")
def release_clears() -> Backend:
    class Memory(Disguise):
        """Clears a range when its export is taken back."""

        def release(self, extent: ExportedExtent) -> None:
            chunk = extent.chunks[0]
            if chunk.nbytes > 4096:
                os.pwrite(extent.fds[0], bytes(4096), chunk.offset)
            self.inner.release(extent)

    return LyingBackend(memory=Memory)


@caught_by("LIFE-054")
def exit_waits_for_ever() -> Backend:
    class Memory(Disguise):
        """Starts a thread with each mapping that the interpreter waits for at its end."""

        def open(self, extent: ExportedExtent) -> Any:
            opened = self.inner.open(extent)
            ended = threading.Event()
            self.__dict__.setdefault("ends", {})[opened.ptr] = ended
            threading.Thread(target=ended.wait).start()
            return opened

        def close(self, opened: OpenedExtent) -> None:
            self.inner.close(opened)
            self.__dict__.setdefault("ends", {}).pop(opened.ptr).set()

    return LyingBackend(memory=Memory)


@caught_by("LIFE-109")
def closes_the_latest() -> Backend:
    class Memory(Disguise):
        """Closes the mapping that was opened last, whichever was meant."""

        def open(self, extent: ExportedExtent) -> Any:
            self.__dict__.setdefault("order", []).append(self.inner.open(extent))
            return self.__dict__["order"][-1]

        def close(self, opened: OpenedExtent) -> None:
            self.inner.close(self.__dict__["order"].pop())

    return LyingBackend(memory=Memory)


@caught_by("LIFE-120")
def opens_run_out() -> Backend:
    class Memory(Disguise):
        """Opens 200 extents in the life of a process, closed or not."""

        def open(self, extent: ExportedExtent) -> Any:
            count = self.__dict__["count"] = self.__dict__.get("count", 0) + 1
            if count > 200:
                raise ResourceExhausted("no slot is left for a mapping", remedy="start again")
            return self.inner.open(extent)

    return LyingBackend(memory=Memory)


@caught_by("MEM-098")
def takes_equal_numbers_for_its_own() -> Backend:
    class Memory(Signed):
        """Takes a descriptor that has the exporter's number for one of its own."""

        def open_of(self, extent: ExportedExtent, owner: int, number: int) -> OpenedExtent:
            opened: OpenedExtent = self.inner.open(extent)
            return self.zeros(extent) if number == extent.fds[-1] else opened

    return LyingBackend(memory=Memory)


@caught_by("MEM-107")
def opens_are_not_thread_safe() -> Backend:
    class Memory(Disguise):
        """Keeps what it opens in one place for all threads for a moment."""

        def open(self, extent: ExportedExtent) -> Any:
            self.__dict__["current"] = self.inner.open(extent)
            threading.Event().wait(0.002)
            return self.__dict__["current"]

    return LyingBackend(memory=Memory)


@caught_by("MEM-108", "MEM-208")
def takes_its_own_export_for_the_peers() -> Backend:
    class Memory(Disguise):
        """Opens an own export instead when there is one of that size."""

        def export(self, ptr: int, nbytes: int, **options: Any) -> Any:
            extent = self.inner.export(ptr, nbytes, **options)
            self.__dict__.setdefault("own", {})[nbytes] = extent
            return extent

        def release(self, extent: ExportedExtent) -> None:
            self.__dict__.setdefault("own", {}).pop(extent.nbytes, None)
            self.inner.release(extent)

        def open(self, extent: ExportedExtent) -> Any:
            return self.inner.open(self.__dict__.setdefault("own", {}).get(extent.nbytes, extent))

    return LyingBackend(memory=Memory)


@caught_by("MEM-119")
def keeps_what_it_mapped_before_the_fault() -> Backend:
    class Memory(Disguise):
        """Maps the good chunks first, and forgets them when a later one is bad."""

        def open(self, extent: ExportedExtent) -> Any:
            try:
                return self.inner.open(extent)
            except DevIPCError:
                if len(extent.chunks) > 1:
                    self.inner.open(ExportedExtent(extent.kind, extent.chunks[:1], extent.fds[:1]))
                raise

    return LyingBackend(memory=Memory)


@caught_by("MEM-117")
def no_descriptor_is_a_surprise() -> Backend:
    class Memory(Disguise):
        """Duplicates descriptors for itself, and lets the system's error through."""

        def open(self, extent: ExportedExtent) -> Any:
            for fd in extent.fds:
                os.close(os.dup(fd))
            return self.inner.open(extent)

    return LyingBackend(memory=Memory)
