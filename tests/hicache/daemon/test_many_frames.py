"""A hundred thousand frames that no client sends: none ends the daemon, reaches a copy, or costs anybody else."""

from __future__ import annotations

import random
import struct
import tempfile
import threading
import time
from contextlib import closing
from typing import Any

import pytest

from devipc.errors import DevIPCError
from devipc.hicache.api import UNFENCED, connect
from devipc.hicache.operations import Event, Status
from devipc.hicache.wire import protocol as p
from devipc.hicache.wire.transport import Way
from devipc.registry import load_backend
from tests.hicache.daemon.daemons import RawClient, daemon, until
from tests.hicache.daemon.scene import Scene
from tests.hicache.daemon.test_hostile import held
from tests.hicache.engine_with_faults import FOLDER, MODULE, Faults
from tests.hicache.pools import TIMEOUT_S, closed_behind

SENSELESS, CHANGED, BATCH = 95_000, 5_000, 64
OUTSIDE = (-(2**63), -(2**31), -1, 33, 34, 1000, 2**31, 2**40, 2**62, 2**63 - 1)  # pages are 1 .. 32
FIRST_OP = 10**6


class Attacker:
    """A client whose pool is registered, and who sends frames by hand beside it."""

    def __init__(self, scene: Scene, device: Any) -> None:
        self.client = connect("unix:" + scene.daemon.path, device=device)
        self.memory = scene.it.attention_pool()
        self.handle = scene.it.register(self.client, self.memory)
        link: Any = self.client._link
        self.attachment = link._current
        self.answers: dict[int, Event] = {}
        self.twice: list[int] = []
        self._came = threading.Event()

    def senseless(self, rng: random.Random, op: int) -> p.RequestFrame:
        """A frame that is one, and asks for what cannot be."""
        handle, count = self.handle, rng.randint(1, 6)
        pages = [rng.randint(1, 32) for _ in range(count)]
        what = rng.choice(["page", "page", "page", "page", "pool", "generation", "keys", "short"])
        names: dict[str, Any] = {"op": op, "pool": handle.number, "generation": handle.generation}
        keys = count
        if what == "page":
            pages[rng.randrange(count)] = rng.choice([*OUTSIDE, rng.randint(33, 2**63 - 1), -rng.randint(1, 2**63)])
        elif what == "pool":
            names["pool"] = rng.choice([handle.number + 1, 2**31])
        elif what == "generation":
            names["generation"] = rng.choice([handle.generation + 1, 2**40])
        elif what == "keys":
            keys += rng.randint(1, 3)
        else:
            keys -= 1
        transfer: dict[str, Any] = {
            "pages": struct.pack(f"<{count}q", *pages),
            "keys": rng.randbytes(16 * keys),
            "ready": True,
            "slot": rng.randrange(4096),
            "timeout_s": 1.0,
            "partial": rng.random() < 0.5,
        }
        if what in ("pool", "generation") and rng.random() < 0.3:
            return p.LookupFrame(keys=transfer["keys"], lease_s=1.0, **names)
        if rng.random() < 0.5:
            return p.RestoreFrame(**names, **transfer)
        return p.BackupFrame(confirmed=rng.random() < 0.5, **names, **transfer)

    def push(self, frame: p.RequestFrame) -> None:
        """Send one, whose answer is noted."""

        def take(event: Event, _answer: object) -> None:
            if frame.op in self.answers:
                self.twice.append(frame.op)
            self.answers[frame.op] = event

        self.attachment._own[frame.op] = take
        self.attachment.ops[frame.op] = -1
        self.attachment._transport.push(p.pack(frame), timeout_s=TIMEOUT_S)

    def wait(self, count: int) -> None:
        self.attachment.pump.attend()
        deadline = time.monotonic() + TIMEOUT_S
        while len(self.answers) < count:
            assert time.monotonic() < deadline, f"{count - len(self.answers)} frames have no answer"
            assert self.attachment.over is None, self.attachment.over
            time.sleep(0.0002)
        self.attachment.ops.clear()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_100_000_frames_that_are_wrong_cost_their_senders_alone() -> None:
    rng = random.Random(4)
    device: Any = load_backend("host").open_device()
    with (
        closing(device),
        tempfile.TemporaryDirectory() as folder,
        daemon(options={"engine_module": MODULE}, environment={FOLDER: folder}) as one,
    ):
        scene = Scene(device, one, folder)
        attacker = Attacker(scene, device)
        with closed_behind(scene), closed_behind(attacker.client), Faults(folder, scene.engine_pid) as faults:
            image, calls = attacker.memory.load(), faults.calls()
            before = one.status()
            for done in range(0, SENSELESS, BATCH):
                for op in range(done, min(done + BATCH, SENSELESS)):
                    attacker.push(attacker.senseless(rng, FIRST_OP + op))
                attacker.wait(min(done + BATCH, SENSELESS))
            assert set(attacker.answers.values()) == {Event.REFUSED}
            assert not attacker.twice
            ended = _changed(one.path, rng, attacker)
            # No copy was begun, no byte written, nobody was let go, nothing is held.
            assert faults.calls() == calls
            assert (attacker.memory.load() == image).all()
            until(lambda: len(one.status()["clients"]) == 2)
            after = one.status()
            assert after["engine"]["starts"] == 1
            assert after["operations"] == {}
            assert after["tier"] == before["tier"]
            assert {name: lane["moved_nbytes"] for name, lane in after["lanes"].items()} == {
                name: lane["moved_nbytes"] for name, lane in before["lanes"].items()
            }
            scene.check_serves(77)
            # Its numbers were used up by hand, so that the next one ends its attachment; it attaches by itself.
            had: Any = attacker.client.status()
            last = attacker.client.restore(attacker.handle, scene.keys[:2], [1, 2], ready=UNFENCED)
            assert last.wait(TIMEOUT_S).status is Status.LOST
            until(lambda: (now := attacker.client.status())["losses"] != had["losses"] and not now["degraded"])
            again = attacker.client.restore(attacker.handle, scene.keys[:2], [1, 2], ready=UNFENCED)
            assert again.wait(TIMEOUT_S).status is Status.COMPLETED
            print(f"{SENSELESS} refused, {CHANGED} changed frames ended {ended} connections; {held(one.process.pid)}")
        assert one.end() == 0
        assert "defect" not in one.said()


def _changed(path: str, rng: random.Random, attacker: Attacker) -> int:
    """Send frames in which some bytes were changed; return how many connections that cost."""
    client: RawClient | None = None
    ended = 0
    for number in range(CHANGED):
        client = client or RawClient(path, way=list(Way)[number % 2])
        frame = bytearray(p.pack(attacker.senseless(rng, number + 1)))
        for _ in range(rng.randint(1, 3)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        try:
            client.push(bytes(frame))
            if number % 8 == 7:
                client.push(p.PingFrame(op=2**62))
                while client.take().op != 2**62:
                    pass
        except DevIPCError:
            client.close()
            client = None
            ended += 1
    if client is not None:
        client.close()
    return ended
