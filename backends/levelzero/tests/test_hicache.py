"""The cache's end-to-end scenarios on the simulated driver: every deployment, every strategy, none, no word."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from .peers import environment, run_body

matrix: Any = importlib.import_module("tests.hicache.matrix")
EVERY = matrix.combinations(
    ("host_flag", "polling", "event"),
    no_events="this driver does not have the call",
    no_words={"stream_memop": "no call by which a list stores to", "host_flag": "zexDriverImportExternalPointer"},
)


@pytest.mark.simulator
@pytest.mark.parametrize(("one", "whole"), matrix.cases(EVERY, whole="host_flag"))
def test_scenarios(one: Any, whole: bool, tmp_path: Path) -> None:
    def start(arguments: dict[str, Any], switches: dict[str, object], limit_s: float) -> None:
        run_body(play, arguments, environment(switches), limit_s)

    matrix.run("levelzero", one, whole=whole, folder=tmp_path, start=start)


def play(which: str, whole: bool, out: str, device: Any, sim: Any) -> None:
    matrix.play("levelzero", EVERY, which, whole=whole, out=out)
