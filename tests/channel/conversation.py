"""A scripted conversation that uses every part of a link in both directions; one side may die anywhere in it."""

from __future__ import annotations

import os
import threading

from devipc.channel import Message
from devipc.channel.link import Link, PeerState, Reply
from devipc.channel.listener import Listener
from devipc.errors import CompletionTimeout

ASK, FILES, NOTICE, ASK_BACK, LONG = 64, 65, 66, 67, 68
LONG_NBYTES = 200_000


class Side:
    """What both sides have: a link, the states that it was told, and handlers."""

    def __init__(self, path: str, *, timeout_s: float) -> None:
        self.path = path
        self.timeout_s = timeout_s
        self.link: Link | None = None
        self.states: list[PeerState] = []
        self.noticed = threading.Event()
        self.left = threading.Event()

    def begin(self, link: Link) -> Link:
        self.link = link
        for kind, handler in {
            ASK: self.on_ask,
            FILES: self.on_files,
            NOTICE: self.on_notice,
            ASK_BACK: self.on_ask_back,
            LONG: self.on_ask,
        }.items():
            link.handle(kind, handler)
        link.on_state(self.on_state)
        link.start()
        return link

    def on_state(self, state: PeerState) -> None:
        self.states.append(state)
        if state is not PeerState.CONNECTED:
            self.left.set()

    def on_ask(self, message: Message) -> Reply:
        return message.body, ()

    def on_files(self, message: Message) -> Reply:
        return str(len(message.fds)).encode(), message.fds

    def on_notice(self, _: Message) -> None:
        self.noticed.set()

    def on_ask_back(self, message: Message) -> Reply:
        assert self.link is not None
        return self.link.call(ASK, message.body, timeout_s=self.timeout_s).body, ()

    def talk(self, link: Link) -> None:
        assert link.call(ASK, b"word", timeout_s=self.timeout_s).body == b"word"
        reading, writing = os.pipe()
        try:
            answer = link.call(FILES, fds=[reading, writing], timeout_s=self.timeout_s)
            assert (answer.body, len(answer.fds)) == (b"2", 2)
            answer.close_fds()
        finally:
            os.close(reading)
            os.close(writing)
        link.notify(NOTICE, b"by the way", timeout_s=self.timeout_s)
        assert link.call(ASK_BACK, b"back", timeout_s=self.timeout_s).body == b"back"
        assert len(link.call(LONG, b"x" * LONG_NBYTES, timeout_s=self.timeout_s).body) == LONG_NBYTES

    def close(self) -> None:
        if self.link is not None:
            self.link.close()


class Client(Side):
    def run(self) -> None:
        try:
            self.talk(self.begin(Link.connect(self.path, facts={"side": "client"}, timeout_s=self.timeout_s)))
        finally:
            self.close()


class Server(Side):
    def run(self) -> None:
        try:
            with Listener(self.path) as listener:
                channel = listener.accept(self.timeout_s)
            link = self.begin(Link.accept(channel, facts={"side": "server"}, timeout_s=self.timeout_s))
            if not self.left.wait(self.timeout_s):
                raise CompletionTimeout("the client neither left nor died")
            assert self.link is link
        finally:
            self.close()
