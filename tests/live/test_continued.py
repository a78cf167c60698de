"""Sessions that go on where their node died, with real harnesses in real containers: the node is killed at a
turn, and only the turns since the last snapshot are sampled again.

Which harnesses run is chosen as in `test_forks_live.py`.
"""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from forking_kit import RESUMING, forking_program, parameters, prompt, task, told, trained
from live_kit import free_port, serving, short_temporary

from polarnode.core.trajectory import Trajectory, Turn
from polarnode.providers.volatile import RESUME_MARKER

pytestmark = [pytest.mark.podman, pytest.mark.harness]

EVERY, KILLED = 3, 5  # a snapshot before turns 3, 6, …; so many turns are there when the node is killed


def check_continued(name: str, theirs: Sequence[Turn], found: Trajectory) -> None:
    """The turns of an attempt that was lost, and the one that went on with it."""
    assert found.outcome.status == "completed", found.outcome
    went_on = found.continued_from
    assert went_on is not None
    turn = went_on.turn
    assert (went_on.session_id, turn % EVERY) == (name, 0)
    own = found.turns
    # at most the turns since the last snapshot are sampled again
    assert 0 <= len(theirs) - turn <= EVERY
    assert [each.sampled for each in own[:turn]] == [each.sampled for each in theirs[:turn]]
    if len(theirs) > turn:
        assert own[turn].sampled != theirs[turn].sampled
        # the same prompt, token for token
        assert prompt(own[turn]) == prompt(theirs[turn])
    # and the same workdir
    assert told(own[turn + 1], "before") == told(own[turn], "after")
    assert [each.index for each in own] == list(range(len(own)))
    assert {each.kind for each in own[1:]} == {"extend"}
    assert RESUME_MARKER not in json.dumps([str(each.new_messages) for each in own])
    # every token of the place is trained once, in the session that holds it
    assert trained(found) == found.sampled_tokens == sum(len(each.sampled) for each in own)


@pytest.mark.parametrize("harness", parameters(RESUMING))
def test_session_continues_after_node_kill(podman_works: None, tmp_path: Path, harness: str) -> None:
    program = forking_program(tmp_path, warm=0)
    state, port = tmp_path / "state", free_port()
    with short_temporary() as temporary:
        one = {"node_id": f"gone-{port}", "port": port, "program": program}
        with serving(state, temporary, **one) as node:
            spec = task(harness, "long-12", task_id="t", snapshot_at={"every": EVERY})
            [name] = node.submit(**spec)
            node.under_way(name, turns=KILLED)
            os.kill(node.process.pid, signal.SIGKILL)
            node.process.wait()
        with serving(state, temporary, **one) as node:
            lost = node.finished(name)
            assert lost.retried_as is not None
            assert lost.outcome.status == "interrupted"
            check_continued(name, lost.turns, node.finished(lost.retried_as))
