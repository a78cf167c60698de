"""The exchange, as transcripts: told this, it says that, in this order. No event loop, no clock, real
dialects and a real parser.
"""

import json
from array import array
from typing import Any

import pytest
from attrs import evolve
from exchange_kit import (
    ANTHROPIC,
    BYTE_FAMILY,
    CALL,
    CALLED,
    CHAT,
    END,
    HI,
    REQUEST_ID,
    Bytes,
    ExchangeScene,
    chunk,
    order,
    rendered,
    says,
)

from polarnode.core.arrays import floats, ids
from polarnode.core.conversation import Conversation, Message, Sampling
from polarnode.core.errors import EngineError, InvariantViolated, Refused
from polarnode.core.ports import Chunk
from polarnode.core.trajectory import VersionSpan
from polarnode.gateway.exchange import (
    SESSION_OVER_FAULT,
    Break,
    ChunkProduced,
    ClientLeft,
    CountRefusal,
    EndStream,
    EngineFailed,
    Exchange,
    KeepResponse,
    Quiet,
    RecordTurn,
    RequestRefused,
    Send,
    SessionEnded,
    StartGeneration,
)
from polarnode.gateway.sample import Sample
from polarnode.providers.contract import Dialect, Fault, Reply
from polarnode.tokens.parser import Parser

# ── a whole request ───────────────────────────────────────────────────────────


def test_stream_from_request_to_end() -> None:
    scene = ExchangeScene()
    commands = scene.play(
        (rendered(), [order(temperature=1.0, max_tokens=98)]),
        (chunk("Hel", cached=2), [says('"role":"assistant"', '"content":"Hel"')]),
        (
            chunk("lo", "stop", end=True, start=3, at=12.5),
            [
                RecordTurn,
                KeepResponse,
                says('"content":"lo"', '"finish_reason":"stop"', "[DONE]"),
                EndStream(),
            ],
        ),
        (ClientLeft(at=13.0), []),
    )
    turn = scene.turn(commands)
    assert bytes(list(turn.sampled[:-1])) == b"Hello"
    assert turn.sampled[-1] == END
    assert (turn.state, turn.finish_reason, turn.prompt_length) == ("complete", "stop", 2)
    assert (turn.started, turn.first_token_s, turn.ended_s) == (1000.0, 1.0, 2.5)
    assert turn.answer is not None
    assert turn.answer.text == "Hello"
    assert turn.version_spans == (VersionSpan(version="v1", start=0, end=6),)
    assert (turn.usage.prompt_tokens, turn.usage.completion_tokens, turn.usage.cached_tokens) == (2, 6, 2)
    assert turn.message_key == scene.plan.after(turn.answer)


def test_first_token_time_from_chunk() -> None:
    """The first token came when its chunk says."""
    scene = ExchangeScene()
    commands = scene.play(
        (rendered(), [order(temperature=1.0, max_tokens=98)]),
        (
            chunk("Hello", "stop", end=True, at=12.5, first_at=10.75),
            [RecordTurn, KeepResponse, says('"content":"Hello"', "[DONE]"), EndStream()],
        ),
    )
    turn = scene.turn(commands)
    assert (turn.first_token_s, turn.ended_s) == (0.75, 2.5)


def test_whole_answer_follows_its_record() -> None:
    """A whole answer is one reply, sent after its turn is recorded."""
    scene = ExchangeScene(stream=False)
    commands = scene.play(
        (Quiet(), []),  # nothing can keep it alive
        (rendered(), [StartGeneration]),
        (chunk("Hi"), []),
        (chunk("!", "stop", end=True, start=2), [RecordTurn, KeepResponse, Reply]),
    )
    reply = commands[-1]
    assert isinstance(reply, Reply)
    assert reply.status == 200
    assert json.loads(reply.body)["choices"][0]["message"]["content"] == "Hi!"


def test_turn_recorded_before_last_bytes() -> None:
    for stream in (True, False):
        scene = ExchangeScene(ANTHROPIC, stream=stream)
        scene.to_generation()
        kinds = [type(command) for command in scene.exchange.receive(chunk("x", "stop", end=True))]
        assert kinds == (
            [RecordTurn, KeepResponse, Send, EndStream] if stream else [RecordTurn, KeepResponse, Reply]
        )


