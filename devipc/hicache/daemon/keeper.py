"""Keeps one engine process running: starts it, waits for its end, lets its clients go, and starts the next one.

Owns one *life* at a time: an engine process and the tables that were made for it. The host tier outlives them. It
knows clients only as something that has to be let go between two lives.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from devipc.channel.listener import remove_leftovers
from devipc.deadline import start_thread
from devipc.errors import DeviceLostError, DevIPCError
from devipc.hicache.daemon.options import DaemonConfig
from devipc.hicache.daemon.remote import EngineProcess, EngineSpawn
from devipc.hicache.engine.transferengine import Engine
from devipc.hicache.moving.arena import HostArena
from devipc.hicache.tier.hosttier import HostTier

__all__ = ["Account", "Keeper", "Life"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_LIVED_S = 10.0  # a life that was so long makes the next pause short again
_LETTING_GO_S = 10.0
_KILLED_S = 5.0
_LOOK_S = 0.1
_TOLD_S = 1.0
_log = logging.getLogger("devipc.hicache")


@dataclass(slots=True, eq=False)
class Life:
    """An engine process, and the tables that go with it."""

    process: EngineProcess
    engine: Engine
    number: int
    began: float = field(default_factory=time.monotonic)
    dying: threading.Event = field(default_factory=threading.Event)
    gone: threading.Event = field(default_factory=threading.Event)
    cause: DevIPCError | None = None
    killed: str = ""  # why this side did it

    def ended(self, error: DevIPCError) -> None:
        """Take what the process tells of its end: dying, and, with a DeviceLostError, gone."""
        if self.cause is None or isinstance(error, DeviceLostError):
            self.cause = error
        self.engine.lose(error)
        self.dying.set()
        if isinstance(error, DeviceLostError):
            self.gone.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What a keeper has to tell, all of one moment: none of it is of another life than the rest.

    Parameters
    ----------
    life : Life or None
        The one that serves, or whose end is not over yet.
    serving : bool
        Whether it serves.
    starts : int
        Lives so far.
    last_end : str
        How the one before ended, or why none could begin.
    moved : mapping of str to int
        Bytes by direction, in the lives before it.
    """

    life: Life | None
    serving: bool
    starts: int
    last_end: str
    moved: Mapping[str, int]


