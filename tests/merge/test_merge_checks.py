"""The laws: a correct result passes, and every mutant of one is caught by the law it breaks."""

from array import array
from collections.abc import Callable

import pytest
from attrs import evolve
from merge_toys import Session, ask, system, told, user

from polarnode.core.errors import InvariantViolated
from polarnode.core.trajectory import Built, LeftOut, Trace, Turn, TurnSpan, VersionSpan
from polarnode.merge.builders import per_request, prefix_merging
from polarnode.merge.invariants import Counts, check, check_turns

Mutant = Callable[[Built], Built]


def world() -> Session:
    """Five turns in two rows, and a failed one: a fork after two steps."""
    session, messages = Session(), [system(), user()]
    for number in range(2):
        _, answer = session.say(ask(*messages), f"step number {number}", [("bash", f'{{"n": {number}}}')])
        messages += [answer, told(answer.calls[0], f"result {number}")]
    session.say(ask(*messages), "broken", state="failed")
    session.say(ask(*messages, user("one way")), "one end of it")
    session.say(ask(*messages, user("other way")), "the other end of it")
    return session


@pytest.fixture
def turns() -> tuple[Turn, ...]:
    return world().turns


def test_correct_result_passes_and_counts(turns: tuple[Turn, ...]) -> None:
    sampled = sum(len(turn.sampled) for turn in turns)
    trainable = sampled - len(turns[2].sampled)
    counts = check(turns, prefix_merging(turns, {}))
    assert counts == Counts(sampled=sampled, trainable=trainable, left_out=1, turns=5, traces=2)
    assert counts.merged_ratio == 2.0
    assert check(turns, per_request(turns, {})) == Counts(
        sampled=sampled, trainable=trainable, left_out=1, turns=5, traces=4
    )


def test_empty_result_counts_nothing() -> None:
    assert check((), Built(traces=())) == Counts(sampled=0, trainable=0, left_out=0, turns=0, traces=0)
    assert check((), Built(traces=())).merged_ratio == 0.0


# ── mutants ───────────────────────────────────────────────────────────────────


def first(change: Callable[[Trace], Trace]) -> Mutant:
    return lambda built: evolve(built, traces=(change(built.traces[0]), *built.traces[1:]))


def second(change: Callable[[Trace], Trace]) -> Mutant:
    return lambda built: evolve(built, traces=(built.traces[0], change(built.traces[1])))


def patched(values: array, place: int, value: float) -> array:  # type: ignore[type-arg]
    copy = values[:]
    copy[place] = value  # type: ignore[call-overload]
    return copy


def token(place: Callable[[Trace], int]) -> Callable[[Trace], Trace]:
    return lambda trace: evolve(trace, token_ids=patched(trace.token_ids, place(trace), 77))


def mask(place: Callable[[Trace], int], value: int) -> Callable[[Trace], Trace]:
    return lambda trace: evolve(
        trace,
        loss_mask=trace.loss_mask[: place(trace)] + bytes([value]) + trace.loss_mask[place(trace) + 1 :],
    )


def logprob(place: Callable[[Trace], int], value: float) -> Callable[[Trace], Trace]:
    return lambda trace: evolve(trace, logprobs=patched(trace.logprobs, place(trace), value))


def spans(change: Callable[[list[TurnSpan]], list[TurnSpan]]) -> Callable[[Trace], Trace]:
    return lambda trace: evolve(trace, turn_spans=tuple(change(list(trace.turn_spans))))


def versions(change: Callable[[list[VersionSpan]], list[VersionSpan]]) -> Callable[[Trace], Trace]:
    return lambda trace: evolve(trace, version_spans=tuple(change(list(trace.version_spans))))


def moved(by: int, at: int = 0) -> Callable[[list[TurnSpan]], list[TurnSpan]]:
    return lambda old: [
        evolve(span, start=span.start + by, end=span.end + by) if n == at else span
        for n, span in enumerate(old)
    ]


def sample(n: int, offset: int = 0) -> Callable[[Trace], int]:
    return lambda trace: trace.turn_spans[n].start + offset


def before(n: int) -> Callable[[Trace], int]:
    return lambda trace: trace.turn_spans[n].start - 1


