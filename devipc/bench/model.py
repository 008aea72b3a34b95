"""A model at work on the device, as far as copies can disturb it: steps like decoding, or like prefilling.

Owns that process, ``python -m devipc.bench.model BACKEND DEVICE KIND``: it prints the start and length of each step,
in seconds of the monotonic clock, until its standard input ends. It uses no cache.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import torch

from devipc.hicache.reference.decoding import record
from devipc.integrations import ForeignBuffer, ViewKeeper
from devipc.registry import load_backend

__all__ = ["KINDS", "Model", "torch_device"]

KINDS = ("decode", "decode_launched", "prefill")
"""Bound by reading weights, a step being one recorded graph, as serving systems do it, or a launch for each kernel; and
bound by arithmetic, a launch for each kernel."""
_LAYERS = 16
_TELL_S = 0.2
_SETTLE_S = 1.0


def torch_device(backend: str, uuid: str) -> torch.device:
    """Return torch's name for a device of ours."""
    device = load_backend(backend).open_device(uuid)
    assert device.memory is not None
    block = device.memory.allocate(4096)
    keeper = ViewKeeper(on_last=lambda: None)
    view = ForeignBuffer(
        ptr=block.ptr,
        dtype="uint8",
        shape=(16,),
        strides=None,
        device=device.info,
        readonly=False,
        keeper=keeper,
    )
    found: torch.device = view.to_torch().device
    device.memory.free(block)
    return found


class Model:
    """Matrices, and a step that multiplies by all of them.

    Decoding is bound by reading weights: few rows, much weight. Prefilling is bound by arithmetic: many rows.
    """

    def __init__(self, where: torch.device, kind: str) -> None:
        small = where.type == "cpu"
        if small:
            torch.set_num_threads(1)  # the other process needs processors too
        width, inner = (128, 256) if small else (4096, 14336)
        rows = 8 if kind.startswith("decode") else 64 if small else 4096
        dtype = torch.float32 if small else torch.bfloat16
        self._small = small
        self._x = torch.randn(rows, width, device=where, dtype=dtype)
        # Scaled, so that what is computed stays of one size: arithmetic with infinities takes less power.
        self._up = [torch.randn(width, inner, device=where, dtype=dtype) * width**-0.5 for _ in range(_LAYERS)]
        self._down = [
            torch.randn(inner, width, device=where, dtype=dtype) * (inner / 2) ** -0.5 for _ in range(_LAYERS)
        ]
        self._launch = record(self._step, where) if kind == "decode" and not small else self._step

    def steps(self) -> Iterator[tuple[float, float]]:
        """Run steps for ever; yield when each began (monotonic seconds), and how long it took.

        A device has the next step queued when one ends, as serving systems see to, so that neither the processor nor a
        launch is in the figure: it is the time between two ends on the device.
        """
        if self._small:
            while True:
                start = time.monotonic()
                self._step()
                yield start, time.monotonic() - start
        before, ended = self._enqueue(), self._enqueue()
        while True:
            following = self._enqueue()
            ended.synchronize()
            took = before.elapsed_time(ended) / 1e3
            yield time.monotonic() - took, took
            before, ended = ended, following

    def _enqueue(self) -> torch.Event:
        self._launch()
        end = torch.Event(self._x.device, enable_timing=True)
        end.record()
        return end

    def _step(self) -> None:
        x = self._x
        for up, down in zip(self._up, self._down, strict=True):
            x = torch.relu(x @ up) @ down
        x.clamp_(-1.0, 1.0)


def main() -> None:
    """Step until standard input ends; print the steps a few at a time."""
    backend, uuid, kind = sys.argv[1:]
    model = Model(torch_device(backend, uuid), kind)
    over = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=listen, name="devipc-bench-stdin", daemon=True).start()
    settled = time.monotonic() + _SETTLE_S
    sys.stdout.write("ready\n")
    lines: list[str] = []
    told = time.monotonic()
    for at, took in model.steps():
        if at > settled:
            lines.append(f"{at:.7f} {took:.7f}\n")
        if time.monotonic() - told > _TELL_S and at > settled:
            sys.stdout.write("".join(lines))
            sys.stdout.flush()
            lines.clear()
            told = time.monotonic()
        if over.is_set():
            return


if __name__ == "__main__":
    main()
