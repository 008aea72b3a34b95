"""Copies in this process: a stream and its markers for each direction, and the arena's registration.

Owns what the driver holds for an engine: streams, markers, registered host memory. It knows neither an operation nor
how a client is told. The engine process is built on it as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from devipc.absence import need_transfer
from devipc.errors import DevIPCError
from devipc.hicache.engine.copies import OpenedPool, Opener
from devipc.hicache.engine.pools import Pool
from devipc.hicache.layout import PoolLayout
from devipc.hicache.moving.arena import CHUNK_NBYTES, HostArena, Pinned
from devipc.hicache.moving.entrytimes import submitting
from devipc.hicache.moving.fan import Fan
from devipc.hicache.moving.floor import contiguous_nbytes_per_s, measured_costs
from devipc.hicache.moving.mover import BouncedMover, Lists, MarkerPool, Mover, PinnedMover
from devipc.hicache.planning.planner import LAYER_GROUPS, Direction, Planner
from devipc.hicache.requests import CompletionFence, PageIds, RegisterPool, SignalledFence
from devipc.hicache.results import defect
from devipc.hicache.tier.records import Places
from devipc.interfaces.backend import Device
from devipc.interfaces.transfer import DeviceTransfer, Marker, Stream
from devipc.undoing import try_each, undo

__all__ = ["LocalCarrier", "LocalCopies", "LocalJob", "PlannedAhead"]

_PRIORITY = {Direction.RESTORE: -1, Direction.BACKUP: 0}  # a lower number runs first
_SIDE_STREAMS = 2
_LISTS_AHEAD = 6  # a list has at most 512 runs of pages
_log = logging.getLogger("devipc.hicache")


class LocalJob:
    """Copies on a stream, and the marker behind them: a :class:`~devipc.hicache.engine.copies.Job`. One thread."""

    def __init__(self, copies: LocalCopies) -> None:
        self.error: DevIPCError | None = None
        self._copies = copies
        self._marker: Marker | None = None
        self._done = False

    def mark(self) -> None:
        """Mark the end of the copies; behind a failure too: what was put on the stream before it may still run.

        Raises what keeps the end from being known: then nothing is marked.
        """
        self._copies.fan.settle(self._copies.stream)
        self._marker = self._copies.markers.record(self._copies.stream)

    def poll(self) -> bool:
        """See :class:`~devipc.hicache.engine.copies.Job`."""
        if self._done:
            return True
        if self._marker is None:
            self.mark()
        assert self._marker is not None
        if not self._copies.transfer.query_marker(self._marker):
            return False
        self._copies.flying -= 1
        self._copies.markers.give_back(self._marker)
        self._marker, self._done = None, True
        return True


@dataclass(frozen=True, slots=True)
class PlannedAhead:
    """Copies of a job that were planned before it began, for as long as the other direction is as ``alone`` says."""

    alone: bool
    lists: Lists


class LocalCopies:
    """One direction. Fulfils :class:`~devipc.hicache.engine.copies.Copies`.

    Parameters
    ----------
    transfer : DeviceTransfer
        The device's.
    direction : Direction
        Decides the stream's priority.
    lose : callable
        Told of a defect, which must end the engine.

    Attributes
    ----------
    flying : int
        Jobs whose copies are not known to be over.
    opposite : LocalCopies or None
        The other direction of the same device.
    """

    wakes = False

    def __init__(self, transfer: DeviceTransfer, direction: Direction, lose: Callable[[DevIPCError], None]) -> None:
        self.transfer = transfer
        self.stream: Stream = transfer.create_stream(priority=_PRIORITY[direction])
        self.markers = MarkerPool(transfer)
        self.fan = Fan(transfer, self.markers, count=_SIDE_STREAMS, priority=_PRIORITY[direction])
        self.flying = 0
        self.opposite: LocalCopies | None = None
        self.mover: Mover  # set by the carrier before the first job
        self.wake: Callable[[], None] = lambda: None
        self.stopped: Callable[[], bool] = lambda: (
            False
        )  # True when a stream that stands still must not keep a buffered copy waiting
        self._lose = lose

    def announce(self) -> None:
        """See :class:`~devipc.hicache.engine.copies.Copies`: nobody needs to wake."""

    def start(
        self, pool: Pool, direction: Direction, pages: PageIds, places: Places, fence: CompletionFence
    ) -> LocalJob:
        """See :class:`~devipc.hicache.engine.copies.Copies`."""
        assert isinstance(pool.opened, Planner)
        return self.move(pool.opened, direction, pages, places, fence)  # type: ignore[arg-type]

    @property
    def _alone(self) -> bool:
        """True when the other direction has nothing to move now."""
        return self.opposite is None or not self.opposite.flying

    def plan(self, planner: Planner, direction: Direction, pages: PageIds, places: Places) -> PlannedAhead | None:
        """Return the copies of :meth:`move`, of which the first lists are made now; any thread. Errors as there."""
        alone = self._alone
        lists = self.mover.lists(planner, direction, pages, places, alone=alone, soon=False)
        return None if lists is None else PlannedAhead(alone, chain(list(islice(lists, _LISTS_AHEAD)), lists))

    def move(
        self,
        planner: Planner,
        direction: Direction,
        pages: PageIds,
        places: Places,
        fence: SignalledFence,
        *,
        planned: PlannedAhead | None = None,
    ) -> LocalJob:
        """As :meth:`start`, for a pool whose planner is at hand; ``planned`` is what :meth:`plan` returned."""
        alone, soon = self._alone, not self.flying
        lists = planned.lists if planned is not None and planned.alone is alone else None
        job = LocalJob(self)
        self.flying += 1
        try:
            if len(places.offset):
                self.mover.move(
                    planner,
                    direction,
                    pages,
                    places,
                    self.stream,
                    lambda group: fence.signal(self.stream, group + 1),
                    lists=lists,
                    alone=alone,
                    soon=soon,
                )
            else:
                fence.signal(self.stream, 1)
        except DevIPCError as error:
            job.error = error
        except BaseException as error:
            _log.exception("a defect of the cache engine, which ends it")
            job.error = defect(error)
            self._lose(job.error)
        try:
            job.mark()
        except DevIPCError as error:  # poll() tries it again as long as the device is there, and says what is wrong
            _log.debug("copies were not marked yet: %s", error)
        return job

    def check(self) -> None:
        """Raise DeviceLostError when the driver says that the device is lost. Submits nothing, waits for nothing."""
        self.transfer.is_capturing(self.stream)

    def close(self) -> None:
        """See :class:`~devipc.hicache.engine.copies.Copies`."""
        self.markers.close()
        try:
            self.transfer.destroy_stream(self.stream)
        except DevIPCError as error:
            _log.warning("while an engine was closed: %s", error)
        self.fan.close()


class LocalCarrier:
    """Both directions, in this process. Fulfils :class:`~devipc.hicache.engine.copies.Carrier`.

    Parameters
    ----------
    device : Device
        Stays the caller's, and open.
    arena : HostArena
        Stays the caller's, and mapped, until :meth:`close` has returned.
    chunk_nbytes, pin_required, bounce_nbytes, groups
        As :class:`~devipc.hicache.engine.EngineConfig` has them.
    threads : int
        How many may submit long lists of small copies, each way, where that is sooner than one. More than one is for a
        process of its own: they would share the interpreter with a model.

    Raises
    ------
    CapabilityError, ResourceExhausted
        When the device has no streams, or host memory cannot be registered as demanded.
    """

    def __init__(
        self,
        device: Device,
        arena: HostArena,
        *,
        chunk_nbytes: int = CHUNK_NBYTES,
        pin_required: bool = False,
        bounce_nbytes: int = 32 * 2**20,
        groups: Sequence[int] = LAYER_GROUPS,
        threads: int = 1,
    ) -> None:
        self.device = device
        self.transfer = need_transfer(device)
        self.lose: Callable[[DevIPCError], None] = lambda error: None  # set by whoever has to know of a defect
        self.pinned = Pinned(
            arena, self.transfer, chunk_nbytes=chunk_nbytes, required=pin_required, bounce_nbytes=bounce_nbytes
        )
        self._groups = groups
        self._arena = arena
        self._copies: dict[Direction, LocalCopies] = {}
        try:
            for direction in (Direction.RESTORE, Direction.BACKUP):
                self._copies[direction] = LocalCopies(self.transfer, direction, lambda error: self.lose(error))
            self._measure(threads)
            for copies in self._copies.values():
                copies.fan.threads = self.submitting.threads
                copies.mover = self._mover(copies)
        except BaseException:
            undo(self.abandon)
            raise
        one, other = self._copies.values()
        one.opposite, other.opposite = other, one

    def abandon(self) -> None:
        """Give everything back, as long as nobody has its lanes."""
        try_each([*(copies.close for copies in self._copies.values()), self.pinned.close])

    def _measure(self, threads: int) -> None:
        host = self._arena if self.pinned.bounce is None else self.pinned.bounce
        streams = [copies.stream for copies in self._copies.values()]
        where = self.device, streams[0], host.address, host.nbytes
        self.floor_nbytes_per_s = contiguous_nbytes_per_s(*where)
        self.cost = measured_costs(*where, floor_nbytes_per_s=self.floor_nbytes_per_s)
        several = threads if self.pinned.bounce is None else 1
        self.submitting = submitting(self.device, streams, host.address, host.nbytes, most=several)

    def _mover(self, copies: LocalCopies) -> Mover:
        if self.pinned.bounce is None:
            return PinnedMover(
                self.transfer,
                self._arena,
                groups=self._groups,
                fan=copies.fan,
                cost=self.cost,
                submitting=self.submitting,
            )
        return BouncedMover(
            self.transfer,
            self._arena,
            self.pinned.bounce,
            copies.markers,
            stopped=lambda: copies.stopped(),
            groups=self._groups,
        )

    @property
    def device_uuid(self) -> str:
        """See :class:`~devipc.hicache.engine.copies.Carrier`."""
        return self.device.info.uuid

    @property
    def unpinned_reason(self) -> str:
        """See :class:`~devipc.hicache.engine.copies.Carrier`."""
        return self.pinned.reason

    def plans(self) -> dict[str, dict[str, int]]:
        """See :class:`~devipc.hicache.engine.copies.Carrier`."""
        return {direction.value: dict(copies.mover.counts) for direction, copies in self._copies.items()}

    def copies(self, direction: Direction) -> LocalCopies:
        """See :class:`~devipc.hicache.engine.copies.Carrier`."""
        return self._copies[direction]

    def planner(self, layout: PoolLayout, addresses: Sequence[int], regions: Sequence[int] = ()) -> Planner:
        """Return what plans for a pool at these addresses; see :class:`~devipc.hicache.moving.mover.Mover`."""
        return self._copies[Direction.BACKUP].mover.planner(layout, addresses, regions)

    def open_pool(self, owner: bytes, request: RegisterPool, done: Opener) -> None:
        """See :class:`~devipc.hicache.engine.copies.Carrier`; answers at once."""
        try:
            opened: OpenedPool | DevIPCError = self.planner(request.layout, request.addresses)
        except DevIPCError as error:
            opened = error
        done(opened)

    def close_pool(self, opened: OpenedPool, done: Callable[[], None]) -> None:
        """See :class:`~devipc.hicache.engine.copies.Carrier`: the addresses are the client's own."""
        done()

    def close(self) -> None:
        """See :class:`~devipc.hicache.engine.copies.Carrier`."""
        self.pinned.close()
