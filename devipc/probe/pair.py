"""Two child processes in which checks run, so that a crash or a hang is an answer and costs one row.

Owns starting them, the deadline of each order, their end, and the verdict when they do not answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from devipc.adopting import ADOPTER, adopted, end_adopted
from devipc.capabilities import Capability, Verdict
from devipc.channel.seqpacket import Channel, channel_pair
from devipc.errors import CompletionTimeout, DevIPCError, PeerGone
from devipc.probe.partner import CALL, START_LIMIT_S

__all__ = ["Pair", "Target", "capability_from", "partner_limit"]

_MODULE = "devipc.probe.child"
_GRACE_S = 1.0
_SETTLE_S = 2.0
_MAX_SAID_NBYTES = 3000
_PARTNER_MARGIN_S = 0.3
_EARLY_S = 0.05


@dataclass(frozen=True, slots=True)
class Target:
    """One device as a process of a pair opens it.

    Parameters
    ----------
    backend : str
        Name of the backend.
    uuid : str
        Identity of the device.
    """

    backend: str
    uuid: str


class Pair:
    """An exporter's and an importer's process. For one thread.

    Parameters
    ----------
    exporter : Target
        Which device the exporter opens, when an order needs it.
    importer : Target, optional
        The same of the importer; no such process when None, for orders that need none.

    Raises
    ------
    OSError, ResourceExhausted
        When no process can be started.
    """

    def __init__(self, exporter: Target, importer: Target | None) -> None:
        self._stack = contextlib.ExitStack()
        self._started = False
        with contextlib.ExitStack() as failed, contextlib.ExitStack() as passed_on:
            failed.callback(self.close)
            ours, control = channel_pair()
            self._control: Channel = self._stack.enter_context(ours)
            passed_on.enter_context(control)
            left, right = map(passed_on.enter_context, channel_pair())
            self._exporter = self._start("export", exporter, left, control)
            self._importer = self._start("import", importer, right) if importer is not None else None
            failed.pop_all()

    def _start(self, part: str, target: Target, *channels: Channel) -> _Child:
        fds = [channel.detach() for channel in channels]
        try:
            child = _Child(part, target, fds)
        finally:
            for fd in fds:
                os.close(fd)
        self._stack.callback(child.end)
        return child

    def order(self, what: str, *, limit_s: float) -> dict[str, Any]:
        """Have one thing done and return the answer, or ``{"capability": ..., "hung": ...}`` when none came.

        Blocks for at most ``limit_s`` and a little; the first time also until the processes have started. After a
        verdict other than ``yes`` the pair should not be used again: nobody knows in what state a driver is.
        """
        started = time.monotonic()
        gone = self._exporter
        try:
            if not self._started:
                self._control.receive(START_LIMIT_S)
                self._started, started = True, time.monotonic()
            order = json.dumps({"do": what, "limit_s": limit_s}).encode()
            self._control.send(CALL, order, timeout_s=limit_s)
            answer = json.loads(self._control.receive(limit_s + _GRACE_S).body)
            if not isinstance(answer, dict):
                raise ValueError(f"{type(answer).__name__} in place of named values")
            if "partner_gone" not in answer:
                return answer
            gone = self._importer or gone
        except (PeerGone, CompletionTimeout):
            pass
        except (DevIPCError, ValueError) as error:
            reason = f"the exporter's process gave an answer that cannot be read ({error})"
            return {"capability": Capability.broken(reason).to_json()}
        late = time.monotonic() - started >= partner_limit(limit_s) - _EARLY_S
        return {"capability": _silence(gone, late=late, limit_s=limit_s).to_json(), "hung": late}

    def close(self) -> None:
        """End both processes and all that they started. Calling it again does nothing."""
        self._stack.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Child:
    """One of the processes, by way of the one that adopts what it leaves."""

    def __init__(self, part: str, target: Target, fds: list[int]) -> None:
        self.name = f"{part}er's process"
        # The module path of this process, and no other: a plugin that was found here must be found there.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        arguments = [part, ADOPTER, target.backend, target.uuid, *map(str, fds), *["-1"] * (2 - len(fds))]
        with contextlib.ExitStack() as failed:
            self._said = os.memfd_create("devipc-probe-said")
            failed.callback(os.close, self._said)
            self._process = subprocess.Popen(
                adopted([sys.executable, "-P", "-m", _MODULE, *arguments]),
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                env=environment,
                pass_fds=fds,
                start_new_session=True,
            )
            failed.callback(end_adopted, self._process)
            self._pidfd = os.pidfd_open(self._process.pid)
            failed.pop_all()

    def status(self, limit_s: float) -> int | None:
        """Return the exit status, negative for a signal; None while it runs after ``limit_s``. Reaps nothing."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        if not poller.poll(limit_s * 1e3):
            return None
        found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def said(self) -> str:
        """Return the end of what it wrote, as a rule a stack."""
        size = os.fstat(self._said).st_size
        return os.pread(self._said, _MAX_SAID_NBYTES, max(0, size - _MAX_SAID_NBYTES)).decode(errors="replace").strip()

    def end(self) -> None:
        """End it with all that it started, and reap it; one stuck inside the kernel is left to the kernel."""
        end_adopted(self._process)
        os.close(self._pidfd)
        os.close(self._said)


def _silence(child: _Child, *, late: bool, limit_s: float) -> Capability:
    """Return the verdict about a process that did not answer."""
    status = child.status(_SETTLE_S)
    if status is not None and status < 0:
        return Capability.broken(
            f"the {child.name} crashed (signal {-status})",
            evidence=child.said(),
            remedy="check driver and plugin versions; the evidence has the stack",
        )
    if late or status is None:
        return Capability.broken(
            f"the {child.name} did not answer within {limit_s:g} s",
            evidence=child.said(),
            remedy="see in the evidence where it hung; a driver that never answers often needs a reset or a reboot",
        )
    return Capability.broken(
        f"the {child.name} ended without an answer (exit status {status})",
        evidence=child.said(),
        remedy="check driver and plugin versions",
    )


def partner_limit(limit_s: float) -> float:
    """Return how long the importer may take: a little less than the exporter, which can then still say so."""
    return max(limit_s - _PARTNER_MARGIN_S, limit_s / 2)


def capability_from(fields: Mapping[str, str]) -> Capability:
    """Return the capability behind its JSON-ready values, whatever a plugin put in place of text."""
    return Capability(Verdict(fields["verdict"]), *(str(fields[one]) for one in ("evidence", "reason", "remedy")))
