"""Discovery: devices, identity and honest answers about capabilities."""
# ruff: noqa: D103 - the demand of a case is its documentation

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from devipc.capabilities import Capability, Verdict
from devipc.conformance.catalogue import case
from devipc.conformance.fixtures import Elsewhere
from devipc.conformance.peers import Peer
from devipc.conformance.profile import BackendProfile
from devipc.conformance.roles_device import cost_of_loading, visible_devices
from devipc.conformance.roles_memory import account, grown, identities
from devipc.conformance.suite import Suite
from devipc.errors import CapabilityError
from devipc.interfaces.backend import Backend
from devipc.types import HandleKind, Mechanism


@case(
    "DISC-001",
    "Loading the plugin opens no device and starts no thread.",
    clause="interfaces/backend.py: Backend",
)
def test_loading_costs_nothing(bare_peer: Peer) -> None:
    body = bare_peer.call(cost_of_loading).body
    assert not body["devices"], f"loading the plugin opened {body['devices']}"
    assert body["threads"] == 1, f"loading the plugin started {body['threads'] - 1} threads"


@case(
    "DISC-002",
    "Without a visible device the list is refused as a missing capability, with a remedy, or is empty.",
    clause="interfaces/backend.py: devices",
)
def test_no_device_is_visible(profile: BackendProfile, elsewhere: Elsewhere) -> None:
    if profile.hidden is None:
        pytest.skip("the profile names no environment that hides the devices")
    body = elsewhere(profile.hidden).call(visible_devices).body
    assert not body["devices"], "devices are listed that are hidden"
    assert not body["refused"] or body["remedy"]


@case("DISC-004", "A device has the same identity in two processes.", clause="types.py: DeviceInfo")
def test_identity_is_shared(backend: Backend, bare_peer: Peer) -> None:
    here = [[info.uuid, info.pci, info.total_nbytes, info.parent_uuid] for info in backend.devices()]
    there = bare_peer.call(identities).body["devices"]
    assert sorted(here) == sorted(there)


@case(
    "DISC-005",
    "A device keeps its identity in a process that sees the devices in another order.",
    clause="types.py: DeviceInfo.uuid",
)
def test_other_order(backend: Backend, profile: BackendProfile, elsewhere: Elsewhere) -> None:
    if profile.reordered is None:
        pytest.skip("the profile names no environment that reorders the devices")
    here = [[info.uuid, info.pci, info.name, info.total_nbytes, info.parent_uuid] for info in backend.devices()]
    there = elsewhere(profile.reordered).call(visible_devices).body["devices"]
    assert here != there, "the devices are in the same order; the profile's environment is wrong"
    assert sorted(here) == sorted(there)


def check_answers(answers: Mapping[str, Capability]) -> None:
    assert answers, "there are no answers at all"
    for name, answer in answers.items():
        if answer.verdict is Verdict.YES:
            assert answer.evidence, f"{name}: yes without evidence"
            assert not answer.reason, f"{name}: yes with a reason against it"
        else:
            assert answer.reason, f"{name}: {answer.verdict.value} without a reason"


@case(
    "DISC-007",
    "Every capability, handle kind and mechanism that is not certain comes with a reason, every yes with evidence.",
    clause="capabilities.py: Capability",
)
def test_answers_have_reasons(suite: Suite) -> None:
    device = suite.device
    check_answers(device.capabilities())
    if device.memory is not None:
        kinds: Mapping[HandleKind, Capability] = device.memory.kinds()
        check_answers({kind.value: answer for kind, answer in kinds.items()})
    if device.sync is not None:
        mechanisms: Mapping[Mechanism, Capability] = device.sync.mechanisms()
        assert set(mechanisms) == set(Mechanism), "a mechanism is passed over in silence"
        check_answers({mechanism.value: answer for mechanism, answer in mechanisms.items()})


