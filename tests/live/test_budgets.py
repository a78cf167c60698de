"""How sessions end when it is not by themselves: budgets, exit codes, a trainer's cancel, a container that is
killed. What was captured stays.

All on one node, side by side, and none touches another.
"""

import time

import pytest
from live_kit import ServingNode, container_of, podman, running, until

from polarnode.core.trajectory import Trajectory

pytestmark = [pytest.mark.podman, pytest.mark.engine]

RUN_S = 40.0  # seconds: an agent's three short turns take one, and ten on a machine ten times slower
NUMBER = 4_201_337  # seconds that processes left behind sleep: found by it
POST_S = 120.0


def held(trajectory: Trajectory) -> Trajectory:
    """A trajectory whose turns are in its traces: it was not spoilt by how it ended."""
    complete = [turn.index for turn in trajectory.turns if turn.state == "complete" and turn.sampled]
    assert complete
    assert set(complete) <= {span.turn for trace in trajectory.traces for span in trace.turn_spans}
    return trajectory


def left_nothing(node: ServingNode, mark: str) -> None:
    """Nothing with `mark` in its command line runs on this machine any more."""
    until(lambda: not running(mark), f"processes of {mark} are gone", within=60)


@pytest.fixture(scope="module", autouse=True)
def overrunning(node: ServingNode) -> str:
    """A session that runs out of time while the other tests run."""
    # the pattern must not find its own shell
    script = f'test "$(cat /work/turns.txt)" = 3 && ! pgrep -f "[{str(NUMBER)[0]}]{str(NUMBER)[1:]}"'
    evaluator = {"name": "command", "config": {"script": script}}
    return node.agent(
        turns=3,
        background=NUMBER,
        sleep=3600,
        evaluator=evaluator,
        budgets={"run_s": RUN_S, "post_s": POST_S},
    )


def test_evaluator_timeout_costs_only_reward(node: ServingNode) -> None:
    evaluator = {"name": "command", "config": {"argv": ["sleep", "4201447"]}}
    trajectory = held(node.finished(node.agent(turns=1, evaluator=evaluator, budgets={"post_s": 2.0})))
    assert (trajectory.outcome.status, trajectory.outcome.clock, trajectory.outcome.boundary) == (
        "error",
        "post",
        "evaluator",
    )
    assert trajectory.reward is None
    left_nothing(node, "4201447")


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_turn_budget_refuses_next_call(node: ServingNode, api: str) -> None:
    trajectory = held(node.finished(node.agent(turns=None, api=api, budgets={"max_turns": 4})))
    assert (trajectory.outcome.status, trajectory.outcome.clock) == ("timeout", "turns")
    assert len([turn for turn in trajectory.turns if turn.state == "complete"]) == 4
    # a plain 400, after which a harness does not ask again
    assert trajectory.metrics["refusals"] == {"budget_spent": 1}
    assert "refused 400" in (trajectory.outcome.log_tail or "")


def test_token_budget_refuses_next_call(node: ServingNode) -> None:
    trajectory = held(node.finished(node.agent(turns=None, max_tokens=16, budgets={"max_tokens": 20})))
    assert (trajectory.outcome.status, trajectory.outcome.clock) == ("timeout", "tokens")
    assert sum(len(turn.sampled) for turn in trajectory.turns) == 20


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_repeated_error_ends_agent(node: ServingNode, api: str) -> None:
    """An agent that meets the same error in every turn is ended with what it has."""
    looping = node.agent(turns=None, api=api, reply="Error: no tool was called.", budgets={"max_repeats": 3})
    working = node.agent(turns=5, api=api, budgets={"max_repeats": 3})
    trajectory = held(node.finished(looping))
    assert (trajectory.outcome.status, trajectory.outcome.clock) == ("timeout", "repeats")
    assert (trajectory.outcome.boundary, trajectory.attempt) == (None, 0)
    assert len([turn for turn in trajectory.turns if turn.state == "complete"]) == 3
    assert trajectory.metrics["refusals"] == {"budget_spent": 1}
    assert held(node.finished(working)).outcome.status == "completed"


def test_failed_harness_shows_own_words(node: ServingNode) -> None:
    trajectory = held(node.finished(node.agent(turns=2, exit=3, say="last-words-of-a-failure")))
    assert (trajectory.outcome.status, trajectory.outcome.exit_code) == ("failed", 3)
    assert "last-words-of-a-failure" in (trajectory.outcome.log_tail or "")


def test_cancelled_session_keeps_its_capture(node: ServingNode) -> None:
    session = node.agent(turns=None, say="to-be-cancelled")
    node.under_way(session, turns=2)
    asked = time.monotonic()
    assert node.client.cancel(node.task_of(session))
    trajectory = held(node.finished(session))
    print(f"cancelled in {time.monotonic() - asked:.2f} s")
    assert trajectory.outcome.status == "cancelled"
    assert len(trajectory.turns) >= 2
    left_nothing(node, "to-be-cancelled")
    assert not node.client.cancel(node.task_of(session))


def test_killed_container_costs_own_session(node: ServingNode) -> None:
    victim, sibling = (
        node.agent(turns=None, say="the-victim", budgets={"retries": 0}),
        node.agent(turns=None, say="the-sibling"),
    )
    node.under_way(victim, sibling, turns=2)
    container = container_of(running("the-victim")[0], node.node_id)
    podman("kill", container)
    ended = held(node.finished(victim))
    assert (ended.outcome.status, ended.outcome.boundary) == ("error", "runtime")
    node.under_way(sibling, turns=len(node.captured(sibling)) + 2)
    assert container not in [each["Id"] for each in node.containers()]
    node.client.cancel(node.task_of(sibling))
    assert held(node.finished(sibling)).outcome.status == "cancelled"


def test_timed_out_harness_is_evaluated(node: ServingNode, overrunning: str) -> None:
    """A harness out of time is evaluated, and leaves no process."""
    trajectory = held(node.finished(overrunning))
    assert (trajectory.outcome.status, trajectory.outcome.clock) == ("timeout", "run")
    assert "left behind" in (trajectory.outcome.log_tail or "")
    assert trajectory.reward == 1.0, trajectory.metrics
    assert all(trace.reward == 1.0 for trace in trajectory.traces)
    assert trajectory.timing.run_s >= RUN_S
    assert 0 < trajectory.timing.post_s < POST_S
    print(f"out of time after {trajectory.timing.run_s:.1f} s, evaluated in {trajectory.timing.post_s:.1f} s")
    left_nothing(node, str(NUMBER))
