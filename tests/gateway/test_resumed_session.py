"""A harness that is resumed: its marker is taken out in every dialect, and its first request is the recorded
one or refused.
"""

import json
from typing import Any

import pytest
import trio.testing
from attrs import define, field, frozen
from fakes_engine import ScriptedEngine
from plane_kit import AsgiClient, Stage, new_session, prompts, stage
from test_model_plane_repeats import CHAT, DIALECTS, GEMINI, MESSAGES, RESPONSES, a_look, scripted

from polarnode.core.conversation import Conversation
from polarnode.core.errors import ForkError
from polarnode.gateway.fork_inheritance import ResumedSession
from polarnode.gateway.live_sessions import LiveSession
from polarnode.merge.lineage import Lineages
from polarnode.providers.contract import RequestEnvelope
from polarnode.providers.dialect import route
from polarnode.providers.volatile import RESUME_MARKER

History = list[Any]
TURN = 2


def user(path: str, *texts: str) -> Any:
    """A user's message, of a part for each text."""
    if path == GEMINI:
        return {"role": "user", "parts": [{"text": text} for text in texts]}
    kind = "input_text" if path == RESPONSES else "text"
    return {"role": "user", "content": [{"type": kind, "text": text} for text in texts]}


@frozen
class Asker:
    """A client of one dialect on a stage."""

    here: Stage
    path: str

    def body(self, history: History, **changed: Any) -> bytes:
        name, rest, _ = DIALECTS[self.path]
        return json.dumps({"model": "m", name: history, **rest, **changed}).encode()

    async def ask(self, history: History, key: str, **changed: Any) -> AsgiClient:
        asgi = AsgiClient()
        await asgi.request(self.here.app, self.path, self.body(history, **changed), key=key)
        return asgi

    def then(self, history: History, asgi: AsgiClient, result: str) -> History:
        return history + DIALECTS[self.path][2](json.loads(asgi.body), result)

    def conversation(self, history: History) -> Conversation:
        found = route("POST", self.path, {})
        assert found is not None
        envelope = RequestEnvelope(model=found.model, stream=found.stream)
        return found.dialect.read(self.body(history), envelope).conversation


@define(eq=False)
class Forked:
    """A session of three turns, what it sent, and another one that goes on from its turn TURN."""

    asker: Asker
    engine: ScriptedEngine
    fork: LiveSession
    histories: list[History]
    ended: list[None] = field(factory=list)

    async def ask(self, history: History, **changed: Any) -> AsgiClient:
        return await self.asker.ask(history, "key-fork", **changed)


async def forked(path: str) -> Forked:
    engine = scripted(*(a_look(f"{number}.txt") for number in range(9)))
    asker = Asker(stage(engine), path)
    history, histories = [user(path, "hi", "there")], []
    for number in range(TURN + 1):
        histories.append(history)
        answer = await asker.ask(history, "key-s1")
        assert answer.status == 200
        history = asker.then(history, answer, f"line {number}")
    turns = asker.here.s1.lineages.turns
    fork = new_session("s1")
    fork.key = "key-fork"
    fork.lineages = Lineages.restore(session_id="s1", secret=b"secret", turns=turns[:TURN])
    fork.inherited.resumed = ResumedSession(
        parent="s1",
        turn=TURN,
        before_key=turns[TURN].before_key,
        conversation=asker.conversation(histories[TURN]),
    )
    asker.here.plane.sessions.add(fork)
    found = Forked(asker, engine, fork, histories)
    fork.budget.on_spent = lambda: found.ended.append(None)
    return found


def placeholder(path: str) -> list[Any]:
    """What Claude Code puts before the message that a resumed conversation goes on with."""
    said = {"role": "assistant", "content": [{"type": "text", "text": "No response requested."}]}
    return [said] if path == MESSAGES else []


def marked(path: str, history: History) -> History:
    return [*history, *placeholder(path), user(path, RESUME_MARKER)]


