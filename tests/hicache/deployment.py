"""Where the cache of a test runs: in its own process, or in a daemon with an engine process.

The daemon's supervisor runs on threads of the test's process, so that a test can look at its tables; everything else
is as it is in production: sockets, rings, an engine process, and a session with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import devipc.registry
from devipc.completion import Decision
from devipc.errors import CompletionTimeout
from devipc.hicache.client.daemonlink import DaemonLink
from devipc.hicache.daemon.options import load_config
from devipc.hicache.daemon.supervisor import Supervisor
from devipc.hicache.engine import Engine, EngineConfig
from devipc.hicache.local import LocalEngine, LocalLink
from devipc.hicache.planning.planner import Direction
from devipc.hicache.tier.hosttier import HostTier
from devipc.hicache.wire.transport import Way
from devipc.interfaces.backend import Device
from tests.hicache.engine_with_faults import FOLDER, LEFT, MODULE, NO_SYNC, PIN_NBYTES, Faults, FaultyBackend, Switches
from tests.hicache.faulty import Failing, FaultyDevice
from tests.hicache.held import Held
from tests.hicache.pools import TIMEOUT_S, Gate

INPROC, DAEMON, MESSAGES = "inproc", "daemon", "messages"
AUTO, NOTHING = "auto", "nothing"
"""Strategies beside those of the library: whichever it chooses, and none because the device cannot synchronise."""


@dataclass(slots=True)
class Chosen:
    """Where worlds run, and what client and engine process must decide there.

    Parameters
    ----------
    name, strategy : str
        The deployment, and the completion strategy that its engine is to have.
    decides : str
        The strategy that must be in use; the one that is asked for, if that is one.
    because : Mapping
        For strategies that must have been rejected on the way, a pattern of what is said about each.
    decision : Decision or None
        What was decided last.
    """

    name: str
    strategy: str = AUTO
    decides: str = ""
    because: Mapping[str, str] = field(default_factory=dict)
    decision: Decision | None = None

    def __post_init__(self) -> None:
        if self.strategy not in (AUTO, NOTHING):
            self.decides = self.strategy

    def check(self, decision: Decision) -> None:
        """Look whether a decision is what it must be, and says why."""
        self.decision = decision
        assert not self.decides or decision.strategy == self.decides, decision.to_json()
        said = {each.strategy.value: each.capability for each in decision.candidates}
        for strategy, pattern in self.because.items():
            answer = said[strategy]
            assert not answer, decision.to_json()
            text = f"{answer.reason} {answer.evidence}"
            assert re.search(pattern, text), f"{strategy} was rejected for {text!r}, not for {pattern!r}"


_chosen = [Chosen(INPROC)]


@contextlib.contextmanager
def deployed(
    name: str, strategy: str = AUTO, *, decides: str = "", because: Mapping[str, str] | None = None
) -> Iterator[Chosen]:
    """Let the worlds that are made meanwhile have this deployment; see :class:`Chosen`."""
    _chosen.append(Chosen(name, strategy, decides, because or {}))
    try:
        yield _chosen[-1]
    finally:
        _chosen.pop()


def chosen() -> str:
    return _chosen[-1].name


def chosen_strategy() -> str:
    return _chosen[-1].strategy


@contextlib.contextmanager
def no_sync_here() -> Iterator[None]:
    """Let sessions of this process open devices that cannot synchronise, as the engine process does then."""
    load = devipc.registry.load_backend
    devipc.registry.load_backend = lambda name: cast(Any, FaultyBackend(load(name), Switches(), no_sync=True))
    try:
        yield
    finally:
        devipc.registry.load_backend = load


class Deployment(Protocol):
    """What a world needs of its cache."""

    tier: HostTier

    @property
    def engine(self) -> Engine:
        """The tables of the engine that serves."""

    def link(self) -> Any:
        """Return a link for a new client."""

    def session(self, link: Any) -> Any:
        """Return the engine's side of a client, once its link is attached."""

    def stall(self, direction: str) -> None:
        """Hold the copies of one direction back."""

    def resume(self, direction: str) -> None:
        """Let them go on."""

    def resume_all(self) -> None:
        """Let everything go on."""

    def refuse_copies(self, first: int, count: int) -> None:
        """Let the driver refuse ``count`` copies, beginning with the ``first`` from now on; 0 copies: none."""

    def markers_made(self) -> list[int]:
        """How many markers each pool of them has made in the test's process."""

    def kill_engine(self) -> None:
        """End the engine's process, where it has one of its own, by SIGKILL."""

    def engine_held(self) -> Held | None:
        """Return what the engine's process holds; None: it is this one."""

    def check_decision(self, link: Any) -> None:
        """Look whether a client's session has the strategy that it must have."""

    def close(self, timeout_s: float) -> None:
        """End it."""


