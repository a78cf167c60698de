"""Which sessions of a group are usable, what the group is, how stale a session is; and the event that says
so, there and back.
"""

from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from journal_samples import make_trajectory
from trainers_kit import one_row, session_of_two_rows

from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.core.status import RewardEvent
from polarnode.core.task import GroupSpec
from polarnode.core.trajectory import Outcome, Trajectory, VersionSpan
from polarnode.groups import (
    EARLY_STOP_REASON,
    Group,
    SessionFacts,
    facts_of,
    group_json,
    judged,
    judged_again,
    read_group,
    rows_of,
    stamp_staleness,
    updates_behind,
    with_rewards,
)
from polarnode.groups.group import make_member

EARLY = Outcome(status="cancelled", reason=f"{EARLY_STOP_REASON} in run: 2 usable sessions were wanted")
LOST = Outcome(status="error", boundary="engine")


def facts(
    index: int = 0,
    *,
    reward: float | None = 1.0,
    outcome: Outcome | str = "completed",
    trainable: int | None = 5,
    behind: int | None = 0,
) -> SessionFacts:
    outcome = Outcome(status=outcome) if isinstance(outcome, str) else outcome  # type: ignore[arg-type]
    return SessionFacts(
        session_id=f"s{index}",
        sample_index=index,
        outcome=outcome,
        reward=reward,
        trainable_tokens=trainable,
        staleness=behind,
    )


def group(*members: SessionFacts, **spec: Any) -> Group:
    placed = [evolve(each, session_id=f"s{index}", sample_index=index) for index, each in enumerate(members)]
    return judged(GroupSpec(**spec), placed, task_id="t", group_id="g")


# ── a session ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (facts(), None),
        (facts(reward=0.0), None),
        (facts(outcome="timeout", reward=0.0), None),
        (facts(outcome="failed", reward=0.5), None),
        (facts(trainable=None), None),
        (facts(outcome="cancelled", reward=None), "no reward: cancelled"),
        (facts(outcome="timeout", reward=None), "no reward: timeout"),
        (facts(outcome=Outcome(status="error", boundary="evaluator"), reward=None), "no reward: error"),
        (facts(outcome=EARLY, reward=None), EARLY_STOP_REASON),
        (facts(outcome=LOST, reward=None), "lost to the machine: engine"),
        (
            facts(outcome=Outcome(status="error", boundary="runtime"), reward=None),
            "lost to the machine: runtime",
        ),
        (facts(outcome="interrupted", reward=None), "lost to the machine: node"),
        (facts(trainable=0), "no trainable token"),
    ],
)
def test_usable_session_needs_reward_and_token(one: SessionFacts, why: str | None) -> None:
    member = make_member(GroupSpec(), one)
    assert (member.usable, member.why) == (why is None, why)
    assert (member.status, member.reward, member.staleness) == (one.outcome.status, one.reward, one.staleness)


@pytest.mark.parametrize(
    ("most", "stale", "behind", "usable", "is_stale"),
    [
        (None, "drop", 9, True, False),
        (2, "drop", 2, True, False),
        (2, "drop", 3, False, True),
        (2, "mark", 3, True, True),
        (0, "drop", 0, True, False),
        (0, "drop", 1, False, True),
        (0, "drop", None, True, False),
    ],
)
def test_session_over_staleness_limit(
    most: int | None, stale: Any, behind: int | None, usable: bool, is_stale: bool
) -> None:
    """A session too far behind is dropped or marked."""
    member = make_member(GroupSpec(max_staleness=most, stale=stale), facts(behind=behind))
    assert (member.usable, member.stale) == (usable, is_stale)
    assert member.why == (None if usable else f"stale: {behind} weight updates behind, {most} are allowed")


# ── a group ───────────────────────────────────────────────────────────────────


def test_group_states_from_usable_members() -> None:
    """A group is complete, partial, early or dropped."""
    lost, early, scored = (
        facts(outcome=LOST, reward=None),
        facts(outcome=EARLY, reward=None),
        facts(outcome="failed", reward=0.0),
    )
    assert (group(facts(), scored).state, group(facts(), scored).reason) == ("complete", None)
    some = group(facts(), lost, scored, lost)
    assert (some.state, some.reason) == (
        "partial",
        "some are missing: 2 of 4 sessions are usable (2 lost to the machine)",
    )
    stopped = group(facts(), lost, early, scored, early)
    assert (stopped.state, stopped.reason) == (
        "early",
        "early stop: 2 of 5 sessions are usable (1 lost to the machine, 2 early stop)",
    )
    few = group(facts(), lost, min_usable=2)
    assert (few.state, few.reason) == (
        "dropped",
        "too few: 1 of 2 sessions are usable, 2 are wanted (1 lost to the machine)",
    )
    assert group(lost).state == "dropped", "without a usable session there is no group"


