"""Captures on the real engine: the official SDKs on this machine, one of them through a whole conversation
with a tool, each token where it belongs.
"""

from typing import Any

import httpx
from captures_kit import Told
from live_kit import TOKEN, ServingNode

from polarnode.core.trajectory import Built
from polarnode.merge.invariants import check

LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}


def call(node: ServingNode, method: str, path: str, body: Any) -> Any:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return (
        httpx.request(method, f"http://127.0.0.1:{node.port}{path}", headers=headers, json=body, timeout=600)
        .raise_for_status()
        .json()
    )


def test_real_model_answers_own_agent(node: ServingNode) -> None:
    """A real model answers an agent of one's own, and every token is kept."""
    opened = call(
        node,
        "POST",
        "/v1/capture",
        {"sampling": {"temperature": 1.0, "max_tokens": 24}, "metadata": {"row": 7}},
    )
    told = Told(opened["env"])
    hi = {"role": "user", "content": "What is in notes.txt?"}
    asked = {"model": "m", "messages": [hi], "tools": [LOOK], "logprobs": True}
    headers = {"Authorization": f"Bearer {opened['key']}"}
    first = (
        httpx.post(
            f"{opened['base_urls']['openai']}/chat/completions", headers=headers, json=asked, timeout=600
        )
        .raise_for_status()
        .json()
    )
    answer = first["choices"][0]["message"]
    more = {**asked, "messages": [hi, answer, {"role": "user", "content": "Say it again."}]}
    httpx.post(f"{opened['base_urls']['any']}/v1/chat/completions", json=more, timeout=600).raise_for_status()
    told.messages("Say a word.")
    ended = call(node, "DELETE", f"/v1/capture/{opened['session_id']}", {"reward": 0.5})
    found = node.client.trajectory(opened["session_id"], turns="full")
    check(found.turns, Built(traces=found.traces, left_out=found.left_out))
    assert (ended["turns"], ended["reward"], found.metadata) == (3, 0.5, {"row": 7})
    assert [turn.provider for turn in found.turns] == ["openai_chat", "openai_chat", "anthropic"]
    assert found.turns[1].parent == 0, "the second call extends the first"
    assert (
        found.turns[0].usage.completion_tokens
        == first["usage"]["completion_tokens"]
        == len(found.turns[0].sampled)
    )
    assert (found.left_out, ended["left_out"], ended["left_out_tokens"]) == ((), {}, {})
    assert found.trainable_tokens == found.sampled_tokens > 0
    assert all(value <= 0 for turn in found.turns for value in turn.logprobs)
