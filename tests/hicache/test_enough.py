"""Long runs that are interrupted, or out of time, say what they have done so far, and leave nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from devipc.errors import CompletionTimeout
from tests.hicache.chaos.rig import Rig
from tests.hicache.daemon.daemons import until
from tests.hicache.enough import ROOT

RIG_IS_THERE = "h.sock"


def run(folder: str, *arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
    account = Path(folder, "account.json")
    command = [sys.executable, "-m", *arguments, "--json", str(account)]
    environment = {**os.environ, "TMPDIR": folder}
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, env=environment), account


def account_of(file: Path) -> dict[str, Any]:
    """Read it; nothing else is left."""
    assert os.listdir(file.parent) == [file.name]
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.long
@pytest.mark.chaos
def test_random_kills_that_are_interrupted() -> None:
    with tempfile.TemporaryDirectory() as folder:
        process, file = run(folder, "tests.hicache.chaos", "--kills", "100000", "--rigs", "1", "--seed", "1")
        until(lambda: any(RIG_IS_THERE in names for _, _, names in os.walk(folder)))
        process.send_signal(signal.SIGINT)
        code, found = process.wait(50), account_of(file)
    assert (found["failed"], code) == ([], 128 + signal.SIGINT)
    assert found["incomplete"] == f"SIGINT: {found['kills']} of 100000 kills"
    assert found["rigs_that_ended_without_a_word"] == []


@pytest.mark.long
def test_a_state_machine_that_is_out_of_time() -> None:
    with tempfile.TemporaryDirectory() as folder:
        limits = ("--operations", str(10**9), "--processes", "2", "--time-limit", "1")
        process, file = run(folder, "tests.hicache.stateful", *limits)
        assert process.wait(50) == 0
        found = account_of(file)
    assert found["failed"] == 0
    assert found["incomplete"] == f"time limit of 1 s: {found['operations']} of {10**9} operations"
    assert len(found["processes"]) == 2
    assert found["operations"] > 0


@pytest.mark.long
@pytest.mark.chaos
def test_a_rig_that_does_not_get_together_leaves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: Rig) -> None:
        raise CompletionTimeout("the scheduler was not there in time")

    monkeypatch.setattr(Rig, "_join", refuse)
    with tempfile.TemporaryDirectory() as folder, pytest.raises(CompletionTimeout, match="not there in time"):
        Rig(folder, 1)
