"""Runs the command line in a process that sees chosen backends, and reads what it says.

Owns the environment of that process and the installation of the faulty backend: files as an installer writes them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from devipc.registry import backend_names

SCRIPT = str(Path(sys.executable).with_name("devipc"))
ROOT = Path(__file__).resolve().parents[2]


def environment(folder: Path | None = None, *, fault: str = "", only: str = "", **more: str) -> dict[str, str]:
    """Return an environment with the host backend and, where ``folder`` is given, the faulty one; or with ``only``."""
    shown = {only} if only else {"host", "faulty"}
    hidden = [name for name in ("host", "faulty", *backend_names()) if name not in shown]
    result = {**os.environ, "DEVIPC_BACKENDS_DISABLE": ",".join(hidden), "DEVIPC_TEST_FAULT": fault, **more}
    if folder is not None:
        info = folder / "devipc_faulty-1.0.dist-info"
        if not info.exists():
            info.mkdir()
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: devipc-faulty\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text("[devipc.backends]\nfaulty = tests.probe.faulty\n")
        result["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
    return result


def run(*arguments: str, env: dict[str, str], timeout_s: float = 50) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, timeout=timeout_s, env=env, check=False)


def probe(*arguments: str, env: dict[str, str], code: int, timeout_s: float = 50) -> dict[str, Any]:
    """Run ``devipc probe --json``, check its exit code against both places and return the document."""
    done = run("probe", "--json", *arguments, env=env, timeout_s=timeout_s)
    assert "Traceback" not in done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode, document["exit_code"]) == (code, code), (
        done.stderr,
        verdicts(document),
        document["error"],
    )
    return document


def verdicts(document: dict[str, Any], *, but: str = "yes") -> dict[str, str]:
    """Return the verdict of each check that is not ``but``."""
    return {row["check"]: row["verdict"] for row in document["checks"] if row["verdict"] != but}


def row(document: dict[str, Any], check: str) -> dict[str, Any]:
    return next(found for found in document["checks"] if found["check"] == check)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of ``sys.path`` in which the faulty backend is installed."""
    return tmp_path
