"""Torch tensors over a session, with torch on both sides: torch's own allocator, its expandable segments, and our pool.

Views at offsets 0, 1, 4096, 2 MiB and beyond 4 GiB of one tensor are shared, opened by a peer as tensors and changed by
both sides; a fence on torch's streams orders the turns, without any host waiting in between.
``python -m backends.cuda.tests.hardware.torch_session --out FILE``.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from backends.testing.ends import exporter, importer

from ..peers import Channel, peer
from . import evidence
from .evidence import MIB, until

GIB = 2**30
WHOLE_NBYTES = 4 * GIB + 16 * MIB
OFFSETS = (0, 1, 4096, 2 * MIB, 4 * GIB + 4097)
LENGTHS = dict(zip(OFFSETS, (1, 4095, MIB, MIB, MIB), strict=True))
"""By offset: no view meets another."""
TURNS = 20


def pattern(torch: Any, offset: int, turn: int) -> Any:
    values = torch.arange(LENGTHS[offset], dtype=torch.int64, device="cuda")
    return ((values * 7 + offset + turn * 13) % 251).to(torch.uint8)


def allocate(torch: Any, device: Any, order: str) -> tuple[Any, Any]:
    if order == "pool":
        pool = importlib.import_module("devipc_cuda.torch_pool").TorchPool(device)
        return pool, pool.empty((WHOLE_NBYTES,), dtype=torch.uint8)
    return None, torch.empty(WHOLE_NBYTES, dtype=torch.uint8, device="cuda")


def torch_exporter(device: Any, channel: Channel, sim: Any) -> None:
    """Share views, write every other turn, check the peer's turns."""
    import torch

    order = channel.receive()
    stream = device.transfer.wrap_stream(torch.cuda.current_stream())
    pool, whole = allocate(torch, device, order)
    with exporter(device) as session:
        views = {offset: whole[offset : offset + nbytes] for offset, nbytes in LENGTHS.items()}
        described = device.memory.describe(whole.data_ptr())
        for offset, view in views.items():
            view.copy_(pattern(torch, offset, 0))
            session.share(f"at {offset}", view)
        half = whole[64 * MIB : 65 * MIB].view(torch.bfloat16).view(512, 1024)
        half.copy_(torch.arange(512 * 1024, device="cuda").view(512, 1024))
        session.share("strided", half[::2, :100])
        torch.cuda.synchronize()
        chunks = {offset: len(session.shares._shares[f"at {offset}"].handle.extent.chunks) for offset in OFFSETS}
        session.share("whole", whole)
        chunks["whole"] = len(session.shares._shares["whole"].handle.extent.chunks)  # type: ignore[index]
        channel.send([session.path, described.kind, described.nbytes, chunks])
        them = session.wait_peer()
        decision = them.decision.strategy.value
        mine = session.create_fence("mine", strategy=decision)
        channel.receive()
        theirs = them.open_fence("theirs")
        for turn in range(1, TURNS + 1):
            for offset, view in views.items():
                view.copy_(pattern(torch, offset, 2 * turn - 1))
            mine.signal(stream, turn)
            theirs.wait(stream, turn, timeout_s=20.0)
            for offset, view in views.items():
                assert torch.equal(view, pattern(torch, offset, 2 * turn)), f"turn {turn}, offset {offset}"
        assert float(half[2, 5]) == 4096.0, "the peer's store into the strided view is not seen"
        assert int(whole[-1]) == 99
        theirs.close()
        channel.send(decision)
        channel.receive()
    del views, half, view
    if pool is not None:
        del whole
        until(lambda: pool.live_nbytes == 0, 5.0, pause_s=1e-3)
        assert pool.live_nbytes == 0
    channel.send("closed")


def torch_importer(device: Any, channel: Channel, sim: Any) -> None:
    import torch

    path = channel.receive()
    stream = device.transfer.wrap_stream(torch.cuda.current_stream())
    with importer(device, path) as session:
        began = time.perf_counter()
        memories = {offset: session.open(f"at {offset}") for offset in OFFSETS}
        strided, whole = session.open("strided"), session.open("whole")
        opened_s = time.perf_counter() - began
        views = {offset: memory.to_torch() for offset, memory in memories.items()}
        for offset, view in views.items():
            assert (view.dtype, view.shape, view.device.type) == (torch.uint8, (LENGTHS[offset],), "cuda")
            assert torch.equal(view, pattern(torch, offset, 0)), f"offset {offset}"
        half = strided.to_torch()
        assert (half.dtype, half.shape, half.stride()) == (torch.bfloat16, (256, 100), (2048, 1))
        expected = torch.arange(512 * 1024, device="cuda").view(512, 1024).to(torch.bfloat16)[::2, :100]
        assert torch.equal(half, expected)
        half[1, 5] = 4096.0
        tail = whole.to_torch()
        assert tail.numel() == WHOLE_NBYTES
        tail[-1] = 99
        torch.cuda.synchronize()
        theirs = session.create_fence("theirs", strategy=session.decision.strategy)
        channel.send(round(opened_s, 4))
        mine = session.open_fence("mine", wait_s=20.0)
        for turn in range(1, TURNS + 1):
            mine.wait(stream, turn, timeout_s=20.0)
            for offset, view in views.items():
                assert torch.equal(view, pattern(torch, offset, 2 * turn - 1)), f"turn {turn}, offset {offset}"
                view.copy_(pattern(torch, offset, 2 * turn))
            theirs.signal(stream, turn)
        channel.receive()
        mine.close()
        torch.cuda.synchronize()
        del views, view, half, tail
        for memory in (*memories.values(), strided, whole):
            memory.close()
        channel.send("closed")


def both(order: str) -> dict[str, Any]:
    env = {name: value for name, value in os.environ.items() if name != "PYTORCH_CUDA_ALLOC_CONF"}
    if order == "expandable segments":
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    with peer(torch_exporter, env) as lender, peer(torch_importer, env) as borrower:
        lender.channel.send(order)
        path, kind, nbytes, chunks = lender.channel.receive()
        borrower.channel.send(path)
        opened_s = borrower.channel.receive()
        lender.channel.send("go")
        strategy = lender.channel.receive()
        borrower.channel.send("close")
        assert borrower.channel.receive() == "closed"
        lender.channel.send("close")
        assert lender.channel.receive() == "closed"
    return {
        "memory": kind,
        "allocation": nbytes,
        "chunks": chunks,
        "strategy": strategy,
        "turns": TURNS,
        "seven opens, s": opened_s,
    }


def sections(_device: Any) -> Sequence[evidence.Section]:
    return [(order, partial(both, order)) for order in ("torch's default", "expandable segments", "pool")]


if __name__ == "__main__":
    sys.exit(evidence.main(str(__doc__), sections))
