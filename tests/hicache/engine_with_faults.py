"""An engine process that can be asked to fail: run as ``EngineSpawn(module="tests.hicache.engine_with_faults")``.

With ``DEVIPC_TEST_ENGINE_FAULTS`` set to a folder, it listens there at ``<its pid>.faults`` for lines of JSON, which
:class:`Faults` sends from a test: stall and resume the stream of one direction, slow copies down, refuse to pin, refuse
copies, hang in a copy, lose the device, end by SIGKILL at a chosen call, say what the process holds.
``DEVIPC_TEST_ENGINE_PIN_NBYTES`` limits pinning from the start, ``DEVIPC_TEST_ENGINE_KILL_AT`` counts calls from the
start, ``DEVIPC_TEST_ENGINE_NO_SYNC`` leaves the device without synchronisation, ``DEVIPC_TEST_ENGINE_SUBMITTERS`` has
so many threads submit, also what is short, all in batches, and counts the orders that were taken ahead. At its end on a
simulated driver it writes into ``<its pid>.left`` there what that still holds, and which calls were kept from it by a
layer in between.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

from devipc.calltrace import observe
from devipc.channel.link import Link
from devipc.errors import DriverError
from devipc.hicache.engineproc.process import main
from devipc.interfaces.backend import Device
from devipc.registry import load_backend
from devipc.session.peer import Peer
from tests.hicache.engine_changed import misreading, spread
from tests.hicache.faulty import FaultyDevice
from tests.hicache.held import Held
from tests.hicache.holding import hold

FOLDER, PIN_NBYTES, KILL_AT, NO_SYNC, SUBMITTERS = (
    f"DEVIPC_TEST_ENGINE_{name}" for name in ("FAULTS", "PIN_NBYTES", "KILL_AT", "NO_SYNC", "SUBMITTERS")
)
MODULE = "tests.hicache.engine_with_faults"
LEFT = ".left"
ROOM_FDS = 1
"""Descriptors that a simulated driver keeps as long as its process."""
CALLS = ("copy_strided", "copy_batch", "record", "query_marker")


class Faults:
    """A test's end: each method is a question to the engine process, and returns when that has done it.

    To be used in a ``with`` block: the engine hears one after the other, and one that is left open keeps out the next.
    A block that fails leaves nothing behind that was asked for.
    """

    def __init__(self, folder: str | Path, pid: int, timeout_s: float = 10.0) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(timeout_s)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._socket.connect(str(Path(folder) / f"{pid}.faults"))
                return
            except OSError:
                if time.monotonic() > deadline:
                    self._socket.close()
                    raise
                time.sleep(0.01)

    def __enter__(self) -> Faults:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with contextlib.suppress(OSError):  # the engine process may have ended
                self.undo()
        self.close()

    def _ask(self, what: str, **values: Any) -> Any:
        self._socket.send(json.dumps({"what": what, **values}).encode())
        body = self._socket.recv(65536)
        if not body:
            raise ConnectionResetError("the engine process ended")
        answer = json.loads(body)
        assert "error" not in answer, answer
        return answer["value"]

    def stall(self, direction: str) -> None:
        """Hold back the stream of ``backup`` or ``restore``."""
        self._ask("stall", direction=direction)

    def resume(self, direction: str) -> None:
        self._ask("resume", direction=direction)

    def slow(self, delay_s: float) -> None:
        """Let every call that submits copies take so much longer."""
        self._ask("slow", delay_s=delay_s)

    def refuse(self, count: int, *, after: int = 0) -> None:
        """Refuse ``count`` copies, after so many more that are done."""
        self._ask("refuse", count=count, after=after)

    @contextlib.contextmanager
    def refusing(self, count: int, *, after: int = 0) -> Iterator[None]:
        """As :meth:`refuse`, of copies that the block begins and awaits: all of them must have been refused behind it.

        How many copies a job takes is the planner's business, and follows from what an engine measured when it began.
        """
        self.refuse(count, after=after)
        try:
            yield
        finally:
            left = self._ask("refuse", count=0, after=0)
        assert left == 0, f"{left} of {count} copies were not refused: the jobs took fewer copies than that"

    def undo(self) -> None:
        """Take back what was asked for and has not happened yet: refuse, slow down, hang, kill, hold back nothing."""
        self._ask("undo")

    def hang(self, delay_s: float) -> None:
        """Let the next copy not return for so long."""
        self._ask("hang", delay_s=delay_s)

    def hold_interpreter(self, delay_s: float) -> None:
        """Let the next copy keep the interpreter's lock for so long."""
        self._ask("hold_interpreter", delay_s=delay_s)

    def lose(self) -> None:
        """Lose the device; the engine process may end before it can say so."""
        with contextlib.suppress(ConnectionError):
            self._ask("lose")

    def kill_at(self, call: int) -> None:
        """End by SIGKILL in the ``call``-th call of the driver from now on that copies, marks or asks a marker."""
        self._ask("kill_at", call=call)

    def calls(self) -> int:
        """How many such calls there were."""
        return int(self._ask("calls"))

    def ahead(self) -> list[str]:
        """What was taken while copies of others were being submitted since this was asked last, by kind of order."""
        return list(self._ask("ahead"))

    def plans(self) -> int:
        """How often copies were planned since this was asked last."""
        return int(self._ask("plans"))

    def misread(self) -> None:
        """Have a defect in reading the next order."""
        self._ask("misread")

    def opening(self) -> int:
        """How many threads wait for what a client answers to the question for its memory."""
        return int(self._ask("opening"))

    def held(self) -> Held:
        """What the process holds now."""
        return Held(**self._ask("held"))

    def close(self) -> None:
        self._socket.close()


