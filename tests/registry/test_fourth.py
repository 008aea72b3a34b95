"""A backend that this repository does not know: built as a wheel of its own in a temporary folder, installed into a
fresh environment, and used from there by everything that uses backends, with no edit anywhere.

It is the one that docs/writing-a-backend.md walks through, in the folder ``fourth`` beside this file.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from devipc.channel.listener import default_directory
from devipc.errors import UsageError

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

SOURCES = Path(__file__).with_name("fourth")
WHEEL = "devipc_acorn-0.1.0-py3-none-any.whl"


@dataclass(frozen=True, slots=True)
class Installed:
    """An environment that has the wheel, and an empty folder to work in."""

    python: Path
    folder: Path

    def run(self, *arguments: str, expect: int = 0, timeout_s: float = 50, **environment: str) -> str:
        """Run the environment's Python; return what it printed."""
        done = subprocess.run(
            [self.python, "-W", "error", *arguments],
            cwd=self.folder,
            env={**os.environ, "DEVIPC_TRIAL_CACHE": str(self.folder / "trials"), **environment},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout

    def document(self, *arguments: str) -> dict[str, Any]:
        """Run the command line with ``--json``."""
        found: dict[str, Any] = json.loads(self.run("-m", "devipc", *arguments, "--json"))
        return found


def test_an_allocation_that_its_driver_does_not_take_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "fourth"))
    device = importlib.import_module("devipc_acorn.backend").AcornBackend().open_device()

    def refuse(_range: object) -> NoReturn:
        raise UsageError("overlap")

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(device.memory._driver, "add", refuse)
        with pytest.raises(UsageError):
            device.memory.allocate(4096)
    assert os.listdir("/proc/self/fd") == before
    device.close()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Build and install; what the backend needs is lent by the environment that runs the tests."""
    folder = tmp_path_factory.mktemp("fourth")
    project, dist, environment = folder / "acorn", folder / "dist", folder / "environment"
    shutil.copytree(SOURCES, project, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    for command in (
        [*pip, "wheel", "-q", "--no-build-isolation", *offline, "-w", str(dist), str(project)],
        [sys.executable, "-m", "venv", "--without-pip", str(environment)],
        [*pip, "--python", str(environment / "bin/python"), "install", "-q", *offline, str(dist / WHEEL)],
    ):
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)
    python = environment / "bin/python"
    lent = sysconfig.get_path("purelib")
    scheme = {"base": str(environment), "platbase": str(environment)}
    own = Path(sysconfig.get_path("purelib", vars=scheme))
    (own / "lent.pth").write_text(f"import site; site.addsitedir({lent!r})\n")
    shutil.rmtree(project)  # from here on there is the wheel alone
    (folder / "empty").mkdir()
    os.makedirs(default_directory(), mode=0o700, exist_ok=True)  # of the sockets; it outlasts single tests
    return Installed(python, folder / "empty")


def test_registry_and_command_line_know_it(installed: Installed) -> None:
    where = "from devipc.registry import load_backend; import sys; load_backend('acorn')"
    where += "; print(sys.modules['devipc_acorn'].__file__)"
    assert Path(installed.run("-c", where).strip()).is_relative_to(installed.python.parents[1])
    rows = {row["backend"]: row for row in installed.document("backends")["backends"]}
    assert rows["acorn"]["verdict"] == "yes", rows
    assert [device["name"] for device in rows["acorn"]["devices"]] == ["Acorn"]
    assert "host" in rows


def test_the_probe_tries_it(installed: Installed) -> None:
    report = installed.document("probe", "--backend", "acorn", "--require", "memory,sync=stream_memop,sync=polling")
    rows = {row["check"]: row for row in report["checks"]}
    assert {row["backend"] for row in report["checks"]} == {"acorn"}
    answers = {name: rows[f"sync.{name}"]["verdict"] for name in ("stream_memop", "host_flag", "polling", "event")}
    assert answers == {"stream_memop": "yes", "host_flag": "yes", "polling": "yes", "event": "no"}
    assert rows["memory.memfd"]["verdict"] == "yes"
    refused = json.loads(
        installed.run("-m", "devipc", "probe", "--backend", "acorn", "--require", "sync=event", "--json", expect=1)
    )
    row = next(row for row in refused["checks"] if row["check"] == "sync.event")
    assert (row["verdict"], bool(row["reason"]), bool(row["remedy"])) == ("no", True, True)


def test_two_processes_share_by_each_of_its_strategies(installed: Installed) -> None:
    printed = installed.run(str(SOURCES / "programs/share.py")).splitlines()
    assert printed[:3] == [f"shared by {name}" for name in ("stream_memop", "host_flag", "polling")]
    assert printed[3:] == [
        "event: this device has no inter-process events: an Acorn device has no events that two processes share"
    ]


def test_the_suite_passes_with_its_profile(installed: Installed) -> None:
    results = installed.folder / "results.json"
    arguments = ("-m", "devipc", "conformance", "run", "--profile", "acorn_profile:whole_device")
    installed.run(*arguments, "--results", str(results), timeout_s=200, PYTHONPATH=str(SOURCES))
    document = json.loads(results.read_text())
    counts = document["counts"]
    assert counts["fail"] == counts["error"] == counts["deviation"] == 0
    assert {name: document["cases"][name] for name in ("DISC-205", "SYNC-066", "CRASH-060", "STATE-202")} == {
        "DISC-205": "pass",
        "SYNC-066": "pass",
        "CRASH-060": "pass",
        "STATE-202": "pass",
    }
    skipped = {name for name, result in document["cases"].items() if result == "skip"}
    events = {"CRASH-201", "SYNC-071", "SYNC-087", "SYNC-116", "SYNC-205", "SYNC-216", "SYNC-218"}
    grown_or_placed = {"LIFE-220", "MEM-029", "MEM-119", "MEM-220", "MEM-221", "OFF-202"}
    machine = {"DISC-002", "DISC-005", "DISC-010", "MEM-036", "OFF-043", "SYNC-088"}
    assert skipped == events | grown_or_placed | machine


def test_pages_go_through_the_cache_daemon(installed: Installed) -> None:
    assert installed.run(str(SOURCES / "programs/cache.py")) == "8 pages through acorn and back\n"
