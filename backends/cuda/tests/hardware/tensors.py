"""Torch tensors shared with another process: torch's own allocator, with and without expandable segments, and ours.

The exporter is a process of its own, since torch reads its allocator's settings once.
"""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

from backends.testing.helpers import staging

from ..peers import Channel, peer

MIB = 2**20


def torch_exporter(device: Any, channel: Channel, sim: Any) -> None:
    """Export a view of a torch tensor, as ``order`` says; answer when it saw the peer's bytes."""
    import torch

    order = channel.receive()
    count = 300 * MIB
    if order == "pool":
        pool = importlib.import_module("devipc_cuda.torch_pool").TorchPool(device)
        whole = pool.empty((count,), dtype=torch.uint8, zero=True)
        assert pool.live_nbytes >= count
    else:
        whole = torch.zeros(count, dtype=torch.uint8, device="cuda")
    view = whole[8640 : 8640 + 250 * MIB]
    view[:256] = torch.arange(256, dtype=torch.uint8, device="cuda")
    view[-1] = 77
    torch.cuda.synchronize()
    info = device.memory.describe(view.data_ptr())
    extent = device.memory.export(view.data_ptr(), view.numel())
    channel.send([info.kind, info.nbytes, len(extent.chunks), extent.kind])
    channel.send_extent(extent)
    channel.receive()
    assert bytes(view[1000:1004].cpu().numpy()) == b"peer"
    device.memory.release(extent)
    if order == "pool":
        before = device.transfer.memory_info().free_nbytes
        del view, whole
        deadline = time.monotonic() + 5.0
        while pool.live_nbytes and time.monotonic() < deadline:  # given back on a thread of its own
            time.sleep(1e-3)
        assert pool.live_nbytes == 0
        assert device.transfer.memory_info().free_nbytes - before >= count
    channel.send("done")


def torch_tensors(device: Any, order: str) -> dict[str, Any]:
    env = dict(os.environ)
    env.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    if order == "expandable":
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    with peer(torch_exporter, env) as other, staging(device) as host:
        other.channel.send(order)
        kind, nbytes, chunks, handle = other.channel.receive()
        extent = other.channel.receive_extent()
        opened = device.memory.open(extent)
        device.memory.release(extent)
        assert host.read(opened.ptr, 256) == bytes(range(256))
        assert host.read(opened.ptr + opened.nbytes - 1, 1) == b"\x4d"
        host.write(opened.ptr + 1000, b"peer")
        device.memory.close(opened)
        other.channel.send()
        assert other.channel.receive() == "done"
    return {"kind": kind, "allocation": nbytes, "chunks": chunks, "handle": handle}
