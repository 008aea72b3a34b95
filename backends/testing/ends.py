"""Ends of sessions in test processes, on a device that is open already. Owns no measurement."""

from __future__ import annotations

import importlib
from typing import Any


class Given:
    """The vendor's backend, whose only device is this one, so that a session opens no second one."""

    def __init__(self, device: Any) -> None:
        package, _, _ = type(device).__module__.partition(".")
        self._backend = importlib.import_module(f"{package}.plugin").devipc_backend()
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def open_device(self, uuid: str | None = None) -> Any:
        return self._device


def exporter(device: Any, **options: Any) -> Any:
    return importlib.import_module("devipc.session").Exporter(backend=Given(device), **options)


def importer(device: Any, path: str, **options: Any) -> Any:
    return importlib.import_module("devipc.session").Importer(path, backend=Given(device), **options)
