"""The benchmarks measure, compare bytes, and say what they measured on; small sizes, figures of no worth."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from devipc.bench.control import measure_control
from devipc.bench.pools import ALLOCATIONS, GEOMETRIES, Pinned, Pool
from devipc.bench.transfer import Case, measure_cases
from devipc.errors import CapabilityError, DevIPCError
from devipc.registry import load_backend

SMALL = {"rows": 512, "repetitions": 2, "warm_up": 1}


@pytest.fixture
def device() -> Iterator[Any]:
    opened = load_backend("host").open_device()
    yield opened
    opened.close()


def run(device: Any, *cases: Case, **options: Any) -> list[dict[str, Any]]:
    return list(measure_cases("inproc:", load_backend("host"), device, cases, **{**SMALL, **options}))


def test_every_direction_and_method_has_a_row_beside_its_floor(device: Any) -> None:
    cases = [
        Case("tp4", "one", page_tokens=16, tokens=64),
        Case("mla", "layers", page_tokens=1, tokens=64, shape="runs"),
    ]
    several = Case("tp4", page_tokens=16, tokens=32, in_flight=3)
    rows = run(device, *cases, several, slow_repetitions=1)
    assert [(row["method"], row["direction"]) for row in rows[-3:]] == [
        ("cache", way) for way in ("backup", "restore", "both")
    ]
    # Three at a time, four times: bytes of 12 operations of 32 tokens.
    assert {(row["in_flight"], row["nbytes"]) for row in rows[-3:]} == {(3, 12 * 32 * GEOMETRIES["tp4"].token_nbytes)}
    found = {(row["geometry"], row["method"], row["direction"]) for row in rows}
    ways = {"cache": ("backup", "restore", "both"), "loop": ("backup", "restore"), "batch": ("backup", "restore")}
    assert found == {(case.geometry, name, way) for case in cases for name, some in ways.items() for way in some}
    for row in rows:
        assert row["share_of_floor"] == pytest.approx(row["gb_per_s"] / row["floor_gb_per_s"], rel=0.05, abs=0.01)
        assert row["floor"] == "numpy's copy of one contiguous array"
        assert ("first_layer_share" in row) == (row["method"] == "cache" and row["direction"] == "restore")
    assert {(row["in_flight"], row["samples"]) for row in rows if row["method"] == "cache"} == {(1, 2), (3, 1)}


def test_other_bytes_end_the_measurement(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read, calls = Pool.read, []

    def damaged(pool: Pool, pages: Any, pinned: Pinned) -> Any:
        found = read(pool, pages, pinned)
        calls.append(1)
        found[-1, -1] ^= len(calls) == 2
        return found

    monkeypatch.setattr(Pool, "read", damaged)
    with pytest.raises(DevIPCError, match="other bytes") as caught:
        run(device, Case("tp4", page_tokens=16, tokens=64))
    assert caught.value.code == "wrong_bytes"


@pytest.mark.parametrize("allocation", ALLOCATIONS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_pools_tell_every_place_from_every_other(geometry: str, allocation: str, device: Any) -> None:
    if allocation == "classic":
        with pytest.raises(CapabilityError):
            Pool(device, GEOMETRIES[geometry], allocation, rows=64, page_tokens=16)
        return
    pool, pinned = Pool(device, GEOMETRIES[geometry], allocation, rows=64, page_tokens=16), Pinned(device, 2**23)
    pool.fill(pinned, seed=1)
    pages = pool.read(np.arange(1, pool.page_count), pinned)
    assert pages.shape == (3, pool.page_nbytes)
    planes = pages.reshape(3 * len(pool.starts), -1)
    assert len({plane.tobytes() for plane in planes}) == len(planes)
    pinned.close()
    pool.close()


def test_requests_are_timed_beside_a_bare_round_trip(device: Any) -> None:
    rows = measure_control("inproc:", load_backend("host"), device, repetitions=3, warm_up=1)
    assert rows[0]["request"] == "bare round trip"
    assert (rows[0]["median_over_bare"], rows[0]["samples"]) == (1.0, 3)
    assert {"no-op", "backup of one page", "restore of one page"} <= {row["request"] for row in rows}


def command(*arguments: str) -> dict[str, Any]:
    answer = subprocess.run(
        [sys.executable, "-m", "devipc", "bench", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "DEVIPC_TRIAL_CACHE": ""},
    )
    assert answer.returncode == 0, answer.stderr
    found: dict[str, Any] = json.loads(answer.stdout)
    assert found["machine"]["cores"] == os.cpu_count()
    assert found["backend"] == "host"
    return found


def test_the_command_writes_what_it_measured_on(tmp_path: Any) -> None:
    sizes = ("--tokens", "64", "--page-tokens", "16", "--geometry", "tp4", "--repetitions", "1")
    found = command("transfer", *sizes, "--out", str(tmp_path / "found.json"))
    assert found["schema"] == "devipc.bench.transfer/1"
    assert len(found["results"]) == 3
    assert json.loads((tmp_path / "found.json").read_text()) == found


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        (("transfer", "--url", "daemon", "--tokens", "64", "--page-tokens", "16", "--repetitions", "2"), 3),
        (("control", "--url", "daemon", "--repetitions", "5"), 7),
        (("sync", "--repetitions", "5"), 6),
        (("footprint", "--tier-mib", "64", "--rows", "2048"), 5),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_daemon_of_its_own_is_measured_and_ended(arguments: tuple[str, ...], rows: int) -> None:
    assert len(command(*arguments)["results"]) == rows


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_model_runs_beside_the_transfers() -> None:
    pytest.importorskip("torch")
    found = command("interference", "--url", "daemon", "--tokens", "128", "--model", "decode", "--windows", "1")
    assert [row["moved_by"] for row in found["results"]] == ["cache", "contiguous copies", "gather kernel"]
    assert all(row["steps_quiet"] > 1 and row["steps_busy"] > 1 for row in found["results"])


@pytest.mark.long
@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_an_engine_is_measured_in_each_deployment_and_survives_its_parts() -> None:
    pytest.importorskip("torch")
    rows = command("engine", "--model", "tiny")["results"]
    by_name = {row["deployment"]: row for row in rows if "deployment" in row}
    assert set(by_name) == {"none", "inproc", "daemon", "process"}
    assert all("ttft_restored_ms" in row for name, row in by_name.items() if name != "none")
    assert by_name["process"]["messages_per_batch"] == 2
    for name in ("inproc", "daemon"):
        assert by_name[name]["moved_busy_gb_per_s"] > 0
        assert by_name[name]["throttle"]["batches"] == 1
        assert len(by_name[name]["hiding"]) == 3
        for hidden in by_name[name]["hiding"]:
            low, high = hidden["stall_quartiles_ms"]
            assert low <= hidden["stall_ms"] <= high
            assert hidden["pairs"] >= 9
    assert {row["died"]: row["same_answers"] for row in rows if "died" in row} == {"runtime": True, "daemon": True}
