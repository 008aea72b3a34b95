"""Typed access to the control functions of a simulated driver library.

Owns the ctypes signatures of ``devsim_*`` and the environment of a simulated
process.  It makes no driver call.
"""

from __future__ import annotations

import ctypes
import json
import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.simulator import build

LIBRARY = "libcuda.so.1"


class SimulatorError(RuntimeError):
    """A control function refused its arguments."""


def new_room() -> str:
    """A name that keeps one test's memory accounting apart from everybody else's."""
    return uuid.uuid4().hex[:12]


def environment(folder: Path, room: str, **switches: object) -> dict[str, str]:
    """Variables that make a new process load the simulated driver from ``folder``.

    Parameters
    ----------
    folder
        What `build.build` returned.
    room
        Processes of one room share the devices and their memory accounting.
    switches
        Switches and texts by lower-case name: ``devices=1``, ``fault="cuInit@1=34"``.
    """
    path = os.environ.get("LD_LIBRARY_PATH")
    result = {
        "LD_LIBRARY_PATH": f"{folder}:{path}" if path else str(folder),
        "DEVSIM_ROOM": room,
        "CUDA_PYTHON_DISABLE_VERSION_CHECK": "1",
    }
    result.update({f"DEVSIM_{name.upper()}": str(value) for name, value in switches.items()})
    return result


def mapped() -> str:
    """Path of the simulated driver that is mapped into this process, empty for none; the first of several."""
    names = tuple(f"/{Path(library).name}" for library in build.LIBRARIES.values())
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = (line.split(maxsplit=5)[5].strip() for line in maps if "/simulator/" in line and ".so" in line)
        return next((path for path in paths if path.endswith(names)), "")


@dataclass(frozen=True, slots=True)
class CallCount:
    """How often an exported call ran and how often it failed."""

    calls: int
    failures: int


@dataclass(frozen=True, slots=True)
class Report:
    """Counters of this process at one moment."""

    counters: dict[str, int]
    calls: dict[str, CallCount] = field(default_factory=dict)

    def __getitem__(self, name: str) -> int:
        return self.counters[name]


class Simulator:
    """The simulated driver that is loaded in this process.

    Every method is safe from any thread and returns at once.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        text = ctypes.c_char_p
        for name, result, arguments in (
            ("devsim_inject", ctypes.c_int, [text]),
            ("devsim_set", ctypes.c_int, [text, ctypes.c_long]),
            ("devsim_stall", None, [ctypes.c_int]),
            ("devsim_stall_stream", ctypes.c_int, [ctypes.c_void_p, ctypes.c_int]),
            ("devsim_lose", ctypes.c_int, [ctypes.c_int, ctypes.c_int]),
            ("devsim_calls", ctypes.c_long, [text]),
            ("devsim_counter", ctypes.c_long, [text]),
            ("devsim_live", ctypes.c_long, []),
            ("devsim_used", ctypes.c_long, [ctypes.c_int, ctypes.c_int]),
            ("devsim_switches", ctypes.c_int, [text, ctypes.c_size_t]),
            ("devsim_report", ctypes.c_int, [text, ctypes.c_size_t]),
        ):
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments

    @classmethod
    def loaded(cls, name: str = "") -> Simulator:
        """The simulator behind ``name`` in this process, loading it if need be.

        Without a name the one that is there already, else that of CUDA.

        Raises
        ------
        SimulatorError
            The library found under that name is a real driver.
        """
        name = name or mapped() or LIBRARY
        library = ctypes.CDLL(name)
        if not hasattr(library, "devsim_live"):
            raise SimulatorError(f"{name} is not the simulated driver")
        return cls(library)

    def inject(self, *rules: str) -> None:
        """Adds fault rules ``name@when=action``; see the README for their grammar."""
        for rule in rules:
            if self._library.devsim_inject(rule.encode()) != 0:
                raise SimulatorError(f"cannot read the rule {rule!r}, or there are too many")

    def clear_faults(self) -> None:
        """Removes every fault rule."""
        self._library.devsim_inject(b"clear")

    def set(self, name: str, value: int) -> None:
        """Sets a switch of this process."""
        if self._library.devsim_set(name.encode(), value) != 0:
            raise SimulatorError(f"there is no switch {name!r}")

    def stall(self, on: bool = True, *, stream: int | None = None) -> None:
        """Freezes all streams of this process, or one; work stays queued until released."""
        if stream is None:
            self._library.devsim_stall(int(on))
        elif self._library.devsim_stall_stream(stream, int(on)) != 0:
            raise SimulatorError(f"there is no stream {stream:#x}")

    def lose(self, device: int = 0, code: int = 719) -> None:
        """Puts a device into a sticky error: every later call answers ``code``."""
        if self._library.devsim_lose(device, code) != 0:
            raise SimulatorError(f"there is no device {device}")

    def calls(self, name: str) -> int:
        """Calls of an exported name (with or without version suffix, or a prefix ending in ``*``)."""
        count = int(self._library.devsim_calls(name.encode()))
        if count < 0:
            raise SimulatorError(f"there is no call {name!r}")
        return count

    def counter(self, name: str) -> int:
        """One counter."""
        report = self.report().counters
        if name not in report:
            raise SimulatorError(f"there is no counter {name!r}")
        return report[name]

    def live(self) -> int:
        """Objects of all kinds that this process has not given back."""
        return int(self._library.devsim_live())

    def used_bytes(self, device: int = 0, pid: int = 0) -> int:
        """Device memory in use by all processes of the room, or charged to process ``pid``."""
        used = int(self._library.devsim_used(device, pid))
        if used < 0:
            raise SimulatorError(f"there is no device {device}")
        return used

    def switches(self) -> dict[str, dict[str, Any]]:
        """Every switch: ``value``, ``default`` and ``text``."""
        return dict(self._json(self._library.devsim_switches))

    def report(self) -> Report:
        """All counters and call counts."""
        raw = self._json(self._library.devsim_report)
        calls = {name: CallCount(**count) for name, count in raw["calls"].items()}
        return Report(counters=raw["counters"], calls=calls)

    def _json(self, function: Any) -> Any:
        size = 1 << 16
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = function(buffer, size)
            if length < size:
                return json.loads(buffer.value)
            size = length + 1024
