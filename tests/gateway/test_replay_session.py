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


def test_a_history_that_is_appended_to_is_one_lineage_and_only_what_is_new_is_rendered() -> None:
    one, two = played(ask(HELLO), ask(HELLO, said("  hi  "), HELLO))
    assert (one.kind, one.parent, one.lineage, one.reason, one.role) == ("root", None, 0, "first", "main")
    assert (two.kind, two.parent, two.lineage, two.reason, two.role) == ("extend", "1", 0, "appended", "main")
    assert one.prompt_tokens == one.new_tokens == len(model().template.root(_conversation(ask(HELLO))))
    assert two.new_tokens is not None
    assert 0 < two.new_tokens < 20


def test_a_prompt_has_the_tokens_of_the_whole_conversation() -> None:
    bodies = ask(HELLO), ask(HELLO, said("hi"), HELLO)
    assert played(*bodies)[1].prompt_tokens == len(model().template.root(_conversation(bodies[1])))


def _conversation(body: dict[str, Any]) -> Any:
    request = recorded(0, body).request
    assert request is not None
    return request.conversation


def test_the_same_body_again_is_a_retry_in_its_place() -> None:
    first, again, then = played(ask(HELLO), ask(HELLO), ask(HELLO, said("hi"), HELLO))
    assert (first.kind, again.kind, then.kind) == ("root", "retry", "extend")
    assert {first.lineage, again.lineage, then.lineage} == {0}
    assert then.parent == again.file


def test_a_title_that_comes_first_is_a_side_call() -> None:
    asks = {"role": "system", "content": "You are a title generator. You output ONLY a thread title."}
    title, main = played(ask(asks, HELLO, tools=False), ask(HELLO))
    assert (title.role, main.role) == ("auxiliary", "main")
    assert total([title, main]).main_lineages == 1


def test_totals_add_up() -> None:
    once = total(played(ask(HELLO), ask(HELLO, said("hi"), HELLO)))
    both = added([once, once])
    assert (both.requests, both.turns, both.lineages, both.new_tokens) == (4, 4, 2, 2 * once.new_tokens)
    assert added([]).requests == 0


def test_a_request_that_can_not_be_planned_does_not_end_the_others() -> None:
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
