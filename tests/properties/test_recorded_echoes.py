"""Traffic that harnesses really sent, with what other harnesses do to a history done to it too: every session
stays one lineage, and each prompt the same ids.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from echo_kit import ECHOES, Echo, halves_text, reorders_keys, splits_messages
from golden_kit import HARNESSES, RECORDED
from hypothesis import given
from hypothesis import strategies as st
from sample_kit import examples
from tokens_kit import model
from wire_kit import ANTHROPIC, CHAT, GOOGLE, RESPONSES, Wire

from polarnode.gateway.recorded_request import read_recorded
from polarnode.gateway.replay import Line, replay_session
from polarnode.providers.contract import NoMemory

# A deferred tool is told in the words of its schema where a result refers to it, in its client's own order:
# another order is another text.
KEPT = [echo for echo in ECHOES if echo is not reorders_keys]


def wire_of(body: Any) -> Wire:
    return (
        RESPONSES
        if "input" in body
        else GOOGLE
        if "contents" in body
        else ANTHROPIC
        if "system" in body
        else CHAT
    )


def played(recordings: list[Any]) -> list[Line]:
    read = [
        read_recorded(f"{number}", json.dumps(each).encode(), NoMemory())
        for number, each in enumerate(recordings)
    ]
    return replay_session(read, model().template)


def files(harness: str) -> list[Path]:
    return sorted(RECORDED.glob(f"{harness}_?.json"))


@pytest.mark.parametrize("harness", HARNESSES)
@examples(25)
@given(echoes=st.lists(st.sampled_from(KEPT), min_size=1, max_size=4, unique=True))
def test_rewritten_echo_is_same_session(harness: str, echoes: list[Echo]) -> None:
    """A recorded session echoed otherwise is the same session."""
    recordings = [{"method": "POST"} | json.loads(file.read_text()) for file in files(harness)]
    plain = played(recordings)
    body = json.loads(json.dumps(recordings[-1]["body"]))
    # the others know a text in one piece
    for echo in sorted(echoes, key=lambda echo: echo in (halves_text, splits_messages)):
        body = echo(wire_of(body), body)
    told = played([*recordings[:-1], recordings[-1] | {"body": body}])
    assert [line.error for line in told] == [None] * len(told)
    assert [(line.kind, line.lineage, line.parent) for line in told] == [
        (line.kind, line.lineage, line.parent) for line in plain
    ]
    assert [(line.prompt_tokens, line.new_tokens) for line in told] == [
        (line.prompt_tokens, line.new_tokens) for line in plain
    ]