def test_equal_rewards_drop_group_on_request() -> None:
    equal = (facts(reward=0.25), facts(reward=0.25), facts(outcome=LOST, reward=None))
    assert group(*equal).state == "partial"
    dropped = group(*equal, drop_uniform_reward=True)
    assert (dropped.state, dropped.reason) == (
        "dropped",
        "uniform reward: 2 of 3 sessions are usable, each with 0.25",
    )
    assert group(facts(reward=0.25), facts(reward=0.5), drop_uniform_reward=True).state == "complete"
    assert group(facts(), drop_uniform_reward=True).state == "dropped", "one alone is compared with nobody"


def test_members_keep_their_places_order() -> None:
    found = judged(GroupSpec(), [facts(2), facts(0), facts(1)], task_id="t", group_id="g")
    assert [member.sample_index for member in found.members] == [0, 1, 2]


# ── staleness ─────────────────────────────────────────────────────────────────


def sampled_by(*versions: str) -> Trajectory:
    """A session with a turn of each version, and the last turn cut in two by its update."""
    trajectory = make_trajectory("s", turns=len(versions))
    turns = tuple(
        evolve(turn, version_spans=(VersionSpan(version=name, start=0, end=3),))
        for turn, name in zip(trajectory.turns, versions, strict=True)
    )
    return evolve(trajectory, turns=turns)


@pytest.mark.parametrize(
    ("versions", "history", "behind"),
    [
        (("v1",), ("v1",), 0),
        (("v1",), ("v0", "v1", "v2", "v3"), 2),
        (("v3", "v1", "v2"), ("v1", "v2", "v3"), 2),
        (("v1",), ("v1", "v2", "v1"), 0),
        (("v2",), ("v1", "v2", "v1"), 1),
        (("v0",), ("v1", "v2"), None),
        (("v0", "v2"), ("v1", "v2"), 0),
        ((), ("v1",), None),
        (("v1",), (), None),
        (("", "v1"), ("", "v1"), None),  # weights that nobody named may be of any age
    ],
)
def test_staleness_counts_updates_since_oldest(
    versions: tuple[str, ...], history: tuple[str, ...], behind: int | None
) -> None:
    """Staleness is the updates since the oldest token."""
    assert updates_behind(sampled_by(*versions), history) == behind
    assert stamp_staleness(sampled_by(*versions), history).staleness == behind


def test_update_inside_turn_counts_older_half() -> None:
    (turn,) = sampled_by("v1").turns
    halves = (VersionSpan(version="v1", start=0, end=1), VersionSpan(version="v2", start=1, end=3))
    assert (
        updates_behind(evolve(sampled_by("v1"), turns=(evolve(turn, version_spans=halves),)), ("v1", "v2"))
        == 1
    )
    empty = (VersionSpan(version="v1", start=0, end=0), VersionSpan(version="v2", start=0, end=3))
    assert (
        updates_behind(evolve(sampled_by("v1"), turns=(evolve(turn, version_spans=empty),)), ("v1", "v2"))
        == 0
    )


# ── the event, and back ───────────────────────────────────────────────────────


def test_written_group_reads_back() -> None:
    written = group(
        facts(),
        facts(outcome=LOST, reward=None, behind=None),
        facts(behind=3, reward=0.5),
        max_staleness=1,
        stale="mark",
    )
    body = group_json(written)
    assert (body["rewards"], body["usable"], body["state"]) == ([1.0, None, 0.5], 2, "partial")
    assert read_group(body | {"to_come": 1}) == written
    assert isinstance(read_group(body), Group)


