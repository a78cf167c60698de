"""The exchange, as transcripts: several samples of one prompt, logprobs, one call an answer, constraints, and
answers that need no engine.
"""

import json
from itertools import pairwise
from typing import Any

import pytest
from attrs import evolve
from exchange_kit import (
    CALL,
    CALLED,
    END,
    HI,
    LINES,
    REQUEST_ID,
    THOUGHT,
    Bytes,
    ExchangeScene,
    chunk,
    rendered,
    sampled,
    says,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from providers_kit import a_call

from polarnode.core.arrays import TopLogprobs, floats, ids
from polarnode.core.conversation import (
    Alternative,
    Answer,
    Constraint,
    Conversation,
    Message,
    Sampling,
    TextPart,
    ThinkingPart,
    TokenLogprob,
    Tool,
    ToolCall,
    Usage,
)
from polarnode.core.errors import EngineError, Refused
from polarnode.core.task import BuilderSpec
from polarnode.core.trajectory import VersionSpan
from polarnode.gateway.exchange import (
    CANCELLED_FAULT,
    EMPTY_ANSWER,
    SESSION_OVER_FAULT,
    Break,
    ClientLeft,
    Command,
    CountPrewarm,
    CountRefusal,
    CountReplay,
    CutCall,
    EndStream,
    EngineFailed,
    Exchange,
    KeepResponse,
    RecordTurn,
    Render,
    RequestReceived,
    RequestRefused,
    Send,
    SessionEnded,
    StartGeneration,
    UndeliveredResponse,
    render_cached_response,
)
from polarnode.gateway.model_requests import enforceable_request
from polarnode.gateway.sample import request_ids
from polarnode.merge.attach import Plan
from polarnode.merge.builders import build
from polarnode.providers.contract import Fault, Reply

BODY = b'{"name": "go", "arguments": {}}'
GO = [CALL, *BODY, CALLED]
TOOL = Tool(name="go")


def orders(commands: list[Command]) -> list[Any]:
    return [command.order for command in commands if isinstance(command, StartGeneration)]


# ── several samples of one prompt ─────────────────────────────────────────────


def test_each_choice_is_a_turn() -> None:
    """Each choice is a turn of its own, and the answer ends when all have ended."""
    scene = ExchangeScene(LINES, choices=3)
    asked = orders(scene.to_generation())
    assert len({order.request_id for order in asked}) == 3
    assert asked[0].request_id == REQUEST_ID
    assert {bytes(list(order.prompt)) for order in asked} == {b"hi"}
    commands = scene.play(
        (chunk("b", choice=1, cached=2), [says("start 2 2\n1: b\n")]),
        (chunk("aa", "stop", end=True, choice=0), [RecordTurn, says("0: aa\n")]),
        (chunk("late", choice=0), []),
        (chunk("c", "length", choice=2), [RecordTurn, says("2: c\n")]),
        (
            chunk("B", "stop", end=True, choice=1, start=1),
            [RecordTurn, KeepResponse, says("1: B\nend stop stop length 2+7\n"), EndStream],
        ),
    )
    turns = scene.turns(commands)
    assert [(turn.index, bytes(token for token in turn.sampled if token < END)) for turn in turns] == [
        (0, b"aa"),
        (2, b"c"),
        (1, b"bB"),
    ]
    assert [turn.usage.completion_tokens for turn in turns] == [3, 1, 3]


def test_choices_are_siblings_not_retries() -> None:
    """Choices are siblings, and no retries of each other."""
    scene = ExchangeScene(choices=3)
    first, second, third = scene.plans
    assert [(plan.kind, plan.reason, plan.parent) for plan in scene.plans] == [
        ("root", "first", None),
        ("root", "choice", None),
        ("root", "choice", None),
    ]
    assert len({plan.index for plan in scene.plans}) == len({plan.lineage for plan in scene.plans}) == 3
    assert (first.request_key, second.request_key, third.request_key) == ("body", "body.1", "body.2")
    assert scene.lineages.plan(HI, request_key="body").kind == "retry"


def test_choices_of_extended_turn_are_branches() -> None:
    """Choices of a turn that is extended are branches beside it."""
    scene = ExchangeScene(LINES)
    scene.to_generation()
    scene.turn(scene.play((chunk("yes", "stop", end=True), [RecordTurn, KeepResponse, Send, EndStream])))
    more = Conversation(
        messages=(*HI.messages, Message(role="assistant", text="yes"), Message(role="user", text="go on"))
    )
    plan = scene.lineages.plan(more, request_key="next")
    twin = scene.lineages.also(plan, 1)[0]
    assert [(each.kind, each.reason, each.parent) for each in (plan, twin)] == [
        ("extend", "appended", 0),
        ("branch", "choice", 0),
    ]


def test_choices_differ_by_seed_share_room() -> None:
    """One seed does not make all choices one answer, and the room is shared."""
    asked = orders(ExchangeScene(choices=2, seed=7, token_room=9).to_generation())
    assert [order.sampling.seed for order in asked] == [7, 8]
    assert [order.sampling.max_tokens for order in asked] == [4, 4]


@pytest.mark.parametrize("stream", [True, False])
def test_failed_choice_cuts_the_others(stream: bool) -> None:
    """An engine that fails one choice fails the call and cuts the others."""
    scene = ExchangeScene(LINES, choices=3, stream=stream)
    scene.to_generation()
    scene.play(
        (chunk("half", choice=2), [Send] * stream),
        (chunk("whole", "stop", end=True, choice=0), [RecordTurn, *[Send] * stream]),
    )
    ending = [RecordTurn, RecordTurn]
    broken: list[Any] = [says("failed engine_failed"), Break] if stream else [Reply]
    commands = scene.play(
        (EngineFailed(error=EngineError("gone"), at=12.0, choice=1), [*ending, *broken]),
        (chunk("x", choice=2), []),
    )
    assert [(turn.index, turn.state) for turn in scene.turns(commands)] == [(1, "failed"), (2, "partial")]
    assert scene.exchange.ended(2)  # whoever takes its chunks stops


def test_disconnect_cuts_every_running_choice() -> None:
    scene = ExchangeScene(choices=3)
    scene.to_generation()
    scene.play((chunk("whole", "stop", end=True, choice=1), [RecordTurn, Send]))
    commands = scene.play((ClientLeft(at=12.0), [RecordTurn, RecordTurn]))
    assert [(turn.index, turn.state) for turn in scene.turns(commands)] == [(0, "partial"), (2, "partial")]
    assert scene.exchange.ended(0)
    assert scene.exchange.ended(2)


def test_cut_choices_trained_until_asked_again() -> None:
    """Choices cut together are all trained until the call is asked again."""
    scene = ExchangeScene(choices=2)
    scene.to_generation()
    for choice in range(2):
        scene.exchange.receive(chunk("half", choice=choice))
    scene.turns(scene.exchange.receive(ClientLeft(at=12.0)))
    spec = BuilderSpec(name="prefix_merging")
    assert build(spec, scene.lineages.turns).left_out == ()
    scene.begin()
    scene.to_generation()
    for choice in range(2):
        scene.turns(scene.exchange.receive(chunk("whole", "stop", end=True, choice=choice)))
    assert [(left.turn, left.reason) for left in build(spec, scene.lineages.turns).left_out] == [
        (0, "superseded"),
        (1, "superseded"),
    ]


def test_refused_call_abandons_every_plan() -> None:
    """Every plan of a refused call is abandoned, and the refusal is counted once."""
    for ending in (rendered(b"x" * 100), RequestRefused(error=Refused("no"))):
        scene = ExchangeScene(choices=2)
        scene.play((ending, [CountRefusal, Reply]))
        assert scene.lineages.plan(HI).reason == "first"


def test_sample_names_are_32_hex_digits() -> None:
    names = list(request_ids(REQUEST_ID, 50))
    assert len(set(names)) == 50
    assert all(len(name) == 32 and int(name, 16) >= 0 for name in names)
    assert names == list(request_ids(REQUEST_ID, 50))


# ── logprobs ──────────────────────────────────────────────────────────────────


def token_logprobs(text: bytes, logprob: float = -0.5) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(data=bytes([letter]), logprob=logprob) for letter in text)


