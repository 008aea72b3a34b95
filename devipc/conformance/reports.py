"""Results of runs, read again: what a file says, in a few words and as cells of a table.

Owns the reading of result files. It runs nothing and opens no device, so that documents and programs without a device
can be made from the files alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devipc.conformance.results import SCHEMA, Result
from devipc.errors import UsageError

__all__ = ["Run", "cell", "read_run"]

_KIND_CASE = "MEM-011"
_STRATEGY_CASE = "SYNC-066"


@dataclass(frozen=True, slots=True)
class Run:
    """One file of results.

    Parameters
    ----------
    path : Path
        Where it was read.
    document : dict
        What it holds; see :data:`devipc.conformance.results.SCHEMA`.
    """

    path: Path
    document: dict[str, Any]

    @property
    def backend(self) -> str:
        """Name of the backend."""
        return str(self.document["backend"])

    @property
    def device(self) -> str:
        """Name of the device."""
        return str(self.document["device"]["name"])

    @property
    def driver(self) -> str:
        """Version of the driver: the kernel module's where the backend names one, since it is what people install."""
        facts = self.document["facts"]
        words = str(facts.get("kernel_driver", "")).split()
        module = next((word for word in words if word[:1].isdigit() and "." in word), "")
        return module or str(self.document.get("driver") or facts.get("driver", ""))

    @property
    def bindings(self) -> str:
        """Version of the vendor's bindings, empty when there are none."""
        return str(self.document.get("bindings") or self.document["facts"].get("bindings", ""))

    @property
    def date(self) -> str:
        """Day of the run."""
        return str(self.document["date"])[:10]

    @property
    def where(self) -> str:
        """The device, with its driver and the day in parentheses."""
        return f"{self.device} ({', '.join(filter(None, (self.driver, self.date)))})"

    @property
    def simulated(self) -> bool:
        """True when no real driver was below."""
        said = (self.document["settings"].get("simulated"), self.document["facts"].get("simulated"))
        return any(one in (True, "true", "1") for one in said)

    @property
    def foreign(self) -> bool:
        """True when the calls were passed on to another vendor's device, which ``hardware`` names."""
        return "forwarding" in str(self.document.get("hardware", ""))

    @property
    def whole(self) -> bool:
        """True when no part was left out on request."""
        return not self.document["settings"]["only"]

    @property
    def good(self) -> bool:
        """True when nothing failed and the suite did not break."""
        counts = self.document["counts"]
        return not (counts["fail"] or counts["error"])

    def count(self, result: Result) -> int:
        """Return how many cases ended so, parameters not counted."""
        return sum(value == result.value for value in self.document["cases"].values())

    def skips(self) -> dict[str, str]:
        """Return why whole cases were skipped."""
        reasons = {test["id"]: str(test["reason"]) for test in self.document["tests"] if test["result"] == "skip"}
        return {
            identity: reasons.get(identity, "")
            for identity, result in self.document["cases"].items()
            if result == Result.SKIP.value
        }

    def troubles(self) -> list[tuple[str, str, str, str]]:
        """Return id, parameters, result and first line of the reason of what did not pass and was not skipped."""
        return [
            (test["id"], test["parameters"], test["result"], (str(test["reason"]).splitlines() or [""])[0])
            for test in self.document["tests"]
            if test["result"] not in ("pass", "skip")
        ]

    def seen(self, case: str, parameter: str) -> tuple[str, str]:
        """Return result and reason of a case for one value of its parameter; empty when that did not run."""
        for test in self.document["tests"]:
            if test["id"] == case and parameter in test["parameters"].split("-"):
                return str(test["result"]), str(test["reason"])
        return "", ""

    def summary(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {
            "file": self.path.name,
            "backend": self.backend,
            "device": self.device,
            "driver": self.driver,
            "bindings": self.bindings,
            "date": self.date,
            "simulated": self.simulated,
            "whole": self.whole,
            "good": self.good,
            "cases": {result.value: self.count(result) for result in Result},
            "skips": self.skips(),
            "troubles": [list(trouble) for trouble in self.troubles()],
        }


def read_run(path: Path) -> Run:
    """Read a file of results.

    Raises
    ------
    UsageError
        When it is none.
    """
    try:
        if not path.is_file():  # one that never ends would be read for ever
            raise ValueError("it is no regular file")
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}", remedy="pass files that --results has written") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise UsageError(f"{path} holds no results of schema {SCHEMA}", remedy="pass files that --results has written")
    run = Run(path, document)
    try:
        tests = [Result(test["result"]) for test in document["tests"]]
        if any(document["counts"][result.value] != tests.count(result) for result in Result):
            raise ValueError("its tests are not as many as it counts")
        if set(document["cases"]) != {test["id"] for test in document["tests"]}:
            raise ValueError("its tests are not those of its cases")
        run.summary()
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{path} is damaged: {type(error).__name__}: {error}", remedy="run the suite again with --results"
        ) from error
    return run


def cell(runs: Sequence[Run], *, kind: str = "", strategy: str = "") -> str:
    """Return what is known of a handle kind or a strategy of one backend, from its runs, the best evidence first.

    ``verified on DEVICE (DRIVER, DATE)``; ``untested on its own hardware`` where the calls were passed on to another
    vendor's device; ``no on DEVICE (DRIVER, DATE)``, where a real device refused it by type; ``simulated, untested on
    hardware`` and ``no, simulated``, which are no evidence about any device; ``untested on hardware`` when it ran
    nowhere, or nowhere well; ``-`` when the backend knows no such thing.
    """
    case, parameter = (_KIND_CASE, kind) if kind else (_STRATEGY_CASE, strategy)
    found = [(run, run.seen(case, parameter)[0]) for run in runs]
    if runs and not any(result for _, result in found):
        return "-"
    passed = [run for run, result in found if result == Result.PASS.value]
    real = list(dict.fromkeys(run.where for run in passed if not run.simulated and not run.foreign))
    if real:
        return f"verified on {', '.join(real)}"
    if lent := list(dict.fromkeys(run.where for run in passed if run.foreign)):
        return f"untested on its own hardware; calls proven on {', '.join(lent)}"
    refused = [run for run, result in found if result == Result.SKIP.value and not run.foreign]
    if denied := list(dict.fromkeys(run.where for run in refused if not run.simulated)):
        return f"no on {', '.join(denied)}"
    if passed:
        return "simulated, untested on hardware"
    return "no, simulated" if refused else "untested on hardware"
