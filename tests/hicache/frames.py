"""One frame of every kind, all fields set: what the recorded bytes stand for, and the seeds of the fuzzing.

``python -m tests.hicache.frames`` records the frames of the present version; recorded ones are never changed.
"""

from __future__ import annotations

import json
from pathlib import Path

from msgspec import Struct

from devipc.channel.hello import encode_error
from devipc.errors import ResourceExhausted
from devipc.hicache.layout import Component, Plane, PoolChunk, PoolLayout, Rule, encode_layout
from devipc.hicache.operations import Event
from devipc.hicache.wire import protocol as p
from devipc.hicache.wire.greeting import PROTOCOL_MAX, answer_hello, hello
from devipc.types import HandleKind

FOLDER = Path(__file__).parent / "recorded"
DIGEST = bytes(range(16))
LAYOUT = PoolLayout(
    page_count=8,
    chunks=(PoolChunk(8 * 512, HandleKind.VMM_FD),),
    components=(
        Component("kv", Rule.FULL_ATTENTION, 16, 16, (Plane(0, 0, 0, 16, 16, 512), Plane(0, 0, 256, 16, 16, 512))),
    ),
    first_page=1,
)


def greeting(*, features: int = 0) -> p.HelloFrame:
    return hello(features=features, client=DIGEST, way="rings")


def welcome(theirs: p.HelloFrame, *, features: int = 0, epoch: int = 1) -> p.WelcomeFrame:
    return answer_hello(
        theirs,
        features=features,
        epoch=epoch,
        layer_groups=(1, 2, 4, 8),
        engine_path="/run/devipc/engine-0.sock",
        engine_instance=DIGEST,
        device_uuid="GPU-1",
        backend="host",
        write_policy="write_through",
    )


def samples() -> dict[str, p.AnyFrame]:
    pool = {"pool": 3, "generation": 4}
    pages = b"".join(page.to_bytes(8, "little") for page in (1, 5, 7))
    keys = DIGEST + DIGEST[::-1] + bytes(16)
    error = ResourceExhausted("16 transfers are unfinished", code="busy", remedy="wait for one of them")
    frames: list[p.AnyFrame] = [
        greeting(features=5),
        welcome(greeting(features=5), features=3, epoch=2**62 + 1),
        p.RegisterPoolFrame(
            op=1,
            **pool,
            device_uuid="GPU-1",
            layout=encode_layout(LAYOUT),
            namespace=DIGEST,
        ),
        p.BackupFrame(
            op=2,
            **pool,
            pages=pages,
            keys=keys,
            ready=p.Point(fence=1, n=2**40),
            slot=2,
            timeout_s=30.0,
            confirmed=True,
            partial=False,
        ),
        p.RestoreFrame(op=3, **pool, pages=pages, keys=keys, ready=False, slot=2**32 - 1, timeout_s=0.5, partial=True),
        p.LookupFrame(op=4, **pool, keys=keys, lease_s=86400.0 * 365),
        p.PrefetchFrame(op=5, **pool, keys=b""),
        p.InvalidateFrame(op=6, **pool, keys=keys),
        p.FlushFrame(op=7, **pool),
        p.StatusFrame(op=2**63 - 1),
        p.UnregisterFrame(op=8, **pool),
        p.PingFrame(op=10),
        p.LeaveFrame(timeout_s=30.0),
        p.TellFrame(op=2, event=Event.CANCEL),
        p.AnswerFrame(op=2, event=Event.COMPLETED, results=bytes([1, 2, 6])),
        p.AnswerFrame(op=3, event=Event.REFUSED, results=bytes(3), error=encode_error(error)),
        p.AnswerFrame(op=9, event=Event.COMPLETED, detail=b'{"pages":[1,{"a":null}]}'),
    ]
    return {f"{number:02} {type(frame).__name__}": frame for number, frame in enumerate(frames)}


def decoded(name: str, body: bytes) -> Struct:
    """Decode by the side that receives such a frame."""
    decode = {"HelloFrame": p.decode_hello, "WelcomeFrame": p.decode_welcome, "AnswerFrame": p.decode_answer}
    decode["LeaveFrame"] = p.decode_leave
    return decode.get(name.split()[-1], p.decode_request)(body)


if __name__ == "__main__":
    path = FOLDER / f"v{PROTOCOL_MAX}.json"
    if path.exists():
        raise SystemExit(f"{path.name} is recorded already")
    FOLDER.mkdir(exist_ok=True)
    recorded = {name: p.encode(frame).hex() for name, frame in samples().items()}
    path.write_text(json.dumps(recorded, indent=1) + "\n")