def answered(commands: list[Command]) -> Answer:
    (found,) = [command for command in commands if isinstance(command, KeepResponse)]
    return found.response.answers[0]


def test_logprobs_are_of_visible_tokens() -> None:
    """Logprobs are of the tokens that made visible text."""
    scene = ExchangeScene(LINES, logprobs=0)
    assert orders(scene.to_generation())[0].top_logprobs == 0
    tokens = [*b"\n\na", *GO, *b"b\n", END]
    commands = scene.play((sampled(tokens, "stop"), [RecordTurn, KeepResponse, Send, EndStream]))
    assert answered(commands).parts == (
        TextPart("a"),
        ToolCall(id="call_0_0", name="go", arguments="{}"),
        TextPart("b"),
    )
    assert answered(commands).logprobs == token_logprobs(b"ab")
    turn = scene.turn(commands)
    assert turn.answer is not None
    assert turn.answer.logprobs == ()  # the turn has every token's own
    assert len(turn.logprobs) == len(tokens)


def test_alternatives_are_bytes_likeliest_first() -> None:
    scene = ExchangeScene(LINES, logprobs=2, stream=False)
    assert orders(scene.to_generation())[0].top_logprobs == 2
    top = TopLogprobs(k=2, ids=ids([ord("x"), CALL, END, 0]), logprobs=floats([-0.1, -2.5, -0.2, -9]))
    commands = scene.play(
        (sampled([ord("x"), END], "stop", top_logprobs=top), [RecordTurn, KeepResponse, Reply])
    )
    # float32, as everywhere
    alternatives = (
        Alternative(data=b"x", logprob=pytest.approx(-0.1)),
        Alternative(data=b"<257>", logprob=-2.5),
    )
    assert answered(commands).logprobs == (TokenLogprob(data=b"x", logprob=-0.5, top=alternatives),)


