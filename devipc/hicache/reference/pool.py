"""The runtime's keys and values: one allocation of shareable device memory, as tensors and as a pool of the cache.

Owns that memory. It and what stages small numbers are the places of the reference where addresses are.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from devipc.hicache.builders import BuiltPool, TensorView, token_pool
from devipc.hicache.reference.model import ModelShape
from devipc.integrations import ForeignBuffer, ViewKeeper
from devipc.interfaces.backend import Device

__all__ = ["KVPool"]


class KVPool:
    """See the module.

    Parameters
    ----------
    device : Device
        Stays the caller's, and open until :meth:`close`.
    shape : ModelShape
        Layers and sizes.
    pages, page_tokens : int
        Physical pages; number 0 is never moved.
    dtype : torch.dtype
        Of keys and values.

    Attributes
    ----------
    k, v : Tensor
        ``(layers, pages, page_tokens, kv_heads, head_dim)``, on the device.
    built : BuiltPool
        For :meth:`~devipc.hicache.api.HiCacheClient.register_pool`.
    """

    def __init__(self, device: Device, shape: ModelShape, *, pages: int, page_tokens: int, dtype: torch.dtype) -> None:
        assert device.memory is not None
        self._memory = device.memory
        item = dtype.itemsize
        layer_nbytes = pages * page_tokens * shape.kv_row_elements * item
        self.page_nbytes = 2 * shape.layers * page_tokens * shape.kv_row_elements * item
        self._allocation = self._memory.allocate(2 * shape.layers * layer_nbytes)
        try:
            whole = ForeignBuffer(
                ptr=self._allocation.ptr,
                dtype=str(dtype).removeprefix("torch."),
                shape=(2, shape.layers, pages, page_tokens, shape.kv_heads, shape.head_dim),
                device=device.info,
                keeper=ViewKeeper(lambda: None),
            ).to_torch()
            self.k: Tensor = whole[0]
            self.v: Tensor = whole[1]
            whole.zero_()
            rows = (pages * page_tokens, shape.kv_row_elements)
            views = [
                [
                    TensorView.contiguous(
                        self._allocation.ptr + (part * shape.layers + layer) * layer_nbytes, rows, item
                    )
                    for layer in range(shape.layers)
                ]
                for part in range(2)
            ]
            info = self._memory.describe(self._allocation.ptr)
            self.built: BuiltPool = token_pool(
                views[0], views[1], page_tokens=page_tokens, allocations=[info], first_page=1
            )
        except BaseException:
            self._memory.free(self._allocation)
            raise

    def fill(self, pages: list[int], value: float) -> None:
        """Overwrite pages, with NaN for instance: what is restored later cannot have been there."""
        index = torch.tensor(pages, device=self.k.device)
        self.k[:, index] = value
        self.v[:, index] = value

    def snapshot(self, pages: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """Return the bytes of pages, ``(pages, bytes)``, for comparisons."""
        index = torch.tensor(pages, device=self.k.device)
        both = torch.stack([self.k[:, index], self.v[:, index]]).cpu()
        flat = both.permute(2, 0, 1, 3, 4, 5).contiguous().flatten(1)
        return flat.view(torch.uint8).numpy()

    def close(self) -> None:
        """Free the memory; once no transfer touches it, and no tensor is used any more."""
        del self.k, self.v
        self._memory.free(self._allocation)
