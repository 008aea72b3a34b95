"""Other processes of the tests of the simulator's switches, and what is asked of them.

Owns peers that follow a fence, decide with us, or open what they get, and a thread that shows whether a call blocks.
Knows no switch.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from devipc.spi import DevIPCError

from .ends import exporter, importer
from .helpers import staging
from .peers import Channel, peer

if TYPE_CHECKING:
    from .peers import Peer

TIMEOUT_S = 20.0
WORD = 4096


def completion() -> Any:
    return importlib.import_module("devipc.completion")


# --- fences -----------------------------------------------------------------------------------------------------------


def send_fence(channel: Channel, fence: Any) -> None:
    """Give one consumer's handle away."""
    handle = fence.export()
    channel.send(completion().encode_fence_handle(handle).hex(), handle.fds)
    for fd in handle.fds:
        os.close(fd)


def receive_fence(device: Any, channel: Channel) -> Any:
    """Open the fence whose handle comes."""
    text, fds = channel.receive_fds()
    reader = importlib.import_module("devipc.wire").Reader(bytes.fromhex(text))
    try:
        return completion().open_fence(device, completion().decode_fence_handle(reader, fds))
    finally:
        for fd in fds:
            os.close(fd)


def follow(device: Any, sim: Any, channel: Channel) -> None:
    """Open a fence; answer each value once it is reached, "pending" and the error's name otherwise; close at the end.

    An order is a value and how long to wait for it.
    """
    fence = receive_fence(device, channel)
    channel.send("open")
    while (order := channel.receive()) is not None:
        value, timeout_s = order
        try:
            fence.synchronize(value, timeout_s)
        except DevIPCError as error:
            channel.send([type(error).__name__, error.code])
        else:
            channel.send(["reached", ""])
    fence.close()


def reached(other: Peer, value: int, timeout_s: float = TIMEOUT_S) -> str:
    """Ask a follower; the answer is "reached" or the name of its error."""
    other.channel.send([value, timeout_s])
    return str(other.channel.receive()[0])


@contextmanager
def followed(device: Any, strategy: str, **options: Any) -> Iterator[tuple[Any, Peer]]:
    """Give a fence of ours and a peer that follows it; both are closed."""
    with completion().create_fence(device, strategy, **options) as fence, peer(follow) as other:
        send_fence(other.channel, fence)
        assert other.channel.receive() == "open"
        yield fence, other
        other.channel.send()


def signal_later(device: Any, sim: Any, channel: Channel) -> None:
    """Make a fence; signal each number that comes, from a stream that reaches it when the next message comes.

    The number is issued at once, so that a wait for it is legal, and pending.
    """
    stream = device.transfer.create_stream()
    with completion().create_fence(device, "stream_memop") as fence:
        send_fence(channel, fence)
        message = channel.receive()
        while message is not None:
            sim.stall()
            fence.signal(stream, message)
            channel.send("issued")
            message = channel.receive()
            sim.stall(False)
            if message == "go on":
                message = channel.receive()
        device.transfer.synchronize_stream(stream)
    device.transfer.destroy_stream(stream)


# --- decisions --------------------------------------------------------------------------------------------------------


def decide(device: Any, sim: Any, channel: Channel) -> None:
    path, strategy = channel.receive()
    try:
        with importer(device, path, strategy=strategy) as session:
            channel.send(session.decision.to_json())
            channel.receive()
    except DevIPCError as error:
        channel.send({"error": type(error).__name__, "text": str(error)})
        channel.receive()


def decision(device: Any, strategy: str | None = None) -> dict[str, Any]:
    """Let a session between two processes choose; return its Decision, or the error that it ended with."""
    os.environ["DEVIPC_TRIAL_CACHE"] = ""
    with exporter(device) as session, peer(decide) as other:
        other.channel._socket.settimeout(45.0)
        other.channel.send([session.path, strategy])
        found: dict[str, Any] = other.channel.receive()
        other.channel.send()
    return found


def candidate(found: dict[str, Any], strategy: str) -> tuple[str, str, str]:
    """Return phase, verdict and reason of one candidate of a Decision."""
    one = next(each for each in found["candidates"] if each["strategy"] == strategy)
    return one["phase"], one["verdict"], f"{one['reason']} {one['evidence']}"


# --- memory -----------------------------------------------------------------------------------------------------------


def hold(device: Any, sim: Any, channel: Channel) -> None:
    """Open what comes; answer with bytes of it, with counters, or with the name of an error, as told."""
    opened: list[Any] = []
    with staging(device) as host:
        while (order := channel.receive()) != "end":
            if order == "open":
                extent = channel.receive_extent()
                try:
                    opened.append(device.memory.open(extent))
                except DevIPCError as error:
                    channel.send([type(error).__name__, error.code, str(error)])
                else:
                    channel.send(["opened", "", ""])
                finally:
                    for fd in extent.fds:
                        os.close(fd)
            elif order == "close":
                device.memory.close(opened.pop(0))
                channel.send("closed")
            elif order == "read":
                channel.send(host.read(opened[-1].ptr, 8).hex())
            else:
                channel.send(sim.counter(order))
        while opened:
            device.memory.close(opened.pop())


def asked(other: Peer, order: str, extent: Any = None) -> Any:
    """Give a holder an order, with an extent for "open", and return its answer."""
    other.channel.send(order)
    if extent is not None:
        other.channel.send_extent(extent)
    return other.channel.receive()


class Background:
    """A call on a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.error = error

    def blocks(self, for_s: float = 0.15) -> bool:
        """Return whether it still runs after ``for_s``."""
        self._thread.join(for_s)
        return self._thread.is_alive()

    def blocks_only(self, when: object) -> None:
        """Check that it blocks when ``when`` is true, and ends otherwise, however slow this machine is."""
        if when:
            assert self.blocks()
        else:
            self.done()

    def done(self) -> None:
        """Wait for it; raise what it raised."""
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the call still blocks"
        if self.error is not None:
            raise self.error
