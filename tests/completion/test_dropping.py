"""A producer that lives on drops one of its consumers: that one fails, the others go on, no stream is left waiting."""

from __future__ import annotations

import time

import pytest

from devipc.errors import FencePoisoned
from devipc.interfaces.backend import Device
from devipc.types import PoisonReason, Strategy
from tests.completion.rig import ALL, hold, open_exported, pair, stream_of, transfer_of

every_strategy = pytest.mark.parametrize("strategy", ALL)


@every_strategy
@pytest.mark.parametrize("reason", [PoisonReason.CLOSED, PoisonReason.PEER_DIED])
def test_a_consumer_that_a_living_producer_drops_fails_alone(
    device: Device, strategy: Strategy, reason: PoisonReason
) -> None:
    stream = stream_of(device)
    with pair(device, strategy) as (producer, stays):
        leaves = open_exported(device, producer.export())
        producer.signal(stream, 1)
        producer.drop_consumer(2)
        leaves.poison(reason)
        for ask in (lambda: leaves.query(1), lambda: leaves.value, lambda: leaves.synchronize(2, 5.0)):
            with pytest.raises(FencePoisoned) as caught:
                ask()
            assert caught.value.code == "closed"
        producer.signal(stream, 2)
        stays.synchronize(2, 5.0)
        leaves.close()
        producer.signal(stream, 3)
        stays.synchronize(3, 5.0)


@pytest.mark.parametrize("stuck", [False, True])
def test_a_stream_that_waits_for_a_producer_which_dropped_it_is_let_go(device: Device, stuck: bool) -> None:
    """By the signal if that comes soon; else all are poisoned, since nobody would hear of the producer's death."""
    producing, waiting = stream_of(device), stream_of(device)
    with pair(device, Strategy.STREAM_MEMOP) as (producer, consumer):
        consumer._in_producer = False
        hold(producing)
        producer.signal(producing, 1)
        consumer.wait(waiting, 1)
        producer.drop_consumer(1)
        consumer.poison(PoisonReason.CLOSED)
        if not stuck:
            producing.resume()
        transfer_of(device).synchronize_stream(waiting)
        if stuck:
            with pytest.raises(FencePoisoned):
                producer.query(1)
            producing.resume()
        else:
            time.sleep(0.3)
            assert producer.query(1)