def test_unreadable_call_is_text_with_tokens() -> None:
    """A call that cannot be read is text with its tokens."""
    scene = ExchangeScene(LINES, logprobs=0)
    scene.to_generation()
    answer = answered(
        scene.play(
            (sampled([CALL, *b"bad", CALLED, END], "stop"), [RecordTurn, KeepResponse, Send, EndStream])
        )
    )
    assert answer.text == "<257>bad<258>"
    assert b"".join(token.data for token in answer.logprobs) == b"<257>bad<258>"


def test_no_logprobs_where_none_asked() -> None:
    scene = ExchangeScene(LINES)
    asked = orders(scene.to_generation())[0]
    assert asked.top_logprobs == 0
    assert (
        answered(
            scene.play((chunk("abc", "stop", end=True), [RecordTurn, KeepResponse, Send, EndStream]))
        ).logprobs
        == ()
    )


# ── one call an answer ────────────────────────────────────────────────────────


def test_sample_ends_with_first_call() -> None:
    """The sample ends with its first whole call, and everything is cut there together."""
    scene = ExchangeScene(LINES, one_call=True, stream=False)
    scene.to_generation()
    tokens = [*b"so", *GO, *GO]
    commands = scene.play((sampled(tokens), [RecordTurn, KeepResponse, Reply]), (chunk("more"), []))
    turn = scene.turn(commands)
    kept = 2 + len(GO)
    assert list(turn.sampled) == tokens[:kept]
    assert (len(turn.logprobs), turn.version_spans) == (kept, (VersionSpan(version="v1", start=0, end=kept),))
    assert (turn.state, turn.finish_reason) == ("complete", "tool_calls")
    assert answered(commands).calls == (ToolCall(id="call_0_0", name="go", arguments="{}"),)


def test_engine_end_in_chunk_without_abort() -> None:
    """The engine's own end in the same chunk needs no abort."""
    scene = ExchangeScene(LINES, one_call=True, stream=False)
    scene.to_generation()
    turn = scene.turn(scene.play((sampled([*GO, END], "stop"), [RecordTurn, KeepResponse, Reply])))
    assert list(turn.sampled) == GO


def test_malformed_call_does_not_end_sample() -> None:
    scene = ExchangeScene(LINES, one_call=True, stream=False)
    scene.to_generation()
    scene.play((sampled([CALL, *b"bad", CALLED]), []), (sampled(GO), [RecordTurn, KeepResponse, Reply]))


# ── constraints ───────────────────────────────────────────────────────────────

SCHEMA = Constraint(kind="json_schema", text='{"type":"object"}')


