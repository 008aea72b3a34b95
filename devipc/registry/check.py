"""A backend tried where it may crash or hang, and the choice of a default one.

Owns the spawned child that loads a backend and lists its devices, so that a driver which ends its process or never
returns is an answer instead of our end, and the rule by which a backend is chosen when the caller names none. It
knows no vendor: the built-in backend is the last resort, all others come first.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from devipc.capabilities import Capability, Verdict
from devipc.errors import CapabilityError, DevIPCError, PluginError, UsageError
from devipc.registry.plugins import backend_names, describe_error, load_backend, quarantined
from devipc.types import DeviceInfo

if TYPE_CHECKING:
    import subprocess

    from devipc.interfaces.backend import Backend

__all__ = ["BackendCheck", "BackendChoice", "check_backend_in_child", "default_backend"]

BUILT_IN = "host"
_GRACE_S = 1.0
_MAX_ANSWER_NBYTES = 1 << 20
_MAX_EVIDENCE_NBYTES = 4096
_MAX_TEXT = 128  # as the wire takes an identity
_CHILD = """
import sys
name, timeout_s, fd, *sys.path[:] = sys.argv[1:]
del sys.argv[1:]
from devipc.registry.check import _answer
_answer(name, timeout_s=float(timeout_s), fd=int(fd))
"""


@dataclass(frozen=True, slots=True)
class BackendCheck:
    """What came of loading one backend and listing its devices.

    Parameters
    ----------
    name : str
        The backend.
    capability : Capability
        ``yes`` with at least one device; ``no`` where it cannot be loaded or has none; ``broken`` where it raised
        something unexpected, crashed or hung.
    devices : tuple of DeviceInfo
        What it listed.
    """

    name: str
    capability: Capability
    devices: tuple[DeviceInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The backend that :func:`default_backend` chose, and what became of all candidates.

    Parameters
    ----------
    backend : Backend
        The chosen one, loaded in this process.
    checks : tuple of BackendCheck
        All candidates in the order in which they were tried; the chosen one is the last of them.
    """

    backend: Backend
    checks: tuple[BackendCheck, ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """One line for each candidate: why it was passed over, or what made it the choice."""
        return tuple(
            f"{check.name}: {check.capability.reason or check.capability.evidence}"
            + (f"; remedy: {check.capability.remedy}" if check.capability.remedy else "")
            for check in self.checks
        )


def check_backend_in_child(name: str, *, timeout_s: float = 20.0) -> BackendCheck:
    """Load ``name`` and list its devices in a spawned child, and say what happened; never raises for a bad backend.

    The child uses this process's ``sys.path`` and environment, and is ended with everything it started. Blocks for at
    most ``timeout_s`` seconds and a little. Any thread.

    Raises
    ------
    UsageError
        For a ``timeout_s`` that is not positive.
    """
    if not timeout_s > 0:
        raise UsageError(f"timeout of {timeout_s} s", remedy="give the child a positive number of seconds")
    if name not in backend_names():
        return _check(name)  # loads nothing: says why there is nothing to load
    if not sys.executable:
        reason = "this program does not say where its Python interpreter is (sys.executable is empty)"
        return BackendCheck(name, Capability.untested(reason, remedy="set sys.executable"))
    started = time.monotonic()
    try:
        status, answer, said = _run_child(name, timeout_s)
    except OSError as error:
        reason = f"no child could be started ({error.strerror})"
        return BackendCheck(name, Capability.untested(reason, remedy="raise `ulimit -u` or `ulimit -n`"))
    if answer:
        return _decode(name, answer)
    if status is None or time.monotonic() - started >= timeout_s:
        return BackendCheck(
            name,
            Capability.broken(
                f"timed out after {timeout_s:g} s",
                evidence=said,
                remedy="see in the evidence where it hung; a driver that never answers often needs a reset or a reboot",
            ),
        )
    reason = f"crashed (signal {-status})" if status < 0 else f"ended without an answer (exit status {status})"
    return BackendCheck(
        name,
        Capability.broken(reason, evidence=said, remedy="check driver and plugin versions; the evidence has the stack"),
    )


def default_backend(*, timeout_s: float = 20.0) -> BackendChoice:
    """Choose a backend: the first other than the built-in one, by name, that has a device; else the built-in one.

    Each candidate is first tried in a child, at most ``timeout_s`` seconds each. Any thread; blocks.

    Raises
    ------
    PluginError
        When nothing is left, not even the built-in backend; the message has all reasons.
    """
    checks = [
        BackendCheck(fault.name or fault.distribution, Capability.no(fault.reason, remedy=fault.remedy))
        for fault in quarantined()
        if fault.name not in backend_names()
    ]
    for name in sorted(backend_names(), key=lambda name: (name == BUILT_IN, name)):
        check = check_backend_in_child(name, timeout_s=timeout_s) if name != BUILT_IN else None
        if check is None or check.capability:
            check = _check(name)
        checks.append(check)
        if check.capability:
            return BackendChoice(load_backend(name), tuple(checks))
    reasons = "; ".join(f"{check.name}: {check.capability.reason}" for check in checks)
    raise PluginError(
        f"no backend has a device ({reasons or 'none is installed'})",
        code="no_backend",
        remedy="reinstall devipc: its built-in backend needs no device",
    )


# --- in the process that asks ---------------------------------------------------------------------------------------


def _run_child(name: str, timeout_s: float) -> tuple[int | None, bytes, str]:
    """Return exit status (None if it had to be ended), answer, and the end of what it wrote to stderr."""
    import subprocess

    from devipc.adopting import adopted

    answers, fd = os.pipe()
    try:
        isolated = ["-I"] if sys.flags.isolated else ["-P"]
        arguments = [name, str(timeout_s), str(fd), *sys.path]
        child = subprocess.Popen(
            adopted([sys.executable, *isolated, "-c", _CHILD, *arguments]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(fd,),
            start_new_session=True,
        )
    except BaseException:
        os.close(answers)
        raise
    finally:
        os.close(fd)
    try:
        assert child.stderr is not None
        deadline = time.monotonic() + timeout_s + _GRACE_S
        ended, answer, said = _listen(child.pid, answers, child.stderr.fileno(), deadline)
    finally:
        _end(child)
        os.close(answers)
    return child.returncode if ended else None, answer, said.decode(errors="replace")


def _listen(pid: int, answers: int, stderr: int, deadline: float) -> tuple[bool, bytes, bytes]:
    """Read both pipes until the child has ended (True) or the deadline has passed; bounded in time and memory."""
    import select

    pidfd = os.pidfd_open(pid)
    texts = {answers: b"", stderr: b""}
    poller = select.poll()
    for fd in (pidfd, *texts):
        poller.register(fd, select.POLLIN)
    try:
        ended = False
        while True:
            left_s = 0.0 if ended else max(0.0, deadline - time.monotonic())
            ready = {fd for fd, _ in poller.poll(left_s * 1e3)}
            if (ended and not ready & texts.keys()) or (not ended and not left_s):
                return ended, texts[answers], texts[stderr]
            for fd in ready & texts.keys():
                data = os.read(fd, 65536)
                texts[fd] = (texts[fd] + data)[-(_MAX_ANSWER_NBYTES if fd == answers else _MAX_EVIDENCE_NBYTES) :]
                if not data:
                    poller.unregister(fd)
            ended = ended or pidfd in ready
    finally:
        os.close(pidfd)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child with all that it started, and reap it; one stuck inside the kernel is left to the kernel."""
    from devipc.adopting import end_adopted

    end_adopted(child)
    if child.stderr is not None:
        child.stderr.close()


def _decode(name: str, answer: bytes) -> BackendCheck:
    import json

    try:
        told = json.loads(answer)
        return BackendCheck(
            name,
            Capability(Verdict(told.pop("verdict")), **told.pop("why")),
            tuple(DeviceInfo(**device) for device in told["devices"]),
        )
    except Exception as error:  # a plugin can write there too
        return BackendCheck(name, Capability.broken(f"its child gave an answer that cannot be read ({error})"))


# --- where the backend is loaded ------------------------------------------------------------------------------------


def _check(name: str) -> BackendCheck:
    """Load and list in this process; whatever the plugin raises is the answer."""
    try:
        backend = load_backend(name)
    except PluginError as error:
        return BackendCheck(name, Capability.no(error.message, remedy=error.remedy))
    try:
        devices = tuple(backend.devices())
        for device in devices:
            _look_at(device)
    except KeyboardInterrupt:
        raise
    except CapabilityError as error:
        return BackendCheck(name, Capability.no(error.message, remedy=error.remedy, evidence=str(error.status or "")))
    except BaseException as error:
        remedy = error.remedy if isinstance(error, DevIPCError) else "upgrade the plugin or the driver"
        return BackendCheck(name, Capability.broken(f"listing devices raised {describe_error(error)}", remedy=remedy))
    if not devices:
        return BackendCheck(name, Capability.no("it lists no device", remedy="check that this process may see one"))
    listed = ", ".join(f"{device.uuid} ({device.name})" for device in devices)
    return BackendCheck(name, Capability.yes(f"lists {len(devices)} device(s): {listed}"), devices)


def _look_at(device: object) -> None:
    """Raise TypeError when others could not go by what is listed: wrong types, or text that nobody can read."""
    if not isinstance(device, DeviceInfo):
        raise TypeError(f"devices() listed {type(device).__name__}, which is no DeviceInfo")
    for one in fields(device):
        value, wanted = getattr(device, one.name), str if one.type == "str" else int
        if not isinstance(value, wanted):
            raise TypeError(f"{one.name} of a device is {type(value).__name__}, not {wanted.__name__}")
        if isinstance(value, str) and not (value.isprintable() and len(value) <= _MAX_TEXT):
            raise TypeError(f"{one.name} of a device is not at most {_MAX_TEXT} printable characters")
    if not device.uuid:
        raise TypeError("a device has no uuid")


def _answer(name: str, *, timeout_s: float, fd: int) -> None:
    """Run in the child: check, write the answer to ``fd``, and leave without running any library's exit code."""
    import faulthandler
    import json
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    faulthandler.enable()
    # A thread in C: it prints where the child hangs even when that holds the GIL, and ends it if our parent is gone.
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    check = _check(name)
    why = check.capability.to_json()
    told: dict[str, Any] = {"verdict": why.pop("verdict"), "why": why, "devices": [asdict(d) for d in check.devices]}
    answer = memoryview(json.dumps(told).encode())
    while answer:
        answer = answer[os.write(fd, answer) :]
    os._exit(0)