class Switches:
    """The engine's end."""

    def __init__(self) -> None:
        self.device: Any = None
        self.streams: dict[int, Any] = {}
        self.stalled: set[str] = set()
        self.misread = False
        self.delay_s = self.hang_s = self.hold_s = 0.0
        self.refuse_after, self.refuse_count = 0, 0
        self.calls = self.plans = 0
        self.ahead: list[str] = []
        self.kill_call = int(os.environ.get(KILL_AT, "0"))

    def fault(self, name: str) -> None:
        """Called before each call of the driver."""
        if name not in CALLS:
            return
        self.calls += 1
        if self.calls == self.kill_call:
            os.kill(os.getpid(), signal.SIGKILL)
        if not name.startswith("copy"):
            return
        hang_s, self.hang_s = self.hang_s, 0.0
        time.sleep(self.delay_s + hang_s)
        hold_s, self.hold_s = self.hold_s, 0.0
        if hold_s:
            _without_the_interpreter(hold_s)
        if self.refuse_count:
            if self.refuse_after:
                self.refuse_after -= 1
                return
            self.refuse_count -= 1
            raise DriverError("the driver refused the copy", remedy="none: it was asked to")

    def answer(self, what: str, values: dict[str, Any]) -> Any:
        match what:
            case "stall" | "resume":
                self._hold(values["direction"], on=what == "stall")
            case "slow":
                self.delay_s = values["delay_s"]
            case "hang":
                self.hang_s = values["delay_s"]
            case "hold_interpreter":
                self.hold_s = values["delay_s"]
            case "refuse":
                left, self.refuse_after, self.refuse_count = self.refuse_count, values["after"], values["count"]
                return left
            case "undo":
                self.delay_s = self.hang_s = self.hold_s = 0.0
                self.refuse_after = self.refuse_count = self.kill_call = 0
                for direction in list(self.stalled):
                    self._hold(direction, on=False)
            case "lose":
                if self._host:
                    self.device.lose()
                else:
                    self._simulator.lose()
            case "kill_at":
                self.kill_call = self.calls + values["call"]
            case "calls":
                return self.calls
            case "ahead":
                ahead, self.ahead = self.ahead, []
                return ahead
            case "plans":
                plans, self.plans = self.plans, 0
                return plans
            case "misread":
                self.misread = True
            case "held":
                return asdict(Held.now())
            case "opening":
                codes = {Peer.open_all.__code__, Link.call.__code__}
                return sum(codes <= _codes(frame) for frame in sys._current_frames().values())
        return None

    def _hold(self, direction: str, *, on: bool) -> None:
        hold(self.device, self.streams[-1 if direction == "restore" else 0], on=on)
        (self.stalled.add if on else self.stalled.discard)(direction)

    @property
    def _host(self) -> bool:
        return str(self.device.info.uuid).startswith("host-")

    @property
    def _simulator(self) -> Any:
        from tests.simulator.control import Simulator

        return Simulator.loaded()


