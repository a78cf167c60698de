"""Sessions as nodes publish them, for the trainers' formats: turns of every shape, built by our own builders
and held to our own laws.
"""

from collections.abc import Sequence
from typing import Any

from attrs import evolve
from hypothesis import strategies as st

from polarnode.core.arrays import RoutedExperts, TopLogprobs, floats, ids
from polarnode.core.conversation import Sampling, Usage
from polarnode.core.task import BuilderSpec, HarnessSpec, TaskSpec
from polarnode.core.trajectory import ForkedFrom, Outcome, Timing, Trajectory, Turn, Verdict, VersionSpan
from polarnode.groups import Group, Member
from polarnode.merge.trajectory import Identity, Result, assemble

LAYERS, EXPERTS = 2, 3


def make_turn(
    index: int,
    parent: Turn | None,
    delta: Sequence[int],
    sampled: Sequence[int],
    *,
    versions: Sequence[tuple[str, int]] | None = None,
    logprobs: Sequence[float] | None = None,
    temperature: float = 1.0,
    carry: bool = False,
    wide: bool = False,
    **more: Any,
) -> Turn:
    """A turn behind `parent`; `versions` are (version, tokens), `carry` gives it alternatives and experts."""
    before = 0 if parent is None else parent.end
    prompt, count = before + len(delta), len(sampled)
    spans, start = [], 0
    for version, length in versions or [("7", count)]:
        spans.append(VersionSpan(version=version, start=start, end=start + length))
        start += length
    said: dict[str, Any] = {
        "finish_reason": "stop",
        "lineage": 0 if parent is None else parent.lineage,
        "kind": "root" if parent is None else "extend",
    } | more
    if carry:
        first = 0 if parent is None else parent.end - 1
        said |= {"top": top(index, count), "routed": experts(first, prompt + count - 1, wide=wide)}
    return Turn(
        session_id="s", index=index, provider="openai_chat",
        parent=None if parent is None else parent.index, reason="", prompt_delta=ids(delta), prompt_length=prompt, sampled=ids(sampled),
        logprobs=floats([-0.5 - place / 8 - index for place in range(count)] if logprobs is None else logprobs), version_spans=tuple(spans),
        used=Sampling(temperature=temperature), usage=Usage(prompt_tokens=prompt, cached_tokens=before), started=float(index), ended_s=0.5, **said,
    )  # fmt: skip


def top(mark: int, count: int) -> TopLogprobs:
    return TopLogprobs(
        k=2, ids=ids(range(mark, mark + 2 * count)), logprobs=floats([-step / 4 for step in range(2 * count)])
    )


def experts(start: int, end: int, *, wide: bool = False) -> RoutedExperts:
    """Rows that tell their position."""
    data = b"".join(
        ((place % 256).to_bytes(2 if wide else 1, "little")) * (LAYERS * EXPERTS)
        for place in range(start, end)
    )
    return RoutedExperts(
        start=start, layers=LAYERS, top_k=EXPERTS, dtype="int16" if wide else "uint8", data=data
    )


def publish(
    turns: Sequence[Turn],
    *,
    builder: str = "prefix_merging",
    sample_index: int = 0,
    reward: float | None = 1.0,
    **more: Any,
) -> Trajectory:
    """The trajectory of these turns, as a node would publish it; a law that it breaks fails the test."""
    config = more.pop("config", {"train_roles": ["main", "subagent", "auxiliary", "compaction"]})
    spec = TaskSpec(
        instruction="do it",
        harness=HarnessSpec(name="pi"),
        builder=BuilderSpec(name=builder, config=config),
        metadata=more.pop("metadata", {}),
    )
    verdict = (
        None
        if reward is None
        else Verdict(
            reward=reward,
            turn_rewards=more.pop("turn_rewards", {}),
            lineage_rewards=more.pop("lineage_rewards", {}),
        )
    )
    result = Result(
        outcome=more.pop("outcome", Outcome(status="completed")), verdict=verdict, timing=Timing(run_s=9.0)
    )
    identity = Identity(
        session_id=more.pop("session_id", f"s{sample_index}"), task_id="t", group_id="g", sample_index=sample_index, harness="pi",
        harness_version="1", model="tiny", node="n0", forked_from=more.pop("forked_from", None),
    )  # fmt: skip
    found = assemble(identity, spec, turns, result)
    assert found.outcome.boundary != "laws", found.outcome.reason
    assert not more, more
    return found


def one_row(**more: Any) -> Trajectory:
    """Two turns in one row; the second saw the weights change in its middle: positions 3, 4 and 7, 8, 9 are
    trained.
    """
    first = make_turn(0, None, [10, 11, 12], [20, 21], versions=[("7", 2)], carry=True)
    second = make_turn(
        1, first, [13, 14], [22, 23, 24], versions=[("7", 1), ("8", 2)], temperature=0.5, carry=True
    )
    return publish([first, second], **more)


def session_of_two_rows(**more: Any) -> Trajectory:
    """Two lineages, a row each."""
    first = make_turn(0, None, [10, 11], [20, 21])
    other = make_turn(1, None, [30, 31, 32], [40], versions=[("8", 1)], lineage=1)
    return publish([first, other], **more)


