"""The cache's end-to-end scenarios on the simulated runtime: every deployment, every strategy, none, no word."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from .peers import environment, run_body

matrix: Any = importlib.import_module("tests.hicache.matrix")
EVERY = matrix.combinations(
    ("stream_memop", "host_flag", "polling", "event"),
    no_events="event",
    no_words={"stream_memop": "regist", "host_flag": "regist"},
    also=[matrix.Combination("inproc", "auto", "alias", {"host_pointer": 0})],
)


@pytest.mark.simulator
@pytest.mark.parametrize(("one", "whole"), matrix.cases(EVERY, whole="stream_memop"))
def test_scenarios(one: Any, whole: bool, tmp_path: Path) -> None:
    def start(arguments: dict[str, Any], switches: dict[str, object], limit_s: float) -> None:
        run_body(play, arguments, environment(switches), limit_s)

    matrix.run("hip", one, whole=whole, folder=tmp_path, start=start)


def play(which: str, whole: bool, out: str, device: Any, sim: Any) -> None:
    matrix.play("hip", EVERY, which, whole=whole, out=out)