class InProcess:
    """An engine in the test's process."""

    def __init__(self, device: Device, gate: Gate, pin_nbytes: int, config: dict[str, Any]) -> None:
        self._faulty = cast(Any, FaultyDevice(device))
        if chosen_strategy() == NOTHING:
            self._faulty.sync = None
        self._faulty.transfer.pin_nbytes = pin_nbytes
        self._gate = gate
        self.local = LocalEngine(self._faulty, EngineConfig(**config))
        self.tier = self.local.tier

    @property
    def engine(self) -> Engine:
        return self.local.engine

    def link(self) -> LocalLink:
        return LocalLink(self.local, owned=False)

    def session(self, link: Any) -> Any:
        return link.session

    def _stream(self, direction: str) -> Any:
        return self.local.carrier.copies(Direction(direction)).stream

    def stall(self, direction: str) -> None:
        self._gate.stall(self._stream(direction))

    def resume(self, direction: str) -> None:
        self._gate.resume(self._stream(direction))

    def resume_all(self) -> None:
        self._gate.resume_all()

    def refuse_copies(self, first: int, count: int) -> None:
        self._faulty.transfer.fault = Failing(first, more=count - 1) if count else lambda _name: None

    def markers_made(self) -> list[int]:
        pools = [self.local.markers, *(self.local.carrier.copies(direction).markers for direction in Direction)]
        return [len(pool._all) for pool in pools]

    def kill_engine(self) -> None:
        raise AssertionError("the engine is in this process")

    def engine_held(self) -> Held | None:
        return None

    def check_decision(self, link: Any) -> None:
        assert link.status()["strategy"] == "in_process"

    def close(self, timeout_s: float) -> None:
        self.local.close(timeout_s)


class Daemonized:
    """A supervisor on threads of the test's process, and its engine process."""

    def __init__(self, device: Device, pin_nbytes: int, config: dict[str, Any], way: Way) -> None:
        self._device, self._way = device, way
        self.folder = tempfile.mkdtemp(prefix="d", dir="/tmp")
        self.path = os.path.join(self.folder, "h.sock")
        self._held: set[str] = set()
        self._connection: Faults | None = None
        package = type(device).__module__.partition(".")[0]
        backend = package.removeprefix("devipc_") if package != "devipc" else "host"
        flags = {"socket": self.path, "backend": backend, "engine_module": MODULE, **config}
        names = {FOLDER: self.folder, PIN_NBYTES: str(pin_nbytes)}
        self._patched = contextlib.ExitStack()
        if chosen_strategy() == NOTHING:
            names[NO_SYNC] = "1"
            self._patched.enter_context(no_sync_here())
        else:
            flags["strategy"] = chosen_strategy()
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(names)
        self.supervisor = Supervisor(load_config(environment={}, flags=flags), on_stop=lambda: None)
        try:
            assert self.supervisor.start(given_up=lambda: False)
        except BaseException:
            self._end()
            raise
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
        self.tier: HostTier = self.supervisor._tier

    @property
    def life(self) -> Any:
        return _found(lambda: self.supervisor._keeper.life)

    @property
    def engine(self) -> Engine:
        found: Engine = self.life.engine
        return found

    @property
    def faults(self) -> Faults:
        if self._connection is None:
            self._connection = Faults(self.folder, self.life.process.pid)
        return self._connection

    def link(self) -> DaemonLink:
        return DaemonLink(self.path, device=self._device, way=self._way)

    def session(self, link: Any) -> Any:
        clients = self.supervisor._clients
        return _found(lambda: next((one.session for one in clients.all() if one.client == link._target.client), None))

    def check_decision(self, link: Any) -> None:
        _chosen[-1].check(link._current.session.decision)

    def kill_engine(self) -> None:
        pid = self.life.process.pid
        self.faults.close()
        self._connection = None
        self._held.clear()
        os.kill(pid, signal.SIGKILL)

    def engine_held(self) -> Held | None:
        return self.faults.held()

    def stall(self, direction: str) -> None:
        self.faults.stall(direction)
        self._held.add(direction)

    def resume(self, direction: str) -> None:
        self._held.discard(direction)
        self.faults.resume(direction)

    def resume_all(self) -> None:
        for direction in list(self._held):
            self.resume(direction)

    def refuse_copies(self, first: int, count: int) -> None:
        self.faults.refuse(count, after=first - 1)

    def markers_made(self) -> list[int]:
        return []

    def close(self, timeout_s: float) -> None:
        if self._connection is not None:
            self._connection.close()
        self._end()

    def _end(self) -> None:
        self._patched.close()
        began = time.monotonic()
        self.supervisor.close()
        if time.monotonic() - began > TIMEOUT_S:
            raise CompletionTimeout("the daemon took too long to end")
        left = {path.name: json.loads(path.read_text()) for path in Path(self.folder).glob(f"*{LEFT}")}
        shutil.rmtree(self.folder)
        assert not any(left.values()), f"engines left behind: {left}"


def _found(look: Callable[[], Any]) -> Any:
    """Return what ``look`` returns, as soon as that is something."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := look()):
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.001)
    return found


def deploy(device: Device, gate: Gate, *, pin_nbytes: int = 2**40, **config: Any) -> Deployment:
    """Return the chosen deployment, on ``device``; ``gate`` holds back streams of this process."""
    if chosen() == INPROC:
        return InProcess(device, gate, pin_nbytes, config)
    return Daemonized(device, pin_nbytes, config, Way.MESSAGES if chosen() == MESSAGES else Way.RINGS)
