"""Every path through every table ends in one status, and both sides together never contradict each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import pytest

from devipc.errors import ProtocolError, UsageError
from devipc.hicache.operations import (
    ANSWERS,
    REQUESTS,
    TABLES,
    Event,
    Kind,
    Side,
    Status,
    Table,
    diagram,
    step,
    table_of,
)
from devipc.hicache.tables import TEXT

STATUSES = {status.value for status in Status}
ALL = pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: f"{table.name}-{table.side.value}")


def paths(table: Table, state: str) -> Iterator[list[str]]:
    events = table.events(state)
    if not events:
        yield [state]
    for event in events:
        for rest in paths(table, step(table, state, event).state):
            yield [state, *rest]


@ALL
def test_every_path_ends_in_exactly_one_status(table: Table) -> None:
    seen: set[str] = set()
    for path in paths(table, table.initial):  # would not end if a path could return
        assert path[-1] in STATUSES
        assert not STATUSES.intersection(path[:-1])
        seen.update(path)
    assert seen == set(table.states)


@ALL
def test_nothing_follows_a_status(table: Table) -> None:
    assert set(table.terminal) == STATUSES.intersection(table.states)
    for state, event in product(table.terminal, Event):
        with pytest.raises((ProtocolError, UsageError)):
            step(table, state, event)


@ALL
def test_only_what_the_table_says_is_allowed(table: Table) -> None:
    own = ANSWERS if table.side is Side.CLIENT else REQUESTS
    foreign = REQUESTS if table.side is Side.CLIENT else ANSWERS
    for state, event in product(table.states, Event):
        if event in table.events(state):
            assert event not in foreign
            continue
        with pytest.raises(ProtocolError if event in ANSWERS | REQUESTS else UsageError, match=event.value) as caught:
            step(table, state, event)
        assert caught.value.code == "state"
        assert caught.value.remedy
    for following in table.transitions.values():
        assert following.tells is None or following.tells in foreign
    assert own.isdisjoint(foreign)


@ALL
def test_death_of_the_other_side_is_allowed_in_every_open_state(table: Table) -> None:
    dying = {Side.CLIENT: Event.ENGINE_DYING, Side.ENGINE: Event.CLIENT_DYING}[table.side]
    after = {state for (_, event), (state) in ((k, v.state) for k, v in table.transitions.items()) if event is dying}
    for state in table.states:
        assert dying in table.events(state) or state in after | STATUSES


@ALL
def test_the_diagram_shows_the_table(table: Table) -> None:
    lines = diagram(table).splitlines()
    assert lines[:2] == ["stateDiagram-v2", f"    [*] --> {table.initial}"]
    arrow = re.compile(r"    (\w+) --> (\w+): (\w+)(?: / (\w+))?")
    drawn = [found.groups() for line in lines if (found := arrow.fullmatch(line))]
    assert drawn == [
        (s, t.state, e.value, t.tells.value if t.tells else None) for (s, e), t in table.transitions.items()
    ]
    assert {line.split()[0] for line in lines if line.endswith("--> [*]")} == set(table.terminal)


def test_every_kind_has_a_table_on_both_sides() -> None:
    named = {table_of(kind, side).name for kind in Kind for side in Side}
    assert named == set(TEXT)
    for kind, side in product(Kind, Side):
        assert table_of(kind, side).side is side


# --- both sides together -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Joint:
    """Both sides of one operation, and what is under way between them, in order."""

    client: str
    engine: str
    to_engine: tuple[Event, ...] = ()
    to_client: tuple[Event, ...] = ()
    answered: bool = False  # the client's status was told by the engine
    dead: Side | None = None
    gone: bool = False
    word: bool = False
    word_before_copied: bool = False
    confirmed: bool = False


CHOICES = {Event.GIVE_UP, Event.CONFIRM_FENCES, Event.DISCARD_BATCH, Event.USE_LEASE, Event.RELEASE_LEASE}
DEATHS = {Event.CLIENT_DYING, Event.ENGINE_DYING, Event.ENGINE_GONE}


def client_steps(joint: Joint, table: Table) -> Iterator[tuple[Event, Joint]]:
    if joint.dead is Side.CLIENT:
        return
    for event in table.events(joint.client):
        if event in ANSWERS or (event is Event.ENGINE_DYING and joint.dead is not Side.ENGINE):
            continue
        if event is Event.ENGINE_GONE and not joint.gone:
            continue
        following = step(table, joint.client, event)
        told = (following.tells,) if following.tells else ()
        yield (
            event,
            replace(
                joint,
                client=following.state,
                to_engine=joint.to_engine + told,
                to_client=() if event is Event.ENGINE_DYING else joint.to_client,
                word=joint.word or event is Event.GIVE_UP,
                confirmed=joint.confirmed or event is Event.CONFIRM_FENCES,
            ),
        )
    if joint.to_client:
        event, rest = joint.to_client[0], joint.to_client[1:]
        if joint.client in STATUSES:
            assert not joint.answered, f"{event} after the engine had told a status: {joint}"
            yield event, replace(joint, to_client=rest)
        else:
            following = step(table, joint.client, event)
            client, told = following.state, (following.tells,) if following.tells else ()
            yield (
                event,
                replace(
                    joint,
                    to_client=rest,
                    to_engine=joint.to_engine + told,
                    client=client,
                    answered=client in STATUSES and client == event.value,
                ),
            )


def engine_steps(joint: Joint, table: Table) -> Iterator[tuple[Event, Joint]]:
    if joint.dead is Side.ENGINE:
        return
    for event in table.events(joint.engine):
        if event in REQUESTS or (event is Event.CLIENT_DYING and joint.dead is not Side.CLIENT):
            continue
        if (event is Event.WORD_CLEAR and joint.word) or (event is Event.WORD_SET and not joint.word):
            continue
        following = step(table, joint.engine, event)
        told = (following.tells,) if following.tells else ()
        early = joint.word_before_copied or (event is Event.COPIED and joint.word)
        yield (
            event,
            replace(
                joint,
                engine=following.state,
                to_client=joint.to_client + told,
                to_engine=() if event is Event.CLIENT_DYING else joint.to_engine,
                word_before_copied=early,
            ),
        )
    if joint.to_engine:
        event, rest = joint.to_engine[0], joint.to_engine[1:]
        if joint.engine in STATUSES:
            yield event, replace(joint, to_engine=rest)
            return
        following = step(table, joint.engine, event)
        told = (following.tells,) if following.tells else ()
        yield event, replace(joint, to_engine=rest, engine=following.state, to_client=joint.to_client + told)


def deaths(joint: Joint) -> Iterator[Joint]:
    """Either side may be killed at any instant; what it sent may or may not arrive."""
    if joint.dead is None:
        yield replace(joint, dead=Side.ENGINE, to_engine=())
        yield replace(joint, dead=Side.ENGINE, to_engine=(), to_client=())
        yield replace(joint, dead=Side.CLIENT, to_client=())
        yield replace(joint, dead=Side.CLIENT, to_client=(), to_engine=())
    elif joint.dead is Side.ENGINE and not joint.gone:
        yield replace(joint, gone=True)


def check(name: str, joint: Joint, events: list[Event]) -> None:
    """What must hold in every state that both sides can reach together."""
    client_open, engine_open = joint.client not in STATUSES, joint.engine not in STATUSES
    moving = joint.engine in {
        "copying",
        "copying_confirmed",
        "cancelling",
        "dropping",
        "expiring",
        "expiring_confirmed",
    }
    if name == "restore" and joint.dead is None and moving:
        assert client_open, f"pages were given back while they are written: {joint}"
    if name == "restore" and joint.dead is Side.ENGINE and joint.client == "lost":
        assert joint.gone, f"pages were given back before the engine's last write: {joint}"
    if name == "backup" and joint.engine in {"visible", "stored", "completed"}:
        assert joint.confirmed, f"published without the fences confirmed: {joint}"
        assert not joint.word_before_copied, f"published although given up before the copy ended: {joint}"
    unasked = [event for event in events if event not in CHOICES]
    if joint.dead is Side.CLIENT:
        assert not engine_open or unasked, f"the engine hangs after the client's death: {joint}"
    elif joint.dead is Side.ENGINE:
        assert not client_open or unasked or not joint.gone, f"the client hangs after the engine's death: {joint}"
    elif not (joint.to_engine or joint.to_client):
        waits_for_fences = {"submitted", "source_released", "leased"}
        assert unasked or not client_open or joint.client in waits_for_fences & set_of_choices(events), joint
        assert unasked or not engine_open or client_open, f"the engine waits for nobody: {joint}"


def set_of_choices(events: list[Event]) -> set[str]:
    """Where the client's own decision is awaited, it must have one that is not giving up."""
    decides = set(events) & (CHOICES - {Event.GIVE_UP})
    return {"submitted", "source_released", "leased"} if decides else set()


@pytest.mark.parametrize("name", TEXT)
def test_both_sides_together(name: str) -> None:
    client, engine = TABLES[name, Side.CLIENT], TABLES[name, Side.ENGINE]
    start = Joint(client.initial, engine.initial)
    seen, queue = {start}, [start]
    while queue:
        joint = queue.pop()
        steps = [*client_steps(joint, client), *engine_steps(joint, engine)]
        check(name, joint, [event for event, _ in steps])
        for following in [*(after for _, after in steps), *deaths(joint)]:
            if following not in seen:
                seen.add(following)
                queue.append(following)
    print(f"{name}: {len(seen)} joint states")
    assert {joint.client for joint in seen} == set(client.states)
    assert {joint.engine for joint in seen} == set(engine.states)
    ends = {(joint.client, joint.engine) for joint in seen if {joint.client, joint.engine} <= STATUSES}
    assert ("completed", "completed") in ends
