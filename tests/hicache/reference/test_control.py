"""Control with a runtime in this process: the same answers whatever was cached, and the four invariants."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from devipc.errors import PeerGone, ResourceExhausted, StaleError, UsageError
from devipc.hicache.operations import Status
from devipc.hicache.reference.handles import CacheExtentRef, RequestRuntimeHandle
from devipc.hicache.reference.request import BackupPolicy
from devipc.hicache.reference.runtime import BatchPlan, OpenRequest, Prefill, PreparedBatchHandle, RestorePages
from tests.hicache.pools import until
from tests.hicache.reference.engines import SYSTEM, answer, cache, device, prompts, runtime, texts


def test_answers_are_the_same_with_every_cache() -> None:
    on = device()
    with runtime(on, None) as plain:
        _, expected, _ = answer(plain, prompts(), restore=False, prefix_cache=False)
    with runtime(on, None) as tree_only:
        _, found, _ = answer(tree_only, [*prompts(), *prompts()])
        assert [found[f"q{number + 6}"].tokens for number in range(6)] == list(texts(expected).values())
    with cache(on) as client:
        with runtime(on, client) as first:
            _, found, _ = answer(first, prompts())
            assert texts(found) == texts(expected)
        with runtime(on, client, shuffle=11) as second:
            scheduler, found, _ = answer(second, prompts())
            assert texts(found) == texts(expected)
            assert scheduler.discarded == 0
            page = second.limits.page_tokens
            for one in found.values():
                assert one.restored + one.from_device == (one.prompt_tokens - 1) // page * page
                assert one.computed <= page


def test_what_lies_in_pages_that_nobody_wrote_is_never_read() -> None:
    on = device()
    with runtime(on, None) as clean:
        _, expected, _ = answer(clean, prompts())
    with runtime(on, None) as dirty:
        dirty.pool.fill(list(range(dirty.limits.pages + 1)), float("nan"))
        _, found, _ = answer(dirty, prompts())
        assert texts(found) == texts(expected)
        assert all(any(one) for one in texts(found).values())


def test_restored_pages_are_bit_for_bit_what_was_computed() -> None:
    on = device()
    with cache(on) as client:
        snapshots = []
        for shuffle in (1, 2):
            with runtime(on, client, shuffle=shuffle) as one:
                scheduler, found, _ = answer(one, prompts(1))
                assert found["q0"].restored == (0, 64)[shuffle - 1]
                node, pages = scheduler._tree.match(_keys(one, prompts(1)[0])[:4])
                assert pages == 4
                physical = one._table.physical([page for ext in scheduler._tree.extents(node) for page in ext.pages])
                snapshots.append(one.pool.snapshot(physical))
        assert np.array_equal(snapshots[0], snapshots[1])


def _keys(over: Any, prompt: list[int]) -> list[bytes]:
    from devipc.hicache.keys import page_keys

    raw = page_keys(prompt, page_tokens=over.limits.page_tokens, parent=over.limits.namespace)
    return [row.tobytes() for row in raw]


def test_where_pages_lie_changes_nothing_that_control_sees() -> None:
    on, traces = device(), []
    for shuffle in (None, 1, 2):
        with cache(on) as client, runtime(on, client, shuffle=shuffle) as one:
            _, _, plans = answer(one, [*prompts(), *prompts()])
            life = one.runtime_id
            traces.append([repr(plan).replace(life, "life").encode() for plan in plans])
    assert traces[0] == traces[1] == traces[2]


def test_control_loads_no_tensor_library_and_no_memory() -> None:
    code = (
        "import sys, devipc.hicache.reference.scheduler\n"
        "bad = [m for m in sys.modules if m == 'torch' or m.startswith(('devipc.session', 'devipc.channel',"
        " 'devipc.completion', 'devipc.integrations', 'devipc.hicache.api', 'devipc.hicache.reference.local'))]\n"
        "assert not bad, bad\n"
        "import devipc.hicache.reference.process\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_nothing_in_a_plan_is_an_address() -> None:
    on = device()
    with cache(on) as client, runtime(on, client) as one:
        _, _, plans = answer(one, prompts())
        low = one.pool.built.exports[0][0]
        numbers = [number for plan in plans for number in _integers(plan)]
        assert numbers
        assert max(numbers) < min(low, 2**20)


def _integers(value: Any) -> list[int]:
    if isinstance(value, bool | bytes | str):
        return []
    if isinstance(value, int):
        return [value]
    if isinstance(value, tuple):
        return [found for one in value for found in _integers(one)]
    return [found for name in value.__slots__ for found in _integers(getattr(value, name))]


@pytest.mark.parametrize("policy", list(BackupPolicy))
def test_pages_come_back_under_each_policy(policy: BackupPolicy) -> None:
    on = device()
    with runtime(on, None) as plain:
        _, expected, _ = answer(plain, prompts(), restore=False, prefix_cache=False)
    with cache(on) as client, runtime(on, client, pages=30) as small:  # little enough that the tree must evict
        for _ in range(3):
            scheduler, found, _ = answer(small, prompts(), policy=policy)
            assert texts(found) == texts(expected)
            assert scheduler.discarded == 0
            scheduler.release_all()
        small._backups.finish()
        assert small.stats().free_pages == small.limits.pages
        saved = small.stats().backed_up_pages
        assert (saved == 0) == (policy is BackupPolicy.NONE)


def test_a_restore_that_fails_discards_the_batch_and_costs_no_answer() -> None:
    on = device()
    with runtime(on, None) as plain:
        _, expected, _ = answer(plain, prompts(), restore=False, prefix_cache=False)
    with cache(on) as client:
        with runtime(on, client) as first:
            answer(first, prompts())
        with runtime(on, client) as second:
            find = second._find
            flushed: list[int] = []

            def find_then_flush(keys: bytes) -> bytes:
                below = find(keys)
                if not flushed and any(below):
                    assert second._handle is not None
                    flushed.append(client.flush(second._handle))
                return below

            second._find = find_then_flush  # type: ignore[method-assign]
            scheduler, found, _ = answer(second, prompts())
            assert flushed[0] > 0
            assert scheduler.discarded >= 1
            assert texts(found) == texts(expected)
            assert all(one.restored == 0 for one in found.values())
            assert any(one.restarts == 1 for one in found.values())


def test_a_batch_behind_a_discarded_one_is_discarded_too() -> None:
    on = device()
    with cache(on) as client:
        with runtime(on, client) as first:
            answer(first, prompts())
        with runtime(on, client) as second:
            completions: list[Any] = []
            execute = second.execute_batch

            def flush_behind(handle: Any) -> Any:
                if len(completions) == 1:  # the restores of the next batch were started already, those after it not
                    assert second._handle is not None
                    client.flush(second._handle)
                completions.append(execute(handle))
                return completions[-1]

            second.execute_batch = flush_behind  # type: ignore[method-assign]
            answer(second, prompts(8))
            for before, after in itertools.pairwise(completions):
                if before.failed:
                    assert after.discarded
                    assert not after.sampled
                    assert not after.kept


def test_a_restore_is_over_while_the_batch_before_it_still_computes() -> None:
    on, prompt = device(), prompts(1)[0]
    with cache(on) as client:
        with runtime(on, client) as first:
            answer(first, [prompt])
        with runtime(on, client) as second:
            keys = b"".join(_keys(second, prompt)[:4])
            one, other = second.open_request(), second.open_request()
            chunk = second._model.chunk
            restored: list[Status | None] = []

            def announcing(*arguments: Any, **options: Any) -> Any:
                if not restored:
                    thread = threading.Thread(target=second.prepare_batch, args=(behind,))
                    thread.start()
                    thread.join(20)
                    assert not thread.is_alive()
                    ticket = second._announced[0].restoring[0].ticket
                    assert ticket is not None
                    restored.append(ticket.wait(20).status)
                return chunk(*arguments, **options)

            def prefill(handle: RequestRuntimeHandle, start: int) -> tuple[Prefill, ...]:
                return (Prefill(handle=handle, start=start, tokens=tuple(prompt[start : start + 5]), sample=True),)

            behind = BatchPlan(
                number=2,
                open=(OpenRequest(handle=other),),
                restore=(RestorePages(handle=other, first_page=0, keys=keys),),
                prefill=prefill(other, 64),
            )
            second._model.chunk = announcing  # type: ignore[method-assign]
            ahead = second.prepare_batch(BatchPlan(number=1, open=(OpenRequest(handle=one),), prefill=prefill(one, 0)))
            assert second.execute_batch(ahead).restored_pages == 0
            assert restored == [Status.COMPLETED]
            done = second.execute_batch(PreparedBatchHandle(second.runtime_id, 2))
            assert (done.restored_pages, done.discarded) == (4, False)


@pytest.mark.parametrize("lost_at", [1, 2, 3])
def test_what_a_lost_runtime_was_asked_is_asked_again(lost_at: int) -> None:
    on = device()
    with cache(on) as client, runtime(on, client) as one:
        _, expected, _ = answer(one, prompts(2), max_tokens=3)
        execute, calls = one.execute_batch, []

        def die_once(handle: Any) -> Any:
            calls.append(1)
            if len(calls) == lost_at:
                raise PeerGone("the runtime is gone", remedy="restart it")
            return execute(handle)

        one.execute_batch = die_once  # type: ignore[method-assign]
        scheduler, found, _ = answer(one, prompts(2), max_tokens=3)
        assert scheduler.lost == 1
        assert texts(found) == texts(expected)


@pytest.mark.parametrize("refused", ["backup", "restore", "find", "closed"])
def test_a_cache_that_refuses_costs_neither_an_answer_nor_a_page(refused: str) -> None:
    on = device()
    with cache(on) as client:
        with runtime(on, client) as first:
            _, expected, _ = answer(first, prompts(2), max_tokens=3)
        with runtime(on, client) as second:
            calls: list[str] = []

            def refuse(*_arguments: Any, **_options: Any) -> Any:
                calls.append(refused)
                raise ResourceExhausted("all slots are in use", code="busy", remedy="try again later")

            if refused == "closed":
                client.close()
            else:
                setattr(client, refused, refuse)
            scheduler, found, _ = answer(second, prompts(2), max_tokens=3)
            assert texts(found) == texts(expected)
            assert refused == "closed" or calls
            scheduler.release_all()
            until(lambda: second.stats().free_pages == second.limits.pages)  # backups that were not refused go on
        if refused == "closed":
            client.close = lambda **_options: None  # type: ignore[method-assign]


def test_a_token_is_told_once_though_its_request_begins_anew() -> None:
    with runtime(device(), None) as one:
        told: list[tuple[str, int]] = []
        execute, calls = one.execute_batch, []

        def die_late(handle: Any) -> Any:
            calls.append(1)
            if len(calls) == 9:
                raise PeerGone("the runtime is gone", remedy="restart it")
            return execute(handle)

        one.execute_batch = die_late  # type: ignore[method-assign]
        scheduler, found, _ = answer(one, prompts(1), on_token=lambda name, token: told.append((name, token)))
        assert (scheduler.lost, found["q0"].restarts) == (1, 1)
        assert [token for _, token in told] == list(found["q0"].tokens)
        scheduler.submit("q0", [1], max_tokens=1)  # it is finished: the name is free
        with pytest.raises(UsageError, match="'q0' is not finished"):
            scheduler.submit("q0", [1], max_tokens=1)


def test_what_is_stale_or_never_fits_is_refused() -> None:
    on = device()
    with runtime(on, None) as one:
        other = RequestRuntimeHandle("another", 0, 1)
        with pytest.raises(StaleError):
            one.prepare_batch(BatchPlan(number=1, open=(OpenRequest(handle=other),)))
        one._announced.clear()
        stale = CacheExtentRef.of(one.runtime_id, 7, [1])
        with pytest.raises(StaleError):
            one._table.pages_of(stale)
        with pytest.raises(UsageError, match="pages"):
            answer(one, [SYSTEM * 80])


def test_memory_is_freed_when_what_was_launched_last_is_over() -> None:
    """A batch that samples nothing is not waited for where a device computes it."""
    heard: list[bool] = []
    with runtime(device(), None) as one:

        class Queue:
            def synchronize(self) -> None:
                heard.append(hasattr(one, "_model") and hasattr(one.pool, "k"))

        one._torch_stream = Queue()  # type: ignore[assignment]  # the host has none
    assert heard == [True]
