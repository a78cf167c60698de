"""Rows longer than a task's limit: cut at turn ends, nothing trained lost, and every mutant of such a result
caught.
"""

import random
from collections.abc import Callable, Sequence

import pytest
from attrs import evolve
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polarnode.core.arrays import RoutedExperts, TopLogprobs, floats, ids
from polarnode.core.conversation import FinishReason
from polarnode.core.errors import InvariantViolated
from polarnode.core.task import BuilderSpec
from polarnode.core.trajectory import Built, Trace, Turn, TurnRole, TurnState, VersionSpan
from polarnode.merge.builders import Slice, build, line_to, per_request, prefix_merging, row, rows, slices
from polarnode.merge.invariants import check, check_lengths, check_parts, check_trace


class Tree:
    """Turns by the lengths of what they bring; every token of a session another."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.said = 0

    def add(
        self,
        parent: int | None,
        delta: int,
        sampled: int,
        *,
        role: TurnRole = "main",
        state: TurnState = "complete",
        finish: FinishReason = "stop",
    ) -> int:
        before = 0 if parent is None else len(self.whole(parent))
        index = len(self.turns)
        logprobs = floats(-0.25 * (place + 1) for place in range(sampled))
        self.turns.append(
            Turn(
                session_id="s",
                index=index,
                provider="toy",
                lineage=index,
                parent=parent,
                kind="root" if parent is None else "extend",
                reason="",
                role=role,
                state=state,
                prompt_delta=self.some(delta),
                prompt_length=before + delta,
                sampled=self.some(sampled),
                logprobs=logprobs,
                version_spans=(VersionSpan(version=f"v{index}", start=0, end=sampled),) if sampled else (),
                finish_reason=finish,
            )
        )
        return index

    def some(self, count: int) -> "ids":  # type: ignore[valid-type]
        self.said += count
        return ids(range(self.said - count, self.said))

    def whole(self, index: int) -> list[int]:
        turn = self.turns[index]
        return [*([] if turn.parent is None else self.whole(turn.parent)), *turn.prompt_delta, *turn.sampled]


def line(*lengths: tuple[int, int]) -> Tree:
    """A session that is only appended to."""
    tree, last = Tree(), None
    for delta, sampled in lengths:
        last = tree.add(last, delta, sampled)
    return tree


def cuts(tree: Tree, limit: int | None, trained: Sequence[int] | None = None) -> list[tuple[int, int]]:
    chosen = {turn.index for turn in tree.turns} if trained is None else set(trained)
    return [(one.start, one.end) for one in slices(tree.turns, chosen, limit)]


def built(tree: Tree, limit: int | None, name: str = "prefix_merging") -> Built:
    made = build(
        BuilderSpec(name=name, config={} if limit is None else {"max_row_tokens": limit}), tree.turns
    )
    check(tree.turns, made)
    check_lengths(made.traces, limit)
    return made


def ends(made: Built) -> list[list[int]]:
    return [[span.turn for span in trace.turn_spans] for trace in made.traces]


# ── where a row is cut ────────────────────────────────────────────────────────


def test_row_within_limit_stays_whole() -> None:
    tree = line((3, 2), (1, 4))
    assert cuts(tree, None) == cuts(tree, 10) == [(0, 10)]
    assert slices(tree.turns, {0, 1}, 10) == [Slice(start=0, end=10, first=0, last=1)]
    assert built(tree, 10) == built(tree, None)


def test_long_row_cut_at_turn_ends() -> None:
    """A longer row is cut at turn ends, and its parts are the row."""
    tree = line((3, 2), (1, 4), (2, 2), (1, 1), (5, 5))
    made = built(tree, 10)
    assert ends(made) == [[0, 1], [2, 3], [4]]
    assert [(trace.offset, trace.part, trace.parts, trace.over_long) for trace in made.traces] == [
        (0, 0, 3, False),
        (10, 1, 3, False),
        (16, 2, 3, False),
    ]
    [whole] = built(tree, None).traces
    assert [token for trace in made.traces for token in trace.token_ids] == list(whole.token_ids)
    assert b"".join(trace.loss_mask for trace in made.traces) == whole.loss_mask
    assert [chance for trace in made.traces for chance in trace.logprobs] == list(whole.logprobs)
    for name in ("turn_spans", "version_spans"):
        put_back = [
            evolve(span, start=span.start + trace.offset, end=span.end + trace.offset)
            for trace in made.traces
            for span in getattr(trace, name)
        ]
        assert put_back == list(getattr(whole, name))
    assert [trace.prompt_length for trace in made.traces] == [3, 2, 5], "what is before a part's first sample"


def test_long_turn_loses_left_of_prompt() -> None:
    """A turn too long loses the left of its prompt and says so."""
    tree = line((20, 3), (1, 2))
    made = built(tree, 8)
    assert [(trace.offset, len(trace.token_ids), trace.prompt_length) for trace in made.traces] == [
        (15, 8, 5),
        (23, 3, 1),
    ]
    assert list(made.traces[0].token_ids) == list(range(15, 23))
    assert not made.traces[0].over_long
    made = built(line((2, 2), (20, 3)), 8)
    assert [(trace.offset, len(trace.token_ids)) for trace in made.traces] == [(0, 4), (19, 8)]


def test_long_sample_is_never_cut() -> None:
    """A sample too long is a row of its own and never cut."""
    tree = line((3, 1), (4, 9), (1, 1))
    made = built(tree, 6)
    assert [(trace.offset, len(trace.token_ids), trace.over_long) for trace in made.traces] == [
        (0, 4, False),
        (7, 10, True),
        (17, 2, False),
    ]
    assert made.traces[1].prompt_length == 1, "the one token that its first is conditioned on"
    assert built(line((3, 6)), 6).traces[0].over_long, "a sample of just the limit has no room for that token"


def test_resumed_answer_is_not_split() -> None:
    """An answer that went on after a cut is not taken apart."""
    tree = line((2, 3), (1, 2), (0, 2), (1, 1))
    assert ends(built(tree, 7)) == [[0], [1, 2, 3]]
    made = built(tree, 4)
    assert ends(made) == [[0], [1, 2], [3]]
    assert [(trace.offset, trace.over_long) for trace in made.traces] == [(1, False), (5, True), (10, False)]


def test_part_starts_with_untrained_token() -> None:
    """Every part has a token before its first trained one."""
    tree = line((2, 3), (0, 3), (0, 3))
    [trace] = built(tree, 4).traces
    assert (trace.offset, trace.over_long, ends(built(tree, 4))) == (1, True, [[0, 1, 2]])


def test_unneeded_context_is_dropped() -> None:
    tree = line((5, 5), (5, 5))
    fork = tree.add(1, 3, 3)
    tree.add(1, 2, 2)
    made = built(tree, 12)
    assert ends(made) == [[0], [1], [fork], [3]]
    assert [(trace.offset, trace.part, trace.parts) for trace in made.traces] == [
        (0, 0, 3),
        (10, 1, 3),
        (20, 2, 3),
        (20, 0, 1),
    ]


def test_part_keeps_as_much_context() -> None:
    """A part shows as much context before it as fits."""
    tree = line((2, 2), (2, 2), (2, 2), (2, 2))
    assert cuts(tree, 9, trained=[3]) == [(8, 16)]
    assert cuts(tree, 13, trained=[3]) == [(4, 16)]
    assert cuts(tree, 12, trained=[1, 3]) == [(4, 16)]
    assert cuts(tree, 11, trained=[1, 3]) == [(0, 8), (8, 16)]


def test_single_request_keeps_prompt_end() -> None:
    """A row of one request keeps the end of its prompt."""
    tree = line((2, 2), (2, 2), (2, 2), (9, 2))
    made = built(tree, 10, "per_request")
    assert ends(made) == [[0], [0, 1], [1, 2], [3]]
    assert [(trace.offset, trace.prompt_length, trace.parts) for trace in made.traces] == [
        (0, 2, 1),
        (0, 6, 1),
        (4, 6, 1),
        (13, 8, 1),
    ]
    assert built(line((2, 2), (0, 12)), 6, "per_request").traces[1].offset == 3, (
        "a token of the sample that it goes on from"
    )


def test_part_is_labelled_by_last_turn() -> None:
    """A part names its last turn's lineage, role and end."""
    tree = Tree()
    first = tree.add(None, 3, 3, finish="length")
    tree.add(first, 3, 3, role="subagent")
    made = built(tree, 6)
    assert [(trace.lineage, trace.role, trace.finish_reason) for trace in made.traces] == [
        (0, "main", "length"),
        (1, "subagent", "stop"),
    ]


