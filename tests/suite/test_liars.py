"""Each lie is found by the cases that are meant for it, as a verdict about the backend and not as a broken suite."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from devipc.conformance import cases
from tests.suite import (
    beside_liars,
    crash_liars,
    device_liars,
    event_liars,
    export_liars,
    liars,
    memory_liars,
    sync_liars,
    transfer_liars,
)
from tests.suite.lying import LIARS
from tests.suite.runs import modules_of, run_suite

MODULES = (
    beside_liars,
    crash_liars,
    device_liars,
    event_liars,
    export_liars,
    liars,
    memory_liars,
    sync_liars,
    transfer_liars,
)
LARGE_NBYTES = 12 << 30


@pytest.fixture(autouse=True)
def _no_files_of_liars() -> Iterator[None]:
    """One of the lies is to leave files behind."""
    yield
    folder, _, beginning = crash_liars.LEFT_FILES.rpartition("/")
    for path in Path(folder).glob(f"{beginning}*"):
        if not crash_liars.alive(int(path.name.removeprefix(beginning))):
            path.unlink(missing_ok=True)


def test_every_case_has_a_liar() -> None:
    assert len(LIARS) >= 40
    caught = {identity for lie in LIARS.values() for identity in lie.cases}
    known = {case.id for case in cases()}
    assert not known - caught, f"no liar trips {sorted(known - caught)}"
    assert not caught - known, f"no such case: {sorted(caught - known)}"
    assert {lie.factory.partition(":")[0] for lie in LIARS.values()} == {module.__name__ for module in MODULES}


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(LIARS))
def test_lie_is_found(name: str, tmp_path: Path) -> None:
    lie = LIARS[name]
    if "--devipc-large" in lie.options and os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") < LARGE_NBYTES:
        pytest.skip(f"needs {LARGE_NBYTES} bytes of free memory")
    what = "profile" if lie.is_profile else "backend"
    only = f"--devipc-only={','.join(lie.cases)}"
    run = run_suite(
        tmp_path,
        *(f"--devipc-{what}={lie.factory}", only, "--devipc-deadline=2", *lie.options),
        timeout_s=280,
        paths=modules_of(lie.cases),
        plugins=False,
    )
    for identity in lie.cases:
        assert run.result(identity) == "fail", run.output
        assert run.reasons(identity).strip()
    assert run.status == 1, run.output
    assert run.document["counts"]["error"] == 0, run.output
