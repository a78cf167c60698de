"""The live matrix: every harness, in its own container and in every dialect it speaks, does the three turns
of a script on the real engine.

The engine is steered (`steering.py`), so what each harness must do is known to the letter: a shell call, a
file written, a last word. Without POLARNODE_MATRIX the cases of CI run, one harness of each kind; `all` runs
every one, and names separated by commas run those. POLARNODE_MATRIX_OUT names a file that takes a line of
JSON for each case: `tools/harness_matrix.py` makes the table of docs/harnesses.md of it.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from attrs import frozen
from live_kit import ServingNode, keep_row, until
from matrix_cases import CASES, Case

from polarnode.core.trajectory import Trajectory, Turn
from polarnode.harnesses import HARNESSES

pytestmark = [pytest.mark.podman, pytest.mark.engine, pytest.mark.harness]

# seconds for one case, the images of those before it included: each takes a minute or two where nothing is
# cached
PATIENCE_S = 2400.0
WANTED = os.environ.get("POLARNODE_MATRIX", "ci")


def wanted(case: Case) -> bool:
    return case.in_ci if WANTED == "ci" else WANTED == "all" or case.name in WANTED.split(",")


def parameters() -> list[Any]:
    skip = pytest.mark.skip(reason="not of CI's part of the matrix: make harness-matrix runs it")
    return [pytest.param(case, id=case.name, marks=() if wanted(case) else skip) for case in CASES]


@frozen
class Run:
    """One case that is over; `forced` is what the engine was made to say, a line an order."""

    case: Case
    trajectory: Trajectory
    forced: list[dict[str, Any]]

    @property
    def main(self) -> list[Turn]:
        return [turn for turn in self.trajectory.turns if turn.role == "main"]

    @property
    def steps(self) -> list[int]:
        """The steps of the script in the order they were said."""
        return [line["step"] for line in self.forced if line["step"] is not None]


@frozen
class Runs:
    """Every wanted case, submitted at once; each is waited for when it is asked for."""

    node: ServingNode
    sessions: dict[str, str]

    def over(self, case: Case) -> Run:
        session = self.sessions[case.name]
        until(
            lambda: self.node.client.session(session)["session"]["outcome"],
            f"case {case.name} is over",
            within=PATIENCE_S,
        )
        return Run(case, self.node.client.trajectory(session, turns="full"), self.node.forced(session))


@pytest.fixture(scope="module")
def runs(steered: ServingNode) -> Runs:
    """One node and one engine for all cases."""
    return Runs(steered, {case.name: steered.submit(**case.task())[0] for case in CASES if wanted(case)})


@pytest.mark.parametrize("case", parameters())
def test_harness_follows_the_script(runs: Runs, case: Case) -> None:
    run = runs.over(case)
    keep_row(row(run))
    print(told(run))
    problems = [*of_the_end(run), *of_the_calls(run), *of_the_traces(run)]
    assert not problems, "\n".join([*problems, told(run)])


def of_the_end(run: Run) -> Iterator[str]:
    """It ended by itself, and both files are as the script had them written."""
    outcome, evaluation = run.trajectory.outcome, run.trajectory.metrics.get("evaluation")
    if outcome.status != "completed":
        yield f"the outcome is {outcome.status}: {outcome.reason}; its last words: {outcome.log_tail}"
    if run.trajectory.reward != 1.0:
        yield f"the reward is {run.trajectory.reward}, the files are not as they were to be: {evaluation}"


def of_the_calls(run: Run) -> Iterator[str]:
    """Each call was answered, in the dialect asked for, with exactly the tokens the script had."""
    case, turns, metrics = run.case, run.trajectory.turns, run.trajectory.metrics
    if metrics["refusals"] or any(turn.state != "complete" for turn in turns):
        yield f"calls were refused or failed: {metrics['refusals']}, {Counter(turn.state for turn in turns)}"
    if (providers := {turn.provider for turn in turns}) != {case.provider}:
        yield f"it spoke {providers}, not {case.provider}"
    if len(run.main) != len(case.steps) or len(turns) - len(run.main) != case.beside:
        yield (
            f"{len(run.main)} turns of the main conversation and {len(turns) - len(run.main)} beside, not"
            f" {len(case.steps)} and {case.beside}"
        )
    if not recorded(turns, run):
        yield "what was recorded is not what the engine was made to say"
    if run.steps != list(range(len(case.steps))):
        yield f"the steps of the script came as {run.steps}"


def recorded(turns: Sequence[Turn], run: Run) -> bool:
    """Whether each order's ids are a turn's, up to where the harness's own stop string ended it, or its wish
    for one call.
    """
    said = {line["prompt_tokens"]: line["ids"] for line in run.forced}
    lines = [(turn, said.get(turn.prompt_length, [])) for turn in turns]
    return len(said) == len(run.forced) == len(turns) and all(
        list(turn.sampled) == ids[: length(turn, ids, run.case)] for turn, ids in lines
    )


def length(turn: Turn, ids: list[int], case: Case) -> int:
    """How much of what was said a turn is to hold."""
    if turn.finish_reason == "stop_string":
        return max(1, len(turn.sampled))
    return len(ids) - (case.one_call and turn.finish_reason == "tool_calls")


def of_the_traces(run: Run) -> Iterator[str]:
    """The main conversation is one lineage and one sequence (or as many as the case says), each token of it
    trainable exactly once.
    """
    traces = [trace for trace in run.trajectory.traces if trace.role == "main"]
    lineages = {turn.lineage for turn in run.main}
    if len(lineages) != run.case.lineages or len(traces) != run.case.lineages:
        yield (
            f"{len(lineages)} lineages and {len(traces)} sequences, not {run.case.lineages};"
            f" {[turn.reason for turn in run.main]}"
        )
    trainable: Counter[int] = Counter()
    for trace in traces:
        for span in trace.turn_spans:
            trainable[span.turn] += sum(trace.loss_mask[span.start : span.end])
    if trainable != {turn.index: len(turn.sampled) for turn in run.main}:
        yield (
            f"trainable tokens by turn are {dict(trainable)}, sampled were"
            f" { ({turn.index: len(turn.sampled) for turn in run.main}) }"
        )


# ── what is told of it ────────────────────────────────────────────────────────


def told(run: Run) -> str:
    """A run in a few lines."""
    lines = [
        f"{turn.role}/{turn.kind}/{turn.reason} {turn.state} {turn.prompt_length}+{len(turn.sampled)}"
        f" {turn.ended_s:.1f} s"
        for turn in run.trajectory.turns
    ]
    return "\n".join(
        [f"{run.case.name}: {run.trajectory.outcome.status}, {run.trajectory.timing.run_s:.1f} s", *lines]
    )


def row(run: Run) -> dict[str, Any]:
    evaluation: Any = run.trajectory.metrics.get("evaluation", {})
    turns = run.trajectory.turns
    return {
        "case": run.case.name,
        "harness": run.case.harness["name"],
        "version": HARNESSES[str(run.case.harness["name"])].version,
        "provider": run.case.provider,
        "shell": evaluation.get("shell", False),
        "write": evaluation.get("write", False),
        "final": run.trajectory.outcome.status == "completed" and len(run.case.steps) - 1 in run.steps,
        "turns": len(run.main),
        "beside": len(turns) - len(run.main),
        "lineages": len({turn.lineage for turn in run.main}),
        "rows": len(run.trajectory.traces),
        "prompt_tokens": run.main[0].prompt_length if run.main else None,
        "seconds": round(run.trajectory.timing.run_s, 1),
        "problems": [
            problem.splitlines()[0] for problem in (*of_the_end(run), *of_the_calls(run), *of_the_traces(run))
        ],
        "why": run.case.why,
    }
