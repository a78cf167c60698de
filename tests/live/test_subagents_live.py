"""A harness starts an agent of its own: its turns are known for a sub-agent's, in a lineage of their own, and
the main conversation stays one.

The engine is steered (`steering.py`): the main agent's script hands a task to a helper, whose prompt names
another script. What runs is chosen as in `test_harness_matrix.py`.
"""

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from live_kit import ServingNode, keep_row, until
from matrix_cases import HELPED, HELPED_FILE, Helped

from polarnode.core.trajectory import Trajectory, Turn

pytestmark = [pytest.mark.podman, pytest.mark.engine, pytest.mark.harness]

PATIENCE_S = 2400.0  # seconds, as for the matrix: what was submitted before is run before
WANTED = os.environ.get("POLARNODE_MATRIX", "ci")
CHECK = f"test \"$(cat /work/{HELPED_FILE})\" = 'a word from a helper'"


def wanted(helped: Helped) -> bool:
    return helped.in_ci if WANTED == "ci" else WANTED == "all" or helped.main.name in WANTED.split(",")


def parameters() -> list[object]:
    skip = pytest.mark.skip(reason="not of CI's part of the matrix: make harness-matrix runs it")
    return [
        pytest.param(helped, id=helped.main.name, marks=() if wanted(helped) else skip) for helped in HELPED
    ]


@pytest.fixture(scope="module")
def sessions(steered: ServingNode) -> dict[str, str]:
    found = {}
    for helped in filter(wanted, HELPED):
        task = {**helped.main.task(), "evaluator": {"name": "command", "config": {"script": CHECK}}}
        found[helped.harness] = steered.submit(**task)[0]
    return found


@pytest.mark.parametrize("helped", parameters())
def test_sub_agent_is_recognised(steered: ServingNode, sessions: dict[str, str], helped: Helped) -> None:
    session = sessions[helped.harness]
    until(
        lambda: steered.client.session(session)["session"]["outcome"],
        f"{helped.main.name} is over",
        within=PATIENCE_S,
    )
    trajectory = steered.client.trajectory(session, turns="full")
    problems = list(
        problems_of(
            trajectory, helped, {line["prompt_tokens"]: line["case"] for line in steered.forced(session)}
        )
    )
    keep_row(row(trajectory, helped, problems))
    print(told(trajectory))
    assert not problems, "\n".join([*problems, told(trajectory)])


def problems_of(trajectory: Trajectory, helped: Helped, said: dict[int, str]) -> Iterator[str]:
    """What is not as it should be; `said` is whose script was said to the prompt of so many tokens."""
    if trajectory.outcome.status != "completed" or trajectory.reward != 1.0:
        yield (
            f"it is {trajectory.outcome.status} with a reward of {trajectory.reward}: the helper is to write"
            " a file"
        )
    if trajectory.metrics["refusals"] or any(turn.state != "complete" for turn in trajectory.turns):
        yield f"calls were refused or failed: {trajectory.metrics['refusals']}"
    helper = [turn for turn in trajectory.turns if said.get(turn.prompt_length) == helped.helper.name]
    main = [turn for turn in trajectory.turns if said.get(turn.prompt_length) == helped.main.name]
    if (
        {turn.role for turn in helper} != {"subagent"}
        or {turn.role for turn in main} != {"main"}
        or len(helper) + len(main) != len(trajectory.turns)
    ):
        yield "the helper's turns are to be a sub-agent's, and all others the main agent's"
    if not (one_lineage(helper) and one_lineage(main)) or Counter(
        trace.role for trace in trajectory.traces
    ) != {"main": 1, "subagent": 1}:
        yield "each of the two agents is to be one lineage and one sequence"


def row(trajectory: Trajectory, helped: Helped, problems: list[str]) -> dict[str, Any]:
    main = [turn for turn in trajectory.turns if turn.role == "main"]
    return {
        "case": helped.main.name,
        "version": trajectory.harness_version,
        "provider": main[0].provider if main else "",
        "shell": trajectory.reward == 1.0,
        "write": None,
        "final": trajectory.outcome.status == "completed",
        "turns": len(main),
        "beside": len(trajectory.turns) - len(main),
        "lineages": len({turn.lineage for turn in trajectory.turns}),
        "rows": len(trajectory.traces),
        "prompt_tokens": main[0].prompt_length if main else None,
        "seconds": round(trajectory.timing.run_s, 1),
        "problems": problems,
        "why": (
            "its agent has a helper do it: the calls beside are the helper's, marked so, in a row of"
            " their own"
        ),
    }


def one_lineage(turns: list[Turn]) -> bool:
    """Turns that extend one another, a helper's word in between or not."""
    return len({turn.lineage for turn in turns}) == 1 and [turn.kind for turn in turns] == ["root"] + [
        "extend"
    ] * (len(turns) - 1)


def told(trajectory: Trajectory) -> str:
    lines = [
        f"{turn.index} {turn.role}/{turn.kind}/{turn.reason} {turn.state} lineage {turn.lineage}"
        f" {turn.prompt_length}+{len(turn.sampled)} {turn.notes}"
        for turn in trajectory.turns
    ]
    return "\n".join(
        [
            str(trajectory.outcome),
            *lines,
            *(f"trace {trace.role} {len(trace.token_ids)}" for trace in trajectory.traces),
        ]
    )
