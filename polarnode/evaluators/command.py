"""`command`: run the task's own test program. Its exit code, or the number in a reward file, is the reward.

Config: `argv` (a program with its arguments) or `script` (text for `sh`); `reward_file` (absolute path, to
which the test writes a number or `{"reward": number, ...}`; it is removed before the test); `user` (default:
the runtime's; root in a container without capabilities can write less, not more); `separate` (run the test in
a clean container without the agent, see `agent_programs`). Without `separate` the agent's files, and those of
its programs that the test runs, share the test's container.

`session_completed`: 1 when the session is `completed` and its harness called the model, else 0. A test of the
workspace says more.

Invariant: a reward file is read only if it was written after `clear`, and no link is followed, because the
harness may have left a file, link, folder or pipe in its place.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial

from attrs import frozen

from polarnode.core.codec.limits import DEPTH
from polarnode.core.conversation import Json
from polarnode.core.errors import EvaluatorError, Refused
from polarnode.core.ports import Ended, Runtime
from polarnode.core.trajectory import Verdict
from polarnode.evaluators import agent_programs, contract
from polarnode.evaluators.agent_programs import SeparateConfig
from polarnode.evaluators.contract import RUN_STDIN_SCRIPT, TAIL, Evaluator, Finished, is_finite, stderr_tail

# ── reward files ───────────────────────────────────────────────────────────────

MAX_REWARD_FILE_BYTES = 64 * 1024  # a reward file is a number or a small object

# If the agent took away the rights to a folder, there or above, the folder's owner gives them back first.
# Root in a container without capabilities may only delete what belongs to root.
REMOVE_SCRIPT = """
opened() { case $1 in ?*/*) opened "${1%/*}";; esac; [ -z "$1" ] || chmod u+rwx -- "$1" 2>/dev/null; }
for each; do case $each in */*) opened "${each%/*}";; esac; done
chmod -R u+rwX -- "$@" 2>/dev/null
exec rm -rf -- "$@"
"""


async def clear(runtime: Runtime, paths: Sequence[str], *, user: str | None = None) -> None:
    """Remove whatever is at these paths; EvaluatorError if something remains."""
    ended = await runtime.run(["rm", "-rf", "--", *paths], user=user, workdir="/")
    for again in (user, "root"):
        if ended.exit_code == 0:
            return
        ended = await runtime.run(["sh", "-c", REMOVE_SCRIPT, "sh", *paths], user=again, workdir="/")
    if ended.exit_code != 0:
        raise EvaluatorError(
            "what stood there before the test could not be removed, judge in a fresh_runtime:"
            f" {stderr_tail(ended.stderr)}"
        )


async def read(runtime: Runtime, path: str) -> bytes | None:
    """The file's bytes; None if there is no regular file."""
    content = await runtime.read(path, limit=MAX_REWARD_FILE_BYTES + 1)
    if content is not None and len(content) > MAX_REWARD_FILE_BYTES:
        raise EvaluatorError(
            f"{path} is larger than {MAX_REWARD_FILE_BYTES} bytes: a reward is one number, or a small JSON"
            " object"
        )
    return content


def parsed(content: bytes, path: str) -> Json:
    """The file as JSON; a number alone is JSON too."""
    try:
        value: Json = json.loads(content)
    except RecursionError as error:
        raise EvaluatorError(
            f"{path} is nested too deeply to be read: at most {DEPTH} levels are kept"
        ) from error
    except ValueError as error:
        raise EvaluatorError(f"{path} is neither a number nor JSON: {content[:80]!r}") from error
    return value


def finite(value: Json, path: str, content: bytes) -> float:
    """A reward as a float; EvaluatorError unless it is a finite number."""
    if not is_finite(value):
        raise EvaluatorError(f"{path} holds no finite number{contract.RANGE} as its reward: {content[:80]!r}")
    return float(value)


def without(value: Mapping[str, Json], *names: str) -> dict[str, Json]:
    """The other fields of a reward file."""
    return {name: kept for name, kept in value.items() if name not in names}


# ── command ────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class CommandConfig:
    """The shape of `evaluator.config`."""

    argv: tuple[str, ...] = ()
    script: str | None = None
    reward_file: str | None = None
    user: str | None = None
    separate: SeparateConfig | None = None


def read_config(config: Mapping[str, Json]) -> CommandConfig:
    """The config, or a refusal naming the field."""
    read = contract.read(config, CommandConfig)
    if bool(read.argv) == bool(read.script):
        raise Refused("the command evaluator needs either argv or script", path=contract.ROOT)
    if read.reward_file is not None:
        contract.absolute("reward_file", read.reward_file)
    agent_programs.check(read.separate)
    return read


def check(config: Mapping[str, Json]) -> None:
    """Refuse at submission what would fail after the run."""
    read_config(config)


async def evaluate(finished: Finished) -> Verdict:
    """Run the test and read its verdict; a test that cannot be judged raises EvaluatorError."""
    config = read_config(finished.config)
    return await agent_programs.judged(
        finished, config.separate, config.user, partial(_tested, finished, config)
    )


async def _tested(finished: Finished, config: CommandConfig) -> Verdict:
    path = config.reward_file
    if path is not None:
        await clear(finished.runtime, [path], user=config.user)
    # The script is not passed as an argument, because programs of the agent could read it there.
    argv = config.argv or ("sh", "-c", RUN_STDIN_SCRIPT)
    ended = await finished.runtime.run(argv, user=config.user, stdin=(config.script or "").encode())
    # From here on, programs that the test started, and programs of the agent's that it may have started,
    # cannot change the reward.
    await finished.runtime.end_processes()
    if path is None:
        why = contract.require_test_ran(finished, ended.exit_code, _tail(ended))
        return Verdict(reward=float(ended.exit_code == 0), metrics={**why, **_metrics(ended)})
    content = await read(finished.runtime, path)
    if content is None:
        contract.require_test_ran(finished, ended.exit_code, _tail(ended))
        output = _tail(ended).strip() or "it printed nothing"
        raise EvaluatorError(f"the test ended with exit code {ended.exit_code} and wrote no {path}: {output}")
    value = parsed(content, path)
    more = without(value, "reward") if isinstance(value, dict) else {}
    reward = finite(value.get("reward") if isinstance(value, dict) else value, path, content)
    # Many tests write a 0 first and their result last.
    why = contract.require_test_ran(finished, ended.exit_code, _tail(ended)) if reward == 0 else {}
    return Verdict(reward=reward, metrics={**more, **why, **_metrics(ended)})


def _metrics(ended: Ended) -> dict[str, Json]:
    return {"exit_code": ended.exit_code, "output_tail": _tail(ended)}


def _tail(ended: Ended) -> str:
    return (ended.stdout + ended.stderr).decode("utf-8", "replace")[-TAIL:]


EVALUATOR = Evaluator(name="command", evaluate=evaluate, check=check, separates=agent_programs.asked)


# ── session completed ──────────────────────────────────────────────────────────


async def evaluate_completed(finished: Finished) -> Verdict:
    """Reward 1.0 for a completed session with at least one complete model call, else 0.0."""
    completed = finished.outcome.status == "completed" and any(
        turn.state == "complete" for turn in finished.turns
    )
    return Verdict(reward=float(completed))


def check_completed(config: Mapping[str, Json]) -> None:
    """Refuse any setting: there are none."""
    for name in config:
        raise Refused(f"session_completed has no setting {name}", path=f"$.evaluator.config.{name}")


SESSION_COMPLETED = Evaluator(
    name="session_completed", evaluate=evaluate_completed, check=check_completed, copies=False
)
