"""A client without a thread, which the engine does not let go in time, does not keep its id for ever."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from devipc.errors import CompletionTimeout, ResourceExhausted
from devipc.hicache.daemon import attaching
from devipc.hicache.wire.transport import Offer, Way

ID = bytes(15) + b"1"


class Unserved:
    """Gets no thread."""

    def __init__(self, client: bytes, link: Any, transport: Any, *_: object, **__: object) -> None:
        self.client, self.link, self.transport, self.session = client, link, transport, None

    def start(self) -> None:
        raise ResourceExhausted("no thread to serve a client with", code="threads")


def test_a_client_without_a_thread_gives_its_id_back_when_the_engine_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    maps, closed = threading.Event(), list[float]()
    maps.set()

    def open_client(_: bytes, fd: int, *, uid: int) -> object:
        os.close(fd)
        return object()

    def close_client(_: object, *, timeout_s: float) -> None:
        closed.append(timeout_s)
        if maps.is_set():
            raise CompletionTimeout("the engine process may still map memory of the client", code="still_mapped")

    process = SimpleNamespace(open_client=open_client, close_client=close_client)
    engine = SimpleNamespace(attach=lambda *_: object(), detach=lambda _: None)
    life: Any = SimpleNamespace(process=process, engine=engine)
    config: Any = SimpleNamespace(max_clients=1)
    nothing: Any = None
    clients = attaching.Clients(config, nothing, life=lambda: life, host=nothing)
    monkeypatch.setattr(attaching, "AttachedClient", Unserved)
    monkeypatch.setattr(clients, "_welcome", lambda *_: b"")
    with Offer(Way.MESSAGES) as offer:
        fds = [os.open("/dev/null", os.O_RDONLY), *(os.dup(fd) for fd in offer.fds)]
        link: Any = SimpleNamespace(peer=SimpleNamespace(uid=0))
        message: Any = SimpleNamespace(take_fds=lambda: fds)
        theirs: Any = SimpleNamespace(client=ID, way="messages", features=0)
        with pytest.raises(ResourceExhausted, match="no thread"):
            clients._attach(link, theirs, message)
    assert len(clients.all()) == 1  # something of it is mapped: nobody else has its id, or its room
    with pytest.raises(ResourceExhausted, match="1 clients are attached"):
        clients._reserve(bytes(15) + b"2", 0)
    maps.clear()
    clients._reserve(ID, 0)
    assert not clients.all()
    assert len(closed) == 3
