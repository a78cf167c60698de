"""A recorded session planned as a live one: kinds, lineages, roles and tokens."""

import json
from typing import Any

from tokens_kit import model

from polarnode.gateway.recorded_request import RecordedRequest, read_recorded
from polarnode.gateway.replay import Line, added, replay_session, total
from polarnode.providers.contract import NoMemory

TOOL = {
    "type": "function",
    "function": {"name": "bash", "description": "run", "parameters": {"type": "object", "properties": {}}},
}
HELLO = {"role": "user", "content": "hello"}


def recorded(number: int, body: dict[str, Any]) -> RecordedRequest:
    said = {"method": "POST", "target": "/v1/chat/completions", "headers": [], "body": {"model": "m", **body}}
    return read_recorded(f"{number}", json.dumps(said).encode(), NoMemory())


def played(*bodies: dict[str, Any]) -> list[Line]:
    lines = replay_session(
        [recorded(number, body) for number, body in enumerate(bodies, 1)], model().template
    )
    assert [line.error for line in lines] == [None] * len(bodies)
    return lines


def ask(*messages: dict[str, Any], tools: bool = True, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **({"tools": [TOOL]} if tools else {}), **more}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_appended_history_is_one_lineage() -> None:
    """An appended history is one lineage, and only new messages are rendered."""
    one, two = played(ask(HELLO), ask(HELLO, said("  hi  "), HELLO))
    assert (one.kind, one.parent, one.lineage, one.reason, one.role) == ("root", None, 0, "first", "main")
    assert (two.kind, two.parent, two.lineage, two.reason, two.role) == ("extend", "1", 0, "appended", "main")
    assert one.prompt_tokens == one.new_tokens == len(model().template.root(_conversation(ask(HELLO))))
    assert two.new_tokens is not None
    assert 0 < two.new_tokens < 20


def test_prompt_has_whole_conversation_tokens() -> None:
    """A prompt has the tokens of the whole conversation."""
    bodies = ask(HELLO), ask(HELLO, said("hi"), HELLO)
    assert played(*bodies)[1].prompt_tokens == len(model().template.root(_conversation(bodies[1])))


def _conversation(body: dict[str, Any]) -> Any:
    request = recorded(0, body).request
    assert request is not None
    return request.conversation


def test_same_body_again_is_retry() -> None:
    """The same body again is a retry in its place."""
    first, again, then = played(ask(HELLO), ask(HELLO), ask(HELLO, said("hi"), HELLO))
    assert (first.kind, again.kind, then.kind) == ("root", "retry", "extend")
    assert {first.lineage, again.lineage, then.lineage} == {0}
    assert then.parent == again.file


def test_title_first_is_side_call() -> None:
    asks = {"role": "system", "content": "You are a title generator. You output ONLY a thread title."}
    title, main = played(ask(asks, HELLO, tools=False), ask(HELLO))
    assert (title.role, main.role) == ("auxiliary", "main")
    assert total([title, main]).main_lineages == 1


def test_session_totals_add_up() -> None:
    once = total(played(ask(HELLO), ask(HELLO, said("hi"), HELLO)))
    both = added([once, once])
    assert (both.requests, both.turns, both.lineages, both.new_tokens) == (4, 4, 2, 2 * once.new_tokens)
    assert added([]).requests == 0


def test_unplannable_request_ends_no_others() -> None:
    """A request that cannot be planned does not end the others."""
    deep: dict[str, Any] = {}
    for _ in range(150):
        deep = {"a": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    bodies = [ask(HELLO), ask(HELLO, tools=False) | {"tools": [tool]}, ask(HELLO, said("hi"), HELLO)]
    lines = replay_session([recorded(number, body) for number, body in enumerate(bodies)], model().template)
    assert [line.kind for line in lines] == ["root", None, "extend"]
    assert lines[1].error is not None
    assert "less deeply" in lines[1].error
    assert lines[1].provider == "openai_chat"
