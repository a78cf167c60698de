"""What lies in a runtime before the harness and before the evaluator: the task's files, its prepare steps, a copy for a fresh judge.

The rule for whoever edits it: a workspace is of any size and full of any names, so it goes from one runtime to the other packed, as a file,
in pieces; and what a task's own steps do wrong is told apart from a runtime that fails, which is worth another try.
"""

import sys
from typing import cast

from polarnode import wire
from polarnode.conversation import Json
from polarnode.errors import EvaluatorError, Refused, boundary
from polarnode.evaluators.evaluator import Finished
from polarnode.ports import Ended, Runtime
from polarnode.records import Outcome, Turn, Verdict
from polarnode.tasks import PrepareStep, RuntimeSpec, TaskSpec

OUTPUT_TAIL = 500  # characters of a failed step's output in the reason: the error line, not the build log
PIECE_BYTES = 16 << 20  # half of what a runtime keeps of a program's output; few sessions are in POST, so few pieces are in memory
COPY_LIMIT = 8 << 30  # bytes of a packed workspace: minutes at the pace of an exec, more than a post budget has
LARGEST = sys.float_info.max  # of a reward: beyond it, and for what is no number, a comparison fails

# Small enough for any image's sh, tar and dd. What `find` can not delete, the harness, being the same user, could not delete either.
PACK = 'f=$(mktemp /tmp/workspace.XXXXXX) && tar -C "$1" -cf "$f" . && echo "$f"'
RECEIVE = "mktemp /tmp/workspace.XXXXXX"
APPEND = 'cat >> "$1"'
UNPACK = 'find "$1" -mindepth 1 -delete; tar -C "$1" -xpof "$2" && rm -f "$2"'


async def prepare(runtime: Runtime, spec: RuntimeSpec) -> None:
    """Place the task's files and run its prepare steps. A step that fails is Refused with its last words: it would fail again."""
    for file in spec.files:
        await runtime.put({_absolute(file.path, runtime.workdir): wire.file_bytes(file)}, mode=file.mode)
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


async def copy(source: Runtime, target: Runtime) -> None:
    """Make the target's workdir what the source's is: files, modes, and links as links, never followed. What is not in the source goes."""
    packed = await _made(source, "packed", PACK, source.workdir)
    received = await _made(target, "received", RECEIVE)
    for number in range(COPY_LIMIT // PIECE_BYTES + 1):
        piece = await _piece(source, packed, number)
        await _done(target, "received", APPEND, received, stdin=piece)
        if len(piece) < PIECE_BYTES:
            break
    else:
        raise EvaluatorError(f"the workspace is larger than {COPY_LIMIT >> 30} GiB: evaluate it where it is, without fresh_runtime")
    await source.run(["rm", "-f", packed])
    await _done(target, "unpacked", UNPACK, target.workdir, received)


async def _piece(source: Runtime, path: str, number: int) -> bytes:
    ended = await source.run(["dd", f"if={path}", f"bs={PIECE_BYTES}", f"skip={number}", "count=1"])
    if ended.exit_code != 0 or ended.truncated:
        raise EvaluatorError(f"the workspace could not be read for a fresh runtime: {_last_words(ended.stderr)}")
    return ended.stdout


async def _made(runtime: Runtime, what: str, script: str, *arguments: str) -> str:
    """The path a script made and told."""
    ended = await _done(runtime, what, script, *arguments)
    path = ended.stdout.decode("utf-8", "replace").strip()
    if not path.startswith("/"):
        raise EvaluatorError(f"the workspace could not be {what} for a fresh runtime: mktemp gave {path[:OUTPUT_TAIL]!r}")
    return path


async def _done(runtime: Runtime, what: str, script: str, *arguments: str, stdin: bytes = b"") -> Ended:
    ended = await runtime.run(["sh", "-c", script, "sh", *arguments], stdin=stdin, workdir="/")
    if ended.exit_code != 0:
        raise EvaluatorError(f"the workspace could not be {what} for a fresh runtime: {_last_words(ended.stderr)}")
    return ended


def finished(runtime: Runtime, outcome: Outcome, turns: tuple[Turn, ...], spec: TaskSpec) -> Finished:
    """The session as its evaluator sees it."""
    return Finished(runtime=runtime, outcome=outcome, turns=turns, instruction=spec.instruction, config=spec.evaluator.config, metadata=spec.metadata)


def checked(verdict: object) -> Verdict:
    """A verdict that can be kept: a finite reward, and metrics as the JSON they make. An evaluator may be anybody's code."""
    if not isinstance(verdict, Verdict):
        raise EvaluatorError(f"the evaluator returned {type(verdict).__name__}: return a polarnode.records.Verdict")
    with boundary(EvaluatorError, "the evaluator's metrics are not JSON"):
        metrics = wire.read_json(wire.dump_json(dict(verdict.metrics)))
    return Verdict(reward=_finite(verdict.reward), metrics=cast(dict[str, Json], metrics))


def _finite(reward: object) -> float:
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not -LARGEST <= reward <= LARGEST:
        raise EvaluatorError(f"the evaluator gave {reward!r:.80} as its reward: return a finite number")
    return float(reward)


async def _step(runtime: Runtime, step: PrepareStep, spec: RuntimeSpec) -> str | None:
    """Run a step; what to say of it when it failed."""
    ended = await runtime.run(step.argv, user=step.user, env=spec.env)
    if ended.exit_code == 0:
        return None
    return f"prepare step {' '.join(step.argv)!r} ended with exit code {ended.exit_code}: {_last_words(ended.stderr or ended.stdout)}"


def _absolute(path: str, workdir: str) -> str:
    return path if path.startswith("/") else f"{workdir.rstrip('/')}/{path}"


def _last_words(output: bytes) -> str:
    return output.decode("utf-8", "replace")[-OUTPUT_TAIL:].strip()
