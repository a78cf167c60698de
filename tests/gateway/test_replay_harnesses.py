"""Long sessions as ten harnesses write them: nothing is refused, and an undisturbed one is one lineage,
whatever becomes of its history.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from attrs import evolve
from replay_kit import (
    DIALECTS,
    Client,
    Dialect,
    Recording,
    compacted,
    delegating_session,
    linear,
    probes,
    resumed,
    titled_session,
    volatile,
    volatile_end,
    with_retries,
)
from tokens_kit import model

from polarnode.gateway.recorded_request import read_recorded
from polarnode.gateway.replay import Line, replay_session, total
from polarnode.providers.contract import NoMemory

FOLDER = Path(__file__).parents[1] / "data" / "providers"
CLIENTS = {
    "as it was sent": lambda dialect: Client(dialect=dialect),
    "parts, sorted and stripped": lambda dialect: Client(
        dialect=dialect, parts=True, stripped=True, sort_keys=True
    ),
    "bare ids": lambda dialect: Client(dialect=dialect, bare_ids=True),
}


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    return request.param


@pytest.fixture
def client(dialect: Dialect) -> Client:
    return Client(dialect=dialect)


def played(recordings: Sequence[Recording]) -> list[Line]:
    read = [
        read_recorded(f"{number}", json.dumps(each).encode(), NoMemory())
        for number, each in enumerate(recordings)
    ]
    lines = replay_session(read, model().template)
    assert [line.error for line in lines] == [None] * len(recordings)
    return lines


def kinds(lines: Sequence[Line]) -> Counter[str | None]:
    return Counter(line.kind for line in lines)


@pytest.mark.parametrize(
    "harness", sorted({file.stem.rpartition("_")[0] for file in FOLDER.glob("*_1.json")})
)
def test_recorded_harness_is_one_lineage(harness: str) -> None:
    lines = played(
        [
            {"method": "POST"} | json.loads(file.read_text())
            for file in sorted(FOLDER.glob(f"{harness}_?.json"))
        ]
    )
    assert [(line.kind, line.lineage, line.role) for line in lines] == [
        ("root", 0, "main"),
        ("extend", 0, "main"),
        ("extend", 0, "main"),
    ]


@pytest.mark.parametrize("spell", CLIENTS.values(), ids=CLIENTS)
def test_undisturbed_session_is_one_lineage(dialect: Dialect, spell: object) -> None:
    lines = played(linear(spell(dialect)))  # type: ignore[operator]
    assert kinds(lines) == {"root": 1, "extend": 23}
    assert [line.parent for line in lines] == [None, *(str(number) for number in range(23))]
    assert {line.role for line in lines} == {"main"}
    assert (total(lines).lineages, total(lines).main_lineages) == (1, 1)
    assert sum(line.new_tokens or 0 for line in lines) <= (lines[-1].prompt_tokens or 0)


def test_retries_keep_their_place(client: Client) -> None:
    lines = played(with_retries(client))
    assert kinds(lines) == {"root": 1, "extend": 23, "retry": 10}
    assert total(lines).lineages == 1


def test_volatile_message_costs_no_lineage(client: Client) -> None:
    """A volatile last message costs tokens but no lineage."""
    lines = played(volatile(client))
    assert kinds(lines) == {"root": 1, "branch": 23}
    assert {line.reason for line in lines[1:]} == {"volatile"}
    assert (total(lines).lineages, total(lines).main_lineages) == (1, 1)


def test_reworded_last_message_costs_no_lineage(client: Client) -> None:
    """A last message that comes back with other words costs no lineage."""
    lines = played(volatile_end(client))
    assert kinds(lines) == {"root": 1, "branch": 2, "extend": len(lines) - 3}
    assert total(lines).lineages == 1


def test_volatile_message_is_retried_too(client: Client) -> None:
    asked = volatile(client, 6)
    lines = played([asked[0], asked[0], *asked[1:4], asked[3], *asked[4:]])
    assert kinds(lines) == {"root": 1, "branch": 5, "retry": 2}
    assert total(lines).lineages == 1


def test_probes_are_no_turns(client: Client) -> None:
    lines = played([*probes(), *linear(evolve(client, stripped=True, sort_keys=True), 4)])
    assert kinds(lines) == {None: 8, "root": 1, "extend": 3}


def test_early_title_is_side_call(client: Client) -> None:
    """A title before the conversation is a side call."""
    lines = played(titled_session(client))
    assert [line.role for line in lines] == ["auxiliary", *["main"] * 24]
    assert total(lines).main_lineages == 1


def test_compaction_starts_new_lineage(client: Client) -> None:
    """A compaction starts a lineage, and the call for it is a side call."""
    lines = played(compacted(client))
    assert kinds(lines) == {"root": 3, "extend": 14}
    assert [line.role for line in lines] == [*["main"] * 8, "compaction", *["main"] * 8]
    assert total(lines).main_lineages == 2


def test_unmarked_subagents_known_by_task(client: Client) -> None:
    lines = played(delegating_session(client))
    assert kinds(lines) == {"root": 3, "extend": len(lines) - 3}
    assert Counter((line.lineage, line.role) for line in lines) == {
        (0, "main"): 12,
        (1, "subagent"): 6,
        (2, "subagent"): 6,
    }


def test_marked_subagents_known_by_headers() -> None:
    client = Client(dialect="anthropic", headers={"X-Claude-Code-Session-Id": "s"})
    lines = played(
        delegating_session(
            client, lambda each, k: evolve(each, headers=each.headers | {"x-claude-code-agent-id": f"a{k}"})
        )
    )
    assert Counter((line.lineage, line.role) for line in lines) == {
        (0, "main"): 12,
        (1, "subagent"): 6,
        (2, "subagent"): 6,
    }


def test_partial_answer_kept_is_extended(client: Client) -> None:
    """A partial answer that the client keeps is extended."""
    lines = played(resumed(client))
    assert total(lines).lineages == 1
    assert kinds(lines) == {"root": 1, "extend": 5}
