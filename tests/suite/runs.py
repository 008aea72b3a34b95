"""Runs of the suite in a process of their own, outside the checkout, and what they left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devipc.conformance import cases, catalogue

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Run:
    """One finished run."""

    status: int
    output: str
    document: dict[str, Any]

    def result(self, identity: str) -> str:
        """Result of a case; the whole output when it has none."""
        assert identity in self.document.get("cases", {}), self.output
        return str(self.document["cases"][identity])

    def reasons(self, identity: str) -> str:
        """All reasons of a case."""
        return "\n".join(test["reason"] for test in self.document["tests"] if test["id"] == identity)


def modules_of(identities: Iterable[str]) -> tuple[str, ...]:
    """Where cases are, as ``paths`` of a run that loads no others."""
    cases()  # loads them all here
    return ("--pyargs", *sorted({catalogue._known[one][0].rpartition(".")[0] for one in identities}))


def run_suite(
    folder: Path, *arguments: str, timeout_s: float = 120.0, paths: tuple[str, ...] = (), plugins: bool = True
) -> Run:
    """Run the suite with ``arguments`` in ``folder``; kill it after ``timeout_s``.

    Without ``plugins`` pytest loads none that is installed: it begins in half the time.
    """
    results = folder / "results.json"
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(folder), "-p", "no:cacheprovider"]
    command += ["-p", "devipc.conformance.plugin", f"--devipc-results={results}", "-q", "--tb=short", *arguments]
    command += paths or ("--pyargs", "devipc.conformance")
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **({} if plugins else {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    document = json.loads(results.read_text()) if results.exists() else {}
    return Run(done.returncode, done.stdout, document)