@pytest.mark.parametrize(
    ("conversation", "kept", "thinking"),
    [
        (HI, True, False),
        (evolve(HI, thinking=True), True, True),
        (evolve(HI, tools=(TOOL,)), False, None),
        (evolve(HI, tools=(TOOL,), tool_choice="required"), False, None),
        (evolve(HI, tools=(TOOL,), tool_choice="none"), True, False),
        (evolve(HI, tool_choice="required"), True, False),
    ],
)
def test_constraint_kept_only_where_certain(
    conversation: Conversation, kept: bool, thinking: bool | None
) -> None:
    """A constraint is kept where the answer can be nothing else."""
    asked = enforceable_request(
        a_call(conversation=conversation, constraint=SCHEMA, notes=("before",)).request
    )
    assert asked.constraint == (SCHEMA if kept else None)
    assert asked.conversation.thinking is thinking
    assert asked.notes[0] == "before"
    assert [note.split(":")[0] for note in asked.notes[1:]] == ([] if kept else ["constraint"])


def test_constraint_would_forbid_message_headers() -> None:
    """A constraint would forbid the headers of a model's messages."""
    asked = enforceable_request(a_call(conversation=HI, constraint=SCHEMA).request, headers=True)
    assert (asked.constraint, asked.conversation) == (None, HI)
    assert "headers of their own" in asked.notes[-1]


def test_request_without_constraint_is_unchanged() -> None:
    request = a_call(conversation=evolve(HI, tools=(TOOL,))).request
    assert enforceable_request(request) is request


def test_constraint_to_engine_notes_to_turn() -> None:
    """The engine is told the constraint, and the turn has the notes."""
    scene = ExchangeScene(constraint=SCHEMA, notes=("a grammar was asked",))
    (order,) = orders(scene.to_generation())
    assert (order.constraint, order.constraint_after) == (SCHEMA, None)
    assert scene.turn(
        scene.play((chunk("{}", "stop"), [RecordTurn, KeepResponse, Send, EndStream]))
    ).notes == ("a grammar was asked",)


def test_constraint_begins_after_open_thought() -> None:
    """Behind a thought that the prompt opened, a constraint holds from the thought's end."""
    (order,) = orders(ExchangeScene(LINES, constraint=SCHEMA, opens_thinking=True).to_generation())
    assert (order.constraint, order.constraint_after) == (SCHEMA, THOUGHT)


# ── a generation that was ended from outside ──────────────────────────────────


@pytest.mark.parametrize("stream", [True, False])
def test_abort_before_first_token_is_fault(stream: bool) -> None:
    """An abort before the first token is a fault that tells the client to ask again."""
    scene = ExchangeScene(stream=stream)
    scene.to_generation()
    commands = scene.play((sampled([], "abort"), [RecordTurn, Reply]))
    reply, turn = commands[-1], scene.turn(commands)
    assert isinstance(reply, Reply)
    assert (reply.status >= 429, "retry-after" in dict(reply.headers)) == (True, True)
    assert CANCELLED_FAULT.message in json.loads(reply.body)["error"]["message"]
    assert (turn.state, turn.finish_reason, turn.answer) == ("failed", "abort", None)


def test_abort_in_stream_keeps_sample() -> None:
    """An abort in mid-stream keeps what was sampled and does not end the stream as if it were whole."""
    scene = ExchangeScene(LINES)
    scene.to_generation()
    commands = scene.play((chunk("half"), [Send]), (sampled([], "abort", start=4), [RecordTurn, Send, Break]))
    turn = scene.turn(commands)
    assert (turn.state, len(turn.sampled)) == ("partial", 4)


def test_session_end_between_choices_records_rest() -> None:
    """A session that ends between two choices records the rest."""
    scene = ExchangeScene(LINES, choices=2, stream=False)
    scene.to_generation()
    scene.play((chunk("one", "stop", end=True, choice=0), [RecordTurn]))
    commands = scene.play((SessionEnded(at=13.0), [RecordTurn, Reply]))
    assert [turn.state for turn in scene.turns(commands)] == ["partial"]


# ── answers that need no engine ───────────────────────────────────────────────

PARTS = (ThinkingPart("hm"), TextPart("a"), ToolCall(id="c", name="go", arguments="{}"), TextPart("b"))


