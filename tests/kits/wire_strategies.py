"""Hypothesis strategies for turns and trajectories: sessions as they are built, and sessions nobody would
build.
"""

from typing import Any

from attrs import evolve
from hypothesis import strategies as st

from polarnode.core.arrays import RoutedExperts, TopLogprobs, floats, ids
from polarnode.core.conversation import Answer, Message, Sampling, TextPart, ThinkingPart, ToolCall, Usage
from polarnode.core.trajectory import (
    ContinuedFrom,
    ForkedFrom,
    LeftOut,
    NewMessages,
    Outcome,
    Timing,
    Trace,
    Trajectory,
    Turn,
    TurnSpan,
    VersionSpan,
)

TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
INT32_STRATEGY = st.integers(-(2**31), 2**31 - 1)
FLOAT32_STRATEGY = st.floats(width=32, allow_nan=False, allow_infinity=False)
SECONDS = st.floats(0, 1e10, allow_nan=False)
JSON_MAP_STRATEGY: st.SearchStrategy[Any] = st.dictionaries(
    TEXTS,
    st.none() | st.booleans() | st.integers(-9, 9) | TEXTS | st.lists(st.integers(0, 3), max_size=2),
    max_size=3,
)
IDS = st.lists(INT32_STRATEGY, max_size=12).map(ids)
SPANS = st.lists(
    st.builds(VersionSpan, version=TEXTS, start=st.integers(0, 9), end=st.integers(0, 9)), max_size=2
).map(tuple)
ROLES: st.SearchStrategy[Any] = st.sampled_from(["main", "subagent", "auxiliary", "compaction"])
REASONS: st.SearchStrategy[Any] = st.sampled_from(
    ["stop", "tool_calls", "length", "stop_string", "abort", "error"]
)
PARTS = (
    TEXTS.map(TextPart) | TEXTS.map(ThinkingPart) | st.builds(ToolCall, id=TEXTS, name=TEXTS, arguments=TEXTS)
)
ANSWERS = st.builds(
    Answer, parts=st.lists(PARTS, max_size=3).map(tuple), finish_reason=REASONS, stop_string=st.none() | TEXTS
)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.none() | st.floats(0, 2),
    max_tokens=st.none() | st.integers(1, 9),
    stop=st.lists(TEXTS, max_size=2).map(tuple),
)
CALLS = st.builds(ToolCall, id=TEXTS, name=TEXTS, arguments=TEXTS)
MESSAGES = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    text=TEXTS,
    calls=st.lists(CALLS, max_size=1).map(tuple),
    call_id=st.none() | TEXTS,
    thinking=TEXTS,
)
TOOLS = st.sampled_from(["", '[{"name":"bash","description":"","parameters":{"type":"object"}}]'])
NEW_MESSAGES_STRATEGY = st.builds(
    NewMessages,
    messages=st.lists(MESSAGES, max_size=2).map(tuple),
    tools=TOOLS,
    thinking=st.none() | st.booleans(),
)
SEED_STRATEGY = st.integers(0, 2**16)


def top(rows: int, seed: int) -> TopLogprobs:
    """Some alternatives, of a few draws only: many more make Hypothesis slow."""
    k = 1 + seed % 3
    return TopLogprobs(
        k=k,
        ids=ids(range(seed, seed + k * rows)),
        logprobs=floats([-step / 8 - seed for step in range(k * rows)]),
    )


def routes(seed: int) -> RoutedExperts:
    """Some rows of experts, of the shape and at the place that a number tells."""
    layers, top_k, count = 1 + seed % 2, 1 + seed % 3, seed % 5
    size = layers * top_k * count * (1 + seed % 2)
    return RoutedExperts(
        start=seed % 7,
        layers=layers,
        top_k=top_k,
        dtype="int16" if seed % 2 else "uint8",
        data=bytes([seed % 256]) * size,
    )


