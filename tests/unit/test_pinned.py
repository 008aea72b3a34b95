"""Pinning in steps: all of them or none, whatever ends it in the middle."""

from __future__ import annotations

import pytest

from devipc.errors import DevIPCError, DriverError
from devipc.memfd import PAGE_NBYTES
from devipc.pinned import Pins


class Pinning:
    """A driver that pins what it is told, and is interrupted or refuses at one of its calls."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        self.pinned: set[int] = set()
        self._calls, self._at, self._error = 0, at, error

    def pin(self, address: int, nbytes: int) -> None:
        if self._error is DriverError:
            self._count()
        self.pinned.add(address)
        if self._error is not DriverError:
            self._count()  # the handler of a signal runs when the driver's call has returned

    def unpin(self, address: int) -> None:
        if address not in self.pinned:
            raise DriverError("not pinned")
        self.pinned.discard(address)

    def device_ptr(self, address: int) -> int:
        self._count()
        return address

    def settle(self) -> None:
        pass

    def explain(self, error: DevIPCError, *, nbytes: int, pinned: int) -> DevIPCError:
        return error

    def _count(self) -> None:
        self._calls += 1
        if self._calls == self._at:
            raise self._error("stop")


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError, DriverError])
@pytest.mark.parametrize("at", range(1, 7))
def test_what_ends_in_the_middle_leaves_nothing_pinned(at: int, error: type[BaseException]) -> None:
    pinning = Pinning(at, error)
    pins = Pins(pinning, backend="test", step_nbytes=PAGE_NBYTES)
    with pytest.raises(error):
        pins.register(PAGE_NBYTES, 3 * PAGE_NBYTES)
    assert not pinning.pinned
    pins.unregister(pins.register(PAGE_NBYTES, 3 * PAGE_NBYTES))
    assert not pinning.pinned
