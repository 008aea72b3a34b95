"""Which calls stand still while a stream of the same process waits for a word.

One table with the wait pending and one without it, each in a process of its own. A call counts as blocked when it has
not returned within the limit; then the word is stored, and the call has to come back. Every call runs on another
stream, unless its name says that it runs behind the wait.
``python -m backends.cuda.tests.hardware.pending_wait --out FILE``.
"""

from __future__ import annotations

import importlib
import os
import struct
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from backends.testing.helpers import Staging, staging
from devipc.spi import HandleKind

from ..peers import Channel, Peer
from . import evidence
from .attempts import CALLS, KINDS, WORD, Attempt
from .code import launch, load
from .evidence import MIB, SIMULATED

LIMIT_S = 0.3
RETURN_S = 10.0


class Lab:
    """One process's streams and memory, and the wait that is pending while a call is tried."""

    def __init__(self, device: Any, host: Staging, *, pending: bool) -> None:
        self.device = device
        self.host = host
        self.pending = pending
        self.driver: Any = importlib.import_module("devipc_cuda.driver")
        self.held = device.transfer.create_stream()
        self.other = device.transfer.create_stream()
        self.near, self.far = (device.memory.allocate(MIB, kind=HandleKind.LEGACY).ptr for _ in range(2))
        self.extents: dict[str, Any] = {}
        self.event = b""
        with device.context:
            self.warm = load("warm")
            launch(self.warm, self.other)
        device.transfer.synchronize_stream(self.other)
        self._value = 0

    def call(self, name: str, *arguments: Any) -> Any:
        return self.driver.call(name, *arguments)

    def measure(self, attempt: Attempt) -> dict[str, Any]:
        """Try one call; return whether it blocked, how long it took, and what it raised."""
        with self.device.context:
            action = next(attempt)
        self._value += 1
        if self.pending:
            self.device.sync.word_waits.wait(self.held, self.host.device_ptr + WORD, self._value)
            time.sleep(0.01)  # the device has begun to wait
        found: dict[str, Any] = {}
        began = time.perf_counter()

        def run() -> None:
            try:
                with self.device.context:
                    action()
            except BaseException as error:
                found["raised"] = f"{type(error).__name__}: {error}"
            found["ms"] = round((time.perf_counter() - began) * 1e3, 3)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(LIMIT_S)
        found["blocked"] = thread.is_alive()
        struct.pack_into("<Q", self.host.view, WORD, self._value)
        thread.join(RETURN_S)
        if thread.is_alive():
            raise AssertionError("the call never came back")
        for stream in (self.held, self.other):
            self.device.transfer.synchronize_stream(stream)
        with self.device.context:
            for _ in attempt:
                pass
        return found


def try_calls(device: Any, channel: Channel, sim: Any) -> None:
    """Measure every call, with or without a pending wait, and send the table line by line."""
    pending = channel.receive()
    host = Staging(device)
    lab = Lab(device, host, pending=pending)
    lab.extents = {kind: channel.receive_extent() for kind in KINDS}
    lab.event = bytes.fromhex(channel.receive())
    for name, attempt in CALLS.items():
        try:
            channel.send([name, lab.measure(attempt(lab))])
        except Exception as error:
            channel.send([name, {"failed": f"{type(error).__name__}: {error}"}])
    channel.send(None)
    channel.receive()
    os._exit(0)  # a call that never came back would keep the process


def table(device: Any, *, pending: bool) -> dict[str, Any]:
    events, memory = device.sync.events, device.memory
    blocks = {kind: memory.allocate(2 * MIB, kind=HandleKind(kind)) for kind in KINDS}
    extents = {kind: memory.export(block.ptr, block.nbytes) for kind, block in blocks.items()}
    event = events.create()
    rows: dict[str, Any] = {}
    with staging(device) as host:
        events.record(event, host.stream)
        other = Peer(try_calls)
        try:
            other.channel.send(pending)
            for extent in extents.values():
                other.channel.send_extent(extent)
            other.channel.send(events.export(event).hex())
            while (row := other.channel.receive()) is not None:
                rows[row[0]] = row[1]
        finally:
            other.kill()
            other.channel.close()
    events.destroy(event)
    for kind, extent in extents.items():
        memory.release(extent)
        memory.free(blocks[kind])
    blocked = [name for name, row in rows.items() if row.get("blocked")]
    failed = {name: row for name, row in rows.items() if "failed" in row or "raised" in row}
    if not pending:
        assert blocked == [], "blocked without any wait"
    assert SIMULATED or not failed, failed
    return {"blocked until released": blocked, "did not work": failed, "calls": rows}


def sections(device: Any) -> Sequence[evidence.Section]:
    return [
        ("no wait pending", partial(table, device, pending=False)),
        ("a wait pending", partial(table, device, pending=True)),
    ]


if __name__ == "__main__":
    sys.exit(evidence.main(str(__doc__), sections))