def test_call_is_streamed_whole() -> None:
    scene = ExchangeScene()
    scene.to_generation()
    tokens = [CALL, *b'{"name": "go", "arguments": {"to": 1}}']
    half = ChunkProduced(chunk=Chunk(ids=ids(tokens), logprobs=floats([-1] * len(tokens))), at=11)
    rest = ChunkProduced(
        chunk=Chunk(ids=ids([CALLED, END]), logprobs=floats([-1, -1]), finish_reason="stop"), at=12
    )
    commands = scene.play(
        (half, [says('"role":"assistant"')]),
        (
            rest,
            [
                RecordTurn,
                KeepResponse,
                says('"name":"go"', '"id":"call_0_0"', '"finish_reason":"tool_calls"'),
                EndStream,
            ],
        ),
    )
    assert scene.turn(commands).finish_reason == "tool_calls"


def test_unread_bytes_kept_until_end() -> None:
    """Text that the harness has not received is held until the end."""
    scene = ExchangeScene()
    scene.to_generation()
    scene.play((chunk("a\n\n"), [says('"content":"a"')]), (Quiet(), [says('"delta":{}')]))
    assert (
        scene.turn(
            scene.play((chunk("", "stop", end=True, start=3), [RecordTurn, KeepResponse, Send, EndStream]))
        ).answer.text
        == "a"
    )  # type: ignore[union-attr]


# ── signs of life ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("spoken", "sign"), [(CHAT, '"role":"assistant"'), (ANTHROPIC, "event: ping")])
def test_keepalive_in_dialect_before_prompt(spoken: Dialect, sign: str) -> None:
    """Silence is broken in the dialect's own data, even before the prompt is rendered."""
    scene = ExchangeScene(spoken)
    scene.play(
        (Quiet(), [says(sign)]),
        (rendered(), [StartGeneration]),
        (Quiet(), [Send]),
        (chunk("x"), [Send]),
    )


def test_anthropic_start_waits_for_chunk() -> None:
    """Anthropic's start waits for the first chunk because it counts the cached tokens."""
    scene = ExchangeScene(ANTHROPIC)
    scene.to_generation(b"hello")
    scene.play(
        (Quiet(), [says("ping")]),
        (chunk("x", cached=4), [says("message_start", '"cache_read_input_tokens":4', '"input_tokens":1')]),
    )


# ── sampling ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("task", "asked", "room", "used"),
    [
        ({}, {}, None, {"temperature": 1.0, "max_tokens": 98}),
        (
            {"temperature": 0.5},
            {"temperature": 0.0, "top_p": 0.9},
            None,
            {"temperature": 0.5, "top_p": 0.9, "max_tokens": 98},
        ),
        ({}, {"temperature": 0.0, "max_tokens": 7}, None, {"temperature": 0.0, "max_tokens": 7}),
        ({}, {"max_tokens": 64_000}, None, {"temperature": 1.0, "max_tokens": 98}),
        ({"max_tokens": 20}, {"max_tokens": 64_000}, 9, {"temperature": 1.0, "max_tokens": 9}),
        ({"max_tokens": 20}, {"max_tokens": 5}, None, {"temperature": 1.0, "max_tokens": 20}),
    ],
)
def test_task_sampling_wins_both_recorded(
    task: dict[str, Any], asked: dict[str, Any], room: int | None, used: dict[str, Any]
) -> None:
    """The task's sampling wins over the client's, and both are recorded."""
    scene = ExchangeScene(task=Sampling(**task), token_room=room, **asked)
    commands = scene.play(
        (rendered(), [order(**used)]),
        (chunk("x", "length"), [RecordTurn, KeepResponse, Send, EndStream]),
    )
    turn = scene.turn(commands)
    assert turn.used == Sampling(**used)
    assert turn.asked == Sampling(**asked)


def test_notes_name_what_was_ignored() -> None:
    """The turn's notes say what of the request was not obeyed."""
    conversation = Conversation(messages=(Message(role="user", text="hi"),), tool_choice="required")
    scene = ExchangeScene(conversation=conversation, ignored=("$.response_format",))
    scene.play(
        (evolve(rendered(close_length=1), notes=("seam: it ends with another token",)), [StartGeneration]),
    )
    notes = scene.turn(scene.play((chunk("x", "stop"), [RecordTurn, KeepResponse, Send, EndStream]))).notes
    assert [note.split(":")[0].split(" ")[0] for note in notes] == [
        "closed",
        "seam",
        "tool_choice",
        "ignored",
    ]


