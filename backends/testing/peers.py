"""Runs test bodies in processes of their own, on a simulated driver or on a real one, alone or in pairs.

Owns spawning, deadlines, forwarded tracebacks and the check that nothing stayed behind. A driver is chosen by the
environment at the start of a process, so no test loads one into pytest itself. Knows no vendor and no test: what is a
vendor's own is in ``peers.py`` of that vendor's tests (``environment``, ``loaded``, ``open_device``, ``watched``).
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import json
import os
import socket
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from devipc.spi import ExportedExtent

ROOT = Path(__file__).resolve().parents[2]
CHILD_TIMEOUT_S = 50.0
RECEIVE_TIMEOUT_S = 30.0
_CONTROL = "DEVIPC_TEST_CHANNEL"
_PACKAGE = "DEVIPC_TEST_PACKAGE"


@functools.cache
def simulator_folder(front: str, *missing: str) -> str:
    """Build the simulated driver; skip where there is no compiler, fail where it does not compile.

    ``DEVIPC_SIMULATOR`` names a folder that holds one already; ``missing`` are entry points that it shall not have.
    """
    if "DEVIPC_SIMULATOR" in os.environ and not missing:
        return os.environ["DEVIPC_SIMULATOR"]
    command = [sys.executable, str(ROOT / "tests/simulator/build.py"), front, *missing]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode and "no C compiler" in done.stderr:
        pytest.skip("no C compiler: the simulated driver cannot be built")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def variables(backend: str, switches: dict[str, object], *, cleared: tuple[str, ...], **own: str) -> dict[str, str]:
    """Variables of a process on a simulated driver, in a room of its own.

    Those that begin as ``cleared`` says are not passed on. A lower-case switch is one of the simulator, an upper-case
    one a variable.
    """
    values = {name: value for name, value in os.environ.items() if not name.startswith(("DEVSIM_", *cleared))}
    values |= {**own, "DEVSIM_ROOM": uuid.uuid4().hex[:12], "PYTHONFAULTHANDLER": "1"}
    values |= {name if name.isupper() else f"DEVSIM_{name.upper()}": str(v) for name, v in switches.items()}
    return python_path(backend, values)


def python_path(backend: str, values: dict[str, str]) -> dict[str, str]:
    """Add what the children import."""
    parts = (str(ROOT), str(ROOT / "backends" / backend), values.get("PYTHONPATH"))
    return {**values, "PYTHONPATH": os.pathsep.join(filter(None, parts))}


def body_test(
    environment: Callable[[], dict[str, str]], *, bare: bool, limit_s: float = CHILD_TIMEOUT_S
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a body that runs in a process on the simulated driver.

    The body gets ``device`` (opened, closed behind it) and ``sim`` (its controls); with ``bare`` only ``sim``. Other
    parameters are the test's own and must be JSON.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(**arguments: Any) -> None:
            run_body(body, arguments, environment(), limit_s)

        test.body = body  # type: ignore[attr-defined]
        test.bare = bare  # type: ignore[attr-defined]
        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        own = [p for name, p in inspect.signature(body).parameters.items() if name not in ("device", "sim")]
        test.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
        return pytest.mark.simulator(test)  # type: ignore[no-any-return]

    return decorate


def run_body(
    body: Callable[..., None], arguments: dict[str, Any], env: dict[str, str], limit_s: float = CHILD_TIMEOUT_S
) -> None:
    """Run a body in a child and fail with what it printed."""
    process = subprocess.Popen(
        command(body, json.dumps(arguments)),
        env=env,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        output += f"\nno end after {limit_s} s"
    if process.returncode:
        pytest.fail(f"child ended with {process.returncode}\n{output}", pytrace=False)


def command(function: Callable[..., None], arguments: str) -> list[str]:
    """Return the command that runs ``function`` in a child: as its file's vendor, else as this process's."""
    path = Path(inspect.getfile(function)).resolve().relative_to(ROOT).with_suffix("")
    here = Path(__file__).resolve().parent.relative_to(ROOT)
    package = os.environ[_PACKAGE] if path.is_relative_to(here) else ".".join(path.parts[:3])
    return [sys.executable, "-m", "backends.testing.child", package, ".".join(path.parts), function.__name__, arguments]


class Channel:
    """Messages and descriptors between two test processes."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.settimeout(RECEIVE_TIMEOUT_S)

    def send(self, message: object = None, fds: tuple[int, ...] = ()) -> None:
        socket.send_fds(self._socket, [json.dumps(message).encode()], fds)

    def receive(self) -> Any:
        message, fds = self.receive_fds()
        assert not fds
        return message

    def receive_fds(self) -> tuple[Any, tuple[int, ...]]:
        data, fds, _, _ = socket.recv_fds(self._socket, 2**20, 64)
        if not data:
            raise EOFError("the other test process is gone")
        return json.loads(data), tuple(fds)

    def send_extent(self, extent: ExportedExtent) -> None:
        chunks = [(c.allocation_nbytes, c.offset, c.nbytes, c.payload.hex(), c.has_fd) for c in extent.chunks]
        self.send([extent.kind, chunks], extent.fds)

    def receive_extent(self) -> ExportedExtent:
        from devipc.spi import Chunk, ExportedExtent, HandleKind

        (kind, chunks), fds = self.receive_fds()
        made = tuple(Chunk(a, o, n, bytes.fromhex(payload), has_fd=has_fd) for a, o, n, payload, has_fd in chunks)
        return ExportedExtent(HandleKind(kind), made, fds)

    def close(self) -> None:
        self._socket.close()