def test_thousands_of_parts_in_linear_time() -> None:
    tree, last = Tree(), None
    before = 0
    for index in range(3000):
        delta, sampled = ids([index] * 3), ids([index] * 2)
        before += 3
        tree.turns.append(
            Turn(
                session_id="s",
                index=index,
                provider="toy",
                lineage=0,
                parent=last,
                kind="extend",
                reason="",
                prompt_delta=delta,
                prompt_length=before,
                sampled=sampled,
                logprobs=floats([-1, -1]),
                version_spans=(VersionSpan(version="v", start=0, end=2),),
            )
        )
        before, last = before + 2, index
    for name in ("prefix_merging", "per_request"):
        made = built(tree, 5, name)
        assert len(made.traces) == 3000
        assert sum(len(trace.token_ids) for trace in made.traces) == 15_000


# ── what rows carry ───────────────────────────────────────────────────────────


def carrying(*lengths: tuple[int, int]) -> Tree:
    """A line whose turns carry two alternatives a token and one expert a position, each telling which token
    it is of.
    """
    tree = line(*lengths)
    for place, turn in enumerate(tree.turns):
        start = max(turn.prompt_length - len(turn.prompt_delta) - 1, 0)
        end = turn.prompt_length + len(turn.sampled) - 1
        top = TopLogprobs(
            k=2,
            ids=ids(token + more for token in turn.sampled for more in (0, 500)),
            logprobs=floats([-0.5] * (2 * len(turn.sampled))),
        )
        routed = RoutedExperts(start=start, layers=1, top_k=1, dtype="uint8", data=bytes(range(start, end)))
        tree.turns[place] = evolve(turn, top=top, routed=routed)
    return tree