@case(
    "DISC-008",
    "Listing devices again leaves no descriptor, thread, child or mapping behind.",
    clause="interfaces/backend.py: devices",
)
def test_listing_leaves_nothing(bare_peer: Peer) -> None:
    bare_peer.call(identities)
    before = bare_peer.call(account).body
    bare_peer.call(identities, times=50)
    body = bare_peer.call(grown, earlier=before, limits=[0, 0, None]).body
    assert not body["grown"], body["grown"]


@case(
    "DISC-009",
    "Memory, sync and transfer are answered one by one; what is None is not a yes, and what is there is not a no.",
    clause="interfaces/backend.py: capabilities",
)
def test_interfaces_match_answers(suite: Suite) -> None:
    answers = suite.device.capabilities()
    for name in ("memory", "sync", "transfer"):
        assert name in answers, f"capabilities() does not speak of {name}"
        verdict = answers[name].verdict
        if getattr(suite.device, name) is None:
            assert verdict is not Verdict.YES, f"{name} is None and answered yes"
        else:
            assert verdict is not Verdict.NO, f"{name} is there and answered no"


@case("DISC-010", "A slice of a device has an identity of its own.", clause="types.py: DeviceInfo.parent_uuid")
def test_slices_have_own_identity(backend: Backend) -> None:
    slices = [info for info in backend.devices() if info.parent_uuid]
    if not slices:
        pytest.skip("no device here is a slice")
    assert all(info.uuid != info.parent_uuid for info in slices)


@case(
    "DISC-201",
    "A device that is not visible is refused as a missing capability that names those that are.",
    clause="interfaces/backend.py: open_device",
)
def test_unknown_device_is_refused(backend: Backend) -> None:
    with pytest.raises(CapabilityError) as refused:
        backend.open_device("no-such-device")
    assert any(info.uuid in str(refused.value) for info in backend.devices())


@case("DISC-202", "Opening a device again gives the same object.", clause="interfaces/backend.py: open_device")
def test_open_device_again(backend: Backend, suite: Suite) -> None:
    assert backend.open_device(suite.device.info.uuid) is suite.device


@case("DISC-203", "Devices are told apart, and have a name and a size.", clause="types.py: DeviceInfo")
def test_devices_are_described(backend: Backend) -> None:
    infos = backend.devices()
    assert infos
    assert len({info.uuid for info in infos}) == len(infos)
    for info in infos:
        assert info.uuid
        assert info.name
        assert info.total_nbytes > 0


@case("DISC-204", "Facts are strings and never raise.", clause="interfaces/backend.py: facts")
def test_facts_are_strings(backend: Backend) -> None:
    facts = backend.facts()
    assert facts
    for name, value in facts.items():
        assert type(name) is str, name
        assert type(value) is str, f"{name} is {value!r}"


@case(
    "DISC-206",
    "Answers about capabilities stay the same when they are asked for again, also on another thread.",
    clause="interfaces/backend.py: capabilities",
)
def test_answers_stay(suite: Suite) -> None:
    device = suite.device

    def verdicts() -> dict[str, Verdict]:
        found = {name: answer.verdict for name, answer in device.capabilities().items()}
        if device.memory is not None:
            found |= {f"kind {kind.value}": answer.verdict for kind, answer in device.memory.kinds().items()}
        if device.sync is not None:
            found |= {name.value: answer.verdict for name, answer in device.sync.mechanisms().items()}
        return found

    first = verdicts()
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(verdicts).result(suite.profile.deadline_s)
    assert verdicts() == again == first


@case(
    "DISC-205",
    "What the profile expects of handle kinds is there.",
    clause="conformance/profile.py: BackendProfile.handle_kinds",
)
def test_expected_kinds_are_there(profile: BackendProfile, suite: Suite) -> None:
    if profile.handle_kinds is None:
        pytest.skip("the profile expects nothing in particular")
    missing = {kind.value: reason for kind in profile.handle_kinds if (reason := suite.kind_missing(kind))}
    assert not missing, missing
