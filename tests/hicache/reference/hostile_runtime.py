"""A runtime's process that computes nothing, and in each of its lives does another wrong thing.

Owns the faults. What it answers else is what a plan wants: every token is 7. ``spec.cache`` names a file with one fault
a line; each life takes the first of them. Run by :class:`~devipc.hicache.reference.process.ProcessGPURuntime`.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from devipc.channel.link import Link, PeerState, Reply
from devipc.channel.seqpacket import Channel, Message
from devipc.hicache.reference.handles import CacheExtentRef, PageRun
from devipc.hicache.reference.process import COMPLETION, FAILED, PLAN, START, Started
from devipc.hicache.reference.runtime import BatchCompletion, BatchPlan, RuntimeLimits
from devipc.hicache.reference.spec import RuntimeSpec

LIFE = f"hostile {os.getpid()}"
FAULT_AT = 2
LIMITS = RuntimeLimits(page_tokens=16, chunk_tokens=16, max_requests=8, pages=256, namespace=bytes(16))
encode = msgspec.msgpack.Encoder().encode
numbers = itertools.count(1)


def extent(pages: int) -> CacheExtentRef:
    return CacheExtentRef.of(LIFE, 1, [next(numbers) for _ in range(pages)])


def honest(plan: BatchPlan) -> BatchCompletion:
    wanted = [one.handle for one in plan.prefill if one.sample] + [one.handle for one in plan.decode]
    return BatchCompletion(
        number=plan.number,
        sampled=tuple((handle, 7) for handle in wanted),
        kept=tuple(extent(one.page_count) for one in plan.keep),
        found=tuple(bytes(len(one) // 16) for one in plan.ask),
    )


def others(answer: BatchCompletion, **changes: Any) -> BatchCompletion:
    return replace(answer, sampled=tuple((replace(handle, **changes), 7) for handle, _ in answer.sampled))


WRONG: dict[str, Callable[[BatchCompletion], BatchCompletion]] = {
    "number": lambda answer: replace(answer, number=answer.number + 1),
    "generation": lambda answer: others(answer, generation=77),
    "slot": lambda answer: others(answer, slot_id=10**6),
    "fewer": lambda answer: replace(answer, sampled=answer.sampled[1:]),
    "more": lambda answer: replace(answer, sampled=answer.sampled + answer.sampled[:1]),
    "negative": lambda answer: replace(answer, sampled=tuple((handle, -1) for handle, _ in answer.sampled)),
    "huge_extent": lambda answer: replace(
        answer, kept=tuple(CacheExtentRef(LIFE, 1, (PageRun(1, 2**60),)) for _ in answer.kept)
    ),
    "other_extent": lambda answer: replace(
        answer, kept=tuple(CacheExtentRef("another", 1, one.page_runs) for one in answer.kept)
    ),
    "no_extent": lambda answer: replace(answer, kept=()),
    "more_extents": lambda answer: replace(answer, kept=(*answer.kept, extent(1))),
    "found": lambda answer: replace(answer, found=(*answer.found, b"\1")),
}
"""Completions that a plan did not ask for, made of the right one."""


class Hostile:
    def __init__(self, link: Link) -> None:
        self._link = link
        self._fault = ""
        link.handle(START, self._on_start)
        link.handle(PLAN, self._on_plan)
        link.on_state(lambda state: None if state is PeerState.CONNECTED else os._exit(0))
        link.start()

    def _on_start(self, message: Message) -> Reply:
        path = Path(msgspec.msgpack.decode(bytes(message.body), type=RuntimeSpec).cache)
        self._fault, *left = path.read_text().splitlines() or [""]
        path.write_text("\n".join(left))
        answers: dict[str, Any] = {
            "start_exit": lambda: os._exit(3),
            "start_silence": lambda: time.sleep(60),
            "start_garbage": lambda: b"\xc1",
            "start_limits": lambda: encode(Started(LIFE, replace(LIMITS, page_tokens=0))),
        }
        return answers.get(self._fault, lambda: encode(Started(LIFE, LIMITS)))(), ()

    def _on_plan(self, message: Message) -> None:
        plan = msgspec.msgpack.decode(bytes(message.body), type=BatchPlan)
        answer, fault = honest(plan), self._fault
        if fault in WRONG and plan.number >= FAULT_AT:
            answer = WRONG[fault](answer)
        elif plan.number == FAULT_AT:
            doings: dict[str, Callable[[], object]] = {
                "silence": lambda: time.sleep(60),
                "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
                "exit": lambda: os._exit(0),
                "bye": self._link.close,
                "garbage": lambda: self._link.notify(COMPLETION, b"\xc1" * 100),
                "huge": lambda: self._link.notify(COMPLETION, bytes(2**23), timeout_s=20.0),
                "failed": lambda: self._link.notify(FAILED, b"\xff" * 2**20, timeout_s=20.0),
                "twice": lambda: self._link.notify(COMPLETION, encode(answer)),
                "unknown": lambda: self._link.notify(999, b"?"),
            }
            doings.get(fault, lambda: None)()
        self._link.notify(COMPLETION, encode(answer))


if __name__ == "__main__":
    Hostile(Link.accept(Channel(socket.socket(fileno=int(sys.argv[1]))), facts={}, timeout_s=10.0))
    time.sleep(600)