@pytest.mark.parametrize("name", ["prefix_merging", "per_request"])
@pytest.mark.parametrize("limit", [None, 10, 4])
def test_part_carries_own_token_extras(name: str, limit: int | None) -> None:
    for trace in built(carrying((3, 2), (1, 4), (2, 2), (1, 1), (5, 5)), limit, name).traces:
        assert trace.missing_extras == ()
        assert trace.top is not None
        assert trace.routed is not None
        tokens = [token for token, mask in zip(trace.token_ids, trace.loss_mask, strict=True) if mask]
        assert trace.top.ids.tolist() == [token + more for token in tokens for more in (0, 500)]
        assert (trace.routed.start, list(trace.routed.data)) == (trace.offset, list(trace.token_ids[:-1]))


def test_trace_extras_are_its_turns() -> None:
    tree = carrying((3, 2), (1, 4), (2, 2))
    made = built(tree, 10)
    check(tree.turns, part(0, lambda trace: evolve(trace, top=None, routed=None))(made))
    for name in ("top", "routed"):
        with pytest.raises(InvariantViolated, match="invariant 3: the"):
            check(
                tree.turns,
                part(0, lambda trace, name=name: evolve(trace, **{name: getattr(made.traces[1], name)}))(
                    made
                ),
            )


# ── whatever comes ────────────────────────────────────────────────────────────