def untrained(trace: Trace) -> Trace:
    return evolve(
        trace, loss_mask=bytes(len(trace.loss_mask)), logprobs=array("f", bytes(4 * len(trace.loss_mask)))
    )


def retrained(built: Built) -> Built:
    """The second row trains the trunk again, with its true logprobs."""
    one, other = built.traces
    trunk = one.turn_spans[1].end
    both = evolve(
        other,
        loss_mask=one.loss_mask[:trunk] + other.loss_mask[trunk:],
        logprobs=one.logprobs[:trunk] + other.logprobs[trunk:],
    )
    return evolve(built, traces=(one, both))


MUTANTS: dict[str, tuple[str, Mutant]] = {
    "a changed prompt token": ("invariant 1", first(token(lambda trace: 0))),
    "a changed token between samples": ("invariant 1", first(token(before(1)))),
    "a changed sampled token": ("invariant 1", first(token(sample(1, 2)))),
    "a changed context token": ("invariant 1", second(token(sample(0)))),
    "a changed last token": ("invariant 1", first(token(lambda trace: len(trace.token_ids) - 1))),
    "a span moved right": ("invariant 1", first(spans(moved(1)))),
    "a span moved left": ("invariant 1", first(spans(moved(-1)))),
    "a span cut": ("invariant 1", first(spans(lambda old: [evolve(old[0], end=old[0].end - 1), *old[1:]]))),
    "a span dropped": ("invariant 1", first(spans(lambda old: old[1:]))),
    "a span of another turn": ("invariant 1", first(spans(lambda old: [*old[:-1], evolve(old[-1], turn=4)]))),
    "two spans changed about": ("invariant 1", first(spans(lambda old: [evolve(old[0], turn=1), evolve(old[1], turn=0), *old[2:]]))),
    "overlapping spans": ("invariant 4", first(spans(lambda old: [evolve(old[0], end=old[1].start + 1), *old[1:]]))),
    "spans out of order": ("invariant 4", first(spans(lambda old: old[::-1]))),
    "an empty span": ("invariant 4", first(spans(lambda old: [evolve(old[0], end=old[0].start), *old[1:]]))),
    "no spans": ("invariant 4", first(spans(lambda old: []))),
    "an unknown turn": ("invariant 4", first(spans(lambda old: [evolve(old[0], turn=9), *old[1:]]))),
    "a failed turn": ("invariant 2", first(spans(lambda old: [*old[:-1], evolve(old[-1], turn=2)]))),
    "a gap at the end": ("invariant 4", first(spans(lambda old: old[:-1]))),
    "tokens after the end": ("invariant 4", first(lambda trace: evolve(
        trace, token_ids=trace.token_ids + array("i", [5]), loss_mask=trace.loss_mask + b"\0", logprobs=trace.logprobs + array("f", [0.0])))),
    "a token missing": ("invariant 4", first(lambda trace: evolve(
        trace, token_ids=trace.token_ids[:-1], loss_mask=trace.loss_mask[:-1], logprobs=trace.logprobs[:-1]))),
    "a mask flipped off": ("invariant", first(mask(sample(1), 0))),
    "a mask and its logprob off": ("invariant 2", lambda built: first(logprob(sample(1), 0.0))(first(mask(sample(1), 0))(built))),
    "a mask flipped on before a sample": ("invariant 2", first(mask(before(1), 1))),
    "a mask flipped on in the prompt": ("invariant 2", first(mask(lambda trace: 0, 1))),
    "a mask of two": ("invariant 2", first(mask(sample(1), 2))),
    "a mask one short": ("invariant 3", first(lambda trace: evolve(trace, loss_mask=trace.loss_mask[:-1]))),
    "a row not trained at all": ("invariant 2", second(untrained)),
    "a trunk trained twice": ("invariant 2: .* trained in trace 1 and in one before it", retrained),
    "a row twice": ("invariant 2: .* trained in trace 1 and in one before it", lambda built: evolve(built, traces=(built.traces[0], *built.traces))),
    "a row dropped": ("invariant 2", lambda built: evolve(built, traces=built.traces[:1])),
    "a prompt that is trained": ("invariant 2", first(lambda trace: evolve(trace, prompt_length=trace.turn_spans[0].end))),
    "a prompt longer than the row": ("invariant 2", second(lambda trace: evolve(trace, prompt_length=len(trace.token_ids) + 1))),
    "a prompt of less than nothing": ("invariant 2", first(lambda trace: evolve(trace, prompt_length=-1))),
    "a logprob changed": ("invariant 3", first(logprob(sample(0, 1), -9.0))),
    "a logprob where nothing is trained": ("invariant 3", second(logprob(sample(0), -0.5))),
    "a logprob in the prompt": ("invariant 3", first(logprob(lambda trace: 0, -0.5))),
    "logprobs one short": ("invariant 3", first(lambda trace: evolve(trace, logprobs=trace.logprobs[:-1]))),
    "logprobs shifted by one": ("invariant 3", first(lambda trace: evolve(trace, logprobs=trace.logprobs[1:] + trace.logprobs[:1]))),
    "logprobs in double": ("invariant 3", first(lambda trace: evolve(trace, logprobs=array("d", trace.logprobs)))),
    "ids in long": ("invariant 3", first(lambda trace: evolve(trace, token_ids=array("q", trace.token_ids)))),
    "ids in a list": ("invariant 3", first(lambda trace: evolve(trace, token_ids=list(trace.token_ids)))),
    "a version changed": ("invariant 3", first(versions(lambda old: [evolve(old[0], version="v9"), *old[1:]]))),
    "a version dropped": ("invariant 3", first(versions(lambda old: old[:-1]))),
    "a version of context dropped": ("invariant 3", second(versions(lambda old: old[1:]))),
    "versions out of order": ("invariant 3", first(versions(lambda old: [old[1], old[0], *old[2:]]))),
    "a version that ends late": ("invariant 3", first(versions(lambda old: [evolve(old[0], end=old[0].end + 1), *old[1:]]))),
    "versions twice": ("invariant 3", first(versions(lambda old: old + old))),
    "a turn left out and trained": ("invariant 2", lambda built: evolve(built, left_out=(*built.left_out, LeftOut(turn=0, reason="tired")))),
    "a turn left out in silence": ("invariant 2", lambda built: evolve(built, left_out=())),
    "a turn left out without reason": ("invariant 2", lambda built: evolve(built, left_out=(LeftOut(turn=2, reason=""),))),
    "a turn left out twice": ("invariant 2", lambda built: evolve(built, left_out=built.left_out * 2)),
    "a stranger left out": ("invariant 2", lambda built: evolve(built, left_out=(*built.left_out, LeftOut(turn=50, reason="who?")))),
    "rows of another session": ("invariant 1", lambda built: prefix_merging(tuple(evolve(turn, prompt_delta=array("i", [8] * len(turn.prompt_delta))) for turn in world().turns), {})),
}  # fmt: skip


