"""The prototype of a gather by the pool's owner: the right bytes both ways, in every form and size of a piece."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
gather = pytest.importorskip("benchmarks.gather")


@pytest.mark.timing
def test_every_form_is_measured_alone_and_beside_a_model() -> None:
    rows = list(
        gather.measure(torch.device("cpu"), rows=100, tokens=40, chunks=(16,), repetitions=2, windows=1, window_s=0.2)
    )
    assert len(rows) == 2 * 4
    assert {row["form"] for row in rows} == {gather.ONE, gather.PLANE}
    for row in rows:
        assert row["gb_per_s"] > 0
        assert row.get("share_of_floor", 1) > 0


@pytest.mark.parametrize("form", [gather.ONE, gather.PLANE])
@pytest.mark.parametrize("chunk", [8, 64])
def test_the_right_bytes_go_both_ways(form: str, chunk: int) -> None:
    pool = gather.OwnersPool(torch.device("cpu"), rows=50, tokens=20, chunk=chunk, form=form)
    pages = torch.randperm(50)[:20]
    before = pool.pool.clone()
    pool.move(gather.BACKUP, pages)
    pool.check(pages)
    pool.pool[:, pages] = -1
    pool.move(gather.RESTORE, pages)
    assert torch.equal(pool.pool, before)
    pool.host[0, 3, 2, 7] += 1
    with pytest.raises(AssertionError, match="differ"):
        pool.check(pages)