def grown(numbers: random.Random, count: int) -> Tree:
    """Turns that extend, fork and go on, some of them side calls, aborted or failed."""
    tree = Tree()
    for index in range(count):
        living = [turn.index for turn in tree.turns if turn.state != "failed"]
        parent = numbers.choice([*living[-2:], numbers.choice([None, *living])]) if living else None
        delta = numbers.choice([0, 1, 2, 3, 9]) if parent is not None else numbers.choice([1, 2, 9])
        state: TurnState = numbers.choice(["complete"] * 6 + ["partial", "failed"])
        role: TurnRole = numbers.choice(["main", "main", "main", "subagent", "auxiliary"])
        tree.add(parent, delta, numbers.choice([0, 1, 2, 2, 3, 8]), role=role, state=state)
        assert len(tree.turns) == index + 1
    return tree


def fewest(tree: Tree, line_: Sequence[Turn], trained: set[int], limit: int) -> int:
    """Parts, by brute force over where they may begin: each a run of trained turns, from where what the first
    brought begins, within the limit.

    A run too long by itself is allowed only where no turn of it could begin a part.
    """
    places = [place for place, turn in enumerate(line_) if turn.index in trained]
    best = [0] + [len(places) + 1] * len(places)
    for last in range(len(places)):
        for first in range(last + 1):
            head, tail = line_[places[first]], line_[places[last]]
            alone = all(_stays(line_, places[one], trained) for one in range(first + 1, last + 1))
            fits = (
                tail.prompt_length + len(tail.sampled) - (head.prompt_length - len(head.prompt_delta))
                <= limit
            )
            if (fits or alone) and not _stays(line_, places[first], trained):
                best[last + 1] = min(best[last + 1], best[first] + 1)
    return best[-1]


def _stays(line_: Sequence[Turn], place: int, trained: set[int]) -> bool:
    """Whether nothing stands between a turn's sample and a trained one before it."""
    return any(
        line_[place].prompt_length == one.prompt_length + len(one.sampled)
        for one in line_[:place]
        if one.index in trained
    )


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 10**9),
    st.integers(1, 12),
    st.integers(2, 30),
    st.sampled_from(["prefix_merging", "per_request"]),
)
@example(63, 10, 2, "prefix_merging")  # a turn that brought nothing stands between two samples that touch
def test_invariants_hold_with_fewest_parts(seed: int, count: int, limit: int, name: str) -> None:
    """The laws hold in as few parts as can be."""
    tree = grown(random.Random(seed), count)
    made, whole = built(tree, limit, name), built(tree, None, name)
    by_index = {turn.index: turn for turn in tree.turns}
    assert made.left_out == whole.left_out
    at = 0
    for trace in whole.traces:
        leaf = trace.turn_spans[-1].turn
        line_ = line_to(by_index, leaf)
        trained = {span.turn for span in trace.turn_spans if any(trace.loss_mask[span.start : span.end])}
        parts = made.traces[at : at + made.traces[at].parts]
        at += len(parts)
        assert len(parts) == (1 if len(trace.token_ids) <= limit else fewest(tree, line_, trained, limit))
        assert {
            span.turn
            for part in parts
            for span in part.turn_spans
            if any(part.loss_mask[span.start : span.end])
        } == trained
        for part in parts:
            assert list(part.token_ids) == tree.whole(part.turn_spans[-1].turn)[part.offset :]
            assert part.offset == 0 or part.loss_mask[0] == 0
            assert len(part.token_ids) <= limit or len(part.token_ids) - part.loss_mask.index(1) >= limit
    assert at == len(made.traces)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9), st.integers(2, 12), st.integers(2, 30), st.data())
