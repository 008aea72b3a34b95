"""Moving the bytes of pages: a plan is made and put on a stream, straight to the arena or through a small buffer.

Owns the addresses of host places and the order of driver calls. It knows no operation, no key and no client.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from devipc.errors import BoundsError, ClosedError, DevIPCError, UsageError
from devipc.hicache.layout import PoolLayout
from devipc.hicache.moving.arena import HostArena
from devipc.hicache.moving.fan import Fan
from devipc.hicache.planning.expand import CopyList
from devipc.hicache.planning.forms import Submitting
from devipc.hicache.planning.planner import LAYER_GROUPS, Direction, HostPages, Planner
from devipc.hicache.planning.strips import CostModel
from devipc.hicache.tier.hosttier import HostTier
from devipc.hicache.tier.records import Places
from devipc.interfaces.transfer import DeviceTransfer, Marker, Stream
from devipc.memfd import SharedMap

__all__ = ["BouncedMover", "Lists", "MarkerPool", "Mover", "PinnedMover"]

Lists = Iterator[tuple[CopyList, int]]
"""What :meth:`~devipc.hicache.planning.planner.Planner.copies` yields."""

_BY_ONE = Submitting()
_PAUSE_S = 50e-6
_FIRST_RUNS, _PART_RUNS = 16, 512
"""How many runs of pages are planned before anything is submitted, at most, and behind that at a time."""
_APART_NBYTES = 16 * 2**20
"""What takes a bus so long that a quarter of few runs is worth a call of its own: the rest is submitted meanwhile."""
_log = logging.getLogger("devipc.hicache")


class MarkerPool:
    """Markers that are used again: making one is a driver call. Any thread."""

    def __init__(self, transfer: DeviceTransfer) -> None:
        self._transfer = transfer
        self._unused: list[Marker] = []
        self._all: list[Marker] = []

    def record(self, stream: Stream) -> Marker:
        """Return a marker behind all work of ``stream`` so far."""
        try:
            marker = self._unused.pop()
        except IndexError:
            marker = self._transfer.create_marker()
            self._all.append(marker)
        try:
            self._transfer.record(marker, stream)
        except BaseException:
            self._unused.append(marker)
            raise
        return marker

    def give_back(self, marker: Marker) -> None:
        """Take a marker back that nobody will ask again. Streams that wait for it go on doing so."""
        self._unused.append(marker)

    def close(self) -> None:
        """Destroy all of them; to be called when nobody asks any more. A lost device gives nothing back."""
        self._unused.clear()
        while self._all:
            try:
                self._transfer.destroy_marker(self._all.pop())
            except DevIPCError as error:
                _log.warning("a marker was not given back: %s", error)


class Mover(Protocol):
    """Moves pages between one device and one arena. Each lane has a stream of its own and calls from its thread."""

    @property
    def counts(self) -> dict[str, int]:
        """Copies that were submitted so far, for each of :data:`~devipc.hicache.moving.fan.FORMS`."""
        ...

    def planner(self, layout: PoolLayout, addresses: Sequence[int], regions: Sequence[int] = ()) -> Planner:
        """Return what plans for a pool at these device addresses.

        Parameters
        ----------
        layout : PoolLayout
            The pool.
        addresses : sequence of int
            Of each chunk.
        regions : sequence of int
            For each chunk the region in which it is mapped side by side with others, 0 for none; none at all when
            empty. See :attr:`devipc.session.RemoteMemory.region`.

        Raises
        ------
        UsageError
            When a page of the pool cannot be moved here.
        """
        ...

    def lists(
        self,
        planner: Planner,
        direction: Direction,
        pages: npt.NDArray[np.int64],
        places: Places,
        *,
        alone: bool,
        soon: bool,
    ) -> Lists | None:
        """Return the copies of :meth:`move`, made one list after the other; None where they are not known beforehand.

        ``alone``: the other direction has nothing to move now. ``soon``: the stream has nothing to do, so that what
        takes long begins with a list that is made and submitted at once.
        """
        ...

    def move(
        self,
        planner: Planner,
        direction: Direction,
        pages: npt.NDArray[np.int64],
        places: Places,
        stream: Stream,
        on_group: Callable[[int], None],
        *,
        lists: Lists | None = None,
        alone: bool = True,
        soon: bool = True,
    ) -> None:
        """Put the copies of ``pages`` on ``stream``; call ``on_group(k)`` behind those of layer group ``k`` (from 0).

        Of groups that are submitted as one, only the last is told. A backup has one group. What was put there before
        an error stays there: wait for it. ``lists`` are what :meth:`lists` has returned for them, when it was asked.
        """
        ...


def _regions(regions: Sequence[int]) -> list[int] | None:
    """Give every chunk that is mapped alone a region of its own."""
    return [region or -1 - number for number, region in enumerate(regions)] or None


def _check_places(places: Places, page_nbytes: int, arena_nbytes: int) -> None:
    """Refuse places outside of the arena, where no plan is made that would."""
    most = arena_nbytes // page_nbytes
    inside, span = (places.offset >= 0) & (places.offset <= arena_nbytes), places.span
    if span is not None and places.index is not None:
        inside &= (span >= 1) & (span <= most) & (places.index >= 0) & (places.index < span)
    # Only now can the ends not overflow.
    if not inside.all() or (places.offset + (1 if span is None else span) * page_nbytes > arena_nbytes).any():
        raise BoundsError(
            f"host places leave the {arena_nbytes} bytes of host memory",
            code="host_bounds",
            remedy="pass offsets inside the arena, and indices below the extent's length",
        )


class PinnedMover:
    """Copies straight to and from a registered arena.

    Parameters
    ----------
    transfer : DeviceTransfer
        The device's.
    arena : HostArena
        Registered with it.
    groups : sequence of int
        Sizes of a restore's first layer groups.
    fan : Fan, optional
        Side streams; none when None.
    cost : CostModel, optional
        Of the device.
    submitting : Submitting
        How the fan submits long batches.
    """

    def __init__(
        self,
        transfer: DeviceTransfer,
        arena: HostArena,
        *,
        groups: Sequence[int] = LAYER_GROUPS,
        fan: Fan | None = None,
        cost: CostModel | None = None,
        submitting: Submitting = _BY_ONE,
    ) -> None:
        self._submitting = submitting
        self._arena = arena
        self._cost = cost
        self._groups = groups
        self._fan = fan or Fan(transfer, MarkerPool(transfer), count=0, priority=0)
        self.counts = self._fan.counts

    def planner(self, layout: PoolLayout, addresses: Sequence[int], regions: Sequence[int] = ()) -> Planner:
        """See :class:`Mover`."""
        return Planner(
            layout,
            addresses,
            arena=(self._arena.address, self._arena.nbytes),
            block_nbytes=HostTier.block_of(layout.page_nbytes),
            regions=_regions(regions),
            cost=self._cost,
            groups=self._groups,
            submitting=self._submitting,
        )

    def lists(
        self,
        planner: Planner,
        direction: Direction,
        pages: npt.NDArray[np.int64],
        places: Places,
        *,
        alone: bool,
        soon: bool,
    ) -> Lists:
        """See :class:`Mover`."""
        base = places.offset + self._arena.address
        if places.span is None or places.index is None:
            host = HostPages.blocks(base)
        else:
            host = HostPages.extents(base, places.span, places.index)
        return planner.copies(
            direction,
            pages,
            host,
            by_layer_group=direction is Direction.RESTORE,
            alone=alone,
            first_runs=_FIRST_RUNS if soon else 0,
            part_runs=_PART_RUNS,
            apart_nbytes=_APART_NBYTES if soon else 0,
        )

    def move(
        self,
        planner: Planner,
        direction: Direction,
        pages: npt.NDArray[np.int64],
        places: Places,
        stream: Stream,
        on_group: Callable[[int], None],
        *,
        lists: Lists | None = None,
        alone: bool = True,
        soon: bool = True,
    ) -> None:
        """See :class:`Mover`."""
        if lists is None:  # each is made while the copies of those before it run
            lists = self.lists(planner, direction, pages, places, alone=alone, soon=soon)
        restore = direction is Direction.RESTORE
        for copies, end in lists:
            self._fan.put(stream, copies, alone=alone, soon=soon)
            soon = False
            if end:
                on_group(end - 1 if restore else 0)


class BouncedMover:
    """Copies through a small registered buffer, for an arena that could not be registered. Blocks its lane meanwhile.

    Parameters
    ----------
    transfer, arena, groups
        As :class:`PinnedMover`.
    bounce : SharedMap
        The buffer; half of it is for each direction.
    markers : MarkerPool
        For waiting.
    stopped : callable
        True when nobody waits any more: a stream that stands still must not keep the engine from closing.
    """

    def __init__(
        self,
        transfer: DeviceTransfer,
        arena: HostArena,
        bounce: SharedMap,
        markers: MarkerPool,
        *,
        stopped: Callable[[], bool],
        groups: Sequence[int] = LAYER_GROUPS,
    ) -> None:
        self._transfer = transfer
        self._arena = arena
        self._bounce = bounce
        self._markers = markers
        self._fan = Fan(transfer, markers, count=0, priority=0)
        self.counts = self._fan.counts
        self._stopped = stopped
        self._groups = groups
        self._half = bounce.nbytes // 2

    def planner(self, layout: PoolLayout, addresses: Sequence[int], regions: Sequence[int] = ()) -> Planner:
        """See :class:`Mover`."""
        if layout.page_nbytes > self._half:
            raise UsageError(
                f"pages of {layout.page_nbytes} bytes, the buffer of an unpinned host tier takes {self._half}",
                code="bounce",
                remedy="let the host tier be pinned (its status says why it is not), or use smaller pages",
            )
        arena = (self._bounce.address, self._bounce.nbytes)
        return Planner(layout, addresses, arena=arena, regions=_regions(regions), groups=self._groups)

    def lists(
        self,
        planner: Planner,
        direction: Direction,
        pages: npt.NDArray[np.int64],
        places: Places,
        *,
        alone: bool,
        soon: bool,
    ) -> None:
        """See :class:`Mover`: they depend on what is in the buffer."""

    def move(
        self,
        planner: Planner,
        direction: Direction,
        pages: npt.NDArray[np.int64],
        places: Places,
        stream: Stream,
        on_group: Callable[[int], None],
        *,
        lists: Lists | None = None,
        alone: bool = True,
        soon: bool = True,
    ) -> None:
        """See :class:`Mover`. When it returns, the copies are done."""
        page = planner.page_nbytes
        _check_places(places, page, self._arena.nbytes)
        base = self._bounce.address + (self._half if direction is Direction.RESTORE else 0)
        step = self._half // page
        pieces = [component.page_rows * plane.row_nbytes for component, plane in planner.layout.planes()]
        for start in range(0, len(pages), step):
            part = pages[start : start + step]
            slots = base + page * np.arange(len(part))
            plan = planner.plan(direction, part, HostPages.blocks(slots))
            if direction is Direction.RESTORE:
                self._shift(slots, places, start, pieces, to_arena=False)
            for copies in plan.groups:
                self._fan.put(stream, copies)
            self._await(stream)
            if direction is Direction.BACKUP:
                self._shift(slots, places, start, pieces, to_arena=True)
        for group in range(len(planner.groups) if direction is Direction.RESTORE else 1):
            on_group(group)

    def _shift(
        self, slots: npt.NDArray[np.int64], places: Places, start: int, pieces: list[int], *, to_arena: bool
    ) -> None:
        """Move pages between the buffer, where each is packed, and their extents, which are plane by plane."""
        for number, slot in enumerate(slots.tolist(), start):
            base = self._arena.address + int(places.offset[number])
            span = 1 if places.span is None else int(places.span[number])
            index = 0 if places.index is None else int(places.index[number])
            before = 0
            for nbytes in pieces if span > 1 else (sum(pieces),):
                place, packed = base + span * before + index * nbytes, slot + before
                target, source = (place, packed) if to_arena else (packed, place)
                ctypes.memmove(target, source, nbytes)
                before += nbytes

    def _await(self, stream: Stream) -> None:
        marker = self._markers.record(stream)
        try:
            while not self._transfer.query_marker(marker):
                if self._stopped():
                    raise ClosedError("the engine was closed while its stream stood still", remedy="look at the device")
                time.sleep(_PAUSE_S)
        finally:
            self._markers.give_back(marker)
