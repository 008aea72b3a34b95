"""Requirements, exit codes, explanations and redaction, without a process."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from devipc.capabilities import Capability
from devipc.errors import UsageError
from devipc.probe import environment
from devipc.probe.catalogue import AREAS, TRANSFER_NAMES, all_checks, explain
from devipc.probe.partner import NotTried
from devipc.probe.report import BackendRow, Report, Requirement, Row, parse_requirements
from devipc.probe.runner import pick_devices
from devipc.probe.transfer import TRANSFER_CHECKS, check_transfer
from devipc.types import DeviceInfo

YES, NO = Capability.yes("seen"), Capability.no("refused", remedy="ask")
HOMES = "/home"
INFO = [DeviceInfo(f"ID-{n}a", n, f"Device {n}") for n in range(12)]


def rows(**found: Capability) -> list[Row]:
    return [Row(check.replace("__", "."), "x", "ID-0a", capability) for check, capability in found.items()]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("memory", [Requirement("memory")]),
        (" memory , sync=stream_memop ", [Requirement("memory"), Requirement("sync", "stream_memop")]),
        ("sync.polling,transfer.copy", [Requirement("sync", "polling"), Requirement("transfer", "copy")]),
        ("identity", [Requirement("identity")]),
    ],
)
def test_requirements_are_read(text: str, found: list[Requirement]) -> None:
    assert list(parse_requirements(text)) == found
    assert list(parse_requirements(",".join(map(str, found)))) == found


@pytest.mark.parametrize("text", ["", ",", "speed", "memory=", "memory=fast", "sync=vmm_fd", "identity=yes"])
def test_requirements_that_make_no_sense_are_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_requirements(text)
    assert refused.value.remedy


@pytest.mark.parametrize(
    ("require", "found", "missing"),
    [
        ("memory", {"memory__legacy": NO, "memory__vmm_fd": YES}, ""),
        ("memory", {"memory__legacy": NO}, "memory.legacy no: refused"),
        ("memory=legacy", {"memory__legacy": NO, "memory__vmm_fd": YES}, "memory.legacy no: refused"),
        ("memory=pool", {"memory__vmm_fd": YES}, "memory.vmm_fd yes: "),
        ("memory", {"memory": NO}, "memory no: refused"),
        ("memory=pool", {"memory": NO}, "memory no: refused"),
        ("sync=event", {"identity": NO}, "no such check came about"),
        ("transfer", {"transfer__copy": YES, "transfer__order": NO}, "transfer.order no: refused"),
        ("identity", {"identity": YES}, ""),
    ],
)
def test_what_is_missing_is_said(require: str, found: dict[str, Capability], missing: str) -> None:
    (requirement,) = parse_requirements(require)
    assert requirement.missing(rows(**found)) == missing
    report = Report([BackendRow("x", YES, tuple(INFO[:1]))], rows(**found), [requirement])
    assert report.exit_code == (1 if missing else 0)
    (told,) = report.to_json()["required"]
    assert told["holds"] is not bool(missing)


def test_a_requirement_must_hold_on_every_device() -> None:
    both = [*rows(memory__legacy=YES), Row("memory.legacy", "x", "ID-1a", NO)]
    report = Report([], both, parse_requirements("memory"))
    assert report.exit_code == 1
    assert [(backend, device) for _, backend, device, _ in report.missing] == [("x", "ID-1a")]


def test_nothing_found_and_a_failed_tool_have_their_own_codes() -> None:
    assert Report([], [], parse_requirements("memory")).exit_code == 3
    assert Report([], rows(memory__legacy=YES), parse_requirements("memory"), error="no luck").exit_code == 4


@pytest.mark.parametrize(
    ("wanted", "found"),
    [((), range(12)), (("1",), [1]), (("1", "ID-2"), [1, 2]), (("ID-1",), [1, 10, 11]), (("nobody",), [])],
)
def test_devices_are_picked_by_number_or_by_the_beginning_of_an_identity(
    wanted: tuple[str, ...], found: list[int]
) -> None:
    listed = [BackendRow("x", YES, tuple(INFO))]
    assert [info.ordinal for _, info in pick_devices(listed, wanted)] == list(found)


def test_every_check_is_explained() -> None:
    assert tuple(TRANSFER_CHECKS) == TRANSFER_NAMES
    for check in all_checks():
        explanation = explain(check)
        assert explanation is not None
        assert explanation.about.endswith(".")
        assert explanation.about != explanation.tries
        assert explanation.remedies
        assert all("\n" not in remedy and len(remedy) < 120 for remedy in explanation.remedies)
        if "." in check:
            assert not explanation.about.startswith(AREAS[check.partition(".")[0]].title[:20].capitalize())
    assert explain("memory.nothing") is None


@pytest.mark.parametrize("name", ["batch", "strided"])
def test_without_numpy_descriptors_are_not_tried_and_the_remedy_is_to_install_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)  # makes an import of it fail
    with pytest.raises(NotTried, match="numpy is not installed") as refused:
        check_transfer(None, None, name)  # type: ignore[arg-type]
    assert refused.value.remedy == "pip install numpy"


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        (f"{HOMES}/ada/lib/x.so, loaded", "~/lib/x.so, loaded"),
        (f"{HOMES}/somebody-else/x", "~/x"),
        ("ada@engine: ready", "<user>@<host>: ready"),
        ("adamant engineer", "adamant engineer"),
        ("GPU-d0e15170-0a5c-4d2b-9f31-000000000001", "GPU-d0e15170-..."),
        ("host-b9d5260d02964679acb31ffc9df0d035", "host-b9d526..."),
        ("serial 132042011234567", "serial 1320..."),
        ("driver 580.159.04, 25276510208 bytes", "driver 580.159.04, 25276510208 bytes"),
    ],
)
def test_what_is_private_is_taken_out(monkeypatch: pytest.MonkeyPatch, text: str, redacted: str) -> None:
    monkeypatch.setenv("HOME", f"{HOMES}/ada")
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.setattr(socket, "gethostname", lambda: "engine")
    assert environment.redact(text) == redacted


def test_an_unusual_home_is_taken_out_and_a_common_name_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "ada"))
    monkeypatch.setenv("LOGNAME", "root")
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert environment.redact(f"{tmp_path}/ada/x and {tmp_path}/adam") == f"~/x and {tmp_path}/adam"
    assert environment.redact("root on localhost") == "root on localhost"


def test_variables_that_choose_devices_are_facts_whoever_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"]
    names += ["ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR", "CUDA_DEVICE_ORDER", "DEVIPC_TRIAL_CACHE"]
    for name in names:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MY_SECRET", "hunter2")
    facts = environment.collect(backends=False)
    assert set(names) <= set(facts["variables"])
    assert "MY_SECRET" not in facts["variables"]
    assert {"ipc", "mnt", "pid"} <= set(facts["namespaces"])
    assert {"/dev/shm", "memlock (soft / hard)", "ptrace scope"} <= set(facts["limits"])
    assert all(facts[section] for section in ("devipc", "packages", "machine"))
