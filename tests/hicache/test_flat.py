"""Nothing piles up: operations of one client, clients of one engine, engines of one process.

Counted in blocks of Python and bytes of malloc, not in resident memory, which has steps of its own. The long run is
``stateful.py``.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.hicache.deployment import DAEMON, INPROC
from tests.hicache.driver import Driver
from tests.hicache.held import BOUNDS, ENOUGH_LOOKS, WARM_UP, Held, Watch
from tests.hicache.machine import CacheMachine
from tests.hicache.stateful import lent
from tests.hicache.world import until

LOOKS = 2 * ENOUGH_LOOKS


def grew(step: Callable[[], object], look: Callable[[], list[Held]]) -> list[Held]:
    """Return how much more is held late than early, in each process that is looked at; a third does not count."""
    watches: list[Watch] = []
    for number in range(LOOKS):
        step()
        found = look()
        watches = watches or [Watch(warm_up=LOOKS // 3) for _ in found]
        for watch, held in zip(watches, found, strict=True):
            watch.look(number, held)
    return [Held(**watch.account()["grew"]) for watch in watches]


def flat(
    step: Callable[[], object], look: Callable[[], list[Held]] = lambda: [Held.now()], *, blocks: int = 200
) -> bool:
    """Return whether nothing piles up; what leaks does so the second time, too, a table that just doubles does not."""
    bounds = replace(BOUNDS, blocks=blocks, malloc_nbytes=32 * 2**10, resident_nbytes=2**40)
    for _ in range(2):
        found = grew(step, look)
        print(found)
        if all(held.within(bounds) for held in found):
            return True
    return False


@pytest.mark.once
def test_operations_of_one_client() -> None:
    """A block that stayed of each would be 1,200 from early to late."""
    with lent(INPROC):
        machine = CacheMachine()
        driver = Driver(machine)

        def step() -> None:
            driver.run(100)
            machine.client.forget()

        assert flat(step)
        machine.teardown()


@pytest.mark.once
def test_clients_that_come_and_go() -> None:
    """Some end, some crash; 12 from early to late."""
    with lent(INPROC):

        def step() -> None:
            machine = CacheMachine()
            driver = Driver(machine)
            driver.run(15)
            machine.crash(0)
            driver.run(15)
            machine.teardown()

        assert flat(step)


def test_a_client_that_is_gone_is_not_kept() -> None:
    """Also not by the threads of an engine that does nothing, which had its operations in hand last."""
    with lent(INPROC):
        machine = CacheMachine()
        Driver(machine).run(50)
        kept = weakref.ref(machine.client), weakref.ref(machine.client.session)
        machine.teardown()
        del machine

        def forgotten() -> bool:
            gc.collect()
            return kept[0]() is None and kept[1]() is None

        until(forgotten)


@pytest.mark.once
def test_engines_that_come_and_go() -> None:
    def step() -> None:
        with lent(INPROC):
            machine = CacheMachine()
            Driver(machine).run(20)
            machine.teardown()

    assert flat(step)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_clients_of_a_daemon_that_come_and_go(caplog: pytest.LogCaptureFixture) -> None:
    """Looked at are both: what the engine's process holds, and what daemon and clients do in this one."""
    caplog.set_level(logging.CRITICAL, logger="devipc")  # pytest keeps what is logged, and with errors whoever met them
    with lent(DAEMON) as it:

        def step() -> None:
            for crash in (True, False):
                machine = CacheMachine()
                driver = Driver(machine)
                driver.run(10)
                if crash:
                    machine.crash(0)
                machine.teardown()

        def look() -> list[Held]:
            engine = it.deployment.engine_held()
            assert engine is not None
            return [Held.now(), engine]

        assert flat(step, look, blocks=400)


def steady(number: int) -> Held:
    """What a run holds that is flat: there is noise, and a peak now and then."""
    noise = number * 7919 % 200
    return Held(90 * 2**20 + 4096 * noise, 300_000 + noise + 5000 * (number % 9 == 0), 10**7 + 100 * noise, 4, 9)


def watched(held: Callable[[int], Held]) -> bool | None:
    watch = Watch()
    for number in range(200):
        watch.look(number * 2500, held(number))
    flat: bool | None = watch.account()["flat"]
    return flat


def test_a_long_run_that_is_flat() -> None:
    assert watched(steady) is True


@pytest.mark.parametrize(
    ("sense", "each"), [("blocks", 20), ("malloc_nbytes", 6000), ("resident_nbytes", 20_000), ("descriptors", 0.01)]
)
def test_a_long_run_that_grows(sense: str, each: float) -> None:
    """By so much from look to look; twenty blocks are one of every hundredth operation."""

    def held(number: int) -> Held:
        found = steady(number)
        return replace(found, **{sense: getattr(found, sense) + int(each * number)})

    assert watched(held) is False


def test_a_run_that_is_too_short_to_tell() -> None:
    watch = Watch()
    for number in range(ENOUGH_LOOKS - 1):
        watch.look(WARM_UP + number, steady(number))
    assert watch.account()["flat"] is None