def _codes(frame: FrameType | None) -> set[CodeType]:
    found = set()
    while frame is not None:
        found.add(frame.f_code)
        frame = frame.f_back
    return found


def _pin_nbytes() -> int:
    file = Path(os.environ.get(FOLDER, ""), "pin_nbytes")
    return int(file.read_text() if file.exists() else os.environ.get(PIN_NBYTES, str(2**40)))


def _without_the_interpreter(hold_s: float) -> None:
    import ctypes

    ctypes.PyDLL(None).usleep(int(hold_s * 1e6))


class FaultyBackend:
    """A backend whose device fails on demand."""

    def __init__(self, inner: Any, switches: Switches, *, no_sync: bool = NO_SYNC in os.environ) -> None:
        self._inner = inner
        self._switches = switches
        self._no_sync = no_sync
        self._devices: dict[str, Any] = {}

    def open_device(self, uuid: str | None = None) -> Device:
        device = self._inner.open_device(uuid)
        found = self._devices.get(device.info.uuid)
        if found is None:
            found = self._devices[device.info.uuid] = cast(Any, FaultyDevice(device))
            found.transfer.fault = self._switches.fault
            found.transfer.pin_nbytes = int(os.environ.get(PIN_NBYTES, str(2**40)))
            if self._no_sync:
                found.sync = None
            create = found.transfer.create_stream

            def create_stream(*, priority: int = 0) -> Any:
                stream = create(priority=priority)
                self._switches.streams.setdefault(priority, stream)  # the lanes' are the first
                return stream

            found.transfer.create_stream = create_stream
            self._switches.device = device
        opened: Device = found
        return opened

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def listen(path: str, switches: Switches) -> None:
    """Answer one test after the other; a thread of its own."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            while body := connection.recv(65536):
                values = json.loads(body)
                try:
                    answer = {"value": switches.answer(values.pop("what"), values)}
                except Exception as error:
                    answer = {"error": repr(error)}
                connection.send(json.dumps(answer).encode())
            connection.close()

    threading.Thread(target=serve, name="test-faults", daemon=True).start()


def left(made: Counter[str]) -> dict[str, int]:
    """What is not as before the first call of the driver; ``made`` are the calls that this process made."""
    from tests.simulator.control import Simulator, SimulatorError, mapped

    if not mapped():
        return {}
    simulator = Simulator.loaded()
    counters = simulator.report().counters
    found = {name: n for name, n in counters.items() if name.startswith(("live_", "unreturned")) and n}
    if counters["fds"] > ROOM_FDS:
        found["fds"] = counters["fds"]
    for name, count in made.items():
        try:
            kept = count - simulator.calls(name)
        except SimulatorError:  # no call of the driver
            continue
        if kept > 0:
            found[f"{name} refused in front of the driver"] = kept
    return found


if __name__ == "__main__":
    made = Switches()
    misreading(made)
    if SUBMITTERS in os.environ:
        spread(int(os.environ[SUBMITTERS]), made)
    calls: Counter[str] = Counter()
    if folder := os.environ.get(FOLDER):
        listen(str(Path(folder) / f"{os.getpid()}.faults"), made)
    with observe(lambda name: calls.update((name,))):
        main(int(sys.argv[1]), load=lambda name: FaultyBackend(load_backend(name), made))
    if folder:
        Path(folder, f"{os.getpid()}{LEFT}").write_text(json.dumps(left(calls)))
