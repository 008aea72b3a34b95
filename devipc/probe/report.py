"""The result of a probe: rows with evidence, what was required, and the exit code that follows.

Owns the records, the grammar of requirements and the document ``devipc.probe/1``. It runs nothing and prints nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from devipc._version import __version__
from devipc.capabilities import Capability, Verdict
from devipc.errors import UsageError
from devipc.probe.catalogue import AREAS, check_names
from devipc.types import DeviceInfo

__all__ = [
    "EXIT_MISSING",
    "EXIT_NO_DEVICE",
    "EXIT_OK",
    "EXIT_TOOL_FAILED",
    "SCHEMA",
    "BackendRow",
    "Report",
    "Requirement",
    "Row",
    "parse_requirements",
]

SCHEMA = "devipc.probe/1"
"""Name of the document's form; ``docs/schemas/probe-1.json`` describes it."""

EXIT_OK = 0
"""All that is required holds."""
EXIT_MISSING = 1
"""Something required is missing or broken."""
EXIT_NO_DEVICE = 3
"""No usable backend or device: nothing was there to be probed."""
EXIT_TOOL_FAILED = 4
"""The probe itself failed; its verdicts, if any, are worth nothing."""


@dataclass(frozen=True, slots=True)
class BackendRow:
    """One installed or asked-for backend.

    Parameters
    ----------
    name : str
        The backend.
    capability : Capability
        ``yes`` where it lists devices.
    devices : tuple of DeviceInfo
        All that it lists, probed or not.
    """

    name: str
    capability: Capability
    devices: tuple[DeviceInfo, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        devices = [
            {
                "uuid": info.uuid,
                "number": info.ordinal,
                "name": info.name,
                "pci": info.pci,
                "parent_uuid": info.parent_uuid,
                "total_nbytes": info.total_nbytes,
            }
            for info in self.devices
        ]
        return {"backend": self.name, **self.capability.to_json(), "devices": devices}


@dataclass(frozen=True, slots=True)
class Row:
    """One check of one device.

    Parameters
    ----------
    check : str
        Identifier, ``area`` or ``area.name``; see :mod:`devipc.probe.catalogue`.
    backend, device : str
        Whose; the device by its uuid.
    capability : Capability
        What came of trying it.
    claim : Capability or None
        What the backend said of it untried, when it says anything.
    duration_s : float
        Seconds that it took, the start of processes included.
    """

    check: str
    backend: str
    device: str
    capability: Capability
    claim: Capability | None = None
    duration_s: float = 0.0

    @property
    def area(self) -> str:
        """First part of the identifier."""
        return self.check.partition(".")[0]

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {
            "check": self.check,
            "backend": self.backend,
            "device": self.device,
            **self.capability.to_json(),
            "claim": self.claim.to_json() if self.claim is not None else None,
            "duration_s": round(self.duration_s, 3),
        }


@dataclass(frozen=True, slots=True)
class Requirement:
    """Something that must hold on every probed device.

    Parameters
    ----------
    area : str
        ``identity``, ``memory``, ``mechanism``, ``sync`` or ``transfer``.
    name : str
        One check of the area. Empty: any one of ``memory``, ``mechanism`` and ``sync``; all of the other areas.
    """

    area: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.area}={self.name}" if self.name else self.area

    def missing(self, rows: Iterable[Row]) -> str:
        """Return why it does not hold for one device's rows; empty when it does."""
        own = [row for row in rows if row.area == self.area]
        named = [row for row in own if not self.name or row.check == f"{self.area}.{self.name}"]
        if not named:
            reasons = [f"{row.check} {row.capability.verdict}: {row.capability.reason}" for row in own]
            return "; ".join(reasons) or "no such check came about"
        bad = [row for row in named if not row.capability]
        if not bad or (AREAS[self.area].any_of and len(bad) < len(named)):
            return ""
        return "; ".join(f"{row.check} {row.capability.verdict}: {row.capability.reason}" for row in bad)


def parse_requirements(text: str) -> tuple[Requirement, ...]:
    """Return the requirements in ``text``: ``memory,sync=stream_memop``; a dot may stand for the sign.

    Raises
    ------
    UsageError
        For an area or a check that does not exist; names those that do.
    """
    found: list[Requirement] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        area, _, name = part.replace(".", "=", 1).partition("=")
        if area not in AREAS:
            raise UsageError(f"nothing called {area!r} can be required", remedy=f"use one of {', '.join(AREAS)}")
        names = check_names(area)
        if (name and name not in names) or ("=" in part and not name):
            raise UsageError(
                f"{area} has no check {name!r}", remedy=f"use {area} alone, or {area}= with one of {', '.join(names)}"
            )
        found.append(Requirement(area, name))
    if not found:
        raise UsageError("nothing is required", remedy="name an area, such as memory, or leave the option out")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Report:
    """All that a probe found.

    Parameters
    ----------
    backends : sequence of BackendRow
        All that were looked at.
    rows : sequence of Row
        Checks in the order in which they ran, device by device.
    requirements : sequence of Requirement
        What must hold.
    facts : Mapping
        For each backend with a device, what it says its behaviour depends on.
    duration_s : float
        Seconds that all of it took.
    error : str
        Why the tool failed; empty when it did not.
    """

    backends: Sequence[BackendRow] = ()
    rows: Sequence[Row] = ()
    requirements: Sequence[Requirement] = ()
    facts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    duration_s: float = 0.0
    error: str = ""

    @property
    def missing(self) -> list[tuple[Requirement, str, str, str]]:
        """What does not hold: requirement, backend, device and reason."""
        devices = dict.fromkeys((row.backend, row.device) for row in self.rows)
        return [
            (requirement, backend, device, reason)
            for requirement in self.requirements
            for backend, device in devices
            if (reason := requirement.missing(r for r in self.rows if (r.backend, r.device) == (backend, device)))
        ]

    @property
    def exit_code(self) -> int:
        """0, 1, 3 or 4; see the constants above."""
        if self.error:
            return EXIT_TOOL_FAILED
        if not self.rows:
            return EXIT_NO_DEVICE
        return EXIT_MISSING if self.missing else EXIT_OK

    @property
    def counts(self) -> dict[str, int]:
        """How many checks came to each verdict."""
        return {verdict.value: sum(row.capability.verdict is verdict for row in self.rows) for verdict in Verdict}

    def to_json(self) -> dict[str, Any]:
        """Return the document ``devipc.probe/1`` as JSON-ready values."""
        missing = self.missing
        return {
            "schema": SCHEMA,
            "devipc": __version__,
            "exit_code": self.exit_code,
            "error": self.error,
            "duration_s": round(self.duration_s, 3),
            "required": [
                {
                    "requirement": str(requirement),
                    "holds": bool(self.rows) and not any(found[0] is requirement for found in missing),
                    "missing": [
                        {"backend": backend, "device": device, "reason": reason}
                        for found, backend, device, reason in missing
                        if found is requirement
                    ],
                }
                for requirement in self.requirements
            ],
            "counts": self.counts,
            "backends": [{**row.to_json(), "facts": dict(self.facts.get(row.name, {}))} for row in self.backends],
            "checks": [row.to_json() for row in self.rows],
        }
