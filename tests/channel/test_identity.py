"""What a process says about itself, and what a difference between two means."""

from __future__ import annotations

import os
from typing import Any

import pytest

from devipc.channel.identity import compare_facts, local_facts, process_instance


def test_an_instance_is_random_and_stays() -> None:
    assert len(process_instance()) == 16
    assert process_instance() == process_instance()
    assert process_instance() != bytes(16)


def test_facts_are_true_text() -> None:
    facts = local_facts()
    assert all(facts.values())
    assert facts["pid"] == str(os.getpid())
    assert facts["uid"] == str(os.getuid())
    with open("/proc/sys/kernel/random/boot_id") as file:
        assert facts["boot_id"] == file.read().strip()
    assert facts["pid_ns"].endswith(os.readlink("/proc/self/ns/pid").strip("pid:[]"))
    with open("/proc/self/stat") as file:
        assert facts["start_time"] == file.read().split()[21]
    assert local_facts() == facts


def test_missing_entries_are_missing_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "no proc here")

    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr(os, "stat", refuse)
    facts = local_facts()
    assert not {"boot_id", "start_time", "dev_shm", "pid_ns"} & set(facts)
    assert facts["pid"] == str(os.getpid())


def test_equal_facts_have_no_difference() -> None:
    assert compare_facts(local_facts(), local_facts()) == []


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("boot_id", "kernels"),
        ("pid_ns", "pidfd"),
        ("ipc_ns", "events"),
        ("net_ns", "abstract sockets"),
        ("mnt_ns", "paths"),
        ("dev_shm", "/dev/shm"),
        ("uid", "user"),
        ("byteorder", "words"),
    ],
)
def test_each_difference_says_what_it_breaks(name: str, word: str) -> None:
    ours = local_facts()
    found = {difference.name: difference for difference in compare_facts(ours, {**ours, name: "other", "pid": "1"})}
    assert set(found) == {name}
    assert (found[name].ours, found[name].theirs) == (ours[name], "other")
    assert word in found[name].breaks
    unknown = {key: value for key, value in ours.items() if key != name} | {"pid": "1"}
    (difference,) = compare_facts(ours, unknown)
    assert "does not tell" in difference.breaks


def test_the_same_process_id_in_two_namespaces_is_pointed_out() -> None:
    ours = local_facts() | {"pid": "1"}
    assert [difference.name for difference in compare_facts(ours, ours | {"pid_ns": "other"})] == ["pid_ns", "pid"]


def test_nonsense_is_compared_without_an_error() -> None:
    assert compare_facts({}, {}) == []
    assert len(compare_facts({}, local_facts())) > 5
    assert compare_facts({"unknown": "1"}, {"unknown": "2"}) == []