class Peer:
    """Another process, running a function ``(device, sim, channel)``.

    ``prefix`` is a command that starts it, as ``unshare`` does.
    """

    def __init__(
        self, function: Callable[..., None], env: dict[str, str] | None = None, *, prefix: Sequence[str] = ()
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [*prefix, *command(function, "{}")],
                env={**(env if env is not None else os.environ), _CONTROL: str(theirs.fileno())},
                cwd=ROOT,
                pass_fds=(theirs.fileno(),),
            )
        self.channel = Channel(ours)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=RECEIVE_TIMEOUT_S)

    def finish(self) -> None:
        code = self.process.wait(timeout=RECEIVE_TIMEOUT_S)
        assert code == 0, f"peer ended with {code}"


@contextmanager
def peer(function: Callable[..., None], env: dict[str, str] | None = None) -> Iterator[Peer]:
    """Start a peer; it must end well when the block does, and is killed when the block fails."""
    other = Peer(function, env)
    try:
        yield other
        other.finish()
    finally:
        if other.process.poll() is None:
            other.kill()
        other.channel.close()


def vendor() -> Any:
    """The module ``peers`` of the vendor whose tests this process runs."""
    return importlib.import_module(f"{os.environ[_PACKAGE]}.peers")


def life_fds() -> int:
    """Descriptors that tell peers of sessions whether this process lives; they stay until it ends."""
    liveness = sys.modules.get("devipc.channel.liveness")
    life = liveness._life if liveness is not None else None
    return sum(fd is not None for fd in (life.memfd, life.pidfd)) if life is not None else 0


def check_nothing_left(sim: Any, fds: int) -> None:
    """Check the driver's live objects, and the descriptors against ``fds``, those before the device was opened."""
    gc.collect()
    deadline = time.monotonic() + 2.0
    while left := _left(sim, fds):  # a thread of a session or of the driver lets go a little after it is told to
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.01)


def _left(sim: Any, fds: int) -> dict[str, int]:
    report = sim.report()
    left = {key: value for key, value in report.counters.items() if key.startswith(("live_", "unreturned")) and value}
    more = len(os.listdir("/proc/self/fd")) - fds - int(report["fds"]) - life_fds()
    return left | ({"descriptors": more} if more > 0 else {})


def main() -> int:
    """Run one body in this process."""
    package, module, name, arguments = sys.argv[1:]
    os.environ[_PACKAGE] = package
    target = getattr(importlib.import_module(module), name)
    body = getattr(target, "body", target)
    values = json.loads(arguments)
    sim = vendor().loaded() if "DEVSIM_ROOM" in os.environ else None
    if sim is not None or "sim" in inspect.signature(body).parameters:
        values["sim"] = sim
    if _CONTROL in os.environ:
        values["channel"] = Channel(socket.socket(fileno=int(os.environ.pop(_CONTROL))))
    if getattr(target, "bare", False):
        body(**values)
        return 0
    with vendor().watched(sim):
        fds = len(os.listdir("/proc/self/fd"))
        device = vendor().open_device()
        try:
            body(device=device, **values)
        except BaseException:
            traceback.print_exc()  # before the device is closed, which may stand still behind what is pending
            raise
        finally:
            device.close()
    if sim is not None:
        check_nothing_left(sim, fds)
    return 0