def test_cached_answer_rendered_part_for_part() -> None:
    answer = Answer(parts=PARTS, finish_reason="tool_calls", logprobs=token_logprobs(b"ab"))
    usage = Usage(prompt_tokens=5, completion_tokens=9, cached_tokens=3)
    (streamed, done) = render_cached_response(LINES, a_call(stream=True), [answer], usage)
    assert isinstance(streamed, Send)
    assert streamed.data == b"start 5 3\n0: hm\n0: a\n0: go({})\n0: b\nend tool_calls 5+9\n"
    assert (streamed.content_type, done) == ("text/plain", EndStream())
    (whole,) = render_cached_response(LINES, a_call(), [answer], usage)
    assert isinstance(whole, Reply)
    assert whole.body == LINES.whole(a_call(), [answer], usage)


def test_empty_answer_has_all_choices() -> None:
    """The empty answer has as many choices as were asked for."""
    _, (_, streamed, _) = requested(generate=False, choices=2)
    assert isinstance(streamed, Send)
    assert streamed.data == b"start 0 0\nend stop stop 0+0\n"


# ── what is decided before a plan ─────────────────────────────────────────────

SPENT = Fault(kind="budget_spent", message="spent")


def cached(text: str = "yes") -> UndeliveredResponse:
    answer = Answer(parts=(TextPart(text),), finish_reason="stop")
    return UndeliveredResponse(
        id="earlier", created=7, signature="signed", answers=(answer,), usage=Usage(prompt_tokens=2)
    )


def requested(
    *,
    stream: bool = True,
    generate: bool = True,
    choices: int = 1,
    refusal: Fault | None = None,
    undelivered: UndeliveredResponse | CutCall | None = None,
) -> tuple[Exchange, list[Command]]:
    """An exchange and what it makes of its request."""
    scene = ExchangeScene(LINES, stream=stream, choices=choices)
    call = scene.settings.call
    call = evolve(call, request=evolve(call.request, generate=generate))
    exchange = Exchange(evolve(scene.settings, call=call))
    event = RequestReceived(at=10.0, wall=1000.0, refusal=refusal, undelivered=undelivered)
    return exchange, exchange.receive(event)


@pytest.mark.parametrize("undelivered", [None, CutCall()])
def test_a_request_is_planned_anew(undelivered: CutCall | None) -> None:
    """Unless it has a cut turn to go on with."""
    exchange, (command,) = requested(undelivered=undelivered)
    assert isinstance(command, Render)
    assert (command.plan, command.history) == (exchange.plans[0], None)
    assert not exchange.over


def test_unaccepted_plan_is_abandoned() -> None:
    """A plan that the session does not accept is abandoned."""
    scene = ExchangeScene(LINES)
    scene.exchange.receive(ClientLeft(at=10.0))

    def refuse(plan: Plan, conversation: Conversation) -> None:
        raise Refused("not this one")

    exchange = Exchange(evolve(scene.settings, check_plan=refuse))
    counted, reply = exchange.receive(RequestReceived(at=10.0, wall=1000.0))
    assert counted == CountRefusal(Fault(kind="bad_request", message="not this one"))
    assert isinstance(reply, Reply)
    assert exchange.over
    assert scene.lineages.plan(HI).reason == "first"


@pytest.mark.parametrize("refusal", [None, SPENT])
@pytest.mark.parametrize("stream", [True, False])
def test_undelivered_response_sent_without_engine(stream: bool, refusal: Fault | None) -> None:
    """An undelivered response is sent again without the engine, whatever budget is spent."""
    exchange, commands = requested(stream=stream, refusal=refusal, undelivered=cached())
    again = cached().call(exchange.settings.call.request)
    assert (again.id, again.created, again.signature) == ("earlier", 7, "signed")
    sent = render_cached_response(LINES, again, cached().answers, cached().usage)
    assert commands == [CountReplay(), *sent]
    assert exchange.over
    assert exchange.receive(ClientLeft(at=11.0)) == []


@pytest.mark.parametrize("refusal", [None, SPENT])
@pytest.mark.parametrize("undelivered", [None, CutCall(3), cached()])
def test_prewarm_is_answered_empty_and_counted(
    refusal: Fault | None, undelivered: UndeliveredResponse | CutCall | None
) -> None:
    """A request that generates nothing is answered empty and counted."""
    exchange, commands = requested(generate=False, refusal=refusal, undelivered=undelivered)
    call = exchange.settings.call
    empty = render_cached_response(LINES, call, [EMPTY_ANSWER], Usage())
    assert commands == [CountPrewarm(call), *empty]
    assert exchange.over