class Keeper:
    """See the module. Any thread.

    Parameters
    ----------
    config : DaemonConfig
        Which engine, and how patient to be.
    arena, tier
        What the engines move pages from and to; they stay the caller's.
    folder : str
        Where the engines' sockets are made.
    let_go : callable
        Lets all clients of a life go within the seconds given; returns False when something of them still moves.
    on_defect : callable
        Called when no engine will be started any more.
    """

    def __init__(
        self,
        config: DaemonConfig,
        arena: HostArena,
        tier: HostTier,
        *,
        folder: str,
        let_go: Callable[[Life, float], bool],
        on_defect: Callable[[], None],
    ) -> None:
        self._config, self._arena, self._tier = config, arena, tier
        self._folder = folder
        self._let_go, self._on_defect = let_go, on_defect
        self._lock = threading.Lock()  # of what an account tells
        self._life: Life | None = None
        self._starts = 0
        self._last_end = ""
        self._moved = {"backup": 0, "restore": 0}  # bytes, in lives that are over
        self._stopping = threading.Event()
        self._begun = threading.Event()
        self.failure: DevIPCError | None = None
        self._patience_s = _LETTING_GO_S
        # One thread starts all of them, each when nothing of the one before is left.
        self._thread = threading.Thread(target=self._run, name="devipc-hicache-keeper", daemon=True)

    @property
    def life(self) -> Life | None:
        """The life that serves; None between two of them."""
        life = self._life
        return None if life is None or life.dying.is_set() else life

    @property
    def current(self) -> Life | None:
        """The life that serves, or whose end is not over yet."""
        return self._life

    def account(self) -> Account:
        """Return what there is to tell of this moment. Never blocks."""
        with self._lock:
            life = self._life
            serving = life is not None and not life.dying.is_set()
            return Account(
                life=life,
                serving=serving,
                starts=self._starts,
                last_end=self._last_end,
                moved=dict(self._moved),
            )

    @property
    def over(self) -> bool:
        """True when no engine is left that could touch the tier's memory."""
        return self._life is None and not self._thread.is_alive()

    def start(self) -> None:
        """Begin to start the first engine. Does not wait for it."""
        start_thread(self._thread, "keep an engine")

    def wait_begun(self, timeout_s: float) -> bool:
        """Block until the first engine serves, or failed to: then :attr:`failure` says why. False while neither."""
        return self._begun.wait(timeout_s)

    def kill(self, life: Life, why: str) -> None:
        """End the engine process of a life at once; another one follows. One that is dying is left alone. No wait."""
        if not life.dying.is_set():
            _log.error("the engine process is killed: %s", why)
            life.killed = why
            life.process.kill()

    def close(self, timeout_s: float) -> None:
        """End the engine, by force if it takes longer than ``timeout_s``, and start no other. Blocks.

        An engine that is just being started is not waited for: it ends with this process.
        """
        self._patience_s = timeout_s
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s + 4 * _KILLED_S if self._begun.is_set() else timeout_s)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = _FIRST_PAUSE_S
        try:
            while not self._stopping.is_set():
                life = self._begin()
                if life is None:
                    if self.failure is not None:
                        return
                else:
                    self._live(life)
                    if time.monotonic() - life.began > _LIVED_S:
                        pause = _FIRST_PAUSE_S
                self._stopping.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        except BaseException:
            _log.exception("a defect of the daemon, which ends: whoever started it starts a whole one again")
            self._on_defect()
        finally:
            self._begun.set()

    def _begin(self) -> Life | None:
        config = self._config
        first = not self._begun.is_set()
        remove_leftovers(self._folder)  # of an engine that was killed with its supervisor: nobody else would
        try:
            process = EngineProcess(self._spawn(), self._arena.fileno(), self._arena.nbytes)
            try:
                engine = Engine(process.carrier, self._tier, config.engine())
            except BaseException:
                process.close(_KILLED_S)
                raise
        except DevIPCError as error:
            if first:
                self.failure = error
            else:
                self._ended(str(error))
                _log.error("the engine did not start, and is tried again: %s", error)
            return None
        life = Life(process, engine, self._starts + 1)
        process.on_end(life.ended)
        self._follow(life)
        _log.info("engine process %d serves %s", process.pid, engine.carrier.device_uuid)
        self._begun.set()
        return life

    def _spawn(self) -> EngineSpawn:
        config = self._config
        return EngineSpawn(
            backend=config.backend,
            device=config.device,
            strategy="" if config.strategy == "auto" else config.strategy,
            folder=self._folder,
            module=config.engine_module,
            start_timeout_s=config.start_timeout_s,
            chunk_nbytes=config.chunk_nbytes,
            pin_required=config.pin_required,
            bounce_nbytes=config.bounce_nbytes,
            layer_groups=config.layer_groups,
        )

    def _live(self, life: Life) -> None:
        while not self._stopping.is_set() and not life.process.ended:
            if life.dying.wait(_LOOK_S):
                life.process.wait_ended(timeout_s=_LOOK_S)
        if life.process.ended and life.gone.wait(_TOLD_S):
            self._ended(life.killed or str(life.cause))
            _log.error("engine process %d is gone: %s", life.process.pid, self._last_end)
        self._finish(life)

    def _ended(self, why: str) -> None:
        with self._lock:
            self._last_end = why

    def _finish(self, life: Life) -> None:
        """Let the clients of a life go, then give back what it has; its process is killed when copies do not end."""
        while not self._let_go(life, self._patience_s) and not life.process.ended:
            _log.error("engine process %d is killed: copies do not end", life.process.pid)
            life.process.kill()
            if not life.process.wait_ended(timeout_s=_KILLED_S) and self._stopping.is_set():
                return  # not even that ends it: the memory that it may write to stays mapped until both are gone
        life.engine.close(_KILLED_S)
        if not life.process.close(_KILLED_S):
            _log.error("engine process %d does not end: its memory stays in use", life.process.pid)
            return
        self._follow(None)

    def _follow(self, life: Life | None) -> None:
        """Let a life, or none, follow the one before it, which is counted."""
        with self._lock:
            before, self._life = self._life, life
            if life is not None:
                self._starts = life.number
            if before is not None:
                self._moved["backup"] += before.engine.backups.moved_nbytes
                self._moved["restore"] += before.engine.restores.moved_nbytes