USAGE_STRATEGY = st.builds(Usage, prompt_tokens=st.integers(0, 9), cached_tokens=st.integers(0, 9))


@st.composite
def turns(
    draw: st.DrawFn,
    *,
    index: int = 0,
    session_id: str = "s",
    logprob: st.SearchStrategy[float] = FLOAT32_STRATEGY,
) -> Turn:
    sampled = draw(IDS)
    return Turn(
        session_id=session_id,
        index=index,
        provider=draw(TEXTS),
        lineage=draw(st.integers(0, 3)),
        parent=draw(st.none() | st.integers(0, index - 1)) if index else None,
        kind=draw(st.sampled_from(["root", "extend", "branch", "continue", "retry"])),
        reason=draw(TEXTS),
        role=draw(ROLES),
        state=draw(st.sampled_from(["complete", "partial", "failed"])),
        prompt_delta=draw(IDS),
        prompt_length=draw(st.integers(0, 99)),
        close_length=draw(st.integers(0, 3)),
        matched=draw(st.none() | st.integers(0, 9)),
        messages=draw(st.none() | st.integers(0, 9)),
        sampled=sampled,
        logprobs=floats(draw(st.lists(logprob, min_size=len(sampled), max_size=len(sampled)))),
        version_spans=draw(SPANS),
        finish_reason=draw(REASONS),
        request_key=draw(TEXTS),
        before_key=draw(TEXTS),
        message_key=draw(TEXTS),
        new_messages=draw(st.none() | NEW_MESSAGES_STRATEGY),
        answer=draw(st.none() | ANSWERS),
        asked=draw(SAMPLINGS),
        used=draw(SAMPLINGS),
        usage=draw(USAGE_STRATEGY),
        started=draw(SECONDS),
        first_token_s=draw(st.none() | SECONDS),
        ended_s=draw(SECONDS),
        notes=draw(st.lists(TEXTS, max_size=2).map(tuple)),
        top=draw(st.none() | SEED_STRATEGY.map(lambda seed: top(len(sampled), seed))),
        routed=draw(st.none() | SEED_STRATEGY.map(routes)),
    )


def merged(session: tuple[Turn, ...], last: int) -> Trace:
    """The trace a builder makes of turn `last` and its ancestors: every sample trainable."""
    by_index = {turn.index: turn for turn in session}
    chain: list[Turn] = []
    at: int | None = last
    while at is not None:
        chain.insert(0, by_index[at])
        at = by_index[at].parent
    token_ids, mask, logprobs, spans = ids(), b"", floats(), []
    for turn in chain:
        spans.append(
            TurnSpan(
                turn=turn.index,
                start=len(token_ids) + len(turn.prompt_delta),
                end=len(token_ids) + len(turn.prompt_delta) + len(turn.sampled),
            )
        )
        token_ids += turn.prompt_delta + turn.sampled
        mask += b"\0" * len(turn.prompt_delta) + b"\1" * len(turn.sampled)
        logprobs += floats([0.0] * len(turn.prompt_delta)) + turn.logprobs
    return Trace(
        lineage=0,
        token_ids=token_ids,
        loss_mask=mask,
        logprobs=logprobs,
        prompt_length=len(chain[0].prompt_delta),
        turn_spans=tuple(spans),
        version_spans=(),
    )


def sliced(trace: Trace, span: int) -> Trace:
    """What follows the sample of a trace's span, as the second of its two slices; the trace itself where
    nothing does.
    """
    start = trace.turn_spans[span].end if span < len(trace.turn_spans) else len(trace.token_ids)
    if start == len(trace.token_ids):
        return trace
    return evolve(
        trace,
        token_ids=trace.token_ids[start:],
        loss_mask=trace.loss_mask[start:],
        logprobs=trace.logprobs[start:],
        turn_spans=tuple(
            TurnSpan(turn=one.turn, start=one.start - start, end=one.end - start)
            for one in trace.turn_spans[span + 1 :]
        ),
        offset=start,
        part=1,
        parts=2,
    )