@pytest.mark.parametrize("path", list(DIALECTS))
async def test_resumed_prompt_is_the_recorded_one(autojump_clock: trio.testing.MockClock, path: str) -> None:
    found = await forked(path)
    recorded = prompts(found.engine.orders)[TURN]
    history = marked(path, found.histories[TURN])
    answer = await found.ask(history)
    assert answer.status == 200
    assert prompts(found.engine.orders)[-1] == recorded
    # and of all later requests, which have it in their middle
    sampled = found.fork.lineages.turns[-1].sampled
    assert (await found.ask(found.asker.then(history, answer, "another line"))).status == 200
    again = prompts(found.engine.orders)[-1]
    assert again[: len(recorded) + len(sampled)] == [*recorded, *sampled]
    assert [turn.index for turn in found.fork.lineages.turns] == [0, 1, 2, 3]
    assert found.fork.inherited.resumed is not None
    assert (found.fork.inherited.resumed.fault(), found.ended) == (None, [])


@pytest.mark.parametrize("path", list(DIALECTS))
async def test_two_markers_at_one_turn(autojump_clock: trio.testing.MockClock, path: str) -> None:
    found = await forked(path)
    assert (await found.ask(marked(path, marked(path, found.histories[TURN])))).status == 200
    assert prompts(found.engine.orders)[-1] == prompts(found.engine.orders)[TURN]
    assert found.fork.inherited.resumed is not None
    assert found.fork.inherited.resumed.fault() is None


@pytest.mark.parametrize("path", [MESSAGES, GEMINI])
async def test_marker_beside_result_goes_alone(autojump_clock: trio.testing.MockClock, path: str) -> None:
    """A marker in the message of a result is taken out alone."""
    found = await forked(path)
    history = json.loads(json.dumps(found.histories[TURN]))
    history[-1]["parts" if path == GEMINI else "content"] += next(
        each for name, each in user(path, RESUME_MARKER).items() if name != "role"
    )
    assert (await found.ask(history)).status == 200
    assert prompts(found.engine.orders)[-1] == prompts(found.engine.orders)[TURN]


@pytest.mark.parametrize("path", list(DIALECTS))
async def test_different_request_refused_without_sampling(
    autojump_clock: trio.testing.MockClock, path: str
) -> None:
    """Another request is refused with the first difference, and nothing is sampled."""
    found = await forked(path)
    changed = json.loads(json.dumps(found.histories[TURN]).replace("line 0", "line 7"))
    before = len(found.engine.orders)
    refused = await found.ask(marked(path, changed))
    assert refused.status == 400
    assert (
        'in message 3 (tool), after "tool: line", it has "7" where "0" was recorded'
        in json.loads(refused.body)["error"]["message"]
    )
    # the right one is too late
    assert (await found.ask(marked(path, found.histories[TURN]))).status == 400
    assert len(found.engine.orders) == before
    assert [turn.index for turn in found.fork.lineages.turns] == [0, 1]
    assert found.ended
    assert found.fork.inherited.resumed is not None
    fault = found.fork.inherited.resumed.fault()
    assert isinstance(fault, ForkError)
    assert (fault.boundary, "turn 2 of session s1 cannot be forked" in str(fault)) == ("fork", True)


async def test_other_tools_are_refused(autojump_clock: trio.testing.MockClock) -> None:
    found = await forked(CHAT)
    tool = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
    refused = await found.ask(marked(CHAT, found.histories[TURN]), tools=[tool])
    assert refused.status == 400
    assert "in head, after" in json.loads(refused.body)["error"]["message"]


async def test_session_without_marker_is_unchanged(autojump_clock: trio.testing.MockClock) -> None:
    """Without its marker a session keeps every word."""
    found = await forked(CHAT)
    history = marked(CHAT, found.histories[TURN])
    assert (await found.asker.ask(history, "key-s1")).status == 200
    assert found.asker.here.s1.lineages.turns[-1].messages == len(history)


async def test_side_call_alone_is_no_fork(autojump_clock: trio.testing.MockClock) -> None:
    """A harness that never asks again is no fork."""
    found = await forked(CHAT)
    # OpenCode asks for a title of the marker: a call beside the conversation, which has no other user
    title = "You are a title generator. You output ONLY a thread title."
    beside = [{"role": "system", "content": title}, user(CHAT, RESUME_MARKER)]
    answer = await found.ask(beside, tools=[])
    assert answer.status == 200
    assert found.fork.inherited.resumed is not None
    assert isinstance(found.fork.inherited.resumed.fault(), ForkError)
