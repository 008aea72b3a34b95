"""Decoding of all rows at once: what is asked and answered through windows, without a graph and on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from devipc.hicache.reference import decoding  # noqa: E402
from devipc.hicache.reference.decoding import Decoder, Row  # noqa: E402
from devipc.hicache.reference.model import PagedModel  # noqa: E402
from devipc.hicache.reference.staging import Window  # noqa: E402
from devipc.hicache.reference.weights import TINY, random_weights  # noqa: E402

PAGES, PAGE, ROWS = 12, 4, 3
ASKED = [Row(5, 9, (3, 7, 1)), Row(11, 0, (2,)), Row(17, 6, (4, 5)), Row(2, 13, (6, 8, 9, 10))]


class Watched(Window):
    """Knows whether work on it was noted and not yet waited for."""

    busy = False

    def used(self) -> None:
        self.busy = True
        super().used()

    def wait(self) -> None:
        super().wait()
        self.busy = False


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    def each_time(compute: Callable[[], object], where: Any) -> Callable[[], object]:
        return compute  # a device would replay what it launches

    monkeypatch.setattr(decoding, "record", each_time)
    monkeypatch.setattr(decoding, "Window", Watched)
    shape = (TINY.layers, PAGES, PAGE, TINY.kv_heads, TINY.head_dim)
    torch.manual_seed(4)
    pools = [torch.randn(shape) for _ in range(2)]
    weights = random_weights(TINY, dtype=torch.float32, device="cpu", seed=3)
    return Decoder(PagedModel(weights, *pools, max_tokens=64), max_requests=ROWS)


def test_rows_together_get_what_each_gets_alone(decoder: Decoder) -> None:
    expected = decoder.decode(ASKED)
    assert len(set(expected)) > 1
    assert [token for row in ASKED for token in decoder._together([row])] == expected
    assert [*decoder._together(ASKED[:ROWS]), *decoder._together(ASKED[ROWS:])] == expected
    assert decoder._together(ASKED[:2]) == expected[:2]


def test_what_an_interrupt_left_at_work_is_waited_for_before_anything_is_asked_anew(decoder: Decoder) -> None:
    row = ASKED[0]
    expected = decoder.decode([row])
    decoder._together([row])
    (recorded,) = decoder._recorded.values()
    compute, sampled = recorded.replay, recorded.sampled
    assert isinstance(sampled, Watched)

    def interrupted() -> None:
        compute()
        raise KeyboardInterrupt

    recorded.replay = interrupted
    with pytest.raises(KeyboardInterrupt):
        decoder._together([row])
    assert sampled.busy

    def anew() -> None:
        assert not sampled.busy
        compute()

    recorded.replay = anew
    assert decoder._together([row]) == expected
