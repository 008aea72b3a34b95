"""Running the checks: which backends and devices, in which order, in which processes.

Owns the plan. Every check runs in a pair of children that is replaced after anything but a ``yes``, so that one check
cannot spoil the next. Only the devices that were asked for are opened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from devipc.capabilities import Capability, Verdict, is_offered
from devipc.errors import DevIPCError
from devipc.probe.catalogue import TRANSFER_NAMES
from devipc.probe.environment import redact, redact_paths
from devipc.probe.pair import Pair, Target, capability_from
from devipc.probe.report import BackendRow, Report, Requirement, Row
from devipc.registry import backend_names, check_backend_in_child, quarantined
from devipc.types import DeviceInfo

__all__ = ["DEFAULT_TIMEOUT_S", "Checks", "Progress", "list_backends", "pick_devices", "run_probe", "silent"]

DEFAULT_TIMEOUT_S = 20.0
"""Seconds that one check may take."""
DEFAULT_REQUIREMENTS = (Requirement("memory"), Requirement("sync"))
"""What must hold when nobody says what: some handle kind, and some completion strategy."""

MAX_HANGS = 3
"""So many checks in a row without an answer, and the rest of a device is not waited for."""

Progress = Callable[[str, int, int], None]
"""Called with (what is done now, how many are done, how many there are) on the calling thread."""


def silent(what: str, done: int, total: int) -> None:
    """Tell nobody."""


def run_probe(
    *,
    backend: str | None = None,
    devices: Sequence[str] = (),
    requirements: Sequence[Requirement] = DEFAULT_REQUIREMENTS,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    progress: Progress = silent,
) -> Report:
    """Probe devices and return what was found. Blocks for seconds; leaves no process behind, also when interrupted.

    Parameters
    ----------
    backend : str, optional
        The only one to look at; all installed ones when None.
    devices : sequence of str
        Which devices to open: a uuid, the beginning of one, or a number in its backend's list. All when empty.
    requirements : sequence of Requirement
        What must hold on every one of them.
    timeout_s : float
        Limit of listing a backend, and of each check.
    progress : callable
        Told before each step.

    Never raises for what a backend does. Not for several threads at once.
    """
    started = time.monotonic()
    backends = list_backends(backend, timeout_s=timeout_s, progress=progress)
    rows: list[Row] = []
    facts: dict[str, Mapping[str, str]] = {}
    chosen = pick_devices(backends, devices)
    for number, (name, info) in enumerate(chosen):

        def step(what: str, done: int, total: int, at: int = number, of: str = f"{name} {info.ordinal}") -> None:
            progress(f"{of}: {what}", at * total + done, len(chosen) * total)

        with Checks(Target(name, info.uuid), Target(name, info.uuid), timeout_s=timeout_s) as checks:
            rows.extend(_probe_device(checks, step))
        facts.setdefault(name, checks.facts)
    return Report(backends, rows, requirements, facts, time.monotonic() - started)


def list_backends(
    backend: str | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S, progress: Progress = silent
) -> list[BackendRow]:
    """Load each backend in a child and list its devices; those that cannot be loaded get their row too."""
    names = [backend] if backend is not None else backend_names()
    found = []
    for done, name in enumerate(names):
        progress(f"{name}: devices", done, len(names))
        check = check_backend_in_child(name, timeout_s=timeout_s)
        found.append(BackendRow(name, _private(check.capability), check.devices))
    if backend is None:
        found += [
            BackendRow(fault.name or fault.distribution, Capability.no(fault.reason, remedy=fault.remedy))
            for fault in quarantined()
            if fault.name not in names
        ]
    return found


def pick_devices(backends: Sequence[BackendRow], wanted: Sequence[str]) -> list[tuple[str, DeviceInfo]]:
    """Return the devices that ``wanted`` names, each with its backend, in the order of the lists."""
    everything = [(row.name, info) for row in backends for info in row.devices]
    if not wanted:
        return everything
    return [(name, info) for name, info in everything if any(_is(info, text) for text in wanted)]


def _is(info: DeviceInfo, text: str) -> bool:
    return text == str(info.ordinal) if text.isdecimal() else bool(text) and info.uuid.startswith(text)


class Checks:
    """The checks of one exporter and one importer. A pair of processes is started when one is needed.

    Parameters
    ----------
    exporter, importer : Target
        The device of each side.
    timeout_s : float
        Limit of each check.
    """

    def __init__(self, exporter: Target, importer: Target, *, timeout_s: float) -> None:
        self._exporter, self._importer, self._timeout_s = exporter, importer, timeout_s
        self._pair: Pair | None = None
        self._hangs = 0
        self.exporter: dict[str, Any] = {}
        """What the exporter's process says of its device, once :meth:`open` said yes."""
        self.importer: dict[str, Any] = {}
        """The same of the importer's."""
        self.facts: dict[str, str] = {}
        """What the backend says its behaviour depends on."""

    def open(self, *, same: bool = True) -> Row:
        """Open the device in both processes and compare: the check ``identity``.

        With ``same`` False the two are different devices and only have to open.
        """
        started = time.monotonic()
        answer = self._order("claims")
        if "capability" in answer:
            capability = capability_from(answer["capability"])
        else:
            self.facts = {redact(key): redact(value) for key, value in answer["facts"].items()}
            opened = Capability.yes("each opened by its process")
            capability = _same_device(answer["exporter"], answer["importer"]) if same else opened
            if capability:
                self.exporter, self.importer = answer["exporter"], answer["importer"]
        return self._row("identity", capability, None, started)

    def run(self, check: str, claim: Capability | None) -> Row:
        """Do one check."""
        started = time.monotonic()
        return self._row(check, capability_from(self._order(check)["capability"]), claim, started)

    def told(self, check: str, capability: Capability) -> Row:
        """Return the row of a check that cannot be tried because the backend offers nothing to try."""
        found, claim = _told(check, capability), _private(capability)
        return Row(check, self._exporter.backend, self._exporter.uuid, found, claim)

    def _order(self, what: str) -> dict[str, Any]:
        if self._hangs >= MAX_HANGS:
            reason = f"not tried: the {MAX_HANGS} checks before it did not answer in time"
            remedy = "see there; a driver that never answers often needs a reset or a reboot"
            return {"capability": Capability.untested(reason, remedy=remedy).to_json()}
        try:
            if self._pair is None:
                self._pair = Pair(self._exporter, self._importer)
            answer = self._pair.order(what, limit_s=self._timeout_s)
            self._hangs = self._hangs + 1 if answer.get("hung") else 0
            return answer
        except (OSError, DevIPCError) as error:
            reason = f"no process could be started for it: {error}"
            remedy = "raise `ulimit -u` and `ulimit -n`, free memory"
            return {"capability": Capability.untested(reason, remedy=remedy).to_json()}

    def _row(self, check: str, capability: Capability, claim: Capability | None, started: float) -> Row:
        if not capability:
            self.close()
        duration_s = time.monotonic() - started
        claim = _private(claim) if claim is not None else None
        found = _told(check, capability)
        return Row(check, self._exporter.backend, self._exporter.uuid, found, claim, duration_s)

    def close(self) -> None:
        """End the processes; the next check starts new ones."""
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.close()

    def __enter__(self) -> Checks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _probe_device(checks: Checks, progress: Progress) -> Iterator[Row]:
    progress("identity", 0, 1)
    opened = checks.open()
    yield opened
    if not checks.exporter:
        return
    plan = list(_plan(checks.exporter))
    for done, (check, claim, tried) in enumerate(plan, 1):
        progress(check, done, len(plan) + 1)
        yield checks.run(check, claim) if tried or claim is None else checks.told(check, claim)


