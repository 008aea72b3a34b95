"""A Llama-shaped decoder over paged keys and values, in plain torch.

Owns the arithmetic. On the host prefill is computed in chunks of one fixed shape at fixed positions, and decode with
one fixed shape, so that a token's keys and values never depend on what else is in a batch, nor on what was cached: the
same tokens give the same bits. On a device the last chunk of a prompt is no longer than it has to be, and its bits may
depend on its length. Pages are given by physical number; page 0 takes what padding writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from devipc.hicache.reference.staging import Staging

__all__ = ["Layer", "LayerReady", "ModelShape", "PagedModel", "Weights"]

LayerReady = Callable[[int], None]
"""Called before a layer reads or writes the pool; returns when its pages are in place (or its stream waits)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a model."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    rope_theta: float
    norm_eps: float

    @property
    def kv_row_elements(self) -> int:
        """Elements of one token's keys (or values) in one layer."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Weights of one layer; each matrix is ``(out, in)``."""

    input_norm: Tensor
    qkv: Tensor
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of a model. ``head`` may be the same tensor as ``embed``."""

    shape: ModelShape
    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor


class PagedModel:
    """See the module. One thread.

    Parameters
    ----------
    weights : Weights
        On the device that computes.
    k_pool, v_pool : Tensor
        ``(layers, pages, page_tokens, kv_heads, head_dim)``; written to.
    max_tokens : int
        Longest sequence.

    Attributes
    ----------
    fused : bool
        Prefill says that it is causal instead of handing over a mask, so that torch may take a kernel that stores no
        scores; which one a device takes was not looked at. Decode hands heads that share keys over as rows. A chunk
        is halved as long as that leaves whole pages and room for its tokens. False on the host.
    """

    def __init__(self, weights: Weights, k_pool: Tensor, v_pool: Tensor, *, max_tokens: int) -> None:
        self.weights = weights
        self.shape = weights.shape
        self._k, self._v = k_pool, v_pool
        self.page_tokens = k_pool.shape[2]
        self.device = k_pool.device
        self.dtype = weights.embed.dtype
        self.fused = self.device.type != "cpu"
        self._staging = Staging(self.device)
        half = self.shape.head_dim // 2
        frequencies = self.shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(max_tokens, dtype=torch.float64), frequencies)
        self._cos = torch.cat([angles.cos()] * 2, -1).to(self.device, torch.float32)
        self._sin = torch.cat([angles.sin()] * 2, -1).to(self.device, torch.float32)
        self._scale = 1 / math.sqrt(self.shape.head_dim)

    @torch.inference_mode()
    def chunk(
        self, tokens: Sequence[int], start: int, pages: Sequence[int], *, chunk_tokens: int, layer_ready: LayerReady
    ) -> Tensor:
        """Compute one chunk of one sequence; return the logits behind its last token, ``(vocabulary,)``.

        Parameters
        ----------
        tokens : sequence of int
            At positions ``start`` and on; with them the chunk does not pass the next multiple of ``chunk_tokens``.
        pages : sequence of int
            Physical pages of the sequence from its beginning, at least to the last of ``tokens``.
        """
        base = start // chunk_tokens * chunk_tokens  # rows keep their place in the chunk, cached tokens before or not
        first, count = start - base, len(tokens)
        while self.fused and chunk_tokens // 2 >= first + count and not chunk_tokens % (2 * self.page_tokens):
            chunk_tokens //= 2  # few shapes, and none that depends on where the cached tokens end
        page_count = -(-(base + chunk_tokens) // self.page_tokens)
        places = range(start, start + count)
        before, behind = [0] * first, [0] * (chunk_tokens - first - count)
        written = [pages[at // self.page_tokens] * self.page_tokens + at % self.page_tokens for at in places]
        table = [*pages[:page_count], *[0] * (page_count - len(pages))]
        sent = self._staging.send([*before, *tokens, *behind, *before, *written, *behind, *table])
        rows, target, tables = sent.split([chunk_tokens, chunk_tokens, page_count])  # type: ignore[no-untyped-call]
        positions = torch.arange(base, base + chunk_tokens, device=self.device)
        keys = torch.arange(page_count * self.page_tokens, device=self.device)
        # Rows behind the end see what the last token sees: what lies there was not written by this sequence.
        mask = (keys[None, :] <= positions.clamp(max=start + count - 1)[:, None])[None]
        causal = self.fused and (base + chunk_tokens) % self.page_tokens == 0  # the last row sees the last key
        hidden = self._layers(rows[None], positions[None], target[None], tables[None], mask, layer_ready, causal=causal)
        return self._logits(hidden[0, first + count - 1])

    def likeliest(self, logits: Tensor) -> int:
        """Return the token that :meth:`chunk` found likeliest. Blocks until it is known."""
        return self._staging.fetch(logits.argmax())[0]

    @torch.inference_mode()
    def decode(self, tokens: Tensor, positions: Tensor, tables: Tensor) -> Tensor:
        """Compute one token of each sequence; return logits ``(n, vocabulary)``.

        Parameters
        ----------
        tokens, positions : Tensor
            int64 ``(n,)``: the token, and its position.
        tables : Tensor
            int64 ``(n, pages)``: physical pages of each sequence, zeros behind its end.
        """
        page = tables.gather(1, (positions // self.page_tokens)[:, None])[:, 0]
        target = page * self.page_tokens + positions % self.page_tokens
        keys = torch.arange(tables.shape[1] * self.page_tokens, device=self.device)
        mask = (keys[None, :] <= positions[:, None])[:, None]
        hidden = self._layers(
            tokens[:, None], positions[:, None], target[:, None], tables, mask, layer_ready=lambda _layer: None
        )
        return self._logits(hidden[:, 0])

    def _layers(
        self,
        tokens: Tensor,
        positions: Tensor,
        target: Tensor,
        tables: Tensor,
        mask: Tensor,
        layer_ready: LayerReady,
        *,
        causal: bool = False,
    ) -> Tensor:
        """Run all layers on ``(sequences, rows)`` tokens; keys and values go to rows ``target`` of the pool."""
        shape = self.shape
        cos, sin = self._cos[positions][:, :, None], self._sin[positions][:, :, None]
        hidden = self.weights.embed[tokens]
        split = (shape.heads, shape.kv_heads, shape.kv_heads)
        for number, layer in enumerate(self.weights.layers):
            qkv = _rms(hidden, layer.input_norm, shape.norm_eps) @ layer.qkv.T
            q, k, v = qkv.view(*qkv.shape[:2], sum(split), shape.head_dim).split(split, dim=2)  # type: ignore[no-untyped-call]
            layer_ready(number)
            self._k[number].flatten(0, 1)[target] = _rotate(k, cos, sin).to(self._k.dtype)
            self._v[number].flatten(0, 1)[target] = v.to(self._v.dtype)
            attended = self._attend(_rotate(q, cos, sin), number, tables, mask, causal=causal)
            hidden = hidden + attended.flatten(2) @ layer.o.T
            gate, up = (_rms(hidden, layer.post_norm, shape.norm_eps) @ layer.gate_up.T).chunk(2, -1)
            hidden = hidden + (torch.nn.functional.silu(gate) * up) @ layer.down.T
        return hidden

    def _attend(self, q: Tensor, number: int, tables: Tensor, mask: Tensor, *, causal: bool) -> Tensor:
        """Attend over the pages of each sequence: ``(n, rows, heads, head_dim)``."""
        # What lies behind a sequence's end, or in the trash page, may be anything, NaN included: it must not be read.
        # Filled by a kernel's argument: a zero that is copied to the device could not be recorded in a graph.
        beyond = ~mask.any(1)[:, :, None, None]
        k = self._k[number][tables].flatten(1, 2).masked_fill(beyond, 0).to(q.dtype)
        v = self._v[number][tables].flatten(1, 2).masked_fill(beyond, 0).to(q.dtype)
        if self.fused and q.shape[1] == 1:  # heads that share keys as rows: no kernel needs to know of groups
            groups = q.view(q.shape[0], self.shape.kv_heads, -1, self.shape.head_dim)
            return torch.nn.functional.scaled_dot_product_attention(
                groups, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask[:, None], scale=self._scale
            ).reshape(q.shape)
        bias: Any = mask[:, None]
        if causal:
            from torch.nn.attention.bias import causal_lower_right  # brings torch's compiler, and the folder it makes

            bias = causal_lower_right(q.shape[1], k.shape[1])
        return torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=bias,
            scale=self._scale,
            enable_gqa=True,
        ).transpose(1, 2)

    def _logits(self, hidden: Tensor) -> Tensor:
        return _rms(hidden, self.weights.norm, self.shape.norm_eps) @ self.weights.head.T


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.float()
    low, high = wide.chunk(2, -1)
    return (wide * cos + torch.cat([-high, low], -1) * sin).to(x.dtype)
