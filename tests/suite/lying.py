"""How a backend is made that lies once: the host backend with one part in a disguise.

Knows the host backend's parts by name; a disguise overrides what it lies about and passes everything else on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from devipc.conformance import BackendProfile
from devipc.host.backend import HostBackend, HostDevice
from devipc.interfaces.backend import Backend


class Disguise:
    """Stands before one part of the host device."""

    def __init__(self, inner: Any, device: HostDevice) -> None:
        self.inner = inner
        self.device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class SyncDisguise(Disguise):
    """Stands before the sync interface, with other words or events."""

    words: type[Disguise] = Disguise
    waits: type[Disguise] = Disguise
    event_form: type[Disguise] = Disguise

    @property
    def word_writes(self) -> Any:
        return self.words(self.inner.word_writes, self.device)

    @property
    def word_waits(self) -> Any:
        return self.waits(self.inner.word_waits, self.device)

    @property
    def events(self) -> Any:
        return self.event_form(self.inner.events, self.device)


class LyingBackend(HostBackend):
    """The host backend with parts replaced."""

    def __init__(self, **parts: type[Disguise]) -> None:
        super().__init__()
        self._parts = parts
        self._dressed: HostDevice | None = None

    def open_device(self, uuid: str | None = None) -> HostDevice:
        device = super().open_device(uuid)
        if device is not self._dressed:
            self._dressed = device
            for name, disguise in self._parts.items():
                setattr(device, f"_{name}", disguise(getattr(device, f"_{name}"), device))
        return device


@dataclass(frozen=True, slots=True)
class Lie:
    """One liar: where it is made, the cases that must find it, and with which options they run."""

    factory: str
    cases: tuple[str, ...]
    is_profile: bool
    options: tuple[str, ...]


LIARS: dict[str, Lie] = {}
"""Every liar by its name."""

SOON = ("--devipc-deadline=1",)
"""For lies by which many tests of a case run into their deadline."""

Made = Backend | BackendProfile


def caught_by(*cases: str, options: tuple[str, ...] = ()) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Register a liar; its name says what it does, its text how. A profile may lie as well as a backend."""

    def register(factory: Callable[[], Made]) -> Callable[[], Made]:
        name = factory.__name__
        assert name not in LIARS, name
        is_profile = factory.__annotations__["return"] == "BackendProfile"
        LIARS[name] = Lie(f"{factory.__module__}:{name}", cases, is_profile, options)
        return factory

    return register


def store_word(address: int, value: int) -> None:
    """Store a word at a host address."""
    ctypes.c_uint64.from_address(address).value = value
