"""Holds a stream back on a real driver: it waits for a word that is stored when it may go on.

Named by ``DEVIPC_TEST_HOLD``. While it waits, some other calls of the process do too: see :mod:`pending_wait`.
"""

from __future__ import annotations

import struct
import threading
from typing import Any

from backends.testing.helpers import Staging

_lock = threading.Lock()
_hosts: dict[str, Staging] = {}
_words: dict[int, int] = {}
_made: dict[str, int] = {}


def hold(device: Any, stream: Any, *, on: bool) -> None:
    """See :func:`tests.hicache.holding.hold`."""
    uuid = device.info.uuid
    with _lock:
        host = _hosts.get(uuid)
        if host is None:
            host = _hosts[uuid] = Staging(device)
            _made[uuid] = 0
        if not on:
            struct.pack_into("<Q", host.view, _words.pop(stream.handle), 1)
            return
        _made[uuid] += 1
        word = 64 * _made[uuid]
        struct.pack_into("<Q", host.view, word, 0)
        device.sync.word_waits.wait(stream, host.device_ptr + word, 1)
        _words[stream.handle] = word


def end() -> None:
    """Give back what was used, before the device is closed."""
    while _hosts:
        _hosts.popitem()[1].close()
