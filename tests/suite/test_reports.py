"""Result files read again: what they say in words, in cells of the capability matrix, and what is no such file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from devipc.conformance.reports import Run, cell, read_run
from devipc.conformance.results import Result
from devipc.errors import UsageError


def run_of(tests: list[tuple[str, str, str]], *, device: str = "Model 1", simulated: bool = False) -> Run:
    """Make a run; its tests are ids, parameters and results."""
    document: dict[str, Any] = {
        "schema": "devipc.conformance/1",
        "backend": "some",
        "date": "2026-11-29T10:00:00+00:00",
        "device": {"name": device},
        "facts": {"driver": "1.2"},
        "settings": {"only": [], "simulated": simulated},
        "counts": {name: sum(result == name for _, _, result in tests) for name in Result},
        "cases": {identity: result for identity, _, result in tests},
        "tests": [
            {"id": identity, "parameters": parameters, "result": result, "reason": f"why {result}"}
            for identity, parameters, result in tests
        ],
    }
    return Run(Path("results.json"), document)


VERIFIED = run_of([("MEM-011", "vmm_fd", "pass"), ("SYNC-066", "event", "skip"), ("MEM-011", "pool", "fail")])
OTHER = run_of([("MEM-011", "vmm_fd", "pass")], device="Model 2")
SIMULATED = run_of(
    [
        *(("MEM-011", "legacy", "pass"), ("SYNC-066", "event", "pass"), ("MEM-011", "vmm_fd", "pass")),
        ("SYNC-066", "polling", "skip"),
    ],
    simulated=True,
)


@pytest.mark.parametrize(
    ("runs", "kind", "strategy", "expected"),
    [
        ([], "vmm_fd", "", "untested on hardware"),
        ([VERIFIED], "vmm_fd", "", "verified on Model 1 (1.2, 2026-11-29)"),
        ([VERIFIED, OTHER], "vmm_fd", "", "verified on Model 1 (1.2, 2026-11-29), Model 2 (1.2, 2026-11-29)"),
        ([SIMULATED, VERIFIED], "vmm_fd", "", "verified on Model 1 (1.2, 2026-11-29)"),
        ([VERIFIED], "", "event", "no on Model 1 (1.2, 2026-11-29)"),
        ([VERIFIED, SIMULATED], "", "event", "no on Model 1 (1.2, 2026-11-29)"),
        ([VERIFIED], "pool", "", "untested on hardware"),
        ([VERIFIED], "fabric", "", "-"),
        ([VERIFIED, SIMULATED], "legacy", "", "simulated, untested on hardware"),
        ([SIMULATED], "", "event", "simulated, untested on hardware"),
        ([SIMULATED], "", "polling", "no, simulated"),
        ([VERIFIED, SIMULATED], "", "polling", "no, simulated"),
    ],
)
def test_cells(runs: list[Run], kind: str, strategy: str, expected: str) -> None:
    assert cell(runs, kind=kind, strategy=strategy) == expected


def test_a_kernel_module_is_named_before_the_interface() -> None:
    VERIFIED.document["facts"]["kernel_driver"] = "Some module 580.1.2 of today"
    try:
        assert VERIFIED.driver == "580.1.2"
    finally:
        del VERIFIED.document["facts"]["kernel_driver"]
    assert VERIFIED.driver == "1.2"


def test_summary_says_what_is_not_well() -> None:
    summary = VERIFIED.summary()
    assert not summary["good"]
    assert summary["skips"] == {"SYNC-066": "why skip"}
    assert summary["troubles"] == [["MEM-011", "pool", "fail", "why fail"]]
    assert json.loads(json.dumps(summary)) == summary


DAMAGED = [
    {"device": None},
    {"tests": []},
    {"tests": [{"id": "MEM-011", "parameters": "", "result": "nonsense", "reason": ""}]},
    {"counts": {}},
    {"cases": 5},
    {"settings": None},
]


@pytest.mark.parametrize("change", DAMAGED)
def test_damaged_files_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps(VERIFIED.document))
    assert read_run(path).summary() == {**VERIFIED.summary(), "file": "file.json"}
    path.write_text(json.dumps({**VERIFIED.document, **change}))
    with pytest.raises(UsageError, match=r"file\.json is damaged"):
        read_run(path)


@pytest.mark.parametrize("text", ["", "[]", "[" * 10**5, '{"schema": "another/1"}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"file\.json"):
        read_run(path)
