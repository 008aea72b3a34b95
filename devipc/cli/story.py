"""The demo's story: two processes share a pool, order hand-overs by fences, and one of them is killed in the middle.

Owns the steps and what they measured; printing is somebody else's. This process is the importer; the exporter is a
child that ends with its standard input.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from devipc import errors
from devipc.channel.listener import default_directory, remove_leftovers
from devipc.cli.story_peer import page
from devipc.errors import CompletionTimeout, DevIPCError, FencePoisoned, PeerError
from devipc.probe.stage import Stage
from devipc.session import Importer, PeerEvent, PeerState, RemoteMemory

__all__ = ["Story"]

_TIMEOUT_S = 30.0
Progress = Callable[[str, int, int], None]


class Story:
    """Runs the steps in order and collects what each one showed.

    Parameters
    ----------
    backend, device, strategy : str
        As on the command line; empty for the default.
    hand_overs : int
        Pages handed over in order before the kill, and again during it.
    slots, page_nbytes : int
        Geometry of the pool; ``page_nbytes`` is a multiple of 8.
    progress : callable
        Called with (step, done, total) while a long step runs.
    """

    def __init__(
        self,
        *,
        backend: str,
        device: str,
        strategy: str,
        hand_overs: int,
        slots: int,
        page_nbytes: int,
        progress: Progress,
    ) -> None:
        self.report: dict[str, Any] = {"schema": "devipc.demo/1", "backend": backend}
        self._arguments = [backend, device, str(slots), str(page_nbytes), strategy]
        self._backend, self._device, self._strategy = backend, device, strategy
        self._hand_overs, self._slots, self._page_nbytes = hand_overs, slots, page_nbytes
        self._progress = progress

    def run(self) -> dict[str, Any]:
        """Run all steps and return the report.

        Raises
        ------
        DevIPCError
            When a step fails; the child is ended either way.
        """
        with _child(self._arguments) as child:
            started = child.ask("")
            with Importer(
                started["path"],
                backend=self._backend,
                device=self._device or None,
                strategy=self._strategy or None,
                timeout_s=_TIMEOUT_S,
            ) as importer:
                self.report["device"] = importer.device.info.name
                with Stage(importer.device, self._slots * self._page_nbytes) as stage, importer.open("pool") as pool:
                    self._share(child, pool, stage)
                    decision = importer.decision
                    self.report["decision"] = decision.to_json()
                    self._hand_over(child, importer, pool, stage)
                    self._kill(child, importer, pool, stage)
        self.report["ok"] = not any(step["wrong_pages"] for step in self._steps())
        return self.report

    def _steps(self) -> Iterator[dict[str, Any]]:
        for name in ("share", "hand_over", "kill"):
            yield self.report[name]

    def _share(self, child: _Child, pool: RemoteMemory, stage: Stage) -> None:
        """Check that both sides see what the other wrote into the same memory."""
        child.ask("fill 1000")
        nbytes = self._slots * self._page_nbytes  # the pool itself may be rounded up to whole driver blocks
        stage.load(pool.ptr, nbytes)
        stage.synchronize()
        wrong_here = sum(not self._holds(stage, slot, 1000 + slot) for slot in range(self._slots))
        for slot in range(self._slots):
            at = slot * self._page_nbytes
            stage.view[at : at + self._page_nbytes] = page(2000 + slot, self._page_nbytes)
        stage.store(pool.ptr, nbytes)
        stage.synchronize()
        wrong_there = child.ask("verify 2000")["wrong"]
        self.report["share"] = {"nbytes": nbytes, "wrong_pages": wrong_here + wrong_there}

    def _hand_over(self, child: _Child, importer: Importer, pool: RemoteMemory, stage: Stage) -> None:
        """Take every page in order; the producer may only overwrite what was taken."""
        start = time.perf_counter()
        wrong = 0
        for number, right in self._pages(child, importer, pool, stage):
            wrong += not right
            self._progress("hand-overs", number, self._hand_overs)
        seconds = time.perf_counter() - start
        child.answer()
        self.report["hand_over"] = {
            "count": self._hand_overs,
            "wrong_pages": wrong,
            "per_second": round(self._hand_overs / seconds),
            "mb_per_second": round(self._hand_overs * self._page_nbytes / seconds / 1e6, 1),
        }

    def _kill(self, child: _Child, importer: Importer, pool: RemoteMemory, stage: Stage) -> None:
        """Kill the producer in the middle of a second round, and see what this side learns and when."""
        victim = self._hand_overs // 2
        taken = wrong = 0
        killed_at = 0.0
        ended = ""
        noticed: dict[PeerState, float] = {}

        def notice(event: PeerEvent) -> None:
            noticed.setdefault(event.state, time.perf_counter())

        importer.on_event(notice)
        try:
            for number, right in self._pages(child, importer, pool, stage):
                taken, wrong = number, wrong + (not right)
                if number == victim:
                    killed_at = time.perf_counter()
                    child.kill()
        except (FencePoisoned, PeerError) as error:
            ended = f"{type(error).__name__}: {error.message}"
        except CompletionTimeout as error:
            ended = f"HUNG: {error.message}"
            wrong += 1
        self._wait_gone(noticed, killed_at)
        self.report["kill"] = {
            "pages_taken": taken,
            "wrong_pages": wrong,
            "dying_ms": round((noticed[PeerState.DYING] - killed_at) * 1e3, 2),
            "gone_ms": round((noticed[PeerState.GONE] - killed_at) * 1e3, 2),
            "ended_with": ended,
            "memory_stale": pool.stale,
        }

    def _wait_gone(self, noticed: dict[PeerState, float], since: float) -> None:
        while PeerState.GONE not in noticed:  # the state itself changes a moment before the callbacks are told
            if time.perf_counter() - since > _TIMEOUT_S:
                raise CompletionTimeout("the killed process is not reported gone", remedy="this is a bug in devipc")
            time.sleep(1e-3)

    def _pages(self, child: _Child, importer: Importer, pool: RemoteMemory, stage: Stage) -> Iterator[tuple[int, bool]]:
        """Yield (number, whether its content is right) for one round of ordered hand-overs."""
        done = importer.peer.create_fence("done")
        child.tell(f"hand_over {self._hand_overs}")
        child.answer()
        ready = importer.open_fence("ready")
        base, nbytes = pool.ptr, self._page_nbytes
        try:
            for number in range(1, self._hand_overs + 1):
                slot = number % self._slots
                ready.wait(stage.stream, number, timeout_s=_TIMEOUT_S)
                stage.load(base + slot * nbytes, nbytes, at=slot * nbytes)
                stage.synchronize()
                # A wait that a poison ended lets the copy run: only the fence says whether its bytes count.
                if not ready.query(number):
                    raise CompletionTimeout(f"page {number} was let through early", remedy="this is a bug in devipc")
                yield number, self._holds(stage, slot, number)
                done.signal(stage.stream, number)
        finally:
            ready.close()
            done.close()

    def _holds(self, stage: Stage, slot: int, number: int) -> bool:
        at = slot * self._page_nbytes
        return bytes(stage.view[at : at + self._page_nbytes]) == page(number, self._page_nbytes)


class _Child:
    """The exporter's process, spoken to in lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError("the exporter's process ended early", remedy="its message stands above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise _as_error(answer["error"])
        return answer

    def ask(self, command: str) -> dict[str, Any]:
        if command:
            self.tell(command)
        return self.answer()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)


def _as_error(told: dict[str, Any]) -> DevIPCError:
    """Return the exporter's error as the class that it was there."""
    kind = getattr(errors, told["type"], DevIPCError)
    return kind(
        told["message"],
        code=told["code"],
        remedy=told["remedy"],
        backend=told["backend"],
        device=told["device"],
    )


@contextmanager
def _child(arguments: list[str]) -> Iterator[_Child]:
    process = subprocess.Popen(
        [sys.executable, "-m", "devipc.cli.story_peer", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        process_group=0,  # an interrupt from the terminal is for this process, which then ends the other
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield _Child(process)
    finally:
        try:
            process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        remove_leftovers(default_directory())  # one that was killed could not remove its socket
