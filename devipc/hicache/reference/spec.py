"""How a runtime in another process is made: what its process is told, and what that makes of it.

Owns the step from plain values to a device, weights and a client of the cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from devipc.hicache.reference.config import RuntimeConfig

if TYPE_CHECKING:  # control, which starts the process, loads no tensor library
    from devipc.hicache.reference.local import LocalGPURuntime

__all__ = ["RuntimeSpec", "made_from"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSpec:
    """See the module.

    Parameters
    ----------
    backend, device : str
        Name of an installed backend, and identity of its device; its first when empty.
    weights : str
        ``smollm2``, ``llama-3-8b`` (random), or ``tiny`` (random, for tests).
    dtype : str
        Of weights, keys and values, as torch spells it.
    cache : str
        URL of the cache below; empty: none.
    cache_nbytes : int
        Host memory of an ``inproc:`` one.
    threads : int
        Threads that torch computes with on the host; torch's default when 0.
    config : RuntimeConfig
        Sizes.
    """

    backend: str = "host"
    device: str = ""
    weights: str = "smollm2"
    dtype: str = "float32"
    cache: str = ""
    cache_nbytes: int = 256 * 2**20
    threads: int = 0
    config: RuntimeConfig = field(default_factory=lambda: RuntimeConfig(model="smollm2"))


@contextlib.contextmanager
def made_from(spec: RuntimeSpec) -> Iterator[LocalGPURuntime]:
    """Make the runtime; everything is given back at the end. Blocks while weights are loaded."""
    import torch

    from devipc.hicache.api import connect
    from devipc.hicache.engine.transferengine import EngineConfig
    from devipc.hicache.reference.local import LocalGPURuntime
    from devipc.hicache.reference.weights import LLAMA_3_8B, TINY, load_smollm2, random_weights
    from devipc.registry import load_backend

    if spec.threads:
        torch.set_num_threads(spec.threads)
    device = load_backend(spec.backend).open_device(spec.device or None)
    where = "cpu" if spec.backend == "host" else f"cuda:{device.info.ordinal}"
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if spec.weights == "smollm2":
        weights, _ = load_smollm2(dtype=dtype, device=where)
    else:
        shape = LLAMA_3_8B if spec.weights == "llama-3-8b" else TINY
        weights = random_weights(shape, dtype=dtype, device=where)
    with contextlib.ExitStack() as stack:
        client = None
        if spec.cache:
            config = EngineConfig(tier_nbytes=spec.cache_nbytes) if spec.cache == "inproc:" else None
            client = stack.enter_context(connect(spec.cache, device=device, config=config))
        runtime = LocalGPURuntime(device, weights, client, spec.config)
        stack.callback(runtime.close)
        yield runtime
