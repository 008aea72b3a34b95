"""Small numbers on their way: what is sent arrives, in whatever order the windows are used again."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from devipc.hicache.reference.staging import Staging, Window  # noqa: E402

HOST = torch.device("cpu")


def test_a_window_is_the_same_memory_for_both() -> None:
    window = Window(5, HOST)
    window.host[:] = range(5)
    assert window.device.tolist() == [0, 1, 2, 3, 4]
    torch.add(window.device, 10, out=window.device)
    window.used()
    window.wait()
    assert window.host.tolist() == [10, 11, 12, 13, 14]


def test_whoever_has_the_tensor_has_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made, zeros = [], torch.zeros

    def noted(*args: Any, **options: Any) -> Any:
        memory = zeros(*args, **options)
        made.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(torch, "zeros", noted)
    window = Window(5, HOST)
    (memory,) = made
    window.host[:] = range(5)
    part = window.device[2:]
    del window
    gc.collect()
    assert memory() is not None
    assert part.tolist() == [2, 3, 4]
    del part
    gc.collect()
    assert memory() is None


def test_what_was_sent_stays_while_more_is_sent_than_there_are_windows() -> None:
    staging = Staging(HOST)
    wanted = [[7 * number + at for at in range(1 + 400 * number)] for number in range(11)]  # some larger than a window
    sent = [staging.send(values) for values in wanted]
    assert [tensor.tolist() for tensor in sent] == wanted
    assert [staging.fetch(tensor) for tensor in sent] == wanted


def test_any_shape_is_fetched_as_one_list() -> None:
    staging = Staging(HOST)
    assert staging.fetch(torch.tensor(41)) == [41]
    assert staging.fetch(torch.tensor([[1, 2, 3], [4, 5, 6]]).T) == [1, 4, 2, 5, 3, 6]
