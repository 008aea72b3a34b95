"""Kept results of trials: a hit needs no process, and no file in there is ever trusted or fatal."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

import pytest

from devipc.capabilities import Capability
from devipc.completion import choose
from devipc.completion.cache import TrialCache
from devipc.completion.pair import try_in_children
from devipc.registry import load_backend
from devipc.types import Strategy
from tests.completion.rig import host_device
from tests.completion.test_chooser import linked

YES = Capability.yes("tried")
BROKEN = Capability.broken("it lied", remedy="do not")
MEMOP = Strategy.STREAM_MEMOP


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "some" / "trials"
    monkeypatch.setenv("DEVIPC_TRIAL_CACHE", str(folder))
    return folder


def cache(**facts: str) -> TrialCache:
    return TrialCache(backend="host", device_uuid="host-1", facts=facts)


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_a_verdict_is_kept_for_exactly_its_circumstances(folder: Path) -> None:
    assert cache(driver="1").load(MEMOP) is None
    cache(driver="1").store(MEMOP, YES)
    assert cache(driver="1").load(MEMOP) == YES
    assert cache(driver="2").load(MEMOP) is None
    assert cache(driver="1").load(Strategy.POLLING) is None
    assert TrialCache(backend="host", device_uuid="host-2", facts={"driver": "1"}).load(MEMOP) is None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(only_file(folder).stat().st_mode) == 0o600


def test_a_failure_is_tried_again_later_and_what_was_not_tried_is_not_kept(folder: Path) -> None:
    cache().store(MEMOP, Capability.untested("no process could be started"))
    assert not folder.exists()
    cache().store(MEMOP, BROKEN)
    assert cache().load(MEMOP) == BROKEN
    path = only_file(folder)
    content = json.loads(path.read_text())
    for at in (time.time() - 3700, time.time() + 3700):
        path.write_text(json.dumps({**content, "at": at}))
        assert cache().load(MEMOP) is None


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'{"key": 1}',
        b"\xff\xfe",
        b"[" * 50_000,
        b'{"key": KEY}',
        b'{"key": KEY, "capability": {"verdict": "perhaps", "evidence": "", "reason": "", "remedy": ""}, "at": 1}',
        b'{"key": KEY, "capability": {"verdict": "yes", "evidence": 3, "reason": "", "remedy": ""}, "at": 1}',
        b'{"key": KEY, "capability": {"verdict": "yes", "evidence": "", "reason": "", "remedy": ""}, "at": "x"}',
        b'{"key": KEY, "capability": {"verdict": "yes", "evidence": "", "reason": "", "remedy": ""}}',
        b" " * 70_000,
    ],
)
def test_a_damaged_file_is_ignored_and_replaced(folder: Path, damage: bytes) -> None:
    cache().store(MEMOP, YES)
    path = only_file(folder)
    key = json.dumps(json.loads(path.read_text())["key"]).encode()
    path.write_bytes(damage.replace(b"KEY", key))
    assert cache().load(MEMOP) is None
    cache().store(MEMOP, YES)
    assert cache().load(MEMOP) == YES
    assert only_file(folder) == path


def test_files_and_folders_that_others_could_write_are_not_trusted(folder: Path) -> None:
    cache().store(MEMOP, YES)
    path = only_file(folder)
    path.chmod(0o644)
    assert cache().load(MEMOP) is None
    path.chmod(0o600)
    assert cache().load(MEMOP) == YES
    elsewhere = folder.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert cache().load(MEMOP) is None
    path.unlink()
    os.mkfifo(path)
    assert cache().load(MEMOP) is None
    path.unlink()
    elsewhere.rename(path)
    folder.chmod(0o777)
    assert cache().load(MEMOP) is None
    folder.chmod(0o700)
    assert cache().load(MEMOP) == YES


def test_no_folder_is_not_fatal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.parent.mkdir()
    folder.write_text("a file where the folder belongs")
    cache().store(MEMOP, YES)
    assert cache().load(MEMOP) is None
    monkeypatch.setenv("DEVIPC_TRIAL_CACHE", "")
    cache().store(MEMOP, YES)
    assert cache().load(MEMOP) is None


def test_a_hit_starts_no_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Strategy] = []

    def counted(backend: str, uuid: str, strategy: Strategy, *, deadline_s: float) -> Capability:
        started.append(strategy)
        return try_in_children(backend, uuid, strategy, deadline_s=deadline_s)

    monkeypatch.setattr("devipc.completion.chooser.try_in_children", counted)
    with host_device() as device, linked() as link:
        for _ in range(3):
            decision = choose(device, link, backend=load_backend("host"))
            assert decision.strategy is MEMOP
        assert started == [MEMOP]
        only_file(folder).write_bytes(b"{")
        assert choose(device, link, backend=load_backend("host")).strategy is MEMOP
        assert started == [MEMOP, MEMOP]