def test_group_holds_trajectories_in_order() -> None:
    mine = [make_trajectory(f"s{index}", sample_index=index) for index in range(3)]
    body = group_json(
        judged(
            GroupSpec(),
            [facts_of(mine[0]), facts(1, outcome=LOST, reward=None), facts_of(mine[2])],
            task_id="t",
            group_id="g",
        )
    )
    found = read_group(body, [mine[2], make_trajectory("other"), mine[1], mine[0]])
    assert found.trajectories == tuple(mine)
    assert found.usable == (mine[0], mine[2])
    assert read_group(body | {"state": "dropped"}, mine).usable == ()


def test_older_journal_events_are_judged() -> None:
    """Events of older journals are judged by what they say."""
    sessions: list[Json] = [
        {"session_id": "a", "sample_index": 0, "status": "completed", "reward": 1.0},
        {"session_id": "b", "sample_index": 1, "status": "interrupted", "reward": None},
    ]
    found = read_group({"task_id": "t", "group_id": "g", "sessions": sessions, "rewards": [1.0, None]})
    assert (found.state, [member.why for member in found.members]) == (
        "partial",
        [None, "lost to the machine: node"],
    )


def test_malformed_group_refused_with_path() -> None:
    with pytest.raises(Refused, match=r"sessions\[0\].status") as caught:
        read_group(
            {
                "task_id": "t",
                "group_id": "g",
                "sessions": [{"session_id": "a", "sample_index": 0, "status": "won"}],
            }
        )
    assert caught.value.path == "$.sessions[0].status"


# ── whatever the facts ────────────────────────────────────────────────────────

OUTCOMES = st.sampled_from(
    [
        EARLY,
        LOST,
        *(
            Outcome(status=status)
            for status in ("completed", "timeout", "failed", "cancelled", "interrupted")
        ),
    ]
)
FACTS = st.builds(
    facts,
    reward=st.none() | st.sampled_from([0.0, 0.5, 1.0]),
    outcome=OUTCOMES,
    trainable=st.none() | st.integers(0, 3),
    behind=st.none() | st.integers(0, 4),
)
SPECS = st.builds(
    GroupSpec,
    early_stop_min=st.none() | st.integers(1, 4),
    min_usable=st.integers(1, 4),
    max_staleness=st.none() | st.integers(0, 3),
    stale=st.sampled_from(["drop", "mark"]),
    drop_uniform_reward=st.booleans(),
)


@given(st.lists(FACTS, min_size=1, max_size=8), SPECS, st.randoms(use_true_random=False))
def test_group_judged_once_for_any_endings(members: list[SessionFacts], spec: GroupSpec, random: Any) -> None:
    """Whatever ended how a group is judged once and read as it was."""
    placed = [evolve(each, session_id=f"s{index}", sample_index=index) for index, each in enumerate(members)]
    found = judged(spec, placed, task_id="t", group_id="g")
    random.shuffle(placed)
    assert judged(spec, placed, task_id="t", group_id="g") == found, "whoever ended first"
    assert read_group(group_json(found)) == found
    usable = [member for member in found.members if member.usable]
    assert all((member.why is None) == member.usable for member in found.members)
    assert all(member.reward is not None for member in usable)
    assert (found.state == "complete") == (found.reason is None)
    if found.state != "dropped":
        assert len(usable) >= spec.min_usable
        assert not spec.drop_uniform_reward or len({member.reward for member in usable}) > 1
        assert (found.state == "complete") == (len(usable) == len(members))
    if spec.stale == "drop":
        assert not any(member.stale for member in usable)


# ── later rewards ─────────────────────────────────────────────────────────────


def later(name: str, reward: float | None, n: int = 1, **more: Any) -> RewardEvent:
    return RewardEvent(session_id=name, task_id="t", group_id="g", n=n, reward=reward, **more)


