"""A runtime in a process of its own: the same interface, over one connection.

Owns that process and the messages. A batch is one message there and one back; slots are given out here, so that
opening a request costs none. When the process dies, every call raises PeerGone until :meth:`ProcessGPURuntime.restart`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
from collections import Counter

import msgspec

from devipc.channel.link import FIRST_FREE_KIND, Link, PeerState
from devipc.channel.seqpacket import Channel, Message
from devipc.errors import ClosedError, CompletionTimeout, PeerGone, ProtocolError, UsageError
from devipc.hicache.reference.handles import RequestRuntimeHandle
from devipc.hicache.reference.pagetable import SlotBook
from devipc.hicache.reference.runtime import (
    BatchCompletion,
    BatchPlan,
    PreparedBatchHandle,
    RuntimeLimits,
    RuntimeStats,
    check_completion,
    check_limits,
)
from devipc.hicache.reference.spec import RuntimeSpec

__all__ = ["COMPLETION", "FAILED", "PLAN", "START", "STATS", "ProcessGPURuntime", "Started"]

_MOST_WORDS = 4096
START, PLAN, COMPLETION, FAILED, STATS = range(FIRST_FREE_KIND, FIRST_FREE_KIND + 5)


class Started(msgspec.Struct, frozen=True):
    """What a runtime's process answers when it is there."""

    runtime_id: str
    limits: RuntimeLimits


_encode = msgspec.msgpack.Encoder().encode
_completions = msgspec.msgpack.Decoder(BatchCompletion)
_stats = msgspec.msgpack.Decoder(RuntimeStats)
_started = msgspec.msgpack.Decoder(Started)


class ProcessGPURuntime:
    """Fulfils :class:`~devipc.hicache.reference.runtime.RuntimeInterface`. One thread.

    Parameters
    ----------
    spec : RuntimeSpec
        What the process makes.
    start_timeout_s : float
        Limit for loading weights and attaching to the cache.
    batch_timeout_s : float
        Limit for a batch; a runtime that takes longer is ended.
    module : str
        What ``python -m`` runs.

    Attributes
    ----------
    messages : Counter
        Messages by direction and kind, for those who count.
    """

    def __init__(
        self,
        spec: RuntimeSpec,
        *,
        start_timeout_s: float = 180.0,
        batch_timeout_s: float = 60.0,
        module: str = "devipc.hicache.reference.process_main",
    ) -> None:
        self._spec = spec
        self._module = module
        self._start_timeout_s = start_timeout_s
        self._batch_timeout_s = batch_timeout_s
        self.messages: Counter[str] = Counter()
        self._start()

    def _start(self) -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            command = [sys.executable, "-m", self._module, str(there.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[there.fileno()])
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._announced: dict[int, BatchPlan] = {}
        self._failure = b""
        try:
            self._link = Link.over(Channel(here), facts={}, timeout_s=self._start_timeout_s)
            self._link.handle(COMPLETION, self._on_completion)
            self._link.handle(FAILED, self._on_failed)
            self._link.on_state(self._on_state)
            self._link.start()
            body = _encode(self._spec)
            call = self._link.call(START, body, timeout_s=self._start_timeout_s)
            try:
                answer = _started.decode(call.body)
                check_limits(answer.limits)
            except (msgspec.DecodeError, ProtocolError) as error:
                raise self._lost(f"answers what makes no sense: {error}", code="nonsense") from error
        except BaseException:
            self._end()
            raise
        self.runtime_id = answer.runtime_id
        self.limits = answer.limits
        self._book = SlotBook(answer.runtime_id, answer.limits.max_requests)

    @property
    def pid(self) -> int:
        """Process id of the runtime."""
        return self._process.pid

    # --- what the link calls, on its threads -------------------------------------------------------------------------

    def _on_completion(self, message: Message) -> None:
        self._answers.put(bytes(message.body))

    def _on_failed(self, message: Message) -> None:
        self._failure = bytes(message.body)
        self._answers.put(None)

    def _on_state(self, state: PeerState) -> None:
        if state is not PeerState.CONNECTED:
            self._answers.put(None)

    # --- the interface -----------------------------------------------------------------------------------------------

    def open_request(self) -> RequestRuntimeHandle:
        """See :class:`~devipc.hicache.reference.runtime.RuntimeInterface`."""
        return self._book.take()

    def prepare_batch(self, plan: BatchPlan) -> PreparedBatchHandle:
        """See :class:`~devipc.hicache.reference.runtime.RuntimeInterface`: the one message there."""
        try:
            self._link.notify(PLAN, _encode(plan))
        except (ClosedError, CompletionTimeout) as error:  # it was ended; or it stands still, and takes nothing
            raise self._lost(f"does not take a batch: {error.message}") from error
        self.messages["plan"] += 1
        self._announced[plan.number] = plan
        return PreparedBatchHandle(self.runtime_id, plan.number)

    def execute_batch(self, handle: PreparedBatchHandle) -> BatchCompletion:
        """See :class:`~devipc.hicache.reference.runtime.RuntimeInterface`: the one message back."""
        plan = self._announced.pop(handle.number, None)
        if plan is None or handle.runtime_id != self.runtime_id:
            raise UsageError(f"{handle} was not announced", remedy="execute each batch once")
        try:
            body = self._answers.get(timeout=self._batch_timeout_s)
        except queue.Empty:
            raise self._lost(f"did not finish a batch in {self._batch_timeout_s:g} s", code="stuck") from None
        if body is None:
            reason = self._failure[:_MOST_WORDS].decode(errors="replace")
            raise self._lost(f"is gone{': ' if reason else ''}{reason}")
        try:
            completion = _completions.decode(body)
            check_completion(plan, completion, self.runtime_id)
        except (msgspec.DecodeError, ProtocolError) as error:
            raise self._lost(f"answers what makes no sense: {error}", code="nonsense") from error
        self.messages["completion"] += 1
        for one in plan.close:
            self._book.give_back(one)
        return completion

    def _lost(self, what: str, *, code: str = "") -> PeerGone:
        """End the process, and return what to raise."""
        self._end()
        return PeerGone(f"the runtime {what}; it was ended", code=code, remedy="restart it")

    def stats(self) -> RuntimeStats:
        """See :class:`~devipc.hicache.reference.runtime.RuntimeInterface`."""
        self.messages["stats"] += 1
        try:
            return _stats.decode(self._link.call(STATS, timeout_s=self._batch_timeout_s).body)
        except (msgspec.DecodeError, ClosedError, CompletionTimeout) as error:
            raise self._lost(f"does not say what it did: {error}") from error

    def restart(self) -> None:
        """See :class:`~devipc.hicache.reference.runtime.RuntimeInterface`."""
        self._end()
        self._start()

    def close(self) -> None:
        """Let the process finish its backups and leave; it is ended when it does not."""
        if self._process.poll() is None:
            self._link.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self._batch_timeout_s)
        self._end()

    def _end(self) -> None:
        if hasattr(self, "_link"):
            self._link.close()
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired as error:
            raise CompletionTimeout(
                f"process {self._process.pid} of the runtime does not end", remedy="look at its driver"
            ) from error