# ── stop strings ──────────────────────────────────────────────────────────────


def test_stop_string_ends_sample_exactly() -> None:
    """A stop string ends the sample at the token that completes it."""
    scene = ExchangeScene(stop=("END",), stream=False)
    scene.to_generation()
    commands = scene.play(
        (chunk("yes EN"), []), (chunk("D and more", start=6), [RecordTurn, KeepResponse, Reply])
    )
    turn = scene.turn(commands)
    assert bytes(list(turn.sampled)) == b"yes END"  # what was sampled after it is no part of the turn
    assert len(turn.logprobs) == 7
    assert turn.version_spans == (VersionSpan(version="v1", start=0, end=7),)
    assert (turn.finish_reason, turn.state) == ("stop_string", "complete")
    assert turn.answer is not None
    assert (turn.answer.text, turn.answer.stop_string) == ("yes ", "END")


def test_stop_in_last_chunk_without_abort() -> None:
    """A stop string in the last chunk needs no abort."""
    scene = ExchangeScene(stop=("!",))
    scene.to_generation()
    scene.play((chunk("ha!", "length"), [RecordTurn, KeepResponse, Send, EndStream]))


# ── refusals ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("spoken", "words"),
    [(CHAT, "maximum context length is 100"), (ANTHROPIC, "prompt is too long: 100 tokens > 100 maximum")],
)
def test_long_context_refused_in_dialect(spoken: Dialect, words: str) -> None:
    """A long context is refused in the words that harnesses compact on."""
    scene = ExchangeScene(spoken)
    fault = Fault(
        kind="context_too_long",
        message="the prompt has 100 tokens and this model holds 100: shorten the conversation",
        prompt_tokens=100,
        limit=100,
    )
    commands = scene.play((rendered(b"x" * 100), [CountRefusal(fault), Reply]))
    reply = commands[-1]
    assert isinstance(reply, Reply)
    assert reply.status == 400
    assert words in json.loads(reply.body)["error"]["message"]


def test_refusal_after_keepalive_cuts_stream() -> None:
    scene = ExchangeScene()
    scene.play((Quiet(), [Send]), (rendered(b"x" * 100), [CountRefusal, Break]))


def test_template_refusal_is_client_fault() -> None:
    """A conversation that the template refuses is the client's fault."""
    scene = ExchangeScene(ANTHROPIC)
    commands = scene.play(
        (RequestRefused(error=Refused("no system here", path="$.messages")), [CountRefusal, Reply]),
    )
    assert json.loads(commands[-1].body)["error"] == {
        "type": "invalid_request_error",
        "message": "messages: no system here",
    }  # type: ignore[union-attr]


def test_refused_plan_leaves_no_turn() -> None:
    scene = ExchangeScene()
    scene.play((rendered(b"x" * 100), [CountRefusal, Reply]))
    assert scene.lineages.turns == ()
    assert scene.lineages.plan(HI).reason == "first"  # nothing is planned any more


# ── failures ──────────────────────────────────────────────────────────────────


def test_engine_failure_before_first_byte() -> None:
    """An engine that fails before the first byte is a status with Retry-After."""
    scene = ExchangeScene()
    scene.to_generation()
    commands = scene.play((EngineFailed(error=EngineError("the host died"), at=12.0), [RecordTurn, Reply]))
    reply, turn = commands[-1], scene.turn(commands)
    assert isinstance(reply, Reply)
    assert reply.status == 500
    assert "retry-after" in dict(reply.headers)
    assert (turn.state, turn.finish_reason, turn.answer, turn.message_key) == ("failed", "error", None, "")


@pytest.mark.parametrize(("spoken", "words"), [(CHAT, []), (ANTHROPIC, [says("event: error", "api_error")])])
def test_engine_failure_in_stream(spoken: Dialect, words: list[Any]) -> None:
    """An engine that fails in the stream never ends it cleanly."""
    scene = ExchangeScene(spoken)
    scene.to_generation()
    commands = scene.play(
        (chunk("half"), [Send]),
        (EngineFailed(error=EngineError("gone"), at=12.0), [RecordTurn, *words, Break]),
    )
    turn = scene.turn(commands)
    assert bytes(list(turn.sampled)) == b"half"
    assert turn.state == "failed"


