"""`kill -9` of an engine host in mid-run: calls fail at once, harnesses try again, sessions go on with the
host that follows.
"""

import os
import signal
import time

import pytest
from live_kit import ServingNode, until

from polarnode.core.trajectory import Trajectory
from polarnode.support.concurrency import group_members

pytestmark = [pytest.mark.podman, pytest.mark.engine]

# seconds: some ms on a quiet machine, and it must not be the minutes of a harness's own patience
AT_ONCE_S = 10.0
TURNS = 3
# nearly uniform: a sample hardly ever ends before its limit, so calls are in flight
LONG = {"temperature": 100.0, "max_tokens": 800}


def test_sessions_survive_their_engine_host(node: ServingNode) -> None:
    before = node.host()
    sessions = [
        node.agent(turns=TURNS, stream=stream, api=api, max_tokens=800, sampling=LONG)
        for stream, api in ((True, "openai"), (False, "openai"), (True, "anthropic"))
    ]
    # and no more: a quick machine is done with some sessions sooner
    until(lambda: node.host()["in_flight"] >= 2, "calls are in flight")
    killed, killed_wall = time.monotonic(), time.time()
    os.kill(before["pid"], signal.SIGKILL)
    noticed = (
        until(lambda: node.host()["pid"] != before["pid"] and time.monotonic(), "the node notices") - killed
    )
    until(lambda: node.host()["state"] == "ready", "a new host serves")
    served = time.monotonic() - killed
    trajectories = [node.finished(one) for one in sessions]
    failed = [turn for each in trajectories for turn in each.turns if turn.state == "failed"]
    took = [turn.started + turn.ended_s - killed_wall for turn in failed]
    print(
        f"noticed after {noticed:.2f} s, {len(failed)} calls failed after {[round(one, 2) for one in took]}"
        f" s, a new host serves after {served:.1f} s"
    )
    assert failed
    assert max(took) < AT_ONCE_S
    assert node.host()["restarts"] == before["restarts"] + 1
    assert group_members(before["pid"]) == []
    for trajectory in trajectories:
        went_on(trajectory)


def went_on(trajectory: Trajectory) -> None:
    """All turns asked for came, and what the dead host left is known for that and not trained."""
    assert trajectory.outcome.status == "completed", trajectory.outcome
    assert len([turn for turn in trajectory.turns if turn.state == "complete"]) == TURNS
    failed = {turn.index for turn in trajectory.turns if turn.state == "failed"}
    assert failed <= {left.turn for left in trajectory.left_out}
    assert not failed & {span.turn for trace in trajectory.traces for span in trace.turn_spans}
    assert trajectory.metrics["failed_turns"] == len(failed)
