"""Responses: who asks, where a harness says so."""

import json
from typing import Any

import pytest

from polarnode.providers.openai_responses.read import hints
from polarnode.providers.openai_responses.shapes import ResponsesRequest

NOBODY = {"session": "", "agent": "", "parent": ""}


def asked(headers: dict[str, str], *, compacts: bool = False, **body: Any) -> dict[str, str]:
    return hints(ResponsesRequest(**body), headers, compacts=compacts)


def turn(**said: str) -> dict[str, str]:
    return {"x-codex-turn-metadata": json.dumps(said)}


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ({}, {}),
        ({"session-id": "s", "thread-id": "t"}, {"session": "s"}),  # the main agent has no name
        ({"session_id": "s"}, {"session": "s"}),
        ({"x-session-id": "s"}, {"session": "s"}),
        ({"x-litellm-session-id": "c"}, {"session": "c"}),
        (
            {
                "session-id": "s",
                "thread-id": "t",
                "x-codex-parent-thread-id": "p",
                "x-openai-subagent": "collab_spawn",
            },
            {"session": "s", "agent": "t", "parent": "p", "kind": "subagent"},
        ),
        (
            {"session-id": "s", "thread-id": "t", "x-openai-subagent": "review"},
            {"session": "s", "agent": "t", "kind": "subagent"},
        ),
        (
            {"session-id": "s", "thread-id": "t", "x-openai-subagent": "memory_consolidation"},
            {"session": "s", "agent": "t", "kind": "auxiliary"},
        ),
        (
            {"session-id": "s", "thread-id": "t"} | turn(subagent_kind="guardian_review", thread_id="t"),
            {"session": "s", "agent": "t", "kind": "auxiliary"},
        ),
        (
            {"session-id": "s", "thread-id": "t", "x-openai-subagent": "compact"},
            {"session": "s", "agent": "t", "kind": "compaction"},
        ),
        (
            {"x-session-id": "child", "x-parent-session-id": "s"},
            {"session": "child", "agent": "child", "parent": "s", "kind": "subagent"},
        ),
        ({"session-id": "s"} | turn(request_kind="turn", thread_id="t"), {"session": "s"}),
        ({"session-id": "s"} | turn(request_kind="compaction"), {"session": "s", "kind": "compaction"}),
        ({"session-id": "s"} | turn(request_kind="prewarm"), {"session": "s", "kind": "auxiliary"}),
        (
            {"session-id": "s"} | turn(parent_thread_id="p", thread_id="t", subagent_kind="thread_spawn"),
            {"session": "s", "agent": "t", "parent": "p", "kind": "subagent"},
        ),
        ({"session-id": "s", "x-codex-turn-metadata": "{broken"}, {"session": "s"}),
        ({"session-id": "s", "x-codex-turn-metadata": "[5]"}, {"session": "s"}),
        ({"session-id": "s"} | turn(request_kind="else"), {"session": "s"}),
    ],
)
def test_headers_name_the_agent(headers: dict[str, str], found: dict[str, str]) -> None:
    assert asked(headers) == (NOBODY | found if found else {})


def test_body_names_the_session_too() -> None:
    assert asked({}, prompt_cache_key="k") == NOBODY | {"session": "k"}
    assert asked({}, prompt_cache_key=5, client_metadata="x") == {}
    assert asked({"session-id": "s"}, prompt_cache_key="k") == NOBODY | {"session": "s"}
    metadata = {"session_id": "s", "x-codex-turn-metadata": json.dumps({"request_kind": "compaction"})}
    assert asked({}, client_metadata=metadata) == NOBODY | {"session": "s", "kind": "compaction"}


def test_compaction_names_its_kind() -> None:
    """A request that compacts says so itself."""
    assert asked({}, compacts=True) == NOBODY | {"kind": "compaction"}
    assert asked({"session-id": "s"} | turn(request_kind="turn"), compacts=True) == NOBODY | {
        "session": "s",
        "kind": "compaction",
    }
