"""The five results of a case, who is to blame for an exception, and the file that a run leaves.

Owns the words ``pass``, ``fail``, ``error``, ``skip`` and ``deviation`` and the schema of the file. Knows no pytest.
"""

from __future__ import annotations

import datetime
import enum
import json
import os
import platform
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devipc._version import __version__
from devipc.conformance.catalogue import Case
from devipc.errors import DevIPCError, UsageError
from devipc.interfaces.backend import Backend
from devipc.types import DeviceInfo

__all__ = [
    "SCHEMA",
    "Outcome",
    "Record",
    "Recorder",
    "Result",
    "SuiteError",
    "backend_package",
    "check_writable",
    "describe",
    "is_backends_fault",
    "merged",
    "write_results",
]

SCHEMA = "devipc.conformance/1"
"""Name of the file's form."""

_OF_A_RUN = ("schema", "devipc", "backend", "driver", "bindings", "device", "settings")


class Result(enum.StrEnum):
    """What became of a case. The worst of its phases and parameters counts, in this order."""

    PASS = "pass"
    SKIP = "skip"
    DEVIATION = "deviation"
    FAIL = "fail"
    ERROR = "error"

    @property
    def rank(self) -> int:
        """Position in that order; larger is worse."""
        return list(Result).index(self)


class SuiteError(Exception):
    """The suite itself broke: no verdict about the backend."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one phase with its reason."""

    result: Result
    reason: str = ""


@dataclass(slots=True)
class Record:
    """What is kept of one case with one set of parameters."""

    case: Case
    parameters: str
    result: Result = Result.PASS
    reason: str = ""
    duration_s: float = 0.0

    def add(self, outcome: Outcome, duration_s: float) -> None:
        """Add a phase; the worst result stays, with its reason."""
        self.duration_s += duration_s
        if outcome.result.rank > self.result.rank or not self.reason:
            self.reason = outcome.reason
        if outcome.result.rank > self.result.rank:
            self.result = outcome.result

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON-ready values."""
        return {
            "id": self.case.id,
            "parameters": self.parameters,
            "demand": self.case.demand,
            "clause": self.case.clause,
            "result": self.result.value,
            "reason": self.reason,
            "duration_s": round(self.duration_s, 3),
        }


class Recorder:
    """Collects the records of a run."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._started = datetime.datetime.now(datetime.UTC)

    def add(self, key: str, known: Case, parameters: str, outcome: Outcome, duration_s: float) -> None:
        """Add one phase of the test ``key``."""
        self._records.setdefault(key, Record(known, parameters)).add(outcome, duration_s)

    def counts(self) -> dict[Result, int]:
        """Return how many tests ended how."""
        return {result: sum(record.result is result for record in self._records.values()) for result in Result}

    def by_case(self) -> dict[str, Result]:
        """Return the worst result of each case; it counts as skipped only when all its parameters were."""
        return _worst((record.case.id, record.result) for record in self._records.values())

    def skips(self) -> dict[str, dict[str, str]]:
        """Return why cases were skipped: by case, then by its parameters."""
        found: dict[str, dict[str, str]] = {}
        for record in self._records.values():
            if record.result is Result.SKIP:
                found.setdefault(record.case.id, {})[record.parameters] = record.reason
        return dict(sorted(found.items()))

    def document(self, backend: Backend, info: DeviceInfo, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole run as JSON-ready values."""
        facts = dict(backend.facts())
        return {
            "schema": SCHEMA,
            "date": self._started.isoformat(timespec="seconds"),
            "devipc": __version__,
            "python": platform.python_version(),
            "kernel": platform.release(),
            "machine": platform.machine(),
            "backend": backend.name,
            "driver": facts.get("driver", ""),
            "bindings": facts.get("bindings", ""),
            "facts": facts,
            "device": {"uuid": info.uuid, "name": info.name, "pci": info.pci, "total_nbytes": info.total_nbytes},
            "settings": dict(settings),
            "counts": {result.value: count for result, count in self.counts().items()},
            "skips": self.skips(),
            "cases": {identity: result.value for identity, result in sorted(self.by_case().items())},
            "tests": [record.to_json() for record in self._records.values()],
        }


def write_results(path: Path, document: Mapping[str, Any]) -> None:
    """Write the results of a run, whole or not at all; to a terminal, pipe or device as it takes them."""
    text = json.dumps(document, indent=1) + "\n"
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def check_writable(*paths: Path | None) -> None:
    """Find out before a run, and not behind it, that its results have no place.

    Raises
    ------
    UsageError
        When the folder of a file is not there or cannot be written to.
    """
    for path in filter(None, paths):
        folder = path.resolve().parent
        if not path.exists() and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            raise UsageError(f"{path} cannot be written: no writable folder {folder}", remedy="name another place")


def merged(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the results of one run from those of its shares, which ran the same suite against the same device.

    Raises
    ------
    SuiteError
        When two of them are not of one run.
    """
    first = documents[0]
    for other in documents[1:]:
        if differing := [name for name in _OF_A_RUN if other[name] != first[name]]:
            raise SuiteError(f"shares of one run differ in {', '.join(differing)}")
    tests = sorted((test for document in documents for test in document["tests"]), key=lambda test: test["id"])
    results = [Result(test["result"]) for test in tests]
    skips: dict[str, dict[str, str]] = {}
    for document in documents:
        for identity, reasons in document["skips"].items():
            skips.setdefault(identity, {}).update(reasons)
    cases = _worst((test["id"], result) for test, result in zip(tests, results, strict=True))
    return {
        **first,
        "date": min(document["date"] for document in documents),
        "counts": {result.value: results.count(result) for result in Result},
        "skips": dict(sorted(skips.items())),
        "cases": {identity: result.value for identity, result in sorted(cases.items())},
        "tests": tests,
    }


def _worst(results: Iterable[tuple[str, Result]]) -> dict[str, Result]:
    worst: dict[str, Result] = {}
    for identity, result in results:
        known = worst.setdefault(identity, result)
        if {known, result} == {Result.PASS, Result.SKIP}:
            worst[identity] = Result.PASS
        else:
            worst[identity] = max(known, result, key=lambda one: one.rank)
    return worst


def backend_package(backend: Backend) -> str:
    """Return the package that a backend's class lives in."""
    module = type(backend).__module__
    return module.rpartition(".")[0] or module


def is_backends_fault(error: BaseException, package: str) -> bool:
    """Return True when ``error`` speaks against the backend, False when the suite broke.

    An assertion of the suite and a typed refusal where none is due are verdicts. Anything else is one only when it
    passed through the backend's own code, which may raise nothing but typed errors.
    """
    if isinstance(error, SuiteError):
        return False
    if isinstance(error, AssertionError | DevIPCError):
        return True
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module == package or module.startswith(f"{package}."):
            return True
    return False


def describe(error: BaseException) -> str:
    """Return the traceback as text."""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
