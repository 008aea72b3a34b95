"""The end-to-end scenarios over ``unix:``, on the host backend: a supervisor, an engine process, rings or messages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from devipc.channel.liveness import own_life
from devipc.interfaces.backend import Device
from devipc.registry import load_backend
from tests.hicache import scenarios_content, scenarios_faults, scenarios_room, scenarios_rules  # noqa: F401
from tests.hicache.deployment import DAEMON, MESSAGES, deployed
from tests.hicache.scenario import ELSEWHERE, SCENARIOS


@pytest.fixture(scope="module", autouse=True)
def _lasting() -> None:
    own_life()  # this process's sign of life, which peers get, outlasts a test


@pytest.fixture
def device() -> Iterator[Device]:
    opened = load_backend("host").open_device()
    yield opened
    opened.close()


QUICK = {
    "two_clients_and_two_pools_get_back_what_they_stored",
    "layers_arrive_group_by_group",
    "a_ready_point_that_fails_discards",
    "a_cancel_word_is_read_before_anything_is_published",
    "pages_outside_the_pool_never_reach_a_copy",
}
BY_COST = [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in ELSEWHERE]


@pytest.mark.parametrize("name", BY_COST)
def test_over_rings(device: Device, name: str) -> None:
    with deployed(DAEMON):
        SCENARIOS[name](device)


@pytest.mark.long
@pytest.mark.parametrize("name", ELSEWHERE)
def test_over_messages(device: Device, name: str) -> None:
    with deployed(MESSAGES):
        SCENARIOS[name](device)
