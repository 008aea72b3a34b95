"""The document ``devipc.probe/1``: its schema, and a recorded one that must still come out the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from devipc.cli import probe as probe_command
from tests.probe.tool import ROOT, environment, probe

SCHEMA = json.loads((ROOT / "docs" / "schemas" / "probe-1.json").read_text())
# How long the work took to be seen pending, or that it never was: both are right.
PENDING = re.compile(
    r"(the marker was )?pending behind \d+ copies(, then (seen|reached with its data))?"
    r"|((seen|reached with its data); )?the work was too short to (see it pending|wait for|be seen pending)"
)
GOLDEN = Path(__file__).with_name("golden") / "host.json"


def check(document: dict[str, Any]) -> None:
    jsonschema.validate(document, SCHEMA, cls=jsonschema.Draft202012Validator)


def settled(value: Any, key: str = "") -> Any:
    """Return ``value`` without what differs from machine to machine and from run to run."""
    if isinstance(value, dict):
        return {name: settled(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [settled(inner) for inner in value]
    if isinstance(value, float) or key in ("total_nbytes", "devipc", "kernel", "machine", "python"):
        return "..."
    if isinstance(value, str):
        value = re.sub(r"host-[0-9a-f]{32}", "host-...", value)
        value = PENDING.sub("...", value)
        return re.sub(r"\d+ bytes in both|\d+ numbers published behind markers, \d+ of them", "...", value)
    return value


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_the_document_of_the_host_backend_is_the_recorded_one() -> None:
    document = probe("--backend", "host", "--require", "memory=memfd,sync", env=environment(only="host"), code=0)
    check(document)
    assert settled(document) == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize(
    ("fault", "arguments", "code"),
    [
        pytest.param("map_segv", ["--backend", "faulty", "--device", "0"], 1, marks=pytest.mark.long),
        pytest.param("import_segv", [], 0, marks=pytest.mark.long),
        ("device_segv", ["--backend", "faulty", "--device", "0"], 1),
        ("import_raise", ["--backend", "faulty"], 3),
    ],
)
def test_the_document_is_whole_whatever_a_backend_does(site: Path, fault: str, arguments: list[str], code: int) -> None:
    check(probe(*arguments, env=environment(site, fault=fault), code=code))


def test_a_probe_that_fails_itself_still_prints_a_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(probe_command, "run_probe", fail)
    with pytest.raises(SystemExit) as ended:
        probe_command.command(["--json"], standalone_mode=False)
    document = json.loads(capsys.readouterr().out)
    assert (ended.value.code, document["exit_code"], document["error"]) == (4, 4, "RuntimeError: no luck")
    check(document)


@pytest.mark.parametrize("damage", [{"exit_code": 2}, {"checks": [{}]}, {"extra": 1}])
def test_the_schema_refuses_what_is_no_such_document(damage: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        check(json.loads(GOLDEN.read_text()) | {"duration_s": 1.0, "devipc": "1"} | damage)
