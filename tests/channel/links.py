"""Two links inside this process, for tests that need no second one."""

from __future__ import annotations

import threading

from devipc.channel import Message, channel_pair
from devipc.channel.link import Handler, Link

ASK = 64


def joined(**handlers: Handler) -> tuple[Link, Link]:
    """Return two started links inside this process; the second one has the handlers ``ask``, ``two`` and so on."""
    left, right = channel_pair()
    accepted: list[Link] = []
    thread = threading.Thread(target=lambda: accepted.append(Link.accept(right, facts={"side": "b"}, timeout_s=5)))
    thread.start()
    one = Link.over(left, facts={"side": "a"}, timeout_s=5)
    thread.join()
    for number, handler in enumerate(handlers.values()):
        accepted[0].handle(ASK + number, handler)
    one.start()
    accepted[0].start()
    return one, accepted[0]


def waits(event: threading.Event) -> Handler:
    """Return a handler that returns when ``event`` is set."""

    def handler(_: Message) -> None:
        event.wait(20)

    return handler
