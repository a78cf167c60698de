"""What lies in a runtime before the harness and before the evaluator: the task's files, its prepare steps, a copy for a fresh judge."""

import math
from collections.abc import Sequence

from polarnode import wire
from polarnode.errors import EvaluatorError, RuntimeFault, boundary
from polarnode.evaluators.evaluator import Finished
from polarnode.ports import Ended, Runtime
from polarnode.records import Outcome, Turn, Verdict
from polarnode.tasks import PrepareStep, RuntimeSpec, TaskSpec

OUTPUT_TAIL = 500  # characters of a failed step's output in the reason: the error line, not the build log


async def prepare(runtime: Runtime, spec: RuntimeSpec) -> None:
    """Place the task's files and run its prepare steps; one that fails is a RuntimeFault with its last words."""
    for file in spec.files:
        await runtime.put({_absolute(file.path, runtime.workdir): wire.file_bytes(file)}, mode=file.mode)
    await _steps(runtime, spec.prepare, spec)


async def prepare_evaluation(runtime: Runtime, spec: RuntimeSpec) -> None:
    """Run the steps only an evaluator needs (a test suite the harness must not have seen)."""
    await _steps(runtime, spec.eval_prepare, spec)


async def copy(source: Runtime, target: Runtime) -> None:
    """The workspace as the harness left it, into a clean runtime. Links are copied as links, and never followed."""
    packed = await source.run(["tar", "-C", source.workdir, "-cf", "-", "."])
    if packed.exit_code != 0 or packed.truncated:
        raise EvaluatorError(f"the workspace could not be packed for a fresh runtime: {_last_words(packed)}")
    unpacked = await target.run(["tar", "-C", target.workdir, "-xf", "-", "--no-same-owner"], stdin=packed.stdout)
    if unpacked.exit_code != 0:
        raise EvaluatorError(f"the workspace could not be unpacked in the fresh runtime: {_last_words(unpacked)}")


def finished(runtime: Runtime, outcome: Outcome, turns: tuple[Turn, ...], spec: TaskSpec) -> Finished:
    """The session as its evaluator sees it."""
    return Finished(runtime=runtime, outcome=outcome, turns=turns, instruction=spec.instruction, config=spec.evaluator.config, metadata=spec.metadata)


def checked(verdict: Verdict) -> Verdict:
    """A verdict that can be kept: a finite reward and metrics that are JSON. An evaluator may be anybody's code."""
    if isinstance(verdict.reward, bool) or not isinstance(verdict.reward, int | float) or not math.isfinite(verdict.reward):
        raise EvaluatorError(f"the evaluator gave {verdict.reward!r} as its reward: return a finite number")
    with boundary(EvaluatorError, "the evaluator's metrics are not JSON"):
        wire.dump_json(dict(verdict.metrics))
    return verdict


async def _steps(runtime: Runtime, steps: Sequence[PrepareStep], spec: RuntimeSpec) -> None:
    for step in steps:
        ended = await runtime.run(step.argv, user=step.user, env=spec.env)
        if ended.exit_code != 0:
            raise RuntimeFault(f"prepare step {' '.join(step.argv)!r} ended with exit code {ended.exit_code}: {_last_words(ended)}")


def _absolute(path: str, workdir: str) -> str:
    return path if path.startswith("/") else f"{workdir.rstrip('/')}/{path}"


def _last_words(ended: Ended) -> str:
    return (ended.stdout[-OUTPUT_TAIL:] if not ended.stderr else ended.stderr)[-OUTPUT_TAIL:].decode("utf-8", "replace").strip()