@pytest.mark.parametrize("undelivered", [None, CutCall(3)])
def test_spent_budget_refuses_new_samples(undelivered: CutCall | None) -> None:
    """A spent budget refuses what would be sampled."""
    exchange, commands = requested(refusal=SPENT, undelivered=undelivered)
    assert commands == [CountRefusal(SPENT), LINES.error(SPENT)]
    assert exchange.over


@pytest.mark.parametrize("fields", [{}, {"generate": False}, {"undelivered": cached()}])
def test_ended_session_refuses_every_request(fields: dict[str, Any]) -> None:
    exchange, commands = requested(refusal=SESSION_OVER_FAULT, **fields)
    assert commands == [CountRefusal(SESSION_OVER_FAULT), LINES.error(SESSION_OVER_FAULT)]
    assert exchange.over


def test_unplannable_request_is_refused_once() -> None:
    """A request that cannot be planned is refused once, and no plan is abandoned."""
    exchange, _ = requested()
    commands = exchange.receive(RequestRefused(error=Refused("no")))
    assert commands == [CountRefusal(Fault.of(Refused("no"))), LINES.error(Fault.of(Refused("no")))]
    assert exchange.receive(ClientLeft(at=11.0)) == []


@pytest.mark.parametrize(
    ("fields", "tokens", "can_resume"),
    [
        ({}, b"half", True),
        ({}, b"", False),
        ({"logprobs": 0}, b"half", False),
        ({"constraint": SCHEMA}, b"half", False),
        ({"choices": 2}, b"half", False),
    ],
)
def test_which_cut_samples_are_resumable(fields: dict[str, Any], tokens: bytes, can_resume: bool) -> None:
    """Only a cut sample that can go on is resumable."""
    scene = ExchangeScene(LINES, stream=False, **fields)
    scene.to_generation()
    if tokens:
        scene.exchange.receive(sampled(tokens))
    first = scene.exchange.receive(ClientLeft(at=12.0))[0]
    assert isinstance(first, RecordTurn)
    assert (first.resumable, first.owed) == (can_resume, True)
    whole = ExchangeScene(LINES, **fields)
    whole.to_generation()
    (record, *_) = whole.exchange.receive(chunk("x", "stop", end=True))
    assert isinstance(record, RecordTurn)
    assert not record.resumable
    assert not record.owed


# ── streams and wholes ────────────────────────────────────────────────────────

PIECES = st.lists(
    st.sampled_from((b"a", b"\n", b"ST", b"OP", "\u00e9".encode(), b"\xf0", GO, [CALL, *b"bad", CALLED])),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(
    pieces=PIECES,
    cuts=st.lists(st.integers(0, 60), max_size=6),
    stop=st.sampled_from(((), ("STOP",))),
    one_call=st.booleans(),
)
def test_sample_chunks_change_nothing(
    pieces: list[Any], cuts: list[int], stop: tuple[str, ...], one_call: bool
) -> None:
    """However a sample is cut into chunks its answer and turn are the same."""
    tokens = [token for piece in pieces for token in piece] + [END]
    at = [0, *sorted({cut for cut in cuts if 0 < cut < len(tokens)}), len(tokens)]
    found = []
    for bounds in ([0, len(tokens)], at, list(range(len(tokens) + 1))):
        scene = ExchangeScene(LINES, stop=stop, one_call=one_call, logprobs=1, task=Sampling())
        scene.to_generation(b"x")
        commands: list[Command] = []
        for start, end in pairwise(bounds):
            logprobs = [-place / 8 for place in range(start, end)]
            top = TopLogprobs(k=1, ids=ids(tokens[start:end]), logprobs=floats([-0.25] * (end - start)))
            finish = "stop" if end == len(tokens) else None
            commands += scene.exchange.receive(
                sampled(tokens[start:end], finish, start=start, logprobs=logprobs, top_logprobs=top)
            )
        turn = scene.turn(commands)
        found.append((answered(commands), list(turn.sampled), list(turn.logprobs), turn.version_spans))
        written = b"".join(token.data for token in answered(commands).logprobs)
        assert len(written) <= sum(len(Bytes().token_bytes(token)) for token in turn.sampled)
        if not stop and b"\xf0" not in pieces and b"\n" not in pieces:
            assert written.decode() == answered(commands).text
    assert found[0] == found[1] == found[2]
