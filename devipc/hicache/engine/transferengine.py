"""The transfer engine of one device: clients' requests become operations, and those are moved by two lanes.

Owns the lanes, and what each client has open. It knows no socket and no wire: whoever carries requests calls a
:class:`Session`, and gets the answers back through one. Nor does it know who moves the bytes: it is handed a carrier.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

from devipc.deadline import deadline_after, remaining
from devipc.errors import ClosedError, CompletionTimeout, DeviceLostError, DevIPCError, UsageError
from devipc.hicache.engine.copies import Carrier, Copies
from devipc.hicache.engine.lane import Lane
from devipc.hicache.engine.session import Session
from devipc.hicache.moving.arena import CHUNK_NBYTES
from devipc.hicache.moving.pace import Pace
from devipc.hicache.planning.planner import LAYER_GROUPS, Direction
from devipc.hicache.requests import Answers
from devipc.hicache.tier.hosttier import HostTier

__all__ = ["Engine", "EngineConfig"]

_MOST_KEPT = 90  # in percent: the rest is for whoever needs most
_GRACE_S = 0.1  # to end a thread that has nothing to do
_MAY_BE_ZERO = ("kept_percent", "index_entries", "backup_nbytes_per_s", "restore_nbytes_per_s")
_log = logging.getLogger("devipc.hicache")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits and sizes.

    Parameters
    ----------
    tier_nbytes : int
        Host memory of the tier.
    slab_nbytes : int
        Host memory that one page size takes at a time; at least a page of each pool.
    chunk_nbytes : int
        Host memory registered by one call.
    index_entries : int
        Pages that ``match`` can find; others are found by a lookup only. 0: one for each 32 KiB of the tier.
    extent_pages : int
        Longest run of pages that is stored, and evicted, as one.
    pin_required : bool
        Refuse to run when the tier cannot be pinned, instead of copying through a small buffer.
    bounce_nbytes : int
        Size of that buffer.
    kept_percent : int
        Part of the tier that is kept, in equal shares, for the clients and one that may come: no client keeps so much
        from being evicted, by leases and transfers, that others have less than theirs. 0: whoever comes first.
    max_ops : int
        Transfers that a client may have unfinished; more are refused as busy.
    max_flying, max_flying_nbytes : int
        Operations and bytes on a stream at a time, for each direction; an operation alone may be larger.
    backup_nbytes_per_s, restore_nbytes_per_s : int
        Most bytes a second of each direction, on average; 0: as many as the device moves.
    layer_groups : sequence of int
        Layers of a restore's first fences; the last takes the rest.
    """

    tier_nbytes: int = 2**30
    slab_nbytes: int = 64 * 2**20
    chunk_nbytes: int = CHUNK_NBYTES
    index_entries: int = 0
    extent_pages: int = 16
    pin_required: bool = False
    bounce_nbytes: int = 32 * 2**20
    kept_percent: int = 0
    max_ops: int = 256
    max_flying: int = 8
    max_flying_nbytes: int = 2**30
    backup_nbytes_per_s: int = 0
    restore_nbytes_per_s: int = 0
    layer_groups: Sequence[int] = LAYER_GROUPS

    def __post_init__(self) -> None:
        """Refuse what would only fail, or go wrong, at the first copy."""
        sizes = {one.name: getattr(self, one.name) for one in fields(self)}
        for number, group in enumerate(sizes.pop("layer_groups")):
            sizes[f"layer_groups[{number}]"] = group
        for name, value in sizes.items():
            if name == "pin_required":
                continue
            least = 0 if name in _MAY_BE_ZERO else 1
            if not hasattr(value, "__index__") or value < least:
                raise UsageError(f"{name} of {value!r}", code="config", remedy=f"pass an integer, at least {least}")
        if self.kept_percent > _MOST_KEPT:
            raise UsageError(f"kept_percent of {self.kept_percent}", code="config", remedy=f"pass 0 .. {_MOST_KEPT}")