def test_disconnect_keeps_partial_turn() -> None:
    scene = ExchangeScene()
    scene.to_generation()
    commands = scene.play((chunk("half"), [Send]), (ClientLeft(at=12.0), [RecordTurn]), (chunk("more"), []))
    turn = scene.turn(commands)
    assert (turn.state, turn.finish_reason, bytes(list(turn.sampled))) == ("partial", "abort", b"half")
    assert turn.answer is not None
    assert turn.answer.text == "half"


def test_disconnect_before_render_leaves_nothing() -> None:
    """A client that leaves before the prompt was rendered leaves nothing."""
    scene = ExchangeScene()
    scene.play((ClientLeft(at=12.0), []), (rendered(), []))
    assert scene.lineages.plan(HI).reason == "first"
    assert Exchange(scene.settings).receive(ClientLeft(at=1.0)) == []


def test_nothing_attaches_to_unsampled_turn() -> None:
    """Nothing attaches to a turn of which nothing was sampled."""
    scene = ExchangeScene()
    scene.to_generation()
    turn = scene.turn(scene.play((ClientLeft(at=12.0), [RecordTurn])))
    assert (turn.answer, turn.message_key, turn.first_token_s, len(turn.sampled)) == (None, "", None, 0)


@pytest.mark.parametrize("stream", [True, False])
def test_session_end_answers_waiting_client(stream: bool) -> None:
    """A session that ends says so to a client that waits."""
    scene = ExchangeScene(stream=stream)
    scene.to_generation()
    commands = scene.play((SessionEnded(at=12.0), [RecordTurn, Reply]))
    assert commands[-1] == CHAT.error(SESSION_OVER_FAULT)
    assert scene.turn(commands).state == "partial"


def test_session_end_cuts_stream_and_render() -> None:
    """A session that ends cuts a stream and abandons a rendering."""
    scene = ExchangeScene()
    scene.to_generation()
    scene.play((chunk("half"), [Send]), (SessionEnded(at=12.0), [RecordTurn, Break]))
    scene = ExchangeScene()
    scene.play((SessionEnded(at=12.0), [CountRefusal(SESSION_OVER_FAULT), Reply]))
    assert scene.lineages.plan(HI).reason == "first"


def test_engine_abort_is_partial_turn() -> None:
    """A sample the engine aborted is partial, and its client is told to ask again."""
    scene = ExchangeScene()
    scene.to_generation()
    commands = scene.play((chunk("half", "abort"), [RecordTurn, Reply]))
    assert scene.turn(commands).state == "partial"
    assert isinstance(commands[-1], Reply)
    assert commands[-1].status == 503


# ── what holds it together ────────────────────────────────────────────────────


def test_events_out_of_order_are_refused() -> None:
    """An exchange that was asked nothing refuses to go on."""
    with pytest.raises(ValueError, match="is planned before"):
        Exchange(ExchangeScene().settings).receive(rendered())
    with pytest.raises(ValueError, match="rendered before"):
        ExchangeScene().exchange.receive(chunk("x"))


def test_turn_differs_from_plan_is_refused() -> None:
    """The turn that is committed is exactly the planned one."""
    scene = ExchangeScene()
    scene.to_generation()
    (record, *_) = scene.exchange.receive(chunk("x", "stop"))
    assert isinstance(record, RecordTurn)
    with pytest.raises(InvariantViolated, match="lineage"):
        scene.lineages.commit(evolve(record.turn, lineage=7))


def test_spans_logprobs_ids_cut_together() -> None:
    spans = (VersionSpan(version="1", start=0, end=2), VersionSpan(version="2", start=2, end=5))
    parser = Parser(tokenizer=Bytes(), family=BYTE_FAMILY, call_id=str, opens_thinking=False, stop=("c",))
    scene = ExchangeScene()
    sample = Sample(
        plan=scene.plan,
        request_id=REQUEST_ID,
        request=scene.request(),
        rendered=rendered(),
        used=Sampling(stop=("c",)),
        parser=parser,
        token_bytes=Bytes().token_bytes,
    )
    sample.take(Chunk(ids=ids(list(b"abcde")), logprobs=floats([1, 2, 3, 4, 5]), version_spans=spans), at=1.0)
    assert sample.ids == array("i", list(b"abc"))
    assert sample.logprobs == array("f", [1, 2, 3])
    assert sample.spans == (
        VersionSpan(version="1", start=0, end=2),
        VersionSpan(version="2", start=2, end=3),
    )
