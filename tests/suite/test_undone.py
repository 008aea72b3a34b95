"""The suite's own process keeps nothing of what a backend refused half way: later cases would be charged with it."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from devipc.calltrace import observe
from devipc.conformance import BackendProfile
from devipc.conformance.rig import Rig
from devipc.conformance.suite import Suite
from devipc.errors import DriverError
from devipc.host.backend import HostBackend

PAIRS = {
    "host_allocate": "host_free",
    "host_create_marker": "host_destroy_marker",
    "host_create_stream": "host_destroy_stream",
    "host_event_create": "host_event_destroy",
    "host_export": "host_release",
    "host_open": "host_close",
    "host_register_host": "host_unregister_host",
}
"""What makes something, and what gives it back."""


class Refusing:
    """Refuses call number ``at`` of those that ``wanted`` holds for, and counts what is made and given back."""

    def __init__(self, at: int, wanted: Callable[[str], bool] = lambda name: name in PAIRS) -> None:
        self.refused = ""
        self._left = at
        self._wanted = wanted
        self._calls: collections.Counter[str] = collections.Counter()

    def __call__(self, name: str) -> None:
        if self._wanted(name):
            self._left -= 1
            if not self._left:
                self.refused = name
                raise DriverError("refused", backend="host")
        self._calls[name] += 1

    @property
    def kept(self) -> dict[str, int]:
        """What was made and not given back."""
        left = {make: self._calls[make] - self._calls[back] for make, back in PAIRS.items()}
        return {make: count for make, count in left.items() if count}


@contextmanager
def rig() -> Iterator[Rig]:
    made = Rig(HostBackend().open_device(), deadline_s=5.0)
    try:
        yield made
    finally:
        made.close()


def test_a_rig_that_is_refused_anything_keeps_nothing() -> None:
    refused = []
    for at in range(1, 200):
        with observe(refusing := Refusing(at)):
            try:
                with rig() as made:
                    made.warm_up()
            except DriverError:
                pass  # while it was made
        assert not refusing.kept, refusing.refused
        if not refusing.refused:
            break
        refused.append(refusing.refused)
    assert set(PAIRS) - {"host_open"} <= set(refused)
    assert not refusing.refused


def test_copies_to_keep_a_stream_busy_are_all_or_nothing() -> None:
    with rig() as made:
        for at in (1, 2):
            with observe(refusing := Refusing(at)), pytest.raises(DriverError):
                made.queue_copies(made.stream)
            assert not refusing.kept, refusing.refused


def test_an_exchange_whose_export_is_refused_keeps_nothing() -> None:
    """The first export is the rig's own, the second is for a peer."""
    suite = Suite(BackendProfile(backend="host", deadline_s=5.0), large=False, only=(), results=None)
    with observe(refusing := Refusing(2, lambda name: name == "host_export")):
        suite.warm_up()
        suite.close()
    assert refusing.refused
    assert not refusing.kept
