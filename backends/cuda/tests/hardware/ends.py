"""Children that are made ready in advance, and when things happened. Owns no measurement."""

from __future__ import annotations

import select
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..peers import Channel, Peer

READY_AT_ONCE = 5


@contextmanager
def victims(function: Callable[..., None], orders: Sequence[Any]) -> Iterator[Iterator[tuple[Peer, Any]]]:
    """Start children, a few at a time, send each its order and give it out with its first answer; kill all at last."""
    started: list[Peer] = []

    def ready() -> Iterator[tuple[Peer, Any]]:
        for first in range(0, len(orders), READY_AT_ONCE):
            batch = []
            for order in orders[first : first + READY_AT_ONCE]:
                peer = Peer(function)
                started.append(peer)
                peer.channel.send(order)
                batch.append(peer)
            for peer in batch:
                yield peer, peer.channel.receive()

    try:
        yield ready()
    finally:
        for peer in started:
            peer.kill()
            peer.channel.close()


class Clock:
    """When things happened, in milliseconds since the kill; each is noted on a thread of its own."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}
        self._threads: list[threading.Thread] = []

    def note(self, name: str) -> None:
        self.at.setdefault(name, time.perf_counter())

    def when(self, name: str, fd: int, events: int = select.POLLIN) -> None:
        """Note the moment at which ``fd`` has one of ``events``."""

        def watch() -> None:
            poller = select.poll()
            poller.register(fd, events)
            if poller.poll(60_000):
                self.note(name)

        thread = threading.Thread(target=watch)
        thread.start()
        self._threads.append(thread)

    def on_state(self, endpoint: Any) -> None:
        """Note the states of the endpoint's peers by their names."""
        endpoint.on_event(lambda event: self.note(event.state.value))

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        self.note("kill")
        process.kill()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def ms(self, name: str) -> float:
        """Milliseconds since the kill; negative for never."""
        return round((self.at[name] - self.at["kill"]) * 1e3, 3) if name in self.at else -1.0


def hold_stream(device: Any, host: Any, offset: int) -> None:
    """Let the staging's stream wait for a word of it that nobody will store."""
    device.sync.word_waits.wait(host.stream, host.device_ptr + offset, 1)


def sleep_until_killed(channel: Channel) -> None:
    channel._socket.settimeout(120.0)
    channel.receive()