@pytest.mark.parametrize(("invariant", "mutant"), MUTANTS.values(), ids=MUTANTS.keys())
def test_every_mutant_is_caught_with_numbers(turns: tuple[Turn, ...], invariant: str, mutant: Mutant) -> None:
    built = prefix_merging(turns, {})
    check(turns, built)
    with pytest.raises(InvariantViolated, match=invariant) as caught:
        check(turns, mutant(built))
    assert caught.value.boundary == "laws"


def test_single_changed_value_is_caught(turns: tuple[Turn, ...]) -> None:
    """Any single changed token, mask or logprob is caught."""
    built = prefix_merging(turns, {})
    for row, trace in enumerate(built.traces):
        for place in range(len(trace.token_ids)):
            for changed in (
                evolve(trace, token_ids=patched(trace.token_ids, place, trace.token_ids[place] + 1)),
                evolve(
                    trace,
                    loss_mask=trace.loss_mask[:place]
                    + bytes([1 - trace.loss_mask[place]])
                    + trace.loss_mask[place + 1 :],
                ),
                evolve(trace, logprobs=patched(trace.logprobs, place, trace.logprobs[place] - 1.0)),
            ):
                with pytest.raises(InvariantViolated):
                    check(
                        turns,
                        evolve(
                            built,
                            traces=tuple(
                                changed if n == row else other for n, other in enumerate(built.traces)
                            ),
                        ),
                    )


