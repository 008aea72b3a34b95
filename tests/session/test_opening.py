"""Opening several extents, where what was opened cannot be closed again: whoever asked hears of each, once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import pytest

from devipc.capabilities import Capability
from devipc.errors import CapabilityError, DevIPCError, DriverError
from devipc.opening import open_extents
from devipc.types import Chunk, ExportedExtent, HandleKind, OpenedExtent
from devipc.undoing import undo

TIMEOUT_S = 10.0
EXTENTS = [ExportedExtent(HandleKind.OPAQUE, (Chunk(64, 0, 64, b""),), ()) for _ in range(3)]


class Memory:
    """Opens two of three, and closes none."""

    def __init__(self, nbytes: int = 64) -> None:
        self.opens, self.refusals, self.nbytes = 0, list[DriverError](), nbytes

    def open(self, extent: ExportedExtent) -> OpenedExtent:
        self.opens += 1
        if self.opens > 2 and self.nbytes == 64:
            raise DriverError("open failed")
        return OpenedExtent(4096 * self.opens, self.nbytes, self.opens)

    def close(self, opened: OpenedExtent) -> None:
        self.refusals.append(DriverError(f"unmap of {opened.token} failed"))
        raise self.refusals[-1]


class Beside(Memory):
    """Maps side by side, until a step fails, and what undoes it."""

    def __init__(self, error: Callable[[str], DevIPCError]) -> None:
        super().__init__()
        self._error = error

    def side_by_side(self, kind: HandleKind) -> Capability:
        return Capability.untested("tests")

    def open_side_by_side(self, extents: Sequence[ExportedExtent]) -> tuple[OpenedExtent, ...]:
        try:
            raise self._error("map failed")
        except DevIPCError:
            undo(self.close, OpenedExtent(4096, 64, "all"))
            raise


def refused(memory: Memory) -> DevIPCError:
    heard: list[Exception] = []
    with pytest.raises(DevIPCError) as caught:
        open_extents(memory, EXTENTS, timeout_s=TIMEOUT_S, on_refused=heard.append)  # type: ignore[arg-type]
    assert heard == memory.refusals
    assert heard
    assert list(caught.value.left) == heard, "the caller is told as well"
    return caught.value


def test_of_some_that_were_opened_one_by_one() -> None:
    assert refused(Memory()).message == "open failed"


def test_of_some_that_have_another_length() -> None:
    assert refused(Memory(nbytes=32)).code == "short_mapping"


@pytest.mark.parametrize("error", [DriverError, CapabilityError])
def test_of_a_backend_that_undoes_a_part_of_its_own(error: Callable[[str], DevIPCError]) -> None:
    """Also where it says that it cannot map side by side at all: nothing is opened on top of what stays."""
    memory = Beside(error)
    assert refused(memory).message == "map failed"
    assert memory.opens == 0


def test_where_nothing_stays_they_are_opened_one_by_one() -> None:
    memory = Beside(CapabilityError)
    memory.close = lambda opened: None  # type: ignore[method-assign]
    with contextlib.suppress(DriverError):
        open_extents(memory, EXTENTS, timeout_s=TIMEOUT_S)  # type: ignore[arg-type]
    assert memory.opens == 3
