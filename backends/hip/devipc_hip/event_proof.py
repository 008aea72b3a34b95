"""Whether this runtime's interprocess events can be trusted: tried in child processes, once, at their first use.

Owns the trial and its verdict. Run as a program it is one of the children. Runtimes older than 7.3 are refused without
a trial: their events answer "done" whatever happens (ROCm/hip 3778).

What must be seen: an opened event is not done while work in front of it runs, and done behind it; more records than the
ring of 32 that older runtimes had do not stop their caller; and the handle of an event whose process has ended does not
open. The work is a host function of the C library that waits for a semaphore, so that nothing depends on speed, and no
Python runs on a thread of the runtime.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

from devipc.spi import Capability, CapabilityError, ResourceExhausted
from devipc_hip import driver

__all__ = ["OLDEST_WITH_EVENTS", "EventProof"]

OLDEST_WITH_EVENTS = 70_300_000
"""The first runtime whose interprocess events are signals of the layer below (ROCm/rocm-systems 5575)."""

PROOF_TIMEOUT_S = 15.0
"""For all children together."""
_RECORDS = 40  # more than the ring of 32
_LOOK_S = 5.0
_END_S = 2.0
_EVENT_FLAGS = 4 | 2
_PR_SET_PDEATHSIG = 1
_REMEDY = "use stream_memop, host_flag or polling, which need no events"


class EventProof:
    """The verdict about one device's events in this process; shared by all who ask. May be used from any thread.

    Parameters
    ----------
    ordinal : int
        The device's position in this process, and in its children.
    version : int
        The runtime's version.
    """

    def __init__(self, ordinal: int, version: int) -> None:
        self._ordinal = ordinal
        self._lock = threading.Lock()
        self._proven = False
        self._refusal = ""
        if version < OLDEST_WITH_EVENTS:
            self._refusal = (
                f"events of HIP runtime {driver.version_text(version)} are known to say done before they are; from"
                f" {driver.version_text(OLDEST_WITH_EVENTS)} on they are tried"
            )

    def refusal(self) -> str:
        """Return why events are not used, empty while nothing speaks against them. Cheap, tries nothing."""
        return self._refusal

    def capability(self) -> Capability:
        """Return what is known. Cheap, tries nothing."""
        if self._refusal:
            return Capability.no(self._refusal, remedy=_REMEDY)
        if self._proven:
            return Capability.untested("child processes saw them work; a live check decides")
        return Capability.untested("child processes try them at their first use")

    def demand(self) -> None:
        """Try events when nobody did yet; blocks at most :data:`PROOF_TIMEOUT_S`.

        Raises
        ------
        CapabilityError
            When they cannot be trusted here.
        ResourceExhausted
            When no thread is to be had; the next call tries again.
        """
        with self._lock:
            if not (self._proven or self._refusal):
                self._refusal = _try(self._ordinal)
                self._proven = not self._refusal
        if self._refusal:
            raise CapabilityError(self._refusal, code="events_unproven", remedy=_REMEDY, backend="hip")


# --- the trial, from outside ------------------------------------------------------------------------------------------


def _try(ordinal: int) -> str:
    """Return what was seen that must not be, empty for nothing."""
    deadline = time.monotonic() + PROOF_TIMEOUT_S
    children: list[subprocess.Popen[str]] = []
    step = "making an event"
    try:
        ended, maker = _start(children, "end", ordinal), _start(children, "make", ordinal)
        stale, handle = _line(ended, deadline), _line(maker, deadline)
        ended.wait(max(0.0, deadline - time.monotonic()))
        step = "opening an event of another process"
        looker = _start(children, "look", ordinal)
        _tell(looker, handle, stale)
        _line(looker, deadline)
        step = "recording behind work that runs"
        _tell(maker, "hold")
        _line(maker, deadline)
        step = "asking for an event that is not done"
        _tell(looker, "pending")
        if _line(looker, deadline) != "pending":
            return "an opened event was done while the work in front of it ran"
        step = f"recording {_RECORDS} times"
        _tell(maker, "more")
        _line(maker, deadline)
        _tell(maker, "release")
        _line(maker, deadline)
        step = "waiting for an event"
        _tell(looker, "done")
        if _line(looker, deadline) != "done":
            return f"an opened event was not done {_LOOK_S:g} s behind the work in front of it"
        step = "opening an event of a process that has ended"
        _tell(looker, "stale")
        if _line(looker, deadline) != "refused":
            return "the handle of an event whose process has ended opened all the same"
    except (TimeoutError, subprocess.TimeoutExpired):
        return f"{step} did not return within {PROOF_TIMEOUT_S:g} s"
    except (OSError, EOFError, ValueError) as error:
        return f"{step} failed: {error}"
    finally:
        for child in children:
            _end(child)
    return ""


def _start(children: list[subprocess.Popen[str]], role: str, ordinal: int) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-m", "devipc_hip.event_proof", role, str(ordinal)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    children.append(child)
    return child


def _end(child: subprocess.Popen[str]) -> None:
    """End a child. One that stands in the kernel cannot be, and is left to be collected later."""
    child.kill()
    try:
        child.wait(_END_S)
    except subprocess.TimeoutExpired:
        return
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _tell(child: subprocess.Popen[str], *words: str) -> None:
    assert child.stdin is not None
    child.stdin.write(json.dumps(words) + "\n")
    child.stdin.flush()


def _line(child: subprocess.Popen[str], deadline: float) -> str:
    """Return a child's next answer. A thread reads, since a pipe has no deadline; it ends with the child."""
    found: list[str] = []
    assert child.stdout is not None
    read = child.stdout.readline
    reader = threading.Thread(target=lambda: found.append(read()), name="devipc-hip-proof", daemon=True)
    try:
        reader.start()
    except RuntimeError as error:
        raise ResourceExhausted(
            f"no thread to be had to try events with ({error})",
            code="threads",
            remedy="raise `ulimit -u` or the container's pids limit, or free memory",
            backend="hip",
        ) from error
    reader.join(max(0.0, deadline - time.monotonic()))
    if reader.is_alive():
        child.kill()
        reader.join(_END_S)
        raise TimeoutError
    if not found or not found[0]:
        raise EOFError(f"a child ended with status {child.wait(_END_S)}")  # one that says no more may still stand still
    answer: str = json.loads(found[0])
    return answer