def test_changed_part_is_caught(seed: int, count: int, limit: int, data: st.DataObject) -> None:
    """A changed token mask or logprob of a part is caught."""
    tree = grown(random.Random(seed), count)
    made = built(tree, limit)
    if not made.traces:
        return
    number = data.draw(st.integers(0, len(made.traces) - 1))
    trace = made.traces[number]
    place = data.draw(st.integers(0, len(trace.token_ids) - 1))
    tokens, chances = trace.token_ids[:], trace.logprobs[:]
    tokens[place] += 1
    chances[place] -= 1
    mask = trace.loss_mask[:place] + bytes([1 - trace.loss_mask[place]]) + trace.loss_mask[place + 1 :]
    for changed in (
        evolve(trace, token_ids=tokens),
        evolve(trace, logprobs=chances),
        evolve(trace, loss_mask=mask),
    ):
        with pytest.raises(InvariantViolated):
            check(
                tree.turns, evolve(made, traces=(*made.traces[:number], changed, *made.traces[number + 1 :]))
            )


# ── mutants ───────────────────────────────────────────────────────────────────


def sliced() -> tuple[Tree, Built]:
    """Two rows of three parts and of one, whose last turn has a prompt too long."""
    tree = line((3, 2), (1, 4), (2, 2), (1, 1), (5, 5))
    tree.add(4, 30, 3)
    tree.add(None, 2, 2)
    return tree, built(tree, 10)


def part(number: int, change: Callable[[Trace], Trace]) -> Callable[[Built], Built]:
    return lambda made: evolve(
        made, traces=(*made.traces[:number], change(made.traces[number]), *made.traces[number + 1 :])
    )


def order(*numbers: int) -> Callable[[Built], Built]:
    return lambda made: evolve(made, traces=tuple(made.traces[number] for number in numbers))


def earlier(trace: Trace) -> Trace:
    """The part with one token more of its row before it, which the part before it has too."""
    return evolve(
        trace, offset=trace.offset - 1, token_ids=ids([trace.token_ids[0] - 1]) + trace.token_ids, loss_mask=b"\0" + trace.loss_mask,
        logprobs=floats([0.0]) + trace.logprobs, prompt_length=trace.prompt_length + 1,
        turn_spans=tuple(evolve(span, start=span.start + 1, end=span.end + 1) for span in trace.turn_spans),
        version_spans=tuple(evolve(span, start=span.start + 1, end=span.end + 1) for span in trace.version_spans),
    )  # fmt: skip


def bare(trace: Trace) -> Trace:
    """The part without what stands before its first sample."""
    by = trace.turn_spans[0].start
    return evolve(
        trace, offset=trace.offset + by, token_ids=trace.token_ids[by:], loss_mask=trace.loss_mask[by:], logprobs=trace.logprobs[by:],
        prompt_length=0, turn_spans=tuple(evolve(span, start=span.start - by, end=span.end - by) for span in trace.turn_spans),
        version_spans=tuple(evolve(span, start=span.start - by, end=span.end - by) for span in trace.version_spans),
    )  # fmt: skip


