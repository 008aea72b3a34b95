"""Looks whether anything stands still: operations far over their deadline, an engine without a sign of life.

Owns the rules of when to report and when to kill, and the report itself: operations and pins. It ends nothing by
itself: what it decides, it calls.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from devipc.deadline import start_thread
from devipc.hicache.daemon.client import AttachedClient
from devipc.hicache.daemon.keeper import Keeper, Life
from devipc.hicache.tier.hosttier import HostTier

__all__ = ["Watchdog"]

_EVERY_S = 0.25
_log = logging.getLogger("devipc.hicache")


class Watchdog:
    """See the module.

    Parameters
    ----------
    keeper : Keeper
        Whose engine is looked at.
    tier : HostTier
        Whose pins are reported.
    clients : callable
        Returns those who are attached.
    clients_of : callable
        Returns those of one life of the engine.
    stall_s, stuck_s, reap_s : float
        How long an operation may be over its deadline before it is reported; how long an engine may be silent, or in
        one driver call, and how long copies of a client that is gone may go on, before the engine is killed.
    chores : sequence of callable
        Called each time, too.
    """

    def __init__(
        self,
        keeper: Keeper,
        tier: HostTier,
        clients: Callable[[], Iterable[AttachedClient]],
        clients_of: Callable[[Life], Iterable[AttachedClient]],
        *,
        stall_s: float,
        stuck_s: float,
        reap_s: float,
        chores: Iterable[Callable[[], None]] = (),
    ) -> None:
        self._keeper, self._tier, self._clients, self._clients_of = keeper, tier, clients, clients_of
        self._stall_s, self._stuck_s, self._reap_s = stall_s, stuck_s, reap_s
        self._chores = tuple(chores)
        self._stalled: dict[tuple[bytes, int], str] = {}
        self._awake_since = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="devipc-hicache-watchdog", daemon=True)

    @property
    def stalled(self) -> list[str]:
        """Operations that are far over their deadline, as text."""
        return list(self._stalled.values())

    def start(self) -> None:
        """Begin to look.

        Raises
        ------
        ResourceExhausted
            When no thread is to be had.
        """
        start_thread(self._thread, "look after the engine and its clients")

    def close(self) -> None:
        """Stop looking. Blocks for a moment."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._stopping.wait(_EVERY_S):
            now = time.monotonic()
            if now - looked - _EVERY_S > min(self._stuck_s, self._reap_s) / 2:
                # This process stood still, and perhaps all others with it, as those of a container do.
                self._awake_since = now
            looked = now
            for look in (self._look_at_operations, self._look_at_engine, self._look_at_leavers, *self._chores):
                try:
                    look()
                except Exception:  # whatever it is, others must be looked at
                    _log.exception("a defect of the watchdog")

    def _awake_s(self) -> float:
        """Return for how many seconds this process has run since it last stood still."""
        return time.monotonic() - self._awake_since

    def _look_at_operations(self) -> None:
        now = time.monotonic()
        found: dict[tuple[bytes, int], str] = {}
        for client in list(self._clients()):
            for op in client.session.open_ops():
                over_s = op.overdue_s(now)
                if over_s > self._stall_s:
                    found[op.holder] = (
                        f"{op.kind.value} {op.op} of client {client.client.hex()[:8]} (process"
                        f" {client.link.peer.pid}) is {op.state}, {over_s:.1f} s over its deadline"
                    )
        news = found.keys() - self._stalled.keys()
        self._stalled = found
        if news:
            lines = [*(found[holder] for holder in sorted(news)), f"pins: {self._tier.pins()}"]
            _log.error("operations do not end:\n  %s", "\n  ".join(lines))

    def _look_at_engine(self) -> None:
        life = self._keeper.life
        if life is None:
            return
        awake_s = self._awake_s()
        for what, silent_s in life.process.stuck().items():
            if min(silent_s, awake_s) > self._stuck_s:
                doing = "the process gave no sign of life" if what == "process" else f"thread {what!r} is in the driver"
                self._keeper.kill(life, f"{doing} for {silent_s:.1f} s")
                return

    def _look_at_leavers(self) -> None:
        """A client that is gone cannot be asked to wait: what its copies hang on is the engine's device."""
        life = self._keeper.life
        if life is None:
            return
        # Those of an engine that is gone hang on something else, which no later engine can help.
        awake_s = self._awake_s()
        late = [client for client in self._clients_of(life) if min(client.leaving_s(), awake_s) > self._reap_s]
        if late:
            names = ", ".join(f"{client.client.hex()[:8]} (process {client.link.peer.pid})" for client in late)
            why = f"copies of clients that are gone did not end within {self._reap_s:g} s: {names}"
            self._keeper.kill(life, why)
