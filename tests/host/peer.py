"""A second process with a host device of its own, driven by messages over a socket.

Both ends live in this file. It uses plain ``sendmsg``, so that the backend is tested without the channel.
"""

from __future__ import annotations

import array
import base64
import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from devipc.host.backend import HostBackend
from devipc.spi import (
    PAGE_NBYTES,
    Chunk,
    DevIPCError,
    ExportedExtent,
    HandleKind,
    HostRegistration,
    SharedMap,
    close_fds,
    validate_memfd,
)

ROOT = Path(__file__).resolve().parents[2]
_FDS = 16


def send(sock: socket.socket, message: object, fds: Sequence[int] = ()) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([json.dumps(message).encode()], rights)


def receive(sock: socket.socket) -> tuple[Any, list[int]]:
    size = socket.CMSG_SPACE(_FDS * 4)
    data, ancillary, _, _ = sock.recvmsg(1 << 16, size, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for _, _, rights in ancillary:
        fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
    return json.loads(data) if data else None, list(fds)


def to_json(extent: ExportedExtent) -> list[dict[str, Any]]:
    return [asdict(chunk) | {"payload": base64.b64encode(chunk.payload).decode()} for chunk in extent.chunks]


def from_json(chunks: list[dict[str, Any]], fds: Sequence[int]) -> ExportedExtent:
    made = tuple(Chunk(**chunk | {"payload": base64.b64decode(chunk["payload"])}) for chunk in chunks)
    return ExportedExtent(HandleKind.MEMFD, made, tuple(fds))


class Peer:
    """The other process, seen from the test."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.host.peer", str(theirs.fileno())],
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
            )
        self.sock = ours
        self.sock.settimeout(30)

    def call(self, command: str, *arguments: Any, fds: Sequence[int] = ()) -> Any:
        return self.call_fds(command, *arguments, fds=fds)[0]

    def call_fds(self, command: str, *arguments: Any, fds: Sequence[int] = ()) -> tuple[Any, list[int]]:
        """Call; an error of the other side comes back as a dict of its JSON form."""
        send(self.sock, [command, *arguments], fds)
        return receive(self.sock)

    def open(self, extent: ExportedExtent) -> Any:
        return self.call("open", to_json(extent), fds=extent.fds)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def end(self) -> None:
        self.sock.close()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
            self.process.wait(10)


class Server:
    """The other process, seen from inside."""

    def __init__(self) -> None:
        self.device = HostBackend().open_device()
        self.opened: dict[int, Any] = {}
        self.exported: list[ExportedExtent] = []
        self.events: list[Any] = []
        self.stream = self.device.transfer.create_stream()
        self.words: HostRegistration | None = None

    def open(self, chunks: list[dict[str, Any]], fds: list[int]) -> Any:
        try:
            opened = self.device.memory.open(from_json(chunks, fds))
        finally:
            close_fds(fds)
        self.opened[opened.ptr] = opened
        return [opened.ptr, opened.nbytes]

    def close(self, ptr: int, _: list[int]) -> None:
        self.device.memory.close(self.opened.pop(ptr))

    def share(self, blocks: list[int], fds: list[int]) -> Any:
        allocation = self.device.memory.allocate_grown(blocks)
        extent = self.device.memory.export(allocation.ptr, allocation.nbytes)
        self.exported.append(extent)
        fds[:] = extent.fds
        return [allocation.ptr, to_json(extent)]

    def fill(self, where: list[int], _: list[int]) -> None:
        ptr, value, nbytes = where
        ctypes.memset(ptr, value, nbytes)

    def read(self, where: list[int], _: list[int]) -> str:
        return ctypes.string_at(*where).hex()

    def copy(self, where: list[int], _: list[int]) -> None:
        dst, src, nbytes = where
        self.device.transfer.copy(self.stream, dst, src, nbytes)
        self.device.transfer.synchronize_stream(self.stream)

    def map_words(self, _: object, fds: list[int]) -> None:
        validate_memfd(fds[0], min_nbytes=PAGE_NBYTES)
        self.map = SharedMap(fds[0], PAGE_NBYTES)
        close_fds(fds)
        self.words = self.device.transfer.register_host(self.map.address, PAGE_NBYTES)

    def write_word(self, what: list[int], _: list[int]) -> None:
        assert self.words is not None
        writes = self.device.sync.word_writes
        assert writes is not None
        writes.write(self.stream, self.words.device_ptr + 8 * what[0], what[1])

    def wait_word(self, what: list[int], _: list[int]) -> None:
        assert self.words is not None
        waits = self.device.sync.word_waits
        assert waits is not None
        waits.wait(self.stream, self.words.device_ptr + 8 * what[0], what[1])

    def stall(self, on: bool, _: list[int]) -> None:
        (self.stream.stall if on else self.stream.resume)()

    def event(self, verb: str, _: list[int]) -> Any:
        events = self.device.sync.events
        assert events is not None
        if verb == "create":
            self.events.append(events.create())
            return base64.b64encode(events.export(self.events[-1])).decode()
        if verb == "record":
            return events.record(self.events[-1], self.stream)
        if verb == "query":
            return events.query(self.events[-1])
        if verb == "destroy":
            return events.destroy(self.events.pop())
        self.events.append(events.open(base64.b64decode(verb)))
        return None

    def hand_over(self, turns: list[int], _: list[int]) -> None:
        """Wait for each odd value of word 0, copy, answer in word 1: the consumer of a ping-pong."""
        dst, src, nbytes, count = turns
        assert self.words is not None
        for turn in range(1, count + 1):
            self.wait_word([0, turn], [])
            self.device.transfer.copy(self.stream, dst, src, nbytes)
            self.write_word([1, turn], [])

    def serve(self, sock: socket.socket) -> None:
        while True:
            message, fds = receive(sock)
            if message is None:
                break
            command, *arguments = message
            handler: Callable[..., Any] = getattr(self, command)
            try:
                answer = handler(*arguments, fds)
            except DevIPCError as error:
                answer, fds = error.to_json(), []
            send(sock, answer, fds if command == "share" else ())
        self.device.close()


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        Server().serve(sock)


if __name__ == "__main__":
    main()
    # What the last command left is closed by the exit, as for any process.
    os._exit(0)