def taught(trajectory: Trajectory) -> Trajectory:
    """The session with the logprobs of a teacher that is a quarter of a nat surer of every trained token."""
    traces = []
    for trace in trajectory.traces:
        pairs = zip(trace.logprobs, trace.loss_mask, strict=True)
        said = floats(value + 0.25 if trained else 0.0 for value, trained in pairs)
        traces.append(evolve(trace, teacher_logprobs=said))
    return evolve(trajectory, traces=tuple(traces))


def session_without_rows(status: Any = "error", **more: Any) -> Trajectory:
    """A session that ended before it sampled."""
    return publish([], outcome=Outcome(status=status, reason="it was so"), reward=None, **more)


def group_of(*trajectories: Trajectory, lost: Sequence[Trajectory] = ()) -> Group:
    members = [
        Member(
            session_id=each.session_id,
            sample_index=each.sample_index,
            status=each.outcome.status,
            reward=each.reward,
            usable=usable,
        )
        for usable, some in ((True, trajectories), (False, lost))
        for each in some
    ]
    state: Any = "partial" if lost else "complete"
    return Group(
        task_id="t", group_id="g", state=state, members=tuple(members), trajectories=(*trajectories, *lost)
    )


# ── any session ───────────────────────────────────────────────────────────────

LOGPROBS = st.floats(-20, 0, width=32, allow_nan=False)
TOKENS = st.integers(0, 2**17)


@st.composite
def published(draw: st.DrawFn) -> Trajectory:
    """A session of up to five turns, forking at will, merged or not, whole or in slices."""
    carry, wide = draw(st.booleans()), draw(st.booleans())
    turns: list[Turn] = []
    for index in range(draw(st.integers(1, 5))):
        parent = draw(st.none() | st.sampled_from(turns)) if turns else None
        delta = draw(st.lists(TOKENS, min_size=0 if parent is not None and not carry else 1, max_size=5))
        sampled = draw(st.lists(TOKENS, min_size=1, max_size=6))
        cut = draw(st.integers(0, len(sampled) - 1))
        newest = draw(st.integers(0, 12))
        versions = (
            [(str(newest), cut), (str(newest + 1), len(sampled) - cut)]
            if cut
            else [(str(newest), len(sampled))]
        )
        logprobs = draw(st.lists(LOGPROBS, min_size=len(sampled), max_size=len(sampled)))
        turns.append(
            make_turn(
                index, parent, delta, sampled, versions=versions, logprobs=logprobs, temperature=draw(st.sampled_from((0.5, 0.7, 1.0))),
                carry=carry, wide=wide, lineage=index if parent is None else parent.lineage,
                finish_reason=draw(st.sampled_from(("stop", "length", "tool_calls"))),
            )
        )  # fmt: skip
    limit = draw(st.none() | st.integers(4, 12))
    config: dict[str, Any] = {"train_roles": ["main", "subagent", "auxiliary", "compaction"]} | (
        {} if limit is None else {"max_row_tokens": limit}
    )
    return publish(
        turns,
        builder=draw(st.sampled_from(("prefix_merging", "per_request"))),
        config=config,
        reward=draw(st.floats(-1, 1)),
    )


@st.composite
def trees(draw: st.DrawFn) -> list[Trajectory]:
    """A session, forks of it and forks of forks: each goes on from some turn of another one. No two sampled
    tokens have one id.
    """
    fresh = iter(range(1, 2**17))
    config: dict[str, Any] = {"train_roles": ["main", "subagent", "auxiliary", "compaction"]}
    if (limit := draw(st.none() | st.integers(4, 12))) is not None:
        config["max_row_tokens"] = limit
    builder = draw(st.sampled_from(("prefix_merging", "per_request")))
    found: list[Trajectory] = []
    for number in range(draw(st.integers(2, 6))):
        whose = f"s{number}"
        parent = draw(st.sampled_from(found)) if found else None
        turn = 0 if parent is None else draw(st.integers(0, len(parent.turns) - 1))
        got = draw(st.integers(0, turn))
        turns = [] if parent is None else [evolve(each, session_id=whose) for each in parent.turns[:got]]
        for index in range(len(turns), len(turns) + draw(st.integers(1, 3))):
            behind = draw(st.none() | st.sampled_from(turns)) if turns else None
            delta = [next(fresh) for _ in range(draw(st.integers(0 if behind else 1, 3)))]
            sampled = [next(fresh) for _ in range(draw(st.integers(1, 4)))]
            lineage = index if behind is None else behind.lineage
            turns.append(evolve(make_turn(index, behind, delta, sampled, lineage=lineage), session_id=whose))
        fork = None if parent is None else ForkedFrom(
            session_id=parent.session_id, turn=turn, got=got, by="replay"
        )  # fmt: skip
        found.append(
            publish(
                turns,
                sample_index=number,
                session_id=whose,
                builder=builder,
                config=config,
                reward=0.5,
                forked_from=fork,
            )
        )
    return found


def trained(trajectory: Trajectory) -> list[list[tuple[int, float, str]]]:
    """(id, logprob, version) of each trained token, row by row: what every format must say again."""
    found = []
    for trace in trajectory.traces:
        versions = {
            place: span.version for span in trace.version_spans for place in range(span.start, span.end)
        }
        found.append(
            [
                (trace.token_ids[place], trace.logprobs[place], versions[place])
                for place, one in enumerate(trace.loss_mask)
                if one
            ]
        )
    return [row for row in found if row]
