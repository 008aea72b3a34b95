"""A scheduler with a model as a process that is told what to answer, for the demonstration: ``python -m`` it.

Owns the lines in and out, one JSON object each. It is started by the demonstration, which also ends it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from devipc.hicache.api import connect
from devipc.hicache.reference.config import RuntimeConfig
from devipc.hicache.reference.local import LocalGPURuntime
from devipc.hicache.reference.scheduler import Scheduler
from devipc.hicache.reference.texts import all_prompts
from devipc.hicache.reference.weights import load_smollm2
from devipc.registry import load_backend

__all__: list[str] = []

_MODEL = "SmolLM2-135M-Instruct-Q4_1"


def _say(event: str, **values: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()


class _Driver:
    def __init__(self, url: str, backend: str, max_tokens: int) -> None:
        torch.set_grad_enabled(False)
        device = load_backend(backend).open_device(None)
        weights, self._tokenizer = load_smollm2(device="cpu" if backend == "host" else f"cuda:{device.info.ordinal}")
        self._client = connect(url, device=device)
        config = RuntimeConfig(model=_MODEL, pages=512, poison=True)
        self._runtime = LocalGPURuntime(device, weights, self._client, config)
        self._max_tokens = max_tokens
        self._prompts = {name: self._tokenizer.chat(messages) for name, messages in all_prompts().items()}
        self._asked = 0
        self._begin()

    def _begin(self) -> None:
        self._scheduler = Scheduler(
            self._runtime,
            stop_tokens=self._tokenizer.stop_tokens,
            on_token=lambda name, _token: _say("token", name=name),
        )

    def answer(self, names: list[str]) -> None:
        """Answer prompts one behind the other, as their askers wait for them."""
        for name in names:
            self._asked += 1
            key = f"{name}#{self._asked}"
            began = time.monotonic()
            self._scheduler.submit(key, self._prompts[name], max_tokens=self._max_tokens)
            one = self._scheduler.run()[key]
            _say(
                "answered",
                name=name,
                text=self._tokenizer.text(one.tokens),
                tokens=list(one.tokens),
                prompt=one.prompt_tokens,
                kept=one.from_device,
                restored=one.restored,
                computed=one.computed,
                first_token_s=one.first_token_s,
                seconds=time.monotonic() - began,
                restarts=one.restarts,
            )
        _say("done", **self._state())

    def forget(self) -> None:
        """Let the device's own prefix tree go: what comes back now comes from the cache below."""
        self._scheduler.release_all()
        _say("done", **self._state())

    def state(self) -> None:
        _say("done", **self._state())

    def _state(self) -> dict[str, Any]:
        status = self._client.status()
        stats = self._runtime.stats()
        return {"status": status, "backed_up_pages": stats.backed_up_pages, "backups_open": stats.backups_open}

    def close(self) -> None:
        self._runtime.close()
        self._client.close()


def _main(url: str, backend: str, max_tokens: int) -> None:
    driver = _Driver(url, backend, max_tokens)
    _say("ready")
    doings: dict[str, Callable[..., None]] = {
        "answer": driver.answer,
        "forget": driver.forget,
        "state": driver.state,
    }
    for line in sys.stdin:
        order = json.loads(line)
        doings[order.pop("do")](**order)
    driver.close()


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