def test_last_late_reward_replaces_first() -> None:
    """A judge was down for one session, and scored the other by a test that was wrong."""
    down = evolve(make_trajectory("s0", reward=None), outcome=Outcome(status="error", boundary="evaluator"))
    whole = [down, make_trajectory("s1", sample_index=1, reward=1.0), make_trajectory("s2", sample_index=2)]
    before = judged(GroupSpec(min_usable=3), map(facts_of, whole), task_id="t", group_id="g").holding(whole)
    assert (before.state, before.usable) == ("dropped", ())
    given = [
        later("s1", 0.25, n=2, lineage_rewards={"0": 0.5}, turn_rewards={"0": 2.0}),
        later("s0", 0.75),
        later("s1", 9.0, n=1),
        later("s2", None, error="the judge is down"),
        later("another", 5.0),
    ]
    after = with_rewards(before, given, GroupSpec(min_usable=3))
    assert (after.state, after.reason) == ("complete", None)
    assert [each.reward for each in after.members] == [0.75, 0.25, 1.0]
    assert [each.reward for each in after.usable] == [0.75, 0.25, 1.0]
    traces = [each.traces[0] for each in after.trajectories]
    assert [(one.reward, one.turn_spans[0].reward) for one in traces] == [
        (0.75, None),
        (0.5, 2.0),
        (None, None),
    ]
    assert [row.advantage for row in rows_of([after])] == pytest.approx([0.125, -0.375, 0.5])
    assert with_rewards(before, [], GroupSpec(min_usable=3)) == before
    undone = with_rewards(after, [later("s1", 0.25, n=3)], GroupSpec(min_usable=3))
    assert undone.trajectories[1].traces[0].turn_spans[0].reward is None, "the last reward is all of it"


def test_lost_session_stays_lost() -> None:
    lost = evolve(make_trajectory("s0", reward=None), outcome=LOST)
    before = judged(GroupSpec(), [facts_of(lost)], task_id="t", group_id="g")
    assert with_rewards(before.holding([lost]), [later("s0", 1.0)]).usable == ()


# ── at delivery ───────────────────────────────────────────────────────────────


def ended(*sessions: Trajectory, **spec: Any) -> Group:
    """A group whose sessions ended when version 8 was served, the last that sampled a token of them."""
    known = [evolve(each, staleness=1) for each in sessions]
    whole = judged(GroupSpec(**spec), [facts_of(each) for each in known], task_id="t", group_id="g")
    return whole.holding(known)


def test_slow_readers_group_is_stale() -> None:
    """Its oldest trained token is of version 7."""
    whole = ended(one_row(), one_row(sample_index=1), max_staleness=1)
    assert judged_again(whole, [["6", "7", "8"]]) == whole
    later = judged_again(whole, [["6", "7", "8", "9"]])
    assert [(each.staleness, each.stale, each.usable) for each in later.members] == [(2, True, False)] * 2
    assert (later.state, later.usable) == ("dropped", ())
    assert later.members[0].why == "stale: 2 weight updates behind, 1 are allowed"
    assert rows_of([whole], served=("7", "8", "9")) == ()
    assert len(rows_of([whole], served=("7", "8"))) == len(rows_of([whole])) == 2


def test_stale_group_is_marked_on_request() -> None:
    whole = ended(one_row(), session_of_two_rows(sample_index=1), max_staleness=1, stale="mark")
    later = judged_again(whole, [["7", "8", "9", "10"]])
    assert [(each.staleness, each.stale, each.usable) for each in later.members] == [(3, True, True)] * 2
    assert (later.state, len(later.usable)) == ("complete", 2)


def test_group_judged_by_its_task() -> None:
    """Also where it was read from an event, and by the versions of an adapter. Without a limit, from a journal that
    did not keep it, or with versions that nobody knows, it stays as it is.
    """
    fresh = session_of_two_rows(sample_index=1)
    fresh = evolve(fresh, traces=fresh.traces[1:])  # of version 8 alone
    whole = ended(one_row(), fresh, max_staleness=1, min_usable=1)
    again = read_group(group_json(whole), whole.trajectories)
    assert again.requires == whole.requires
    for one in (whole, again):
        later = judged_again(one, [["base"], ["7", "8", "9"]])
        assert [each.usable for each in later.members] == [False, True]
        assert (later.state, later.reason) == (
            "partial",
            "some are missing: 1 of 2 sessions are usable (1 stale)",
        )
    assert judged_again(ended(one_row()), [["7", "8", "9"]]).members[0].staleness == 1
    assert judged_again(whole, [["a", "b"]]) == whole
    old: Any = {name: value for name, value in dict(group_json(whole)).items() if name != "requires"}
    assert judged_again(read_group(old, whole.trajectories), [["7", "8", "9"]]).state == "complete"


def test_rejudging_never_lowers_staleness() -> None:
    whole = ended(evolve(one_row(), staleness=1), max_staleness=1)
    aged = evolve(whole, members=tuple(evolve(each, staleness=5) for each in whole.members))
    assert judged_again(aged, [["7", "8"]]).members[0].staleness == 5
