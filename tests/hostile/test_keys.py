"""Guessing keys: whatever is sent and wherever it stands, only a session's own key opens its own door, and
nothing else comes of it.
"""

import json
from typing import Any

import pytest
from hostile_kit import Arena, reported
from live_kit import until

pytestmark = pytest.mark.podman

VICTIM = """
    import os, time
    from inside import tell, turn
    turn()
    tell(key=os.environ["OPENAI_API_KEY"])
    time.sleep(1000)
"""

GUESS = """
    import json, os
    from inside import ask, call, tell, turn
    own, other = os.environ["OPENAI_API_KEY"], os.environ["OTHER"]
    CHAT = json.loads(call())
    APIS = {
        "chat": ("/v1/chat/completions", CHAT),
        "responses": ("/v1/responses", {"model": "m", "input": "hello"}),
        "anthropic": ("/v1/messages", CHAT),
        "count": ("/v1/messages/count_tokens", CHAT),
        "google": ("/v1beta/models/m:generateContent", {"contents": [{"parts": [{"text": "hello"}]}]}),
        "google_stream": ("/v1beta/models/m:streamGenerateContent?alt=sse", {"contents": [{"parts": [{"text": "hello"}]}]}),
    }
    def flip(key):
        return key[:-1] + ("a" if key[-1] != "a" else "b")
    KEYS = {
        "none": None, "empty": "", "other": other, "near": flip(own), "shorter": own[:-1], "longer": own + "x", "upper": own.upper(), "prefix": own[:8],
        "star": "*", "null": "null", "list": own[:10] + "," + other, "control": "live-control-plane-token", "quoted": "'" + own + "'",
    }
    def placed(where, key, path):
        if key is None:
            return path, {}
        if where == "query":
            return path + ("&" if "?" in path else "?") + "key=" + key.replace("'", "%27"), {}
        if where == "path":
            return "/sessions/" + (key or "-").replace("'", "%27") + path, {}
        value = {"authorization": f"Bearer {key}", "basic": f"Basic {key}", "cookie": f"key={key}"}.get(where, key)
        return path, {{"basic": "Authorization"}.get(where, where): value}
    guesses, other_answers, samples = 0, [], {}
    for api, (path, body) in APIS.items():
        for name, key in KEYS.items():
            for where in ("authorization", "x-api-key", "x-goog-api-key", "query", "path", "basic", "cookie"):
                if (key is None) != (where == "authorization") and key is None:
                    continue
                target, headers = placed(where, key, path)
                status, answer = ask("POST", target, json.dumps(body).encode(), headers)
                guesses += 1
                samples[api] = answer.decode("utf-8", "replace")[:400]
                if status != 401:
                    other_answers.append([api, name, where, status, samples[api]])
    tell(guesses=guesses, other_answers=other_answers[:20], samples=samples)
    both = ask("POST", "/v1/chat/completions", call(), {"Authorization": f"Bearer {other}", "x-api-key": own})[0]
    smuggled = ask("POST", "/v1/chat/completions", call(), {"Authorization": f"Bearer {own}", "x-api-key": other, "X-Session": other, "X-Forwarded-For": "127.0.0.1"})[0]
    tell(both=both, smuggled=smuggled, last=turn())
"""


@pytest.fixture(scope="module")
def guessed(arena: Arena) -> tuple[dict[str, Any], int]:
    """What was answered to every guess, and how many turns the other session had at its end."""
    victim = arena.start(VICTIM)
    told = until(
        lambda: [line for line in arena.node.log(victim).splitlines() if '"key"' in line],
        "the victim says its key",
    )
    trajectory = arena.attack(GUESS, env={"OTHER": json.loads(told[0])["key"]})
    assert arena.node.session(victim) is not None, "it lived all the while"
    assert {row["session_id"] for row in arena.node.status()["sessions"]} == {
        victim,
        arena.peaceful,
    }, "no session came of a key"
    arena.node.client.cancel(arena.node.task_of(victim))
    ended = arena.node.finished(victim)
    assert (ended.outcome.status, len(ended.turns)) == ("cancelled", 1)
    return reported(trajectory), len(trajectory.turns)


def test_wrong_keys_refused_in_provider_shape(guessed: tuple[dict[str, Any], int]) -> None:
    found, _ = guessed
    assert found["other_answers"] == []
    assert found["guesses"] > 400
    openai, anthropic, google = (
        ("code", "invalid_api_key"),
        ("type", "authentication_error"),
        ("status", "UNAUTHENTICATED"),
    )
    shape = {
        "chat": openai,
        "responses": openai,
        "anthropic": anthropic,
        "count": anthropic,
        "google": google,
        "google_stream": google,
    }
    assert set(found["samples"]) == set(shape)
    for api, answer in found["samples"].items():
        error = json.loads(answer.removeprefix("data: "))["error"]
        field, value = shape[api]
        assert error[field] == value, (api, answer)


def test_guessed_keys_make_no_turn(guessed: tuple[dict[str, Any], int]) -> None:
    """Three calls had the session's own key, wherever another's stood beside it: as many turns there are, and
    they are its own.
    """
    found, turns = guessed
    assert turns == [found["both"], found["smuggled"], found["last"]].count(200)
    assert (found["smuggled"], found["last"]) == (200, 200)
