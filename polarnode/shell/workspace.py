"""What lies in a runtime before the harness and before the evaluator, the task's files and steps; and what the evaluator sees and may say.

The rule for whoever edits it: what a task's own steps do wrong is told apart from a runtime that fails, which is worth another try.
"""

from collections.abc import Callable, Sequence
from typing import cast

from polarnode import wire
from polarnode.conversation import Json
from polarnode.errors import EvaluatorError, Refused, boundary
from polarnode.evaluators.evaluator import Finished
from polarnode.evaluators.rewards import checked_rewards, finite
from polarnode.evaluators.running import last_words
from polarnode.merge.roles import recast
from polarnode.ports import Judge, Runtime
from polarnode.records import Outcome, Turn, Verdict
from polarnode.tasks import PrepareStep, RuntimeSpec, TaskSpec


async def prepare(runtime: Runtime, spec: RuntimeSpec) -> None:
    """Place the task's files and run its prepare steps. A step that fails is Refused with its last words: it would fail again."""
    for file in spec.files:
        await runtime.put({wire.in_workdir(file.path, runtime.workdir): wire.file_bytes(file)}, mode=file.mode)
    for index, step in enumerate(spec.prepare):
        said = await _step(runtime, step, spec)
        if said is not None:
            raise Refused(said, path=f"$.runtime.prepare[{index}]")


async def prepare_evaluation(runtime: Runtime, spec: RuntimeSpec) -> None:
    """Run the steps only an evaluator needs (a test suite the harness must not have seen). One that fails is an EvaluatorError."""
    for step in spec.eval_prepare:
        said = await _step(runtime, step, spec)
        if said is not None:
            raise EvaluatorError(said)


def finished(runtime: Runtime, left: Runtime, judge: Callable[[str], Judge], outcome: Outcome, turns: tuple[Turn, ...], spec: TaskSpec) -> Finished:
    """The session as its evaluator sees it; its turns have the roles that the whole session tells."""
    return Finished(
        runtime=runtime,
        left=left,
        judge=judge,
        outcome=outcome,
        turns=recast(turns),
        instruction=spec.instruction,
        config=spec.evaluator.config,
        metadata=spec.metadata,
    )


def checked(verdict: object, turns: Sequence[Turn] = ()) -> Verdict:
    """A verdict that can be kept: finite rewards, of turns and lineages there are, and metrics as the JSON they make. It may be anybody's code."""
    if not isinstance(verdict, Verdict):
        raise EvaluatorError(f"the evaluator returned {type(verdict).__name__}: return a polarnode.records.Verdict")
    with boundary(EvaluatorError, "the evaluator's metrics are not JSON"):
        metrics = wire.read_json(wire.dump_json(dict(verdict.metrics)))
    reward = finite(verdict.reward, "its reward")
    lineages, of_turns = checked_rewards(verdict, turns)
    return Verdict(reward=reward, metrics=cast(dict[str, Json], metrics), lineage_rewards=lineages, turn_rewards=of_turns)


async def _step(runtime: Runtime, step: PrepareStep, spec: RuntimeSpec) -> str | None:
    """Run a step; what to say of it when it failed."""
    ended = await runtime.run(step.argv, user=step.user, env=spec.env)
    if ended.exit_code == 0:
        return None
    return f"prepare step {' '.join(step.argv)!r} ended with exit code {ended.exit_code}: {last_words(ended.stderr or ended.stdout)}"
