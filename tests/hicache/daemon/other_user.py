"""A client that becomes another user before it connects: ``python -m tests.hicache.daemon.other_user SOCKET UID``."""

from __future__ import annotations

import encodings.ascii  # noqa: F401 - the other user may not read the library any more
import json
import os
import sys
from typing import Any

from devipc.channel.link import Link
from devipc.errors import DevIPCError
from devipc.hicache.wire import protocol as p
from devipc.hicache.wire.greeting import hello
from devipc.hicache.wire.slots import Slots
from devipc.hicache.wire.transport import LinkKind, Offer, Way
from tests.hicache.daemon.daemons import TIMEOUT_S


def main(path: str, uid: int) -> dict[str, str]:
    """Try both ways, then to end the daemon; say what came of each."""
    owner = os.geteuid()
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    said: dict[str, str] = {}
    served: list[Any] = []
    slots = Slots.create(4)
    try:
        link = Link.connect(path, facts={}, timeout_s=TIMEOUT_S, allowed_uids=[owner])
    except DevIPCError as error:
        return {"connect": type(error).__name__}
    link.start()
    for way in Way:
        with Offer(way) as offer:
            greeting = p.encode(hello(features=0, client=bytes(16), way=way.value))
            try:
                answer = link.call(LinkKind.HELLO, greeting, fds=[slots.fileno(), *offer.fds], timeout_s=TIMEOUT_S)
            except DevIPCError as error:
                said[way.value] = error.code
                continue
            index, *fds = answer.take_fds()
            os.close(index)
            transport = offer.complete(fds)
            transport.push(p.encode(p.PingFrame(op=1)), timeout_s=TIMEOUT_S)
            said[way.value] = p.decode_answer(transport.take(timeout_s=TIMEOUT_S)).event.value
            served.append(transport)  # once it is closed the daemon may hang up
    try:
        link.call(LinkKind.DRAIN, p.encode(p.LeaveFrame(timeout_s=1.0)), timeout_s=TIMEOUT_S)
    except DevIPCError as error:
        said["drain"] = type(error).__name__
    for transport in served:
        transport.close()
    link.close()
    slots.close()
    return said


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