# --- the trial, from inside -------------------------------------------------------------------------------------------


def _say(word: str) -> None:
    sys.stdout.write(json.dumps(word) + "\n")
    sys.stdout.flush()


def _orders() -> Iterator[list[str]]:
    for line in sys.stdin:
        yield json.loads(line)


def _new_event() -> int:
    return int(driver.call("hipEventCreateWithFlags", _EVENT_FLAGS))


def _end_role() -> None:
    """Hand out an event and end at once, as a process does that is killed."""
    _say(driver.call("hipIpcGetEventHandle", _new_event()).hex())


def _make_role() -> None:
    """Record behind work that runs until it is told to end."""
    library = ctypes.CDLL(None)
    semaphore = ctypes.create_string_buffer(64)
    library.sem_init(semaphore, 0, 0)
    wait = ctypes.cast(library.sem_wait, ctypes.c_void_p).value
    event, stream = _new_event(), int(driver.call("hipStreamCreateWithFlags", 1))
    _say(driver.call("hipIpcGetEventHandle", event).hex())
    actions: dict[str, Callable[[], object]] = {
        "hold": lambda: (
            driver.call("hipLaunchHostFunc", stream, wait, ctypes.addressof(semaphore)),
            driver.call("hipEventRecord", event, stream),
        ),
        "more": lambda: [driver.call("hipEventRecord", event, stream) for _ in range(_RECORDS)],
        "release": lambda: library.sem_post(semaphore),
    }
    for (word,) in _orders():
        actions[word]()
        _say(word)


def _look_role() -> None:
    """Open the maker's event and look at it as told."""
    orders = _orders()
    handle, stale = next(orders)
    event = int(driver.call("hipIpcOpenEventHandle", bytes.fromhex(handle)))
    _say("open")
    for (word,) in orders:
        if word == "stale":
            status, _ = driver.attempt("hipIpcOpenEventHandle", bytes.fromhex(stale))
            _say("refused" if status else "opened")
            continue
        deadline = time.monotonic() + (_LOOK_S if word == "done" else 0.0)
        while (status := driver.attempt("hipEventQuery", event)[0]) and time.monotonic() < deadline:
            time.sleep(0.001)
        _say("pending" if status else "done")


def main() -> None:
    """Play the role that the command line names."""
    role, ordinal = sys.argv[1:]
    # Ends with the thread that waits for it, also where it stands in the runtime.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    driver.initialize()
    driver.call("hipSetDevice", int(ordinal))
    {"end": _end_role, "make": _make_role, "look": _look_role}[role]()
    os._exit(0)  # the runtime's own end would wait for the work that is held


if __name__ == "__main__":
    main()
