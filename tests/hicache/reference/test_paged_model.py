"""The model's arithmetic by itself: saying that prefill is causal gives what its mask gives, and reads no more."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.nn.attention.bias")  # before any test: it makes a folder that stays

from devipc.hicache.reference.model import ModelShape, PagedModel  # noqa: E402
from devipc.hicache.reference.weights import random_weights  # noqa: E402

SHAPE = ModelShape(
    layers=2, width=32, heads=4, kv_heads=2, head_dim=8, hidden=48, vocabulary=97, rope_theta=1e4, norm_eps=1e-5
)
PAGE, PAGES = 4, 12


def prefilled(*, fused: bool, chunk_tokens: int, cut: int) -> list[Any]:
    """Return the logits behind every chunk of 21 tokens, of which the first ``cut`` are computed by an earlier call."""
    pools = [torch.full((SHAPE.layers, PAGES, PAGE, SHAPE.kv_heads, SHAPE.head_dim), float("nan")) for _ in range(2)]
    weights = random_weights(SHAPE, dtype=torch.float32, device="cpu", seed=3)
    model = PagedModel(weights, *pools, max_tokens=64)
    assert not model.fused  # on the host the order of sums stays what it was
    model.fused = fused
    tokens, pages, found = [7 * n % 97 for n in range(21)], [3, 9, 1, 11, 5, 2], []
    at = 0
    while at < len(tokens):
        end = min(at // chunk_tokens * chunk_tokens + chunk_tokens, len(tokens))
        if at < cut < end:
            end = cut
        covered = pages[: -(-end // PAGE)]
        found.append(
            model.chunk(tokens[at:end], at, covered, chunk_tokens=chunk_tokens, layer_ready=lambda _layer: None)
        )
        at = end
    return found


@pytest.mark.parametrize("chunk_tokens", [8, 16, 6])
@pytest.mark.parametrize("cut", [0, 5, 12])
def test_causal_prefill_gives_what_the_mask_gives(chunk_tokens: int, cut: int) -> None:
    masked = prefilled(fused=False, chunk_tokens=chunk_tokens, cut=cut)
    fused = prefilled(fused=True, chunk_tokens=chunk_tokens, cut=cut)
    assert len(masked) == len(fused) >= 2
    for one, other in zip(masked, fused, strict=True):
        assert not one.isnan().any()
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("fused", "end", "rows"), [(True, 5, 8), (True, 8, 8), (True, 9, 16), (True, 3, 4), (False, 3, 16)]
)
@pytest.mark.parametrize("cut", [0, 2])
def test_a_device_computes_no_more_rows_than_a_short_chunk_needs(
    fused: bool, end: int, rows: int, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = [torch.zeros(SHAPE.layers, PAGES, PAGE, SHAPE.kv_heads, SHAPE.head_dim) for _ in range(2)]
    model = PagedModel(random_weights(SHAPE, dtype=torch.float32, device="cpu", seed=3), *pools, max_tokens=64)
    model.fused = fused
    computed, layers = list[Any](), model._layers

    def counted(tokens: Any, *rest: Any, **how: Any) -> Any:
        computed.append(tokens.shape)
        return layers(tokens, *rest, **how)

    monkeypatch.setattr(model, "_layers", counted)
    at = 16 + cut  # the second chunk, of which some tokens may be cached
    model.chunk([5] * (16 + end - at), at, range(1, 9), chunk_tokens=16, layer_ready=lambda _layer: None)
    assert computed == [(1, rows)]  # whatever was cached
