"""One token for each of several requests: alone on the host, together in a recorded graph on a device.

Owns the shapes. On the host each request is computed by itself, so that its bits never depend on the others. On a
device all are computed at once in one shape a table width, recorded once as a graph: a launch costs the host nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from devipc.hicache.reference.model import PagedModel

__all__ = ["Decoder", "Row"]

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
    """A graph with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    positions: Tensor
    tables: Tensor
    sampled: Tensor


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
        table = [[*row.pages, *[0] * (width - len(row.pages))] for row in rows] + [[0] * width] * padding
        recorded.tokens.copy_(torch.tensor([row.token for row in rows] + [0] * padding))
        recorded.positions.copy_(torch.tensor([row.position for row in rows] + [0] * padding))
        recorded.tables.copy_(torch.tensor(table))
        recorded.graph.replay()
        found: list[int] = recorded.sampled[: len(rows)].tolist()
        return found

    def _record(self, width: int) -> _Recorded:
        """Record the computation of all rows; what it writes meanwhile goes to the page that takes padding."""
        where = self._model.device
        tokens = torch.zeros(self._rows, dtype=torch.int64, device=where)
        positions = torch.zeros_like(tokens)
        tables = torch.zeros(self._rows, width, dtype=torch.int64, device=where)

        def compute() -> Tensor:
            with sdpa_kernel(_KERNELS):
                return self._model.decode(tokens, positions, tables).argmax(-1)

        side = torch.cuda.Stream(where)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(where))
        with torch.cuda.stream(side):  # once without recording: libraries set themselves up at first use
            compute()
        torch.cuda.current_stream(where).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process (the engine's) call the driver meanwhile; only this one must not.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            sampled = compute()
        return _Recorded(graph, tokens, positions, tables, sampled)

    def close(self) -> None:
        """Forget the graphs."""
        self._recorded.clear()
