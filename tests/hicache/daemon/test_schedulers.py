"""Schedulers and the daemon, each a process: pages go through the host tier, and any of the processes may die."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from devipc.errors import CompletionTimeout
from devipc.hicache.daemon.admin import ask_drain
from tests.hicache.daemon.daemons import Daemon, alive, daemon, until
from tests.hicache.daemon.scheduler import schedulers
from tests.hicache.engine_with_faults import FOLDER, MODULE, Faults

POOLS = (0, 1)


@contextmanager
def slow_daemon(**options: Any) -> Iterator[tuple[Daemon, Any]]:
    """A daemon whose engine can be slowed down or stopped; and a way to do that."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"engine_module": MODULE, **options}
        with daemon(options=given, environment={FOLDER: folder}) as one:
            faults: list[Faults] = []

            def connect() -> Faults:
                faults.append(Faults(folder, one.status()["engine"]["pid"]))
                return faults[-1]

            try:
                yield one, connect
            finally:
                for connection in faults:
                    connection.close()


def memory_files(pid: int) -> int:
    """How many files of device memory a process has mapped (the host backend's are memory files)."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return len({line.split()[4] for line in maps.splitlines() if "memfd:devipc-host" in line})


def test_two_schedulers_with_two_pools_each_share_the_tier() -> None:
    with daemon() as one, schedulers(one.path, 2) as (first, second):
        for pool in POOLS:
            assert first.backup(pool=pool, pages=[9, 3, 4, 5, 40, 64], seed=pool) == "completed"
            assert second.match(pool=pool, count=6, seed=pool) == 6
            assert second.restore(pool=pool, pages=[1, 2, 30, 31, 33, 50], seed=pool) == "completed"
            assert second.backup(pool=pool, pages=list(range(1, 33)), seed=10 + pool) == "completed"
            assert first.restore(pool=pool, pages=list(range(33, 65)), seed=10 + pool) == "completed"
        assert first.match(pool=0, count=6, seed=99) == 0
        assert first.restore(pool=0, pages=[7], seed=99) == "refused missing"
        status = first.status()
        assert [client["pools"] for client in status["clients"]] == [2, 2]
        assert status["tier"]["pages"] == 2 * (6 + 32)
        assert all(lane["moved_nbytes"] for lane in status["lanes"].values())
        assert set(status["plans"]) == {"backup", "restore"}
        assert all(forms["strided"] + forms["plain"] for forms in status["plans"].values())
        assert status["strategy"] in ("stream_memop", "host_flag", "polling")
        assert one.status()["plans"] == status["plans"]


@pytest.mark.chaos
def test_an_engine_that_is_killed_leaves_the_tier_and_its_schedulers_come_back() -> None:
    with daemon() as one, schedulers(one.path, 2) as both:
        for number, scheduler in enumerate(both):
            for pool in POOLS:
                assert scheduler.backup(pool=pool, pages=[2, 3, 5, 7], seed=10 * number + pool) == "completed"
        os.kill(one.ready["engine_pid"], signal.SIGKILL)
        began = time.monotonic()
        returned = until(lambda: (found := one.status())["state"] == "running" and found and time.monotonic())
        for number, scheduler in enumerate(both):
            other = 1 - number
            for pool in POOLS:
                scheduler.restored_again(pool=pool, pages=[11, 13, 17, 19], seed=10 * other + pool)
                assert scheduler.match(pool=pool, count=4, seed=10 * number + pool) == 4
        print(f"engine back after {returned - began:.2f} s, schedulers {time.monotonic() - returned:.2f} s later")
        assert one.status()["engine"]["starts"] == 2


@pytest.mark.long
@pytest.mark.chaos
@pytest.mark.timing
def test_a_scheduler_that_is_killed_in_mid_transfer_is_let_go_within_a_second() -> None:
    with slow_daemon() as (one, faults), schedulers(one.path, 2) as (victim, other):
        engine = one.ready["engine_pid"]
        assert other.backup(pool=0, pages=[1, 2], seed=5) == "completed"
        with_both = memory_files(engine)
        faults().slow(0.05)
        for number in range(8):
            victim.backup(pool=0, pages=[4 * number + 1, 4 * number + 2], seed=number, wait=False)
        assert one.status()["operations"]
        victim.kill()
        began = time.monotonic()
        until(lambda: len(one.status()["clients"]) == 1)
        took = time.monotonic() - began
        print(f"let go after {took:.2f} s")
        assert memory_files(engine) < with_both
        assert took < 1.0
        assert other.restore(pool=0, pages=[3, 4], seed=5) == "completed"
        status = one.status()
        assert status["tier"]["holds"] == status["tier"]["reservations"] == 0
        assert status["engine"]["starts"] == 1


@pytest.mark.long
@pytest.mark.chaos
def test_copies_of_a_dead_scheduler_that_never_end_cost_the_engine_and_not_the_tier() -> None:
    with slow_daemon(reap_s=1.0) as (one, faults), schedulers(one.path, 2) as (victim, other):
        assert other.backup(pool=0, pages=[1, 2], seed=5) == "completed"
        faults().stall("backup")
        victim.backup(pool=0, pages=[1, 2], seed=1, wait=False)
        until(lambda: one.status()["lanes"]["backup"]["flying"])
        victim.kill()
        status = until(lambda: (found := one.status())["engine"]["starts"] == 2 and found)
        assert "copies of clients that are gone" in status["engine"]["last_end"]
        other.restored_again(pool=0, pages=[3, 4], seed=5)
        assert one.status()["tier"]["reservations"] == 0


def test_a_drain_lets_what_is_under_way_end_and_refuses_what_comes() -> None:
    with slow_daemon() as (one, faults), schedulers(one.path, 2) as (first, second):
        stalled = faults()
        stalled.stall("backup")
        first.backup(pool=0, pages=[1, 2], seed=1, wait=False)
        until(lambda: one.status()["lanes"]["backup"]["flying"])
        one.process.send_signal(signal.SIGTERM)
        until(lambda: one.status()["state"] == "draining")
        assert second.backup(pool=0, pages=[1], seed=2) == "refused"
        for _ in range(2):  # who asks for it, too, only waits
            with pytest.raises(CompletionTimeout, match="under way"):
                ask_drain(one.path, timeout_s=0.2)
        assert one.process.poll() is None
        stalled.resume("backup")
        assert first.statuses() == ["completed"]
        assert one.wait() == 0
        assert not alive(one.ready["engine_pid"])


@pytest.mark.long
def test_a_drain_that_takes_too_long_ends_all_the_same() -> None:
    with slow_daemon(drain_timeout_s=0.5) as (one, faults), schedulers(one.path, 1) as (first,):
        stalled = faults()
        stalled.stall("restore")
        assert first.backup(pool=0, pages=[1, 2], seed=1) == "completed"
        first.tell("restore", pool=0, pages=[3, 4], seed=1)
        until(lambda: one.status()["lanes"]["restore"]["flying"])
        with pytest.raises(CompletionTimeout, match="under way"):
            ask_drain(one.path, timeout_s=0.2)
        assert one.wait() == 1
        assert first.hear().startswith("lost")
        assert not alive(one.ready["engine_pid"])


@pytest.mark.long
def test_what_stands_still_is_reported_with_who_pins_what() -> None:
    with slow_daemon(stall_s=0.3, stuck_s=60) as (one, faults), schedulers(one.path, 1) as (first,):
        stalled = faults()
        stalled.stall("backup")
        first.backup(pool=0, pages=[1, 2], seed=1, wait=False, timeout_s=0.2)
        report = until(lambda: one.status()["stalled"])
        assert re.fullmatch(
            rf"backup \d+ of client \w{{8}} \(process {first.process.pid}\) is expiring, .* s over its deadline",
            report[0],
        )
        assert "extents being filled by operation" in one.said()
        stalled.resume("backup")
        assert first.statuses() == ["timed_out"]
        until(lambda: not one.status()["stalled"])


@pytest.mark.long
def test_a_rate_is_kept_to() -> None:
    with daemon(options={"backup_nbytes_per_s": "200KiB"}) as one, schedulers(one.path, 1) as (first,):
        pages = list(range(1, 33))  # 98,304 bytes
        first.backup(pool=0, pages=pages, seed=0)
        began = time.monotonic()
        for seed in range(1, 4):
            first.backup(pool=0, pages=pages, seed=seed)
        took = time.monotonic() - began
        assert took > 0.9  # 3 * 96 KiB, of which a burst of 20 KiB and the last one's overdraft are free


@pytest.mark.long
@pytest.mark.chaos
def test_schedulers_come_back_to_a_daemon_that_was_killed_and_started_again() -> None:
    with daemon() as one, schedulers(one.path, 2) as (first, second):
        assert first.backup(pool=0, pages=[1, 2], seed=1) == "completed"
        one.process.kill()
        one.wait()
        until(lambda: second.match(pool=0, count=2, seed=1) == 0)  # a dead daemon's pages are misses
        again = Daemon(os.path.dirname(one.path))
        try:
            began = time.monotonic()
            until(lambda: len(again.status()["clients"]) == 2)
            print(f"back after {time.monotonic() - began:.2f} s")
            assert time.monotonic() - began < 2.0
            until(lambda: second.backup_again(pool=1, pages=[5, 6, 7], seed=2) == "completed")
            first.restored_again(pool=1, pages=[8, 9, 10], seed=2)
            assert first.restore(pool=0, pages=[3, 4], seed=1) == "refused missing"
            for scheduler in (first, second):
                scheduler.end()
            assert again.end() == 0
        finally:
            again.close()
