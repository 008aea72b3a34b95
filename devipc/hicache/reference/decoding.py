"""One token for each of several requests: alone on the host, together in a recorded graph on a device.

Owns the shapes. On the host each request is computed by itself, so that its bits never depend on the others. On a
device all are computed at once in one shape a table width, recorded once as a graph: a launch costs the host nothing.
What the graph is asked and what it answers passes through memory that its kernels share with the host: three small
copies there and one back would each wait behind the cache's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from devipc.hicache.reference.model import PagedModel
from devipc.hicache.reference.staging import Window

__all__ = ["Decoder", "Row", "record"]

_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""With torch's own choice answers differed from run to run on an H200; see ``docs/hicache/reference.md``."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one request needs for its next token: the last one, its position, and the physical pages up to it."""

    token: int
    position: int
    pages: Sequence[int]


@dataclass(slots=True)
class _Recorded:
    """What computes all rows, and what it reads and writes: tokens, positions and tables in one; sampled tokens."""

    replay: Callable[[], None]
    asked: Window
    sampled: Window


def record(compute: Callable[[], object], where: torch.device) -> Callable[[], None]:
    """Record what ``compute`` launches as a graph; return what launches that, on the current stream."""
    side = torch.cuda.Stream(where)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(where))
    with torch.cuda.stream(side):  # once without recording: libraries set themselves up at first use
        compute()
    torch.cuda.current_stream(where).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Other threads of this process (the engine's) call the driver meanwhile; only this one must not.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        compute()
    return graph.replay


class Decoder:
    """See the module. One thread; on a device, always on the same stream.

    Parameters
    ----------
    model : PagedModel
        Computes.
    max_requests : int
        Rows of a device's batch.
    """

    def __init__(self, model: PagedModel, *, max_requests: int) -> None:
        self._model = model
        self._rows = max_requests
        self._recorded: dict[int, _Recorded] = {}

    def decode(self, rows: Sequence[Row]) -> list[int]:
        """Return the next token of each row. Blocks until they are known."""
        if not rows:
            return []
        if self._model.device.type == "cpu":
            return [self._alone(row) for row in rows]
        sampled: list[int] = []
        for start in range(0, len(rows), self._rows):
            sampled += self._together(rows[start : start + self._rows])
        return sampled

    def _alone(self, row: Row) -> int:
        tables = torch.tensor([list(row.pages)])
        return int(self._model.decode(torch.tensor([row.token]), torch.tensor([row.position]), tables)[0].argmax())

    def _together(self, rows: Sequence[Row]) -> list[int]:
        width = 1 << (max(len(row.pages) for row in rows) - 1).bit_length()
        recorded = self._recorded.get(width)
        if recorded is None:
            recorded = self._recorded[width] = self._record(width)
        padding = self._rows - len(rows)
        asked = [row.token for row in rows] + [0] * padding
        asked += [row.position for row in rows] + [0] * padding
        for row in rows:
            asked += [*row.pages, *[0] * (width - len(row.pages))]
        recorded.sampled.wait()  # who was interrupted before may have left it at work
        recorded.asked.host[:] = asked + [0] * (width * padding)
        try:
            recorded.replay()
        finally:
            recorded.sampled.used()
        recorded.sampled.wait()
        found: list[int] = recorded.sampled.host[: len(rows)].tolist()
        return found

    def _record(self, width: int) -> _Recorded:
        """Record the computation of all rows; what it writes meanwhile goes to the page that takes padding."""
        rows, where = self._rows, self._model.device
        asked, sampled = Window(rows * (2 + width), where), Window(rows, where)

        def compute() -> None:
            here = asked.device + 0
            tokens, positions, tables = here.split([rows, rows, rows * width])  # type: ignore[no-untyped-call]
            with sdpa_kernel(_KERNELS):
                logits = self._model.decode(tokens, positions, tables.view(rows, width))
            torch.add(logits.argmax(-1), 0, out=sampled.device)

        return _Recorded(record(compute, where), asked, sampled)

    def close(self) -> None:
        """Forget the graphs."""
        self._recorded.clear()
