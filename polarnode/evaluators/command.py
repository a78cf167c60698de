"""`command`: the task's own test is run in the runtime. Its exit code is the verdict, or the number it writes to a reward file.

Config: `argv` (a program with its arguments), or `script` (text for `sh`); `reward_file` (absolute path the test writes one number or
`{"reward": number, ...}` to, removed before the test so that a harness can not have left one); `user` (default: the runtime's, since root in a
container without capabilities can write less, not more). A harness shares this runtime: ask for `fresh_runtime` where a reward must not be forged.
"""

import json
import math
from collections.abc import Mapping

from attrs import frozen

from polarnode import wire
from polarnode.conversation import Json
from polarnode.errors import EvaluatorError, Refused
from polarnode.evaluators.evaluator import Evaluator, Finished
from polarnode.ports import Ended
from polarnode.records import Verdict

TAIL = 2000  # characters of the test's output kept in metrics: enough for a traceback's end
REWARD_BYTES = 64 * 1024  # a reward file is a number or a small object


@frozen(kw_only=True)
class CommandConfig:
    """The shape of `evaluator.config`."""

    argv: tuple[str, ...] = ()
    script: str | None = None
    reward_file: str | None = None
    user: str | None = None


def read_config(config: Mapping[str, Json]) -> CommandConfig:
    """The config, or a refusal naming the field."""
    try:
        read = wire.structure(dict(config), CommandConfig, forbid_extra=True)
    except Refused as refused:
        raise Refused(str(refused), path=(refused.path or "$").replace("$", "$.evaluator.config", 1)) from refused
    if bool(read.argv) == bool(read.script):
        raise Refused("the command evaluator needs either argv or script", path="$.evaluator.config")
    if read.reward_file is not None and not read.reward_file.startswith("/"):
        raise Refused("reward_file must be an absolute path in the runtime", path="$.evaluator.config.reward_file")
    return read


def check(config: Mapping[str, Json]) -> None:
    """Refuse at submission what would fail after the run."""
    read_config(config)


async def evaluate(finished: Finished) -> Verdict:
    """Run the test and read its verdict; a test that can not be judged raises EvaluatorError."""
    config = read_config(finished.config)
    if config.reward_file is not None:
        await _remove(finished, config.reward_file, config.user)
    argv = config.argv or ("sh", "-c", config.script or "")
    ended = await finished.runtime.run(argv, user=config.user)
    if config.reward_file is None:
        return Verdict(reward=float(ended.exit_code == 0), metrics=_metrics(ended))
    return await _from_file(finished, config.reward_file, ended)


async def _remove(finished: Finished, path: str, user: str | None) -> None:
    ended = await finished.runtime.run(["rm", "-rf", path], user=user)
    if ended.exit_code != 0:
        raise EvaluatorError(f"what stood at {path} before the test could not be removed: {_tail(ended)}")


async def _from_file(finished: Finished, path: str, ended: Ended) -> Verdict:
    content = await finished.runtime.read(path, limit=REWARD_BYTES)
    if content is None:
        raise EvaluatorError(f"the test ended with exit code {ended.exit_code} and wrote no {path}: {_tail(ended)}")
    reward, more = _parsed(content, path)
    return Verdict(reward=reward, metrics={**more, **_metrics(ended)})


def _parsed(content: bytes, path: str) -> tuple[float, dict[str, Json]]:
    try:
        value = json.loads(content)
    except ValueError as error:
        raise EvaluatorError(f"{path} is neither a number nor JSON: {content[:80]!r}") from error
    more = {name: kept for name, kept in value.items() if name != "reward"} if isinstance(value, dict) else {}
    reward = value.get("reward") if isinstance(value, dict) else value
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise EvaluatorError(f"{path} holds no finite number as its reward: {content[:80]!r}")
    return float(reward), more


def _metrics(ended: Ended) -> dict[str, Json]:
    return {"exit_code": ended.exit_code, "output_tail": _tail(ended)}


def _tail(ended: Ended) -> str:
    return (ended.stdout + ended.stderr).decode("utf-8", "replace")[-TAIL:]


EVALUATOR = Evaluator(name="command", evaluate=evaluate, check=check)
