"""The process of a runtime: ``python -m devipc.hicache.reference.process_main <socket>``.

Owns the loop: a plan is announced to the runtime as soon as it comes, also while the one before it is computed, so that
its restores hide behind that one; and executed when the one before is done.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys

import msgspec

from devipc.channel.link import Link, PeerState, Reply
from devipc.channel.seqpacket import Channel, Message
from devipc.errors import DevIPCError
from devipc.hicache.reference.local import LocalGPURuntime
from devipc.hicache.reference.process import COMPLETION, FAILED, PLAN, START, STATS, Started
from devipc.hicache.reference.runtime import BatchPlan, PreparedBatchHandle
from devipc.hicache.reference.spec import RuntimeSpec, made_from

__all__: list[str] = []

_GREETING_S = 10.0
_LONGEST_WORDS = 4096
_encode = msgspec.msgpack.Encoder().encode
_plans = msgspec.msgpack.Decoder(BatchPlan)
_specs = msgspec.msgpack.Decoder(RuntimeSpec)


class _Server:
    """Messages in, on the link's threads; everything else on the main thread."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._inbox: queue.SimpleQueue[PreparedBatchHandle | BaseException | None] = queue.SimpleQueue()
        self._spec: queue.SimpleQueue[RuntimeSpec | None] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[bytes | DevIPCError] = queue.SimpleQueue()
        self._runtime: LocalGPURuntime | None = None
        link.handle(START, self._on_start)
        link.handle(PLAN, self._on_plan)
        link.handle(STATS, self._on_stats)
        link.on_state(self._on_state)
        link.start()

    def _on_start(self, message: Message) -> Reply:
        self._spec.put(_specs.decode(bytes(message.body)))
        answer = self._started.get()
        if isinstance(answer, DevIPCError):
            raise answer
        return answer, ()

    def _on_plan(self, message: Message) -> None:
        plan = _plans.decode(bytes(message.body))
        assert self._runtime is not None
        try:
            self._inbox.put(self._runtime.prepare_batch(plan))
        except BaseException as error:
            self._inbox.put(error)

    def _on_stats(self, _message: Message) -> Reply:
        assert self._runtime is not None
        return _encode(self._runtime.stats()), ()

    def _on_state(self, state: PeerState) -> None:
        if state is PeerState.CLOSED:
            self._spec.put(None)
            self._inbox.put(None)
        elif state is not PeerState.CONNECTED:
            os._exit(1)  # nobody is left who would take an answer

    def fail(self, error: BaseException) -> None:
        """Tell control why there is no runtime, or none any more."""
        told = error if isinstance(error, DevIPCError) else DevIPCError(f"{type(error).__name__}: {error}")
        if self._runtime is None:
            self._started.put(told)
            with contextlib.suppress(queue.Empty):
                self._inbox.get(timeout=_GREETING_S)  # until control has read the answer: a goodbye would overtake it
            return
        self._link.notify(FAILED, str(told).encode()[:_LONGEST_WORDS])

    def serve(self) -> None:
        """Make the runtime, then do what comes until control says goodbye."""
        spec = self._spec.get()
        if spec is None:
            return
        with made_from(spec) as runtime:
            self._runtime = runtime
            self._started.put(_encode(Started(runtime.runtime_id, runtime.limits)))
            self._loop(runtime)

    def _loop(self, runtime: LocalGPURuntime) -> None:
        while (announced := self._inbox.get()) is not None:
            if isinstance(announced, BaseException):
                raise announced
            self._link.notify(COMPLETION, _encode(runtime.execute_batch(announced)))


def _main(fd: int) -> None:
    link = Link.accept(Channel(socket.socket(fileno=fd)), facts={}, timeout_s=_GREETING_S)
    with link:
        server = _Server(link)
        try:
            server.serve()
        except BaseException as error:
            server.fail(error)
            raise


if __name__ == "__main__":
    _main(int(sys.argv[1]))
