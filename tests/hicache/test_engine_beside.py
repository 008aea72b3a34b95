"""What an engine process does beside its copies: neither a silent client nor unmapping goes unbounded or unseen."""

from __future__ import annotations

import os
import signal
import time

import pytest

from devipc.errors import DevIPCError
from devipc.hicache.protocol import Point
from devipc.hicache.pulse import Pulse, PulseReader
from tests.hicache.engine_world import engine_world
from tests.hicache.pools import until

POINTS = 60


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def test_a_client_that_does_not_answer_costs_one_thread_however_many_fences_it_names() -> None:
    with engine_world("host") as it:
        it.start()
        with it.client() as client:
            it.attach(client)
            before = threads(it.process.pid)
            client.process.send_signal(signal.SIGSTOP)
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


def test_threads_that_unmap_show_in_the_pulse_and_the_oldest_counts() -> None:
    pulse = Pulse()
    reader = PulseReader(os.dup(pulse.fileno()))
    try:
        with pulse.beside():
            time.sleep(0.2)
            with pulse.beside():
                assert reader.stuck()["unmap"] == pytest.approx(0.2, abs=0.15)
            assert reader.stuck()["unmap"] >= 0.2
        assert "unmap" not in reader.stuck()
    finally:
        reader.close()
        pulse.close()
