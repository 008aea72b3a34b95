"""Fixtures of the cases: the rig, peers, and one value of each parameter; and the accounts around every case.

Owns when a missing capability skips a case, after its refusal was tested, and when that is a failure instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest

from devipc.conformance.peers import Peer
from devipc.conformance.profile import BackendProfile
from devipc.conformance.resources import Account, Slack, grown_after_settling
from devipc.conformance.rig import Rig
from devipc.conformance.roles_memory import account, grown
from devipc.conformance.suite import Suite, suite_of
from devipc.interfaces.backend import Backend
from devipc.types import HandleKind, Strategy

__all__ = ["Elsewhere", "NewPeer"]

Taken = tuple[Peer, dict[str, object], frozenset[int]]
"""A peer of a case, what it held when it was taken, and the processes that there were then."""

NewPeer = Callable[[], Peer]
"""The fixture ``new_peer``: one more warmed-up peer for this case."""

Elsewhere = Callable[[Mapping[str, str]], Peer]
"""The fixture ``elsewhere``: a peer in another environment that has opened no device."""

BROKEN_OFF = pytest.StashKey[bool]()
"""Set on an item that failed or skipped: its accounts say nothing then, and its peers are not used again."""


@pytest.fixture(scope="session")
def suite(request: pytest.FixtureRequest) -> Suite:
    """Return the run, warmed up."""
    found = suite_of(request.config)
    found.warm_up()
    return found


@pytest.fixture
def backend(suite: Suite) -> Backend:
    """Return the backend."""
    return suite.backend


@pytest.fixture
def profile(suite: Suite) -> BackendProfile:
    """Return the profile."""
    return suite.profile


@pytest.fixture
def rig(suite: Suite) -> Rig:
    """Return this process's rig."""
    return suite.rig


@pytest.fixture(autouse=True)
def _accounts(request: pytest.FixtureRequest, suite: Suite) -> Iterator[None]:
    """Fail a case that leaves anything behind in this process."""
    slack = Slack.of(suite.profile)
    with_device = suite.has_rig and slack.device_nbytes is not None

    peers = suite.peers.pids

    def look() -> Account:
        # A process that uses a device costs memory there: nothing can be said when one came or went.
        free = suite.rig.free_nbytes() if with_device and suite.peers.pids == peers else -1
        return Account.now(ignored_fds=suite.peers.fds, ignored_pids=suite.peers.pids, device_free_nbytes=free)

    before = look()
    yield
    if request.node.stash.get(BROKEN_OFF, False):
        return
    left = grown_after_settling(before, look, slack)
    if left:
        pytest.fail("this process was left with more: " + "; ".join(left), pytrace=False)


@pytest.fixture
def new_peer(request: pytest.FixtureRequest, suite: Suite, _accounts: None) -> Iterator[NewPeer]:
    """Return a function that brings peers; those that hold more than before when the case ends fail it."""
    taken: list[Taken] = []

    def take() -> Peer:
        peer = suite.peers.take()
        taken.append((peer, peer.call(account).body, suite.peers.pids))
        return peer

    try:
        yield take
        left = [] if request.node.stash.get(BROKEN_OFF, False) else _settle(taken, suite)
    finally:
        failed = request.node.stash.get(BROKEN_OFF, False)
        for peer, _, _ in taken:
            if peer.usable and not failed and not peer.once:
                suite.peers.give_back(peer)
            else:
                suite.peers.discard(peer)
    if left:
        pytest.fail("; ".join(left), pytrace=False)


def _settle(taken: list[Taken], suite: Suite) -> list[str]:
    left = []
    slack = Slack.of(suite.profile)
    for number, (peer, before, peers) in enumerate(taken, 1):
        if peer.usable:
            device_nbytes = slack.device_nbytes if suite.peers.pids == peers else None
            limits = [slack.maps, slack.threads, device_nbytes]
            more = peer.call(grown, earlier=before, limits=limits).body["grown"]
            if more:
                peer.broken = True
                left.append(f"peer {number} was left with more: {'; '.join(more)}")
    return left


@pytest.fixture
def peer(new_peer: NewPeer) -> Peer:
    """Return one warmed-up peer."""
    return new_peer()


@pytest.fixture
def bare_peer(suite: Suite, _accounts: None) -> Iterator[Peer]:
    """Return a fresh peer that has opened no device; ended with the case."""
    peer = suite.peers.take_bare()
    yield peer
    suite.peers.discard(peer)


@pytest.fixture
def elsewhere(suite: Suite, _accounts: None) -> Iterator[Elsewhere]:
    """Return a function that starts bare peers in another environment; ended with the case."""
    taken: list[Peer] = []

    def take(environment: Mapping[str, str]) -> Peer:
        taken.append(suite.peers.take_bare(environment=environment))
        return taken[-1]

    yield take
    for peer in taken:
        suite.peers.discard(peer)


@pytest.fixture
def kind(request: pytest.FixtureRequest, suite: Suite) -> HandleKind:
    """Return one handle kind; skips when it cannot be had, which must be refused by type then."""
    wanted: HandleKind | None = request.param
    if wanted is None:
        pytest.skip("this device shares no memory: " + suite.why_no("memory"))
    reason = suite.kind_missing(wanted)
    if reason:
        if suite.profile.handle_kinds is not None and wanted in suite.profile.handle_kinds:
            pytest.fail(f"the profile expects {wanted.value}: {reason}", pytrace=False)
        pytest.skip(f"{wanted.value}: {reason}")
    return wanted


@pytest.fixture
def any_kind(suite: Suite) -> HandleKind:
    """Return the first handle kind that can be had, for cases about something else."""
    found = [kind for kind in suite.kinds() if not suite.kind_missing(kind)]
    if not found:
        pytest.skip("this device shares no memory: " + suite.why_no("memory"))
    return found[0]


@pytest.fixture
def rounds(suite: Suite) -> int:
    """Return how often a case about order repeats itself."""
    return 10_000 if suite.large else 100


@pytest.fixture
def strategy(request: pytest.FixtureRequest, suite: Suite) -> Strategy:
    """Return one completion strategy; skips when the device refuses it by type."""
    wanted: Strategy = request.param
    reason = suite.strategy_missing(wanted)
    if reason:
        if suite.profile.strategies is not None and wanted in suite.profile.strategies:
            pytest.fail(f"the profile expects {wanted.value}: {reason}", pytrace=False)
        pytest.skip(f"{wanted.value}: {reason}")
    return wanted
