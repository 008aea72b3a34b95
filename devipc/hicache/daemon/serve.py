"""``devipc hicache serve``: one supervisor from its settings to its end, as a process.

Owns what belongs to a process and not to an object: signals, limits, logging, the announcement that it is ready, and
the order of the end. It loads no driver.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import select
import signal
from contextlib import suppress

from devipc.deadline import deadline_after, remaining
from devipc.hicache.daemon.metrics import MetricsServer
from devipc.hicache.daemon.notify import announce, tell_manager
from devipc.hicache.daemon.options import DaemonConfig
from devipc.hicache.daemon.supervisor import Supervisor

__all__ = ["serve"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LOOK_S = 0.05
_log = logging.getLogger("devipc.hicache")


def serve(config: DaemonConfig, *, as_json: bool = False, ready_fd: int | None = None) -> int:
    """Run a daemon until it is told to end, on the main thread of a process that is nothing else.

    Returns
    -------
    int
        Exit code: 0 when everything that was under way had ended, 1 when some of it was given up.

    Raises
    ------
    DevIPCError
        When it cannot start: the path is taken or unsafe, memory is short, or the engine finds no device.
    """
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S%z"
    )
    _raise_limits()
    with _Told() as told:
        supervisor = Supervisor(config, on_stop=told.add)
        metrics: MetricsServer | None = None
        try:
            if not supervisor.start(given_up=told.came):
                return 0
            if config.metrics_port:
                metrics = MetricsServer(config.metrics_port, supervisor.status)
            gc.collect()
            gc.freeze()  # what is here now stays, and no collection between two operations looks at it again
            _announce(supervisor, as_json=as_json, ready_fd=ready_fd)
            while not told.came():
                told.wait(None)
            return 0 if _drain(supervisor, told, config.drain_timeout_s) else 1
        finally:
            tell_manager("STOPPING=1")
            if metrics is not None:
                metrics.close()
            supervisor.close()


def _announce(supervisor: Supervisor, *, as_json: bool, ready_fd: int | None) -> None:
    facts = supervisor.facts()
    line = json.dumps(facts) if as_json else "READY " + " ".join(f"{name}={value}" for name, value in facts.items())
    announce(line, ready_fd=ready_fd)
    tell_manager(f"READY=1\nMAINPID={os.getpid()}\nSTATUS={facts['device']} at {facts['socket']}")


def _drain(supervisor: Supervisor, told: _Told, timeout_s: float) -> bool:
    """Let what is under way end; False when that took too long, or somebody asked a second time to end."""
    deadline = deadline_after(timeout_s)
    supervisor.begin_drain()
    while not supervisor.idle():
        if told.count > 1 or not remaining(deadline):
            _log.warning("ending although operations are under way: %s", supervisor.under_way())
            return False
        told.wait(_LOOK_S)
    return True


def _raise_limits() -> None:
    """Allow as many descriptors as this process may have: each client needs about twenty."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Told:
    """How often this process was told to end.

    The kernel may deliver a signal to any thread, and only the main one runs handlers: that is woken by a descriptor.
    """

    def __init__(self) -> None:
        self.count = 0
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poller = select.poll()
        self._poller.register(self._reader, select.POLLIN)
        self._woken_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}

    def _handle(self, *_: object) -> None:
        self.count += 1

    def add(self) -> None:
        """Note one more. From any thread."""
        self.count += 1
        with suppress(BlockingIOError):  # full: it wakes all the same
            os.write(self._writer, b"x")

    def came(self) -> bool:
        """Return True once it was told."""
        return self.count > 0

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until it is told again."""
        if self._poller.poll(None if timeout_s is None else timeout_s * 1e3):
            os.read(self._reader, 4096)

    def __enter__(self) -> _Told:
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._woken_before)
        os.close(self._reader)
        os.close(self._writer)