MUTANTS: dict[str, tuple[str, Callable[[Built], Built]]] = {
    "an offset too high": ("invariant 1: trace 1, from token 11", part(1, lambda trace: evolve(trace, offset=trace.offset + 1))),
    "an offset too low": ("invariant 1: trace 1, from token 9", part(1, lambda trace: evolve(trace, offset=trace.offset - 1))),
    "an offset below nothing": ("invariant 1: trace 0, from token -1", part(0, lambda trace: evolve(trace, offset=-1))),
    "a part that says it is whole": ("invariant 4: trace 1 is part 0 of 1, where part 1 of 4", part(1, lambda trace: evolve(trace, part=0, parts=1))),
    "a part of another number": ("invariant 4: trace 1 is part 2 of 4", part(1, lambda trace: evolve(trace, part=2))),
    "a part of more": ("invariant 4: trace 1 is part 1 of 5", part(1, lambda trace: evolve(trace, parts=5))),
    "a part of none": ("invariant 4: trace 4 is part 0 of 0", part(4, lambda trace: evolve(trace, parts=0))),
    "parts in another order": ("invariant 4: trace 1 is part 2 of 4", order(0, 2, 1, 3, 4)),
    "a part dropped": ("invariant 4: trace 1 is part 2 of 4", order(0, 2, 3, 4)),
    "the first part dropped": ("invariant 4: trace 0 is part 1 of 4", order(1, 2, 3, 4)),
    "the last part dropped": ("invariant 4: trace 3 is part 0 of 1", order(0, 1, 2, 4)),
    "the last trace's parts are not all there": ("invariant 4: the last trace is part 2 of 4", order(4, 0, 1, 2)),
    "a part twice": ("invariant", order(0, 1, 1, 2, 3, 4)),
    "a first token that is trained": ("invariant 1: the first token of trace 1 is trained", part(1, bare)),
    "parts that overlap": ("invariant 4: trace 1 begins at 9 of its row, and the part before it ends at 10, with turn 1", part(1, earlier)),
    "a part of another line": ("invariant 4: trace 1 begins at 0", lambda made: evolve(made, traces=(
        *(evolve(made.traces[4], part=0, parts=2), evolve(made.traces[0], part=1, parts=2)), *made.traces[1:4]))),
}  # fmt: skip


@pytest.mark.parametrize(("invariant", "mutant"), MUTANTS.values(), ids=MUTANTS.keys())
def test_every_mutant_part_is_caught(invariant: str, mutant: Callable[[Built], Built]) -> None:
    tree, made = sliced()
    check(tree.turns, made)
    with pytest.raises(InvariantViolated, match=invariant):
        check(tree.turns, mutant(made))


def test_single_part_is_checked_too() -> None:
    tree, made = sliced()
    by_index = {turn.index: turn for turn in tree.turns}
    for number, trace in enumerate(made.traces):
        check_trace(f"trace {number}", trace, by_index, train_failed=False)
    with pytest.raises(InvariantViolated, match="invariant 1: it, from token 0 on, has the samples"):
        check_trace("it", evolve(made.traces[1], offset=0), by_index, train_failed=False)


def test_parts_belong_to_one_lineage() -> None:
    tree = line((2, 2))
    tree.add(0, 2, 2)
    tree.add(0, 8, 2)
    one, other = (row(line_to({turn.index: turn for turn in tree.turns}, leaf), {leaf}) for leaf in (1, 2))
    cut = [*rows(line_to({turn.index: turn for turn in tree.turns}, 2), {2}, limit=5)]
    assert [trace.offset for trace in cut] == [9]
    mixed = (evolve(one, part=0, parts=2), evolve(cut[0], part=1, parts=2))
    with pytest.raises(
        InvariantViolated,
        match="invariant 4: trace 1 begins at 9 of its row, and the part before it ends at 8, with turn 1",
    ):
        check_parts(mixed, {turn.index: turn for turn in tree.turns})
    check_parts((one, other), {turn.index: turn for turn in tree.turns})


def test_lengths_follow_the_tasks_limit() -> None:
    _tree, made = sliced()
    check_lengths(made.traces, 10)
    with pytest.raises(
        InvariantViolated, match="invariant 1: trace 0 is part 0 of 4 from token 0 on, where rows are whole"
    ):
        check_lengths(made.traces, None)
    with pytest.raises(
        InvariantViolated,
        match="invariant 4: trace 0 has 10 tokens, 9 are the most, and it is not marked as over long",
    ):
        check_lengths(made.traces, 9)
    with pytest.raises(InvariantViolated, match="it is marked as over long"):
        check_lengths([evolve(made.traces[0], over_long=True)], 10)


def test_direct_builder_calls_slice_too() -> None:
    tree = line((3, 2), (1, 4))
    for builder in (prefix_merging, per_request):
        assert all(len(trace.token_ids) <= 6 for trace in builder(tree.turns, {"max_row_tokens": 6}).traces)
