"""The life of a cache: schedulers and the daemon come, die and come back, and no answer changes.

Owns the order of events, the processes and what was measured. What a scheduler computes is its driver's business: the
same story is told with checksummed pages and with a language model. A driver is a process that takes orders as JSON
lines and tells events the same way.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from devipc.errors import CompletionTimeout, DevIPCError, PeerGone

__all__ = ["Life"]

Progress = Callable[[str, int, int], None]
_START_S = 240.0
_STEP_S = 240.0
_BACK_S = 10.0


class _Process:
    """One process of the story, with the lines that it tells."""

    def __init__(self, command: Sequence[str], *, name: str) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in _gone
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"demo-{name}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    @property
    def pid(self) -> int:
        return self._process.pid

    def line(self, timeout_s: float) -> str:
        try:
            found = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise CompletionTimeout(f"the {self.name} said nothing for {timeout_s:g} s") from None
        if found is None:
            self._errors.seek(0)
            last = self._errors.read().strip().splitlines()[-1:]
            raise PeerGone(f"the {self.name} ended: {' '.join(last) or 'without a word'}")
        return found

    def order(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def events(self, timeout_s: float = _STEP_S) -> Iterator[dict[str, Any]]:
        """Yield events until ``done``, which is the last."""
        while True:
            event: dict[str, Any] = json.loads(self.line(timeout_s))
            yield event
            if event["event"] == "done":
                return

    def kill(self) -> None:
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
        self._gone()

    def end(self, timeout_s: float = 30.0) -> None:
        """Let it end in good order: its input ends, or it is told to."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self.kill()

    def terminate(self, timeout_s: float = 30.0) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self.kill()

    def _gone(self) -> None:
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()


@contextlib.contextmanager
def _kept(stack: contextlib.ExitStack) -> Iterator[Callable[[_Process, Callable[[_Process], None]], _Process]]:
    """Let a process be made and be known to ``stack``, without an interrupt between: that comes afterwards.

    At the stack's end the process is ended in good order, or killed when the story did not get there.
    """
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))

    def keep(process: _Process, end: Callable[[_Process], None]) -> _Process:
        stack.push(lambda kind, _error, _trace: end(process) if kind is None else process.kill())
        return process

    try:
        yield keep
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            raise KeyboardInterrupt


