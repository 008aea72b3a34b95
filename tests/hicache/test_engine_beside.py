"""What an engine process does beside its copies: neither a silent client nor unmapping goes unbounded or unseen."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from devipc.errors import DevIPCError
from devipc.hicache.daemon.remotecopies import RemotePool
from devipc.hicache.planning.planner import Direction
from devipc.hicache.requests import RegisterPool
from devipc.hicache.wire.protocol import Point
from devipc.hicache.wire.pulse import Pulse, PulseReader
from tests.channel.processes import stop
from tests.hicache.engine_world import EngineWorld, engine_world
from tests.hicache.pools import until

POINTS = 60


def test_a_client_that_does_not_answer_is_let_go_while_its_pool_is_opened() -> None:
    with engine_world("host") as it:
        it.start()
        with it.client() as client:
            it.attach(client)
            opened: list[object] = []
            stop(client.process.pid)
            try:
                asks_for_a_pool(it, opened)
                it.process.close_client(it.remote, timeout_s=3.0)
                assert not opened
            finally:
                client.process.send_signal(signal.SIGCONT)
            until(lambda: bool(opened))
            assert isinstance(opened[0], DevIPCError)


def asks_for_a_pool(it: EngineWorld, opened: list[object]) -> None:
    """Have a pool opened; return when the engine waits for the client, which shares no such pool."""
    request = RegisterPool(op=9, pool=2, generation=2, layout=it.layout, addresses=(), namespace=bytes(16))
    it.carrier.open_pool(it.client_id, request, opened.append)
    with it.faults() as faults:
        until(lambda: faults.opening() == 1)


def released(go_on: threading.Event) -> None:
    assert go_on.wait(30)


def flying(it: EngineWorld, lane: str) -> int:
    status: Any = it.process.status()
    return int(status["lanes"][lane]["flying"])


def sign_of_life(it: EngineWorld, thread: str) -> Callable[[], bool]:
    """Return what says whether a thread that is not idle told the pulse again that it gets on."""
    seen = [it.process.stuck()[thread]]

    def told() -> bool:
        seen.append(it.process.stuck()[thread])
        return seen[-1] < seen[-2]

    return told


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def test_a_client_that_does_not_answer_costs_one_thread_however_many_fences_it_names() -> None:
    with engine_world("host") as it:
        it.start()
        with it.client() as client:
            it.attach(client)
            before = threads(it.process.pid)
            stop(client.process.pid)
            try:
                points = [it.ready(Point(fence=100 + number, n=1)) for number in range(POINTS)]
                assert not any(point.reached() for point in points)
                until(lambda: it.process.status()["watched"] == POINTS)
                assert threads(it.process.pid) <= before + 4
            finally:
                client.process.send_signal(signal.SIGCONT)

            def failed() -> int:
                count = 0
                for point in points:
                    try:
                        point.reached()
                    except DevIPCError:
                        count += 1
                return count

            until(lambda: failed() == POINTS)  # it has no such fences, and says so of each
            assert it.process.status()["watched"] == 0
            it.process.close_client(it.remote)


def test_a_client_that_does_not_answer_is_no_driver_that_hangs() -> None:
    with engine_world("host") as it:
        it.start()
        with it.client() as client:
            it.attach(client)
            opened: list[object] = []
            stop(client.process.pid)
            try:
                asks_for_a_pool(it, opened)
                assert not any("beside" in it.process.stuck() for _ in range(1000))
            finally:
                client.process.send_signal(signal.SIGCONT)
            until(lambda: bool(opened))  # refused: it shares no such pool
            it.process.close_client(it.remote)


def test_reports_that_nobody_takes_are_no_driver_that_hangs() -> None:
    """Neither those beside the copies, nor a lane that unmaps behind its last copy."""
    reports = 1024  # as many as there is room for
    closed: list[int] = []
    asked = itertools.count(1)

    def close_another() -> bool:
        it.carrier.close_pool(RemotePool(it.client_id, (8, next(asked)), 1), lambda: closed.append(1))
        return False

    with engine_world("host") as it:
        it.start()
        with it.client() as client, it.faults() as faults:
            it.attach(client)
            before = threads(it.process.pid)
            go_on = threading.Event()
            faults.stall("backup")
            job = it.start_job(client, Direction.BACKUP, [1], it.places(1), slot=1, op=1)
            until(lambda: flying(it, "backup") == 1)
            it.carrier.close_pool(it.pool.opened, lambda: closed.append(1))
            it.carrier.close_pool(RemotePool(it.client_id, (7, 7), 1), lambda: released(go_on))
            try:
                for _ in range(reports):
                    close_another()
                until(lambda: close_another() or threads(it.process.pid) > before + 20)
                assert not closed
                assert "beside" not in it.process.stuck()
                faults.resume("backup")
                until(lambda: flying(it, "backup") == 0)  # from here on it has only to report
                until(sign_of_life(it, "backup"))
                assert not job.done
            finally:
                go_on.set()
            until(lambda: job.done)
            it.process.close_client(it.remote)


def test_threads_that_unmap_show_in_the_pulse_and_the_oldest_counts() -> None:
    pulse = Pulse()
    reader = PulseReader(os.dup(pulse.fileno()))
    try:
        with pulse.beside():
            time.sleep(0.2)
            with pulse.beside():
                assert reader.stuck()["beside"] == pytest.approx(0.2, abs=0.15)
            assert reader.stuck()["beside"] >= 0.2
        assert "beside" not in reader.stuck()
    finally:
        reader.close()
        pulse.close()
