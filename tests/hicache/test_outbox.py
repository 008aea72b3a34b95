"""Answers to one client: what happened just before is told with the last, or one by one to whoever knows no better."""

from __future__ import annotations

import socket
import time

import numpy as np
import pytest

from devipc.errors import CompletionTimeout
from devipc.hicache.daemon.outbox import Outbox
from devipc.hicache.operations import Event
from devipc.hicache.results import Answer, PageResult
from devipc.hicache.wire import protocol as p
from devipc.hicache.wire.datagrams import MessageTransport
from devipc.hicache.wire.transport import Way
from tests.hicache.test_transport import ends

PASSED = (Event.SOURCE_RELEASED, Event.VISIBLE)


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("joins", [True, False])
def test_one_frame_or_three(way: Way, joins: bool) -> None:
    client, server = ends(way)
    try:
        outbox = Outbox(server, joins=joins)
        stored = np.array([PageResult.STORED, PageResult.STORED], np.uint8)
        outbox.answer(7, Event.COMPLETED, Answer(stored), PASSED)
        told: list[Event] = []
        frames = 0
        while Event.COMPLETED not in told:
            frame = p.decode_answer(client.take(timeout_s=5))
            told += [*frame.passed, frame.event]
            assert (frame.op, frame.results) == (7, stored.tobytes())
            frames += 1
        assert told == [*PASSED, Event.COMPLETED]
        assert frames == (1 if joins else 3)
        assert outbox.answered == {event.value: 1 for event in told}
        with pytest.raises(CompletionTimeout):
            client.take(timeout_s=0.02)
    finally:
        client.close()
        server.close()


def test_a_client_whose_socket_takes_no_answer_is_tried_with_pauses() -> None:
    """The client made both ends, and may make the daemon's too small at any time: that costs no processor."""
    theirs, mine = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    server = MessageTransport(mine, own=False)
    try:
        outbox = Outbox(server, joins=True)
        outbox.answer(7, Event.REFUSED, Answer(np.zeros(60_000, np.uint8)))
        began = time.monotonic()
        assert not outbox.flush(timeout_s=0.1)
        assert time.monotonic() - began >= 0.1
    finally:
        server.close()
        theirs.close()