class Engine:
    """See the module. Any thread.

    Parameters
    ----------
    carrier : Carrier
        Moves the bytes; owned, also when this raises. Memory that it reaches stays mapped until :meth:`close` has
        returned.
    tier : HostTier
        The tier; used by no other engine at the same time.
    config : EngineConfig
        Limits.

    Raises
    ------
    ResourceExhausted
        When no thread is to be had.
    """

    def __init__(self, carrier: Carrier, tier: HostTier, config: EngineConfig) -> None:
        self.carrier = carrier
        self.tier = tier
        self.config = config
        self.lost: DevIPCError | None = None
        self._lock = threading.Lock()
        self._sessions: list[Session] = []
        self._closing = False
        # Through the buffer of a tier that is not pinned, pages go one at a time.
        tier.shares.kept_percent = config.kept_percent
        tier.extent_pages = 1 if carrier.unpinned_reason else config.extent_pages
        copies = [carrier.copies(direction) for direction in (Direction.RESTORE, Direction.BACKUP)]
        lanes: list[Lane] = []
        try:
            rates = (config.restore_nbytes_per_s, config.backup_nbytes_per_s)
            for name, one, rate in zip(("restore", "backup"), copies, rates, strict=True):
                lanes.append(self._lane(name, one, Pace(rate)))
        except BaseException:
            for lane in lanes:
                lane.stop(timeout_s=5.0)
            for one in copies[len(lanes) + 1 :]:  # a lane that could not be made has closed its own
                one.close()
            carrier.close()
            raise
        self.restores, self.backups = lanes
        self.restores.chores = self._expire
        self.backups.chores = self.tier.tidy
        tier.on_room = self.backups.wake_for_room

    def _lane(self, name: str, copies: Copies, pace: Pace) -> Lane:
        return Lane(
            name,
            copies,
            pace=pace,
            max_flying=self.config.max_flying,
            max_flying_nbytes=self.config.max_flying_nbytes,
            lost=lambda: self.lost,
            lose=self.lose,
        )

    # --- clients -----------------------------------------------------------------------------------------------------

    def attach(self, owner: bytes, answers: Answers) -> Session:
        """Return the engine's side of a new client.

        Parameters
        ----------
        owner : bytes
            Its instance, 16 bytes; one life of one process.
        answers : Answers
            Where its answers go.
        """
        session = Session(self, owner, answers)
        with self._lock:
            self._refuse_when_closing()
            self._sessions.append(session)
            self.tier.shares.join(owner)  # before anybody detaches it: the tier's account outlives this engine
        return session

    def detach(self, session: Session) -> None:
        """Forget a client that has nothing open any more."""
        with self._lock:
            if session not in self._sessions:
                return
            self._sessions.remove(session)
        self.tier.shares.leave(session.owner)
        self.tier.on_room()

    def _refuse_when_closing(self) -> None:
        if self._closing:
            raise ClosedError("the cache engine is closed", remedy="connect to another one")

    # --- the device --------------------------------------------------------------------------------------------------

    def lose(self, error: DevIPCError) -> None:
        """End everything that is open, and refuse what comes. The first cause stays.

        Copies that are in flight are waited for, unless it is a :class:`~devipc.errors.DeviceLostError`, also as a
        second cause: then nothing moves any more.
        """
        with self._lock:
            second = isinstance(error, DeviceLostError) and not isinstance(self.lost, DeviceLostError)
            if self.lost is not None and not second:
                return
            self.lost = error
        _log.error("the cache engine ends: %s", error)
        self.restores.wake()
        self.backups.wake()

    def _expire(self) -> float | None:
        """End leases whose time is over; the restore lane's chore."""
        over, following = self.tier.expire()
        if over:
            with self._lock:
                by_owner = {session.owner: session for session in self._sessions}
            for owner, op in over:
                if owner in by_owner:
                    by_owner[owner].expired(op)
        return following

    # --- looking and closing -----------------------------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """Return what the engine does, as JSON-ready values."""
        with self._lock:
            sessions = list(self._sessions)
        now = time.monotonic()
        ops = [op for session in sessions for op in session.open_ops()]
        return {
            "device": self.carrier.device_uuid,
            "lost": str(self.lost) if self.lost else "",
            "pinned": not self.carrier.unpinned_reason,
            "unpinned_reason": self.carrier.unpinned_reason,
            "clients": len(sessions),
            "operations": dict(Counter(f"{op.kind.value}:{op.state}" for op in ops)),
            "oldest_s": max((now - op.began for op in ops), default=0.0),
            "lanes": {
                name: {
                    "flying": lane.flying,
                    "moved_nbytes": lane.moved_nbytes,
                    "busy_s": round(lane.busy_s, 6),
                    "share_of_floor": lane.share_of(self.carrier.floor_nbytes_per_s),
                }
                for name, lane in (("backup", self.backups), ("restore", self.restores))
            },
            "floor_nbytes_per_s": round(self.carrier.floor_nbytes_per_s),
            "plans": self.carrier.plans(),
            "tier": self.tier.status(),
        }

    def close(self, timeout_s: float = 30.0) -> None:
        """End everything, then give back what the device and the driver hold for it. Calling it again does nothing.

        Clients that are still there are told that the engine is dying, and, when nothing moves any more, gone.

        Raises
        ------
        CompletionTimeout
            When a stream did not let go in time. Host memory stays registered and must stay mapped; call it again.
        """
        deadline = deadline_after(timeout_s)
        with self._lock:
            self._closing = True
            sessions = list(self._sessions)
        for session in sessions:
            session.answers.engine_dying()
            session.dying()
        lanes = {"restore": self.restores, "backup": self.backups}
        for lane in lanes.values():
            lane.stop(timeout_s=0.0)  # both at once; none waits for the other
        stuck = [name for name, lane in lanes.items() if not lane.stop(timeout_s=max(remaining(deadline), _GRACE_S))]
        if stuck:
            raise CompletionTimeout(
                f"the {' and '.join(stuck)} stream has not let go of its operations after {timeout_s:g} s",
                code="stalled_stream",
                remedy="find out what the stream waits for; its memory stays mapped until it goes on",
            )
        self.carrier.close()
        self.tier.on_room = lambda: None
        for session in sessions:
            self.detach(session)
            session.answers.engine_gone()
