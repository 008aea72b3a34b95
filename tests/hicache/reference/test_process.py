"""The runtime in a process of its own: the same answers, the messages counted, and its death at any batch."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from devipc.errors import PeerGone
from devipc.hicache.reference.process import ProcessGPURuntime
from devipc.hicache.reference.runtime import BatchPlan
from devipc.hicache.reference.scheduler import Scheduler
from devipc.hicache.reference.spec import RuntimeSpec
from tests.hicache.reference.engines import CONFIG, answer, prompts, texts

pytestmark = [pytest.mark.chaos, pytest.mark.long]
SPEC = RuntimeSpec(weights="tiny", cache="inproc:", cache_nbytes=2**25, threads=1, config=CONFIG)


@contextlib.contextmanager
def process(spec: RuntimeSpec = SPEC, **options: Any) -> Iterator[ProcessGPURuntime]:
    made = ProcessGPURuntime(spec, **options)
    try:
        yield made
    finally:
        made.close()


def test_one_message_there_and_one_back_for_a_batch_and_none_for_a_token() -> None:
    with process() as over:
        scheduler, found, plans = answer(over, prompts())
        tokens = sum(len(one.tokens) for one in found.values())
        assert over.messages == {"plan": len(plans), "completion": len(plans)}
        assert scheduler.batches == len(plans)
        assert tokens > len(plans)
        assert over.stats().backed_up_pages > 0


def test_the_same_answers_as_in_this_process_also_after_its_death() -> None:
    with process() as over:
        first = texts(answer(over, prompts())[1])
        over_again = texts(answer(over, prompts())[1])
        assert over_again == first
        killed_at = 5
        scheduler = Scheduler(over)
        for number, prompt in enumerate(prompts()):
            scheduler.submit(f"q{number}", prompt, max_tokens=12)
        for _ in range(killed_at):
            scheduler.step()
        os.kill(over.pid, signal.SIGKILL)
        assert texts(scheduler.run()) == first
        assert scheduler.lost == 1


@pytest.mark.timeout(240)
def test_death_at_every_batch_harms_no_answer() -> None:
    with process() as over:
        expected = texts(answer(over, prompts(3), max_tokens=5)[1])
        for killed_at in range(1, 13, 2):
            scheduler = Scheduler(over)
            for number, prompt in enumerate(prompts(3)):
                scheduler.submit(f"q{number}", prompt, max_tokens=5)
            for _ in range(killed_at):
                scheduler.step()
            os.kill(over.pid, signal.SIGKILL)
            assert texts(scheduler.run()) == expected
            assert scheduler.lost <= 1


def test_a_runtime_that_stands_still_is_ended() -> None:
    with process(batch_timeout_s=2.0) as over:
        os.kill(over.pid, signal.SIGSTOP)
        handle = over.prepare_batch(BatchPlan(number=1))
        with pytest.raises(PeerGone, match="did not finish"):
            over.execute_batch(handle)
        over.restart()
        assert over.execute_batch(over.prepare_batch(BatchPlan(number=1))).number == 1


def test_a_runtime_that_cannot_be_made_says_why() -> None:
    with pytest.raises(Exception, match="no_such_backend"):
        ProcessGPURuntime(replace(SPEC, backend="no_such_backend"), start_timeout_s=30.0)
    with process() as over:
        handle = over.prepare_batch(BatchPlan(number=1))
        over._link.notify(256 + 1, b"no plan at all")  # dropped with a word in the log, as any message that is none
        assert over.execute_batch(handle).number == 1
