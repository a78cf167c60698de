"""Builders: which turns are trained, in which rows, token for token."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from attrs import evolve
from merge_toys import Session, ask, system, told, user

from polarnode.core.conversation import Json, Message
from polarnode.core.errors import InvariantViolated, Refused
from polarnode.core.task import BuilderSpec
from polarnode.core.trajectory import Built, LeftOut, Trace, Turn, TurnSpan
from polarnode.merge.builders import (
    MAX_SESSION_TOKENS,
    OVERSIZE_REASON,
    build,
    per_request,
    prefix_merging,
    prompt_ids,
)
from polarnode.merge.invariants import check, is_whole
from polarnode.merge.selection import NAMES, Settings, read_settings, select

ALL = {"train_auxiliary": True}


def grown(turns: int, session: Session | None = None) -> tuple[Session, list[Message]]:
    session = session or Session()
    messages = [system(), user()]
    for number in range(turns):
        _, answer = session.say(ask(*messages), f"step {number}", [("bash", f'{{"n": {number}}}')])
        messages += [answer, told(answer.calls[0], f"result {number}")]
    return session, messages


def rows(built: Built) -> list[list[int]]:
    return [[span.turn for span in trace.turn_spans] for trace in built.traces]


def trained(trace: Trace) -> list[int]:
    return [span.turn for span in trace.turn_spans if all(trace.loss_mask[span.start : span.end])]


def left(built: Built) -> dict[int, str]:
    return {one.turn: one.reason for one in built.left_out}


def returns_turns(turns: Sequence[Turn], config: Mapping[str, Json]) -> Built:
    return Built(
        traces=(),
        left_out=tuple(LeftOut(turn=turn.index, reason=str(config.get("why", "mine"))) for turn in turns),
    )


def returns_nonsense(turns: Sequence[Turn], config: Mapping[str, Json]) -> object:
    return []


def raises(turns: Sequence[Turn], config: Mapping[str, Json]) -> Built:
    raise ZeroDivisionError("a reward of nothing")


NUMBER = 3


# ── the size of a session ─────────────────────────────────────────────────────


def siblings() -> Session:
    """Four answers to one prompt: four rows that repeat it."""
    session = Session()
    for number in range(4):
        session.say(ask(system(), user()), f"answer {number}")
    return session


@pytest.mark.parametrize("builder", [prefix_merging, per_request])
def test_rows_over_session_size_are_omitted(builder: Callable[..., Built]) -> None:
    """Rows beyond the size of a session are not made."""
    turns = siblings().turns
    lengths = [len(trace.token_ids) for trace in builder(turns, {}).traces]
    assert len(lengths) == 4
    built = builder(turns, {}, most_tokens=sum(lengths[:2]))
    assert rows(built) == [[0], [1]]
    assert left(built) == {2: OVERSIZE_REASON, 3: OVERSIZE_REASON}
    assert check(turns, built).trainable == sum(len(turn.sampled) for turn in turns[:2])


def test_turn_of_omitted_row_trains_elsewhere() -> None:
    """A turn of a row that is not made is trained in another."""
    session, messages = grown(4)
    session.say(ask(*messages[:4], user("something else")), "short")
    long, short = [len(trace.token_ids) for trace in prefix_merging(session.turns, {}).traces]
    assert short < long
    built = prefix_merging(session.turns, {}, most_tokens=short)
    assert [trained(trace) for trace in built.traces] == [[0, 4]]
    assert left(built) == {1: OVERSIZE_REASON, 2: OVERSIZE_REASON, 3: OVERSIZE_REASON}
    check(session.turns, built)


def test_builders_default_to_session_size(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = siblings().turns
    [first, *_] = prefix_merging(turns, {}).traces
    for builder in (prefix_merging, per_request):
        assert builder.__kwdefaults__ == {"most_tokens": MAX_SESSION_TOKENS}
        monkeypatch.setitem(builder.__kwdefaults__, "most_tokens", len(first.token_ids))
        built = build(BuilderSpec(name=builder.__name__), turns)
        assert rows(built) == [[0]]
        assert set(left(built)) == {1, 2, 3}


# ── prefix merging ────────────────────────────────────────────────────────────


def test_lineage_becomes_one_exact_row() -> None:
    """A line of turns is one row of exactly the seen and the sampled tokens."""
    session, _ = grown(3)
    built = prefix_merging(session.turns, {})
    [trace] = built.traces
    last = session.turns[2]
    assert trace.token_ids == session.prompts[2] + last.sampled
    assert trace.prompt_length == len(session.prompts[0])
    assert trace.finish_reason == last.finish_reason
    assert rows(built) == [[0, 1, 2]]
    for turn, span in zip(session.turns, trace.turn_spans, strict=True):
        assert (span.start, span.end) == (
            len(session.prompts[turn.index]),
            len(session.prompts[turn.index]) + len(turn.sampled),
        )
        assert trace.token_ids[span.start : span.end] == turn.sampled
        assert trace.logprobs[span.start : span.end] == turn.logprobs
        assert set(trace.loss_mask[span.start : span.end]) == {1}
    assert sum(trace.loss_mask) == sum(len(turn.sampled) for turn in session.turns)
    assert all(
        chance == 0.0 for chance, mask in zip(trace.logprobs, trace.loss_mask, strict=True) if not mask
    )
    check(session.turns, built)


def test_version_spans_move_into_row() -> None:
    session, _ = grown(2)
    [trace] = prefix_merging(session.turns, {}).traces
    moved = [(span.version, span.start - start, span.end - start) for turn, start in zip(session.turns, (s.start for s in trace.turn_spans), strict=True)
             for span in trace.version_spans if start <= span.start < start + len(turn.sampled)]  # fmt: skip
    assert moved == [
        (span.version, span.start, span.end) for turn in session.turns for span in turn.version_spans
    ]


def test_fork_trains_trunk_in_first_row() -> None:
    """A fork is two rows, and the trunk is trained in the first."""
    session, messages = grown(2)
    session.say(ask(*messages), "one end")
    session.say(ask(*messages, user("or")), "other end")
    built = prefix_merging(session.turns, {})
    assert rows(built) == [[0, 1, 2], [0, 1, 3]]
    assert [trained(trace) for trace in built.traces] == [[0, 1, 2], [3]]
    assert [trace.lineage for trace in built.traces] == [0, 1]
    check(session.turns, built)


def test_first_leaf_is_lowest_index() -> None:
    """The first leaf is the first by index, whatever order turns come in."""
    session, messages = grown(2)
    for end in ("a", "b", "c"):
        session.say(ask(*messages, user(end)), end)
    forward, backward = prefix_merging(session.turns, {}), prefix_merging(session.turns[::-1], {})
    assert forward == backward
    assert [trained(trace) for trace in forward.traces] == [[0, 1, 2], [3], [4]]


def test_each_root_has_own_row() -> None:
    session, _ = grown(2)
    session.say(ask(system("helper"), user()), "helped", hints={"agent": "a1"})
    built = prefix_merging(session.turns, {})
    assert rows(built) == [[0, 1], [2]]
    assert [trace.role for trace in built.traces] == ["main", "subagent"]


def test_resumed_answer_is_one_row() -> None:
    session = Session()
    _, half = session.say(ask(user()), "half", finish="length")
    session.say(ask(user(), half), " and half")
    built = prefix_merging(session.turns, {})
    assert rows(built) == [[0, 1]]
    assert built.traces[0].turn_spans[0].end == built.traces[0].turn_spans[1].start
    check(session.turns, built)


def test_no_turns_give_no_rows() -> None:
    assert prefix_merging((), {}) == per_request((), {}) == Built(traces=())


# ── which turns are trained ───────────────────────────────────────────────────


def test_failed_turn_is_left_out() -> None:
    session, messages = grown(1)
    session.say(ask(*messages), "broken", state="failed")
    built = prefix_merging(session.turns, {})
    assert rows(built) == [[0]]
    assert left(built) == {1: "failed"}


def test_turn_without_sample_is_left_out() -> None:
    session, messages = grown(1)
    pending = session.begin(ask(*messages))
    session.end(pending, session.answer(pending.plan, ""), state="partial", sampled=[])
    assert left(prefix_merging(session.turns, {})) == {1: "empty"}


def test_extension_of_empty_turn_is_row() -> None:
    """A turn that extends one without a sample is a row."""
    session, messages = grown(1)
    pending = session.begin(ask(*messages))
    answer = session.answer(pending.plan, "")
    session.end(pending, answer, state="partial", sampled=[])
    session.say(ask(*messages, answer.as_message(), user("are you there?")), "yes")
    built = prefix_merging(session.turns, {})
    assert (rows(built), left(built)) == ([[0, 2]], {1: "empty"})
    check(session.turns, built)


def test_reasked_cut_turn_is_superseded() -> None:
    session, messages = grown(1)
    session.say(ask(*messages), "hal", state="partial")
    session.say(ask(*messages), "whole")
    built = prefix_merging(session.turns, {})
    assert (rows(built), left(built)) == ([[0, 2]], {1: "superseded"})
    check(session.turns, built)


def test_reasked_cut_turn_known_by_body() -> None:
    session, messages = grown(1)
    session.say(ask(*messages), "hal", state="partial", request_key="body")
    session.say(ask(*messages), "whole", request_key="body", hints={"agent": "another name"})
    assert left(prefix_merging(session.turns, {})) == {1: "superseded"}


def test_cut_turn_without_retry_stays() -> None:
    session, messages = grown(1)
    session.say(ask(*messages), "hal", state="partial")
    session.say(ask(*messages, user("something else")), "whole")
    built = prefix_merging(session.turns, {})
    assert (rows(built), left(built)) == ([[0, 1], [0, 2]], {})
    assert built.traces[0].finish_reason == "abort"


def test_cut_turn_with_failed_retry_stays() -> None:
    session, messages = grown(1)
    session.say(ask(*messages), "hal", state="partial")
    session.say(ask(*messages), "broken", state="failed")
    assert left(prefix_merging(session.turns, {})) == {2: "failed"}


def test_resumed_cut_turn_stays_though_reasked() -> None:
    """A cut turn that was resumed stays, though it was asked for again."""
    session = Session()
    _, half = session.say(ask(user()), "half", state="partial")
    session.say(ask(user()), "whole")
    session.say(ask(user(), half, user("go on")), "more")
    built = prefix_merging(session.turns, {})
    assert (rows(built), left(built)) == ([[1], [0, 2]], {})


def test_last_of_several_cut_turns_stays() -> None:
    session = Session()
    for text in ("a", "ab", "abc"):
        session.say(ask(user()), text, state="partial")
    built = prefix_merging(session.turns, {})
    assert (rows(built), left(built)) == ([[2]], {0: "superseded", 1: "superseded"})


def test_complete_twins_each_stay() -> None:
    session = Session()
    for _ in range(2):
        session.say(ask(user()), "same", request_key="body")
    assert rows(prefix_merging(session.turns, {})) == [[0], [1]]


def side_calls() -> Session:
    session, messages = grown(1)
    session.say(
        ask(system("You are a title generator. You output ONLY a thread title."), user(), tools=()), "A title"
    )
    session.say(ask(*messages, user("You are performing a CONTEXT CHECKPOINT COMPACTION now")), "the summary")
    return session


def test_side_calls_left_out_by_default() -> None:
    session = side_calls()
    built = prefix_merging(session.turns, {})
    assert (rows(built), left(built)) == ([[0]], {1: "auxiliary", 2: "compaction"})
    everything = prefix_merging(session.turns, ALL)
    assert (rows(everything), left(everything)) == ([[1], [0, 2]], {})
    check(session.turns, built)
    check(session.turns, everything)


@pytest.mark.parametrize(
    ("roles", "trained_turns", "reasons"),
    [
        ([], [], {0: "main", 1: "auxiliary", 2: "compaction"}),
        (["main"], [0], {1: "auxiliary", 2: "compaction"}),
        (["compaction"], [2], {0: "main", 1: "auxiliary"}),
        (["compaction", "main"], [0, 2], {1: "auxiliary"}),
        (["main", "subagent", "auxiliary", "compaction"], [0, 1, 2], {}),
    ],
)
def test_train_roles_select_trained_turns(
    roles: list[Json], trained_turns: list[int], reasons: dict[int, str]
) -> None:
    session = side_calls()
    for builder in (prefix_merging, per_request):
        built = builder(session.turns, {"train_roles": roles})
        assert sorted(turn for trace in built.traces for turn in trained(trace)) == trained_turns
        assert left(built) == reasons
        check(session.turns, built)


def test_extended_side_call_is_context() -> None:
    """A side call that a trained turn extends is context."""
    session = Session()
    session.say(ask(system(), user()), "x")
    head = system("You are a title generator. You output ONLY a thread title.")
    _, title = session.say(ask(head, user(), tools=()), "a plan")
    turn, _ = session.say(ask(head, user(), title, user("now do"), tools=()), "done")
    turns = [evolve(one, role="main") if one.index == turn.index else one for one in session.turns]
    built = prefix_merging(turns, {})
    assert rows(built) == [[0], [1, 2]]
    assert [trained(trace) for trace in built.traces] == [[0], [2]]
    check(turns, built)


BUILDERS = (prefix_merging, per_request)


def both(session: Session, config: Mapping[str, Json]) -> dict[int, str]:
    """What both builders leave out, with the laws held on what they make of the rest."""
    made = [builder(session.turns, config) for builder in BUILDERS]
    for one in made:
        check(session.turns, one, train_failed=config.get("train_failed") is True)
    assert left(made[0]) == left(made[1])
    return left(made[0])


@pytest.mark.parametrize("name", ["train_superseded", "train_failed", "train_cut", "train_partial"])
def test_explicit_default_changes_nothing(name: str) -> None:
    session, messages = grown(1)
    session.say(ask(*messages), "hal", state="partial")
    session.say(ask(*messages), "whole", finish="length")
    session.say(ask(*messages, user("and")), "broken", state="failed")
    assert (
        both(session, {name: name in ("train_cut", "train_partial")})
        == both(session, {})
        == {1: "superseded", 3: "failed"}
    )


def test_train_superseded_keeps_superseded_turns() -> None:
    session, messages = grown(1)
    session.say(ask(*messages), "hal", state="partial")
    session.say(ask(*messages), "whole")
    assert both(session, {"train_superseded": True}) == {}
    assert rows(prefix_merging(session.turns, {"train_superseded": True})) == [[0, 1], [0, 2]]


def test_train_failed_keeps_sample_before_failure() -> None:
    session, messages = grown(1)
    session.say(ask(*messages), "broken", state="failed")
    pending = session.begin(ask(*messages))
    session.end(pending, session.answer(pending.plan, ""), state="failed", sampled=[])
    built = prefix_merging(session.turns, {"train_failed": True})
    assert (rows(built), left(built)) == ([[0, 1]], {2: "failed"})
    assert both(session, {"train_failed": True}) == {2: "failed"}
    with pytest.raises(InvariantViolated, match="invariant 2: trace 0 holds turn 1, which failed"):
        check(session.turns, built)


def test_failed_turn_without_logprob_is_untrained() -> None:
    """A failed turn that lacks a logprob is not trained."""
    session, messages = grown(1)
    session.say(ask(*messages), "broken", state="failed")
    bare = [session.turns[0], evolve(session.turns[1], logprobs=session.turns[1].logprobs[:-1])]
    built = prefix_merging(bare, {"train_failed": True})
    assert left(built) == {1: "failed"}
    check(bare, built, train_failed=True)


def test_train_cut_off_drops_length_cuts() -> None:
    session, messages = grown(1)
    _, half = session.say(ask(*messages), "half", finish="length")
    session.say(ask(*messages, half, user("and?")), "more")
    assert both(session, {}) == {}
    assert both(session, {"train_cut": False}) == {1: "length"}
    built = prefix_merging(session.turns, {"train_cut": False})
    assert (rows(built), [trained(trace) for trace in built.traces]) == (
        [[0, 1, 2]],
        [[0, 2]],
    ), "it is context of what came after it"


def test_resumed_answer_ends_as_last_piece() -> None:
    """An answer that went on after a cut ends as its last piece does."""
    session = Session()
    _, half = session.say(ask(user()), "half", finish="length")
    session.say(ask(user(), half), " and half", finish="length")
    _, again = session.say(ask(user("more")), "half", finish="length")
    session.say(ask(user("more"), again), " and an end")
    assert both(session, {"train_cut": False}) == {0: "length", 1: "length"}


def test_train_partial_off_drops_partial_answers() -> None:
    """Answers whose client left are left out when asked for."""
    session, messages = grown(1)
    session.say(ask(*messages), "hal", state="partial")
    assert both(session, {}) == {}
    assert both(session, {"train_partial": False}) == {1: "partial"}


def test_settings_have_defaults_and_can_change() -> None:
    """A setting that is not said has its default, and every one can be said."""
    assert read_settings({}) == Settings()
    said: dict[str, Json] = {"train_roles": ["main"], "max_row_tokens": 8192} | dict.fromkeys(
        NAMES[1:5], True
    )
    expected = Settings(
        train_roles=frozenset(["main"]), train_superseded=True, train_failed=True, max_row_tokens=8192
    )
    assert read_settings(said) == read_settings(said | {"train_auxiliary": False}) == expected
    assert read_settings({"max_row_tokens": None}).max_row_tokens is None


def test_custom_builder_gets_trained_and_leaves() -> None:
    """A custom builder is given the trained turns and the ends of lines."""
    session, messages = grown(2)
    session.say(ask(*messages, user("or")), "other end")
    session.say(ask(*messages), "broken", state="failed")
    cast = select(session.turns[::-1], {"train_cut": False})
    assert ([turn.index for turn in cast.trained], [turn.index for turn in cast.leaves]) == ([0, 1, 2], [2])
    assert cast.left_out == (LeftOut(turn=3, reason="failed"),)
    assert cast.settings == Settings(train_cut=False)


def test_whole_turn_has_logprobs_and_versions() -> None:
    """A turn is whole with a logprob and weights for each token."""
    session, _ = grown(1)
    turn = session.turns[0]
    assert is_whole(turn)
    assert not is_whole(evolve(turn, logprobs=turn.logprobs[1:]))
    assert not is_whole(evolve(turn, version_spans=()))


# ── per request ───────────────────────────────────────────────────────────────


def test_per_request_row_has_full_prompt() -> None:
    """`per_request` is one row a turn, with all before it as its prompt."""
    session, messages = grown(3)
    session.say(ask(*messages), "broken", state="failed")
    built = per_request(session.turns, {})
    assert rows(built) == [[0], [0, 1], [0, 1, 2]]
    assert [trained(trace) for trace in built.traces] == [[0], [1], [2]]
    assert [trace.prompt_length for trace in built.traces] == [
        len(session.prompts[index]) for index in range(3)
    ]
    assert left(built) == {3: "failed"}
    check(session.turns, built)


# ── choosing a builder ────────────────────────────────────────────────────────


def test_builders_are_chosen_by_name() -> None:
    session, _ = grown(3)
    assert build(BuilderSpec(), session.turns) == prefix_merging(session.turns, {})
    assert build(BuilderSpec(name="per_request"), session.turns) == per_request(session.turns, {})


@pytest.mark.parametrize(
    ("spec", "path", "words"),
    [
        (BuilderSpec(name="magic"), "$.builder.name", "name one of prefix_merging, per_request"),
        (
            BuilderSpec(config={"max_length": 4}),
            "$.builder.config.max_length",
            "have no setting 'max_length'",
        ),
        (
            BuilderSpec(config={"train_auxiliary": 1}),
            "$.builder.config.train_auxiliary",
            "make it true or false",
        ),
        (
            BuilderSpec(config={"train_roles": "main"}),
            "$.builder.config.train_roles",
            "make it a list of main, subagent",
        ),
        (
            BuilderSpec(config={"train_roles": ["main", "side"]}),
            "$.builder.config.train_roles[1]",
            "there is no role 'side'",
        ),
        (
            BuilderSpec(config={"train_roles": [["main"]]}),
            "$.builder.config.train_roles[0]",
            "there is no role",
        ),
        (
            BuilderSpec(config={"train_roles": [], "train_auxiliary": True}),
            "$.builder.config.train_auxiliary",
            "keep train_roles",
        ),
        (BuilderSpec(name="per_request", config={"x": 1}), "$.builder.config.x", "have no setting 'x'"),
        (
            BuilderSpec(config={"train_superseded": "yes"}),
            "$.builder.config.train_superseded",
            "make it true or false",
        ),
        (
            BuilderSpec(config={"train_failed": None}),
            "$.builder.config.train_failed",
            "before the engine failed is trained: make it true or false",
        ),
        (
            BuilderSpec(name="per_request", config={"train_cut": 0}),
            "$.builder.config.train_cut",
            "ended at their token limit",
        ),
        (BuilderSpec(config={"train_partial": []}), "$.builder.config.train_partial", "client left"),
        (
            BuilderSpec(config={"max_row_tokens": "8k"}),
            "$.builder.config.max_row_tokens",
            "make it a whole number from 2",
        ),
        (
            BuilderSpec(config={"max_row_tokens": 1}),
            "$.builder.config.max_row_tokens",
            "make it a whole number from 2",
        ),
        (
            BuilderSpec(name="per_request", config={"max_row_tokens": True}),
            "$.builder.config.max_row_tokens",
            "make it a whole number from 2",
        ),
    ],
)
def test_invalid_spec_refused_with_path(spec: BuilderSpec, path: str, words: str) -> None:
    with pytest.raises(Refused, match=words) as caught:
        build(spec, ())
    assert caught.value.path == path


@pytest.fixture
def here() -> str:
    return Path(__file__).stem


def test_imported_builder_gets_turns_and_config(here: str) -> None:
    session, _ = grown(2)
    built = build(
        BuilderSpec(import_path=f"{here}:returns_turns", config={"why": "not today"}),
        session.turns,
        allowed_imports=(here,),
    )
    assert left(built) == {0: "not today", 1: "not today"}


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("raises", "failed: a reward of nothing"),
        ("returns_nonsense", "returned list: return a Built"),
        ("NUMBER", "is not callable"),
    ],
)
def test_failing_imported_builder_is_callers_fault(here: str, attribute: str, words: str) -> None:
    with pytest.raises(Refused, match=words):
        build(BuilderSpec(import_path=f"{here}:{attribute}"), (), allowed_imports=("*",))


def test_imported_builder_must_be_allowed(here: str) -> None:
    with pytest.raises(Refused, match="may not be imported"):
        build(BuilderSpec(import_path=f"{here}:returns_turns"), ())


@pytest.mark.parametrize("limit", [None, 9])
def test_documented_custom_builder_keeps_invariants(
    monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    session, messages = grown(3)
    session.say(ask(*messages, user("or")), "other end")
    session.say(ask(*messages), "broken", state="failed")
    config: dict[str, Json] = {} if limit is None else {"max_row_tokens": limit}
    built = build(
        BuilderSpec(import_path="own_builder:last_answers", config=config),
        session.turns,
        allowed_imports=("own_builder",),
    )
    assert [trained(trace) for trace in built.traces] == [[3]]
    assert left(built) == dict.fromkeys((0, 1, 2), "not the last answer") | {4: "failed"}
    assert all(limit is None or len(trace.token_ids) <= limit for trace in built.traces)
    check(session.turns, built)
    with pytest.raises(Refused, match="have no setting 'x'"):
        build(
            BuilderSpec(import_path="own_builder:last_answers", config={"x": 1}),
            (),
            allowed_imports=("own_builder",),
        )


def test_incomplete_turns_are_never_built() -> None:
    session, _ = grown(2)
    broken = [session.turns[0], evolve(session.turns[1], logprobs=session.turns[1].logprobs[:-1])]
    with pytest.raises(InvariantViolated, match="invariant 3: turn 1"):
        build(BuilderSpec(), broken)
    with pytest.raises(InvariantViolated, match="invariant 1: turn 1 extends turn 0"):
        build(BuilderSpec(), session.turns[1:])


# ── size ──────────────────────────────────────────────────────────────────────


def test_prompt_ids_equal_engine_prompt() -> None:
    session, _ = grown(4)
    assert [prompt_ids(session.turns, index) for index in range(4)] == [
        session.prompts[index] for index in range(4)
    ]


def test_thousands_of_turns_without_recursion() -> None:
    session, _ = grown(1)
    first = session.turns[0]
    turns, length = [first], first.prompt_length + len(first.sampled)
    for index in range(1, 5000):
        step = evolve(
            first,
            index=index,
            parent=index - 1,
            kind="extend",
            prompt_length=length + len(first.prompt_delta),
            version_spans=first.version_spans,
        )
        turns.append(step)
        length = step.prompt_length + len(step.sampled)
    built = build(BuilderSpec(), turns)
    assert len(built.traces) == 1
    assert len(built.traces[0].token_ids) == length
    assert built.traces[0].turn_spans[-1] == TurnSpan(
        turn=4999, start=length - len(first.sampled), end=length
    )
    assert check(turns, built).merged_ratio == 5000.0
