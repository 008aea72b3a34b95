"""Fences on a device that is lost."""

from __future__ import annotations

import pytest

from devipc.errors import DeviceLostError, FencePoisoned
from devipc.interfaces.backend import Device
from devipc.types import Strategy
from tests.completion.rig import ALL, pair, stream_of, transfer_of


@pytest.mark.parametrize("strategy", ALL)
def test_a_signal_on_a_lost_device_tells_all_who_wait(device: Device, strategy: Strategy) -> None:
    stream = stream_of(device)
    with pair(device, strategy) as (producer, consumer):
        producer.signal(stream, 1)
        consumer.synchronize(1, 5.0)
        stream.call(lambda: 1 / 0)
        with pytest.raises(DeviceLostError):
            transfer_of(device).synchronize_stream(stream)
        with pytest.raises(DeviceLostError):
            producer.signal(stream, 2)
        with pytest.raises(FencePoisoned) as failed:
            consumer.synchronize(2, 5.0)
        assert failed.value.code == "device_lost"
