"""Who can share with whom: every exporting device against every importing one.

Owns the cells: the handle kind and the completion strategy that a session would end up with, found by trying, and why
it is not the best one. It prints nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from devipc._version import __version__
from devipc.capabilities import Capability, is_offered
from devipc.completion.offers import AUTOMATIC, words_are_proven
from devipc.probe.pair import Target, capability_from
from devipc.probe.report import EXIT_MISSING, EXIT_NO_DEVICE, EXIT_OK, EXIT_TOOL_FAILED, BackendRow, Row
from devipc.probe.runner import DEFAULT_TIMEOUT_S, Checks, Progress, list_backends, pick_devices, silent
from devipc.types import DeviceInfo

__all__ = ["MATRIX_SCHEMA", "Cell", "Matrix", "run_matrix"]

MATRIX_SCHEMA = "devipc.matrix/1"
"""Name of the document's form."""

_OTHER_DEVICE = Capability.no(
    "a session opens handles of its own backend and device only", remedy="open the importer on the exporter's device"
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One exporter and one importer.

    Parameters
    ----------
    exporter, importer : str
        Labels of the devices: backend and number.
    kind : str
        The first handle kind, in the backend's order, that passed; empty when none did.
    strategy : str
        The first completion strategy, in the order of the choice, that passed; empty when none did.
    reasons : tuple of str
        Why it is not the best: one line for each check that stands before the chosen one, with its remedy.
    """

    exporter: str
    importer: str
    kind: str
    strategy: str
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {
            "exporter": self.exporter,
            "importer": self.importer,
            "kind": self.kind,
            "strategy": self.strategy,
            "reasons": list(self.reasons),
        }


@dataclass(frozen=True, slots=True)
class Matrix:
    """All cells, exporter by exporter.

    Parameters
    ----------
    backends : sequence of BackendRow
        All that were looked at.
    devices : sequence of (str, str, DeviceInfo)
        Label, backend and device of each row and column.
    cells : sequence of Cell
        In the order of rows, then columns.
    error : str
        Why the tool failed; empty when it did not.
    """

    backends: Sequence[BackendRow]
    devices: Sequence[tuple[str, str, DeviceInfo]]
    cells: Sequence[Cell]
    error: str = ""

    @property
    def exit_code(self) -> int:
        """0; 1 when a device cannot even be shared with another process on it; 3 without a device; 4 with an error."""
        if self.error:
            return EXIT_TOOL_FAILED
        if not self.devices:
            return EXIT_NO_DEVICE
        own = [cell for cell in self.cells if cell.exporter == cell.importer]
        return EXIT_OK if all(cell.kind and cell.strategy for cell in own) else EXIT_MISSING

    def to_json(self) -> dict[str, Any]:
        """Return the document as JSON-ready values."""
        return {
            "schema": MATRIX_SCHEMA,
            "devipc": __version__,
            "exit_code": self.exit_code,
            "error": self.error,
            "backends": [row.to_json() for row in self.backends],
            "devices": [
                {"label": label, "backend": backend, "uuid": info.uuid, "name": info.name}
                for label, backend, info in self.devices
            ],
            "cells": [cell.to_json() for cell in self.cells],
        }


def run_matrix(
    *,
    backend: str | None = None,
    devices: Sequence[str] = (),
    timeout_s: float = DEFAULT_TIMEOUT_S,
    progress: Progress = silent,
) -> Matrix:
    """Try every pair of devices. Blocks for seconds a cell; parameters as for :func:`devipc.probe.runner.run_probe`."""
    backends = list_backends(backend, timeout_s=timeout_s, progress=progress)
    chosen = [(f"{name} {info.ordinal}", name, info) for name, info in pick_devices(backends, devices)]
    cells: list[Cell] = []
    for one in chosen:
        for other in chosen:
            progress(f"{one[0]} to {other[0]}", len(cells), len(chosen) ** 2)
            exporter, importer = Target(one[1], one[2].uuid), Target(other[1], other[2].uuid)
            with Checks(exporter, importer, timeout_s=timeout_s) as checks:
                cells.append(_cell(checks, one[0], other[0], same=exporter == importer))
    return Matrix(backends, chosen, cells)


def _cell(checks: Checks, exporter: str, importer: str, *, same: bool) -> Cell:
    opened = checks.open(same=same)
    if not checks.exporter:
        return Cell(exporter, importer, "", "", (_line(opened),))
    kind, no_kind = _first_kind(checks) if same else ("", [Row("memory", "", "", _OTHER_DEVICE)])
    strategy, no_strategy = _first_strategy(checks)
    return Cell(exporter, importer, kind, strategy, tuple(_line(row) for row in (*no_kind, *no_strategy)))


def _first_kind(checks: Checks) -> tuple[str, list[Row]]:
    rejected: list[Row] = []
    for kind, claim in checks.exporter["kinds"].items():
        row = checks.run(f"memory.{kind}", capability_from(claim))
        if row.capability:
            return kind, rejected
        rejected.append(row)
    if not rejected:
        answer = checks.exporter["capabilities"].get("memory")
        reason = capability_from(answer) if answer else Capability.no("the device has no memory interface")
        rejected.append(checks.told("memory", reason))
    return "", rejected


def _first_strategy(checks: Checks) -> tuple[str, list[Row]]:
    rejected: list[Row] = []
    for strategy in AUTOMATIC:
        check = f"sync.{strategy.value}"
        offers = [capability_from(side["offers"][strategy.value]) for side in (checks.exporter, checks.importer)]
        refused = next((offer for offer in offers if not is_offered(offer)), None)
        if refused is None and not words_are_proven(strategy):
            refused = offers[0]
        row = checks.told(check, refused) if refused is not None else checks.run(check, offers[0])
        if row.capability:
            return strategy.value, rejected
        rejected.append(row)
    return "", rejected


def _line(row: Row) -> str:
    found = row.capability
    return f"{row.check} {found.verdict}: {found.reason}" + (f"; remedy: {found.remedy}" if found.remedy else "")
