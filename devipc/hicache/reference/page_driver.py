"""A scheduler whose "computation" fills pages with bytes that follow from their keys, as a process that takes orders.

Owns the driver of the demonstration that needs no model; run it with ``python -m``. What it answers is a checksum of
the pages as they lie in its pool, so that one wrong byte is another answer.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from devipc.errors import DevIPCError
from devipc.hicache.api import UNFENCED, connect
from devipc.hicache.builders import TensorView, token_pool
from devipc.hicache.client.ticket import Ticket
from devipc.hicache.keys import Namespace, page_keys
from devipc.integrations import ForeignBuffer, ViewKeeper
from devipc.registry import load_backend

__all__ = ["NAMES"]

NAMES = ("a long prompt", "another one", "a document", "a question about it", "a chat", "its next turn")
"""What the story asks for."""

_PAGES, _PAGE_TOKENS, _LAYERS, _ROW = 24, 16, 8, 256
_POISON = 0xEE
_WAIT_S = 10.0


def _say(event: str, **values: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()


class _Driver:
    def __init__(self, url: str, backend: str) -> None:
        self._device = load_backend(backend).open_device(None)
        assert self._device.memory is not None
        rows = (_PAGES + 1) * _PAGE_TOKENS
        self._pool = self._device.memory.allocate(2 * _LAYERS * rows * _ROW)
        # (K or V, layer, page, bytes): the host backend's memory is the host's, so the "computation" is numpy's.
        buffer = ForeignBuffer(
            ptr=self._pool.ptr,
            dtype="uint8",
            shape=(2, _LAYERS, _PAGES + 1, _PAGE_TOKENS * _ROW),
            device=self._device.info,
            keeper=ViewKeeper(lambda: None),
        )
        self._bytes: npt.NDArray[np.uint8] = buffer.to_numpy()
        layers = [
            [TensorView.contiguous(self._pool.ptr + (part * _LAYERS + layer) * rows * _ROW, (rows, _ROW), 1)]
            for part in range(2)
            for layer in range(_LAYERS)
        ]
        views = [one[0] for one in layers]
        info = self._device.memory.describe(self._pool.ptr)
        built = token_pool(views[:_LAYERS], views[_LAYERS:], page_tokens=_PAGE_TOKENS, allocations=[info])
        self._client = connect(url, device=self._device)
        self._namespace = Namespace.of(built.layout, model="checksums", revision="1", dtype="uint8")
        self._handle = self._client.register_pool(built, namespace=self._namespace)
        self._backups: list[Ticket] = []

    def answer(self, names: list[str]) -> None:
        for name in names:
            self._answer(name)
        self.state()

    def _answer(self, name: str) -> None:
        began = time.monotonic()
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")
        tokens = np.arange(_PAGES * _PAGE_TOKENS) + seed
        keys = page_keys(tokens, page_tokens=_PAGE_TOKENS, parent=self._namespace.digest())
        pages = np.arange(1, _PAGES + 1)
        self._settle()  # the pool is used again
        self._bytes[:, :, 1:] = _POISON
        found = self._restored(keys, pages)
        for number in range(found, _PAGES):
            content = hashlib.shake_128(keys[number].tobytes()).digest(2 * _LAYERS * _PAGE_TOKENS * _ROW)
            self._bytes[:, :, number + 1] = np.frombuffer(content, np.uint8).reshape(2, _LAYERS, -1)
            if number == found:
                _say("token", name=name)
        _say("token", name=name)
        first_s = time.monotonic() - began
        if found < _PAGES:
            self._backups.append(self._client.backup(self._handle, pages, keys, ready=UNFENCED))
        checks = [zlib.crc32(np.ascontiguousarray(self._bytes[:, :, page]).tobytes()) for page in pages.tolist()]
        _say(
            "answered",
            name=name,
            text="",
            tokens=checks,
            kept=0,
            restored=found * _PAGE_TOKENS,
            computed=(_PAGES - found) * _PAGE_TOKENS,
            first_token_s=first_s,
            restarts=0,
        )

    def _restored(self, keys: npt.NDArray[np.uint8], pages: npt.NDArray[np.int64]) -> int:
        """Restore what the cache has; 0 when it has nothing, or that went wrong."""
        found = self._client.match(self._handle, keys)
        if not found:
            return 0
        try:
            self._client.restore(self._handle, keys[:found], pages[:found], ready=UNFENCED).result(_WAIT_S)
        except DevIPCError:
            return 0
        return found

    def _settle(self) -> None:
        for ticket in self._backups:
            ticket.wait(_WAIT_S)
        self._backups = []

    def forget(self) -> None:
        self._settle()
        self.state()

    def state(self) -> None:
        _say("done", status=self._client.status(), backups_open=len(self._backups))

    def close(self) -> None:
        assert self._device.memory is not None
        self._settle()
        self._client.close()
        del self._bytes
        self._device.memory.free(self._pool)


def _main(url: str, backend: str) -> None:
    driver = _Driver(url, backend)
    _say("ready")
    doings: dict[str, Callable[..., None]] = {"answer": driver.answer, "forget": driver.forget, "state": driver.state}
    for line in sys.stdin:
        order = json.loads(line)
        doings[order.pop("do")](**order)
    driver.close()


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2])