def _plan(said: Mapping[str, Any]) -> Iterator[tuple[str, Capability | None, bool]]:
    """Yield each check with the backend's claim, and whether there is anything to try."""
    there = {name: bool(said["interfaces"].get(name)) for name in ("memory", "sync", "transfer")}
    absent = {
        name: capability_from(said["capabilities"][name])
        if name in said["capabilities"]
        else Capability.no(f"the device has no {name} interface")
        for name in there
    }
    if not there["memory"]:
        yield "memory", absent["memory"], False
    for kind, claim in said["kinds"].items():
        yield f"memory.{kind}", capability_from(claim), True
    if not there["sync"]:
        yield "mechanism", absent["sync"], False
    for mechanism, claim in said["mechanisms"].items():
        yield f"mechanism.{mechanism}", capability_from(claim), True
    for strategy, offer in said["offers"].items():
        claim = capability_from(offer)
        yield f"sync.{strategy}", claim, is_offered(claim)
    if not there["transfer"]:
        yield "transfer", absent["transfer"], False
        return
    for name in TRANSFER_NAMES:
        yield f"transfer.{name}", absent["transfer"] if name == "copy" else None, True


def _same_device(exporter: Mapping[str, Any], importer: Mapping[str, Any]) -> Capability:
    """Compare what two processes say of one device."""
    ours, theirs = exporter["info"], importer["info"]
    different = [key for key in ("uuid", "name", "pci", "parent_uuid", "total_nbytes") if ours[key] != theirs[key]]
    if exporter["pid"] == importer["pid"]:
        different.append("pid")
    if different:
        return Capability.broken(
            f"two processes that opened one device see different ones: {', '.join(different)}",
            evidence="; ".join(f"{key} {ours.get(key)!r} and {theirs.get(key)!r}" for key in different),
            remedy="give both processes the same visible devices",
        )
    return Capability.yes(
        f"opened in two processes: {ours['uuid']} is number {ours['ordinal']} here and {theirs['ordinal']} there,"
        f" {ours['total_nbytes']} bytes in both"
    )


def _private(capability: Capability) -> Capability:
    """Return ``capability`` without the paths and names of whoever runs this; a verdict without a reason gets one."""
    evidence, reason, remedy = (redact_paths(t) for t in (capability.evidence, capability.reason, capability.remedy))
    if capability.verdict is not Verdict.YES:
        reason = reason or evidence or "the backend gives no reason"
    return Capability(capability.verdict, evidence, reason, remedy)


def _told(check: str, capability: Capability) -> Capability:
    """Return the verdict of ``check`` as it is told; one that is not ``yes`` has a remedy, if only where to read on."""
    found = _private(capability)
    return found if found or found.remedy else replace(found, remedy=f"devipc explain {check}")
