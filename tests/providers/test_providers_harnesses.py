"""What real harnesses send, in small: each of three calls is read, extends the one before it, and its answers
come back to be read again.

The requests in data/providers have the structure of recorded ones (fields, spellings, what changes between
calls) with our own words.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from polarnode.core.conversation import ModelRequest
from polarnode.providers.contract import RequestEnvelope
from polarnode.providers.dialect import Route, route

FOLDER = Path(__file__).parents[1] / "data" / "providers"
HARNESSES = ("claude_code", "codex", "gemini_cli", "mini_swe_agent", "openhands", "pi", "qwen_code")


def load(harness: str, number: int) -> tuple[Route, ModelRequest, Any]:
    recorded = json.loads((FOLDER / f"{harness}_{number}.json").read_text())
    found = route("POST", recorded["target"], recorded["headers"])
    assert found is not None
    query = recorded["target"].partition("?")[2]
    envelope = RequestEnvelope(
        headers=recorded["headers"],
        model=found.model,
        stream=found.stream,
        operation=found.operation,
        query=query,
    )
    request = found.dialect.read(json.dumps(recorded["body"]).encode(), envelope)
    return found, request, recorded["body"]


@pytest.mark.parametrize("harness", HARNESSES)
def test_requests_extend_each_other(harness: str) -> None:
    """Each request extends the one before."""
    one, two, three = (load(harness, number)[1].conversation.messages for number in (1, 2, 3))
    assert two[: len(one)] == one
    assert three[: len(two)] == two
    assert [message.role for message in two[len(one) :]][:2] == ["assistant", "tool"]
    assert len(one) < len(two) < len(three)


@pytest.mark.parametrize("harness", HARNESSES)
def test_name_echoed_tools_read(harness: str) -> None:
    """The name is echoed, and the tools are read."""
    found, request, body = load(harness, 3)
    assert request.model == "local-model"
    assert request.conversation.tools
    assert {call.name for message in request.conversation.messages for call in message.calls} <= {
        tool.name for tool in request.conversation.tools
    }
    assert request.stream is bool(body.get("stream", found.stream))


@pytest.mark.parametrize("harness", HARNESSES)
def test_each_result_answers_its_call(harness: str) -> None:
    messages = load(harness, 3)[1].conversation.messages
    calls = [call.id for message in messages for call in message.calls]
    assert [message.call_id for message in messages if message.role == "tool"] == calls
    assert all(call_id.startswith("call_") for call_id in calls)
    assert calls == [ref for message in messages for ref in message.refs if ref in calls]


def test_claude_code_loads_deferred_tool() -> None:
    before, after = (load("claude_code", number)[1] for number in (1, 2))
    assert [tool.name for tool in before.conversation.tools] == ["Bash", "ToolSearch", "Write"]
    # the head stays as it was: the tool is told where it was found
    assert after.conversation.tools == before.conversation.tools
    assert any(
        '"name":"NotebookEdit"' in message.text
        for message in after.conversation.messages
        if message.role == "tool"
    )
    assert set(before.ignored) == {
        "$.metadata",
        "$.context_management",
        "$.output_config.effort",
        "$.system",
        *(f"$.tools[{index}]" for index in (3, 4, 5)),
    }
    assert before.hints["session"]
    assert "billing" not in before.conversation.messages[0].text


def test_codex_tools_without_hosted_one() -> None:
    """Codex's tools are all there but the hosted one."""
    request = load("codex", 3)[1]
    assert [tool.name for tool in request.conversation.tools] == [
        "exec_command",
        "apply_patch",
        "tool_search",
        "multi_agent_v1.spawn_agent",
    ]
    assert request.ignored == ("$.tools[4]",)
    assert request.hints == {"session": "s-1", "agent": "", "parent": ""}
    assert request.notes == (
        "tools[1]: the grammar of 'apply_patch' is shown to the model, and nothing enforces it",
    )


def test_openhands_names_its_conversation() -> None:
    assert load("openhands", 1)[1].hints == {"session": "c-1", "agent": "", "parent": ""}