class Life:
    """See the module.

    Parameters
    ----------
    driver : callable
        Makes the command of a scheduler from the daemon's URL.
    names : sequence of str
        What is asked, in order.
    backend : str
        Of the daemon.
    tier : str
        Host memory of the daemon's tier.
    progress : callable
        Called with (step, done, total).
    """

    def __init__(
        self,
        driver: Callable[[str], Sequence[str]],
        names: Sequence[str],
        *,
        backend: str,
        tier: str,
        progress: Progress,
    ) -> None:
        self._driver, self._names = driver, list(names)
        self._backend, self._tier, self._progress = backend, tier, progress
        self._expected: dict[str, list[int]] = {}
        self.steps: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any]:
        """Live through it; return the report. Every process is ended either way."""
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="devipc-demo-") as folder, contextlib.ExitStack() as stack:
            self._socket = os.path.join(folder, "hicache.sock")
            daemon = self._daemon(stack)
            first = self._scheduler(stack, "scheduler A")
            self._answer("A computes everything, and backs up", first)
            self._kill_in_the_middle("A is killed while it answers", first, first)
            second = self._scheduler(stack, "scheduler B")
            self._answer("B finds A's pages in host memory", second)
            self._kill_in_the_middle("the daemon is killed while B answers", second, daemon)
            self._order(second, do="forget")
            self._answer("B goes on without the cache", second)
            self._daemon(stack)
            self._attached_again(second)
            self._order(second, do="forget")
            self._answer("B computes, and backs up to the new daemon", second)
            self._settled(second)
            self._order(second, do="forget")
            self._answer("B finds its pages in host memory again", second)
        wrong = sum(step.get("different", 0) for step in self.steps)
        return {
            "schema": "devipc.life/1",
            "backend": self._backend,
            "steps": self.steps,
            "different_answers": wrong,
            "first_token_ms": self._first_tokens(),
            "seconds": round(time.monotonic() - began, 1),
            "ok": not wrong and self._restored_as_it_should(),
        }

    # --- processes ---------------------------------------------------------------------------------------------------

    def _daemon(self, stack: contextlib.ExitStack) -> _Process:
        command = [sys.executable, "-m", "devipc", "hicache", "serve", "--json", "--backend", self._backend]
        began = time.monotonic()
        with _kept(stack) as keep:
            daemon = keep(
                _Process([*command, "--socket", self._socket, "--tier-nbytes", self._tier], name="daemon"),
                _Process.terminate,
            )
        ready = json.loads(daemon.line(_START_S))
        self._note("a daemon serves", seconds=time.monotonic() - began, pinned=bool(ready.get("pinned")))
        return daemon

    def _scheduler(self, stack: contextlib.ExitStack, name: str) -> _Process:
        self._progress(f"{name} starts", 0, 1)
        with _kept(stack) as keep:
            made = keep(_Process(self._driver(f"unix:{self._socket}"), name=name), _Process.end)
        event = json.loads(made.line(_START_S))
        if event["event"] != "ready":
            raise DevIPCError(f"{name} said {event}")
        self._progress(f"{name} starts", 1, 1)
        return made

    # --- steps -------------------------------------------------------------------------------------------------------

    def _answer(self, step: str, scheduler: _Process) -> None:
        scheduler.order(do="answer", names=self._names)
        answers: list[dict[str, Any]] = []
        done: dict[str, Any] = {}
        for event in scheduler.events():
            if event["event"] == "answered":
                answers.append(event)
                self._progress(step, len(answers), len(self._names))
            done = event
        different = 0
        for answer in answers:
            expected = self._expected.setdefault(answer["name"], answer["tokens"])
            different += expected != answer["tokens"]
        first = sorted(answer["first_token_s"] for answer in answers)
        self._note(
            step,
            answers=len(answers),
            different=different,
            restored=sum(answer["restored"] for answer in answers),
            kept=sum(answer["kept"] for answer in answers),
            computed=sum(answer["computed"] for answer in answers),
            first_token_ms=round(1000 * first[len(first) // 2], 1),
            restarts=sum(answer["restarts"] for answer in answers),
            degraded=bool(done["status"].get("degraded")),
            strategy=done["status"].get("strategy", ""),
            plan=done["status"].get("plans", {}),  # of the engine's life so far
            texts={answer["name"]: answer["text"] for answer in answers},
        )

    def _kill_in_the_middle(self, step: str, scheduler: _Process, victim: _Process) -> None:
        """Kill ``victim`` at the second token of an answer; the scheduler, if it lives, goes on to the end."""
        self._order(scheduler, do="forget")
        scheduler.order(do="answer", names=self._names[:2])
        tokens, answers, different = 0, 0, 0
        killed_s = 0.0
        try:
            for event in scheduler.events():
                tokens += event["event"] == "token"
                if tokens == 2 and not killed_s:
                    victim.kill()
                    killed_s = time.monotonic()
                    if victim is scheduler:
                        break
                if event["event"] == "answered":
                    answers += 1
                    different += self._expected[event["name"]] != event["tokens"]
        finally:
            victim.kill()
        self._note(step, answers=answers, different=different, tokens_before=2)

    def _order(self, scheduler: _Process, **order: Any) -> dict[str, Any]:
        scheduler.order(**order)
        *_, last = scheduler.events()
        return last

    def _attached_again(self, scheduler: _Process) -> None:
        began = time.monotonic()
        while self._order(scheduler, do="state")["status"].get("degraded"):
            if time.monotonic() - began > _BACK_S:
                raise CompletionTimeout(f"the scheduler has not attached again after {_BACK_S:g} s")
            time.sleep(0.02)
        self._note("B has attached to it by itself", seconds=time.monotonic() - began)

    def _settled(self, scheduler: _Process) -> None:
        began = time.monotonic()
        while self._order(scheduler, do="forget")["backups_open"]:
            if time.monotonic() - began > _STEP_S:
                raise CompletionTimeout("backups do not come to an end")
            time.sleep(0.02)

    def _note(self, step: str, **values: Any) -> None:
        if "seconds" in values:
            values["seconds"] = round(values["seconds"], 3)
        self.steps.append({"step": step, **values})

    def _first_tokens(self) -> dict[str, float]:
        """Median time to the first token without and with pages from host memory, in milliseconds."""
        answered = [step for step in self.steps if "restored" in step]
        computed = [step["first_token_ms"] for step in answered if not step["restored"]]
        cached = [step["first_token_ms"] for step in answered if step["restored"]]
        return {
            name: round(sorted(some)[len(some) // 2], 1)
            for name, some in (("computed", computed), ("restored", cached))
            if some
        }

    def _restored_as_it_should(self) -> bool:
        """True when pages came from the cache exactly where there was one that had them."""
        answered = [step for step in self.steps if "restored" in step]
        return [bool(step["restored"]) for step in answered] == [False, True, False, False, True]