def test_token_is_trained_only_once(turns: tuple[Turn, ...]) -> None:
    """A builder of another rule: half of a trunk's sample is trained in each row."""
    one, other = prefix_merging(turns, {}).traces
    start = one.turn_spans[0].start
    moved_mask = (
        one.loss_mask[:start] + b"\0" + one.loss_mask[start + 1 :],
        other.loss_mask[:start] + b"\1" + other.loss_mask[start + 1 :],
    )
    split = (
        evolve(one, loss_mask=moved_mask[0], logprobs=patched(one.logprobs, start, 0.0)),
        evolve(other, loss_mask=moved_mask[1], logprobs=patched(other.logprobs, start, one.logprobs[start])),
    )
    assert check(turns, Built(traces=split, left_out=(LeftOut(turn=2, reason="failed"),))).traces == 2


# ── turns ─────────────────────────────────────────────────────────────────────


TURN_MUTANTS: dict[str, tuple[str, dict[str, object]]] = {
    "a logprob missing": ("invariant 3: turn 1 sampled", {"logprobs": array("f", [-1.0])}),
    "a logprob that is no number": (
        "invariant 3: turn 1 has a logprob that is not a number",
        {"logprobs": "nan"},
    ),
    "an infinite logprob": ("invariant 3: turn 1 has a logprob that is not a number", {"logprobs": "inf"}),
    "no version": ("invariant 3: turn 1 sampled .* cover", {"version_spans": ()}),
    "a version too short": (
        "invariant 3: turn 1",
        {"version_spans": (VersionSpan(version="v", start=0, end=1),)},
    ),
    "a version that starts late": (
        "invariant 3: turn 1",
        {"version_spans": (VersionSpan(version="v", start=1, end=5),)},
    ),
    "versions with a gap": (
        "invariant 3: turn 1",
        {
            "version_spans": (
                VersionSpan(version="v", start=0, end=2),
                VersionSpan(version="w", start=3, end=5),
            )
        },
    ),
    "versions overlapping": (
        "invariant 3: turn 1",
        {
            "version_spans": (
                VersionSpan(version="v", start=0, end=4),
                VersionSpan(version="w", start=3, end=5),
            )
        },
    ),
    "a prompt of another length": ("invariant 1: turn 1 has a prompt of 3 tokens", {"prompt_length": 3}),
    "no parent": ("invariant 1: turn 1 has a prompt", {"parent": None}),
    "a parent that comes later": ("invariant 1: turn 1 extends turn 3", {"parent": 3}),
    "itself as parent": ("invariant 1: turn 1 extends turn 1", {"parent": 1}),
    "an unknown parent": ("invariant 1: turn 1 extends turn 70", {"parent": 70}),
    "the number of another": ("invariant 2: the session has two turns 0", {"index": 0}),
}


@pytest.mark.parametrize(("invariant", "changes"), TURN_MUTANTS.values(), ids=TURN_MUTANTS.keys())
def test_incomplete_turns_are_caught(
    turns: tuple[Turn, ...], invariant: str, changes: dict[str, object]
) -> None:
    check_turns(turns)
    assert len(turns[1].sampled) == 5  # where the spans below end, so that nothing but their order is wrong
    if isinstance(changes.get("logprobs"), str):
        changes = {"logprobs": patched(turns[1].logprobs, 2, float(str(changes["logprobs"])))}
    broken = [evolve(turn, **changes) if turn.index == 1 else turn for turn in turns]
    with pytest.raises(InvariantViolated, match=invariant):
        check_turns(broken)
    with pytest.raises(InvariantViolated, match=invariant):
        check(broken, prefix_merging(turns, {}))


def test_failed_turn_cannot_be_extended(turns: tuple[Turn, ...]) -> None:
    broken = [evolve(turn, state="failed") if turn.index == 1 else turn for turn in turns]
    with pytest.raises(InvariantViolated, match="extends turn 1, which is no earlier turn that answered"):
        check_turns(broken)


def test_failed_turn_may_lack_logprobs(turns: tuple[Turn, ...]) -> None:
    bare = [
        evolve(turn, logprobs=array("f"), version_spans=()) if turn.index == 2 else turn for turn in turns
    ]
    assert check(bare, prefix_merging(bare, {})).left_out == 1
