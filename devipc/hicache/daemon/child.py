"""The engine's process itself, as the supervisor holds it: started, ended, and known to be gone.

Owns the process id and nothing that is said to the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from devipc.channel import Channel
from devipc.deadline import bounded, no_thread
from devipc.errors import ResourceExhausted
from devipc.hicache.moving.arena import CHUNK_NBYTES
from devipc.hicache.planning.planner import LAYER_GROUPS

__all__ = ["Child", "EngineSpawn", "meaning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpawn:
    """How an engine process is started.

    Parameters
    ----------
    folder : str
        Where clients' sockets are made; a directory that only this user may change.
    backend, device : str
        Name of the backend, and identity of the device; its first one when empty.
    strategy : str
        Completion strategy to insist on; empty lets the chooser decide with each client.
    chunk_nbytes, pin_required, bounce_nbytes, layer_groups
        As :class:`~devipc.hicache.engine.EngineConfig`.
    module : str
        What ``python -m`` runs.
    start_timeout_s : float
        Limit for opening the device and registering the arena, in seconds.
    """

    folder: str
    backend: str = "host"
    device: str = ""
    strategy: str = ""
    chunk_nbytes: int = CHUNK_NBYTES
    pin_required: bool = False
    bounce_nbytes: int = 32 * 2**20
    layer_groups: Sequence[int] = LAYER_GROUPS
    module: str = "devipc.hicache.engineproc"
    start_timeout_s: float = 120.0


class Child:
    """One process, from a thread that lives as long as it does: the kernel ends it with the thread that started it.

    Parameters
    ----------
    module : str
        What ``python -m`` runs; it is given the number of the descriptor that it inherits.
    on_end : callable
        Called with the exit code, when nothing of the process is left; on a thread of its own.
    """

    def __init__(self, module: str, *, on_end: Callable[[int], None]) -> None:
        self._module = module
        self._on_end = on_end
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: Exception | None = None
        self._started = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, channel: Channel) -> None:
        """Start the process with its end of a connection; owned, also when this raises.

        Raises
        ------
        ResourceExhausted
            When there is no thread, process or descriptor to be had.
        """
        fd = channel.detach()
        thread = threading.Thread(target=self._live, args=(fd,), name="devipc-hicache-engine", daemon=True)
        try:
            thread.start()
            self._started.wait()
        except RuntimeError as error:
            raise no_thread("live beside an engine process", error) from error
        finally:
            os.close(fd)
        self._thread = thread
        if self._failure is not None:
            raise ResourceExhausted(
                f"no engine process ({self._failure})", code="process", remedy="raise `ulimit -u` and `ulimit -n`"
            ) from self._failure

    def _live(self, fd: int) -> None:
        command = [sys.executable, "-m", self._module, str(fd)]
        try:
            self._process = subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.DEVNULL)
        except Exception as error:
            self._failure = error
            return
        finally:
            self._started.set()
        code = self._process.wait()
        self._ended.set()
        self._on_end(code)

    @property
    def pid(self) -> int:
        """The process id, for people; 0 before it was started."""
        return self._process.pid if self._process is not None else 0

    @property
    def ended(self) -> bool:
        """True once nothing of it is left."""
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Block until nothing of it is left; False when the time is up."""
        return self._ended.wait(bounded(timeout_s))

    def kill(self) -> None:
        """End it at once. Of a process that has ended, does nothing."""
        if self._process is not None:
            self._process.kill()

    def join(self, timeout_s: float) -> None:
        """Wait until its end was told, too."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(bounded(timeout_s))


def meaning(code: int) -> str:
    """Say what an exit code means."""
    return f"signal {-code}" if code < 0 else f"exit status {code}"
