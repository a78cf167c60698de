"""What a node counts of its sessions: by a fixed set of labels, and copied for whoever reads it elsewhere."""

from collections import Counter

import pytest
from attrs import evolve
from journal_samples import make_trajectory, make_turn

from polarnode.core.conversation import Sampling
from polarnode.core.task import Budgets
from polarnode.core.trajectory import LeftOut, Outcome, Timing
from polarnode.gateway.live_sessions import LiveSession, SessionBudget
from polarnode.merge.lineage import Lineages
from polarnode.merge.turn_kinds import REASONS
from polarnode.providers.contract import Fault
from polarnode.support.metrics import DURATION_BOUNDS_S, LEFT_OUT, OTHER, DurationHistogram, NodeCounters


def test_turn_counted_by_its_labels() -> None:
    tally = NodeCounters()
    turn = evolve(
        make_turn("s"),
        reason="appended",
        prompt_length=10,
        notes=("edited: it", "edited: too", "ignored: $.x"),
    )
    tally.turn(turn)
    tally.turn(evolve(turn, state="failed", role="subagent"))
    assert tally.turns == {
        ("anthropic", "root", "appended", "main", "complete"): 1,
        ("anthropic", "root", "appended", "subagent", "failed"): 1,
    }
    assert (tally.sampled_tokens, tally.prompt_tokens) == (
        {"main": 3, "subagent": 3},
        {"new": 8, "reused": 12},
    )
    assert tally.notes == {"edited": 4}


@pytest.mark.parametrize(("reason", "expected"), [("first", "first"), ("what a plug-in made up", OTHER)])
def test_unknown_reason_counts_as_other(reason: str, expected: str) -> None:
    tally = NodeCounters()
    tally.turn(evolve(make_turn("s"), reason=reason))
    assert [labels[2] for labels in tally.turns] == [expected]
    assert OTHER not in REASONS


def test_ended_session_counts_its_rows() -> None:
    tally = NodeCounters()
    left = (LeftOut(turn=0, reason="superseded"), LeftOut(turn=1, reason="a word of a builder of one's own"))
    tally.published(evolve(make_trajectory("s", turns=2), left_out=left))
    tally.published(make_trajectory("s", status="timeout"))
    assert tally.sessions == {"completed": 1, "timeout": 1}
    assert (tally.traces, tally.trainable_tokens) == (2, 6)
    assert tally.left_out_turns == {"superseded": 1, OTHER: 1}
    assert tally.left_out_tokens == {"superseded": 3, OTHER: 3}
    assert OTHER not in LEFT_OUT


def test_seconds_counted_in_their_bucket() -> None:
    tally = NodeCounters()
    tally.turn(evolve(make_turn("s"), ended_s=2.0, first_token_s=0.1))
    tally.turn(evolve(make_turn("s"), ended_s=1e6, first_token_s=None))
    timing = Timing(init_s=1.0, ready_s=5.0, run_s=30.0, post_s=2.0)
    tally.published(evolve(make_trajectory("s"), timing=timing))
    places = {bound: place for place, bound in enumerate(DURATION_BOUNDS_S)}
    assert tally.turn_s == DurationHistogram(
        Counter({places[3.0]: 1, len(DURATION_BOUNDS_S): 1}), 1_000_002.0
    )
    assert tally.first_token_s == DurationHistogram(Counter({places[0.1]: 1}), 0.1)
    assert tally.session_s == DurationHistogram(Counter({places[100.0]: 1}), 33.0)
    assert tally.ready_s == DurationHistogram(Counter({places[10.0]: 1}), 5.0)
    then = tally.copied()
    tally.turn_s.note(1.0)
    assert sum(then.turn_s.counts.values()) == 2, "a copy stays as it was"


def test_lost_session_counted_by_fault() -> None:
    """A session that lost its place is counted by whose fault it was, and nowhere else."""
    tally = NodeCounters()
    for outcome in (
        Outcome(status="error", boundary="runtime"),
        Outcome(status="interrupted", boundary="node"),
        Outcome(status="interrupted"),
    ):
        tally.lost(outcome)
    assert tally.replaced == {"runtime": 1, "node": 1, OTHER: 1}
    assert (tally.sessions, tally.traces) == ({}, 0)


def test_live_session_counts_into_tally() -> None:
    tally, lineages = NodeCounters(), Lineages(session_id="s", secret=b"secret")
    budget = SessionBudget(Budgets(), tally=tally)
    live = LiveSession("s", "key", lineages, Sampling(), budget, lambda turn: None)
    live.budget.count_refusal(Fault(kind="session_over", message="over"))
    assert tally.refusals == live.budget.counters.refusals == {"session_over": 1}


def test_copy_does_not_change() -> None:
    tally = NodeCounters()
    tally.turn(make_turn("s"))
    then = tally.copied()
    tally.turn(make_turn("s"))
    tally.malformed_calls += 1
    tally.refused(Fault(kind="session_over", message="over"))
    assert (sum(then.turns.values()), then.malformed_calls, sum(then.refusals.values())) == (1, 0, 0)
    assert then.sampled_tokens == {"main": 3}