@st.composite
def any_trace(draw: st.DrawFn, count: int) -> Trace:
    """Arrays that agree with no turn."""
    token_ids = draw(IDS)
    size = len(token_ids)
    mask = bytes(draw(st.lists(st.sampled_from([0, 1, 1, 2]), min_size=size, max_size=size)))
    places = {"start": st.integers(-2, size + 2), "end": st.integers(-2, size + 2)}
    span = st.builds(TurnSpan, turn=st.integers(0, count), reward=st.none() | st.floats(-1, 1), **places)
    return Trace(
        lineage=draw(st.integers(0, 3)),
        token_ids=token_ids,
        loss_mask=mask,
        logprobs=floats(draw(st.lists(FLOAT32_STRATEGY, min_size=size, max_size=size))),
        prompt_length=draw(st.integers(0, 9)),
        turn_spans=tuple(draw(st.lists(span, max_size=2))),
        version_spans=draw(SPANS),
        role=draw(ROLES),
        finish_reason=draw(REASONS),
        reward=draw(st.none() | st.floats(-1, 1)),
        offset=draw(st.integers(-1, 9)),
        part=draw(st.integers(0, 2)),
        parts=draw(st.integers(1, 3)),
        over_long=draw(st.booleans()),
        top=draw(st.none() | SEED_STRATEGY.map(lambda seed: top(seed % 4, seed))),
        routed=draw(st.none() | SEED_STRATEGY.map(routes)),
        teacher_logprobs=draw(
            st.none()
            | st.lists(FLOAT32_STRATEGY, max_size=size + 1).map(floats)
            | st.just(floats(-0.5 * (each == 1) for each in mask))
        ),
        missing_extras=draw(st.lists(TEXTS, max_size=2).map(tuple)),
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    count = draw(st.integers(0, 4))
    session = tuple(draw(turns(index=index)) for index in range(count))
    whole = (
        [merged(session, last) for last in draw(st.lists(st.integers(0, count - 1), max_size=2))]
        if count
        else []
    )
    honest = [sliced(trace, draw(st.integers(0, 3))) for trace in whole]
    wild = draw(st.lists(any_trace(count), max_size=2))
    return Trajectory(
        session_id="s",
        task_id=draw(TEXTS),
        group_id=draw(TEXTS),
        sample_index=draw(st.integers(0, 9)),
        outcome=draw(
            st.builds(
                Outcome,
                status=st.sampled_from(["completed", "timeout", "interrupted"]),
                exit_code=st.none() | st.integers(0, 255),
                log_tail=st.none() | TEXTS,
            )
        ),
        reward=draw(st.none() | st.floats(-1, 1)),
        traces=(*honest, *wild),
        turns=session,
        left_out=draw(
            st.lists(st.builds(LeftOut, turn=st.integers(0, 9), reason=TEXTS), max_size=2).map(tuple)
        ),
        metrics=draw(JSON_MAP_STRATEGY),
        timing=draw(st.builds(Timing, init_s=SECONDS, run_s=SECONDS)),
        harness=draw(TEXTS),
        harness_version=draw(st.none() | TEXTS),
        model=draw(TEXTS),
        node=draw(TEXTS),
        metadata=draw(JSON_MAP_STRATEGY),
        attempt=draw(st.integers(0, 3)),
        retried_as=draw(st.none() | TEXTS),
        staleness=draw(st.none() | st.integers(0, 9)),
        continued_from=draw(
            st.none() | st.builds(ContinuedFrom, session_id=TEXTS, turn=st.integers(0, 9), run_s=st.just(2.5))
        ),
        forked_from=draw(
            st.none()
            | st.builds(
                ForkedFrom,
                session_id=TEXTS,
                turn=st.integers(0, 9),
                got=st.integers(0, 9),
                by=st.sampled_from(("resume", "replay")),
                differs=st.none() | TEXTS,
            )
        ),
    )
