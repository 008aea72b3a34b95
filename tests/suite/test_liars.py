"""Each lie is found by the case that is meant for it, as a verdict about the backend and not as a broken suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.suite import export_liars, liars, sync_liars
from tests.suite.runs import run_suite

ALL = sorted(liars.LIARS)


def factory_of(name: str) -> str:
    (module,) = (module for module in (liars, export_liars, sync_liars) if hasattr(module, name))
    return f"{module.__name__}:{name}"


def test_there_are_enough_lies() -> None:
    assert len(ALL) >= 40
    assert len(set(liars.LIARS.values())) >= 30


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ALL)
def test_lie_is_found(name: str, tmp_path: Path) -> None:
    identity = liars.LIARS[name]
    run = run_suite(
        tmp_path, f"--devipc-backend={factory_of(name)}", f"--devipc-only={identity}", "--devipc-deadline=2"
    )
    assert run.result(identity) == "fail", run.output
    assert run.status == 1, run.output
    assert run.reasons(identity)
    assert run.document["counts"]["error"] == 0, run.output
