"""`command`: the task's own test is run in the runtime. Its exit code is the verdict, or the number it writes to a reward file.

Config: `argv` (a program with its arguments), or `script` (text for `sh`); `reward_file` (absolute path the test writes one number or
`{"reward": number, ...}` to, removed before the test so that a harness can not have left one); `user` (default: the runtime's, since root in a
container without capabilities can write less, not more). A harness shares this runtime: ask for `fresh_runtime` where a reward must not be forged.
"""

from collections.abc import Mapping

from attrs import frozen

from polarnode.conversation import Json
from polarnode.errors import EvaluatorError, Refused
from polarnode.evaluators import reward_files, settings
from polarnode.evaluators.evaluator import Evaluator, Finished
from polarnode.evaluators.running import TAIL
from polarnode.ports import Ended
from polarnode.records import Verdict


@frozen(kw_only=True)
class CommandConfig:
    """The shape of `evaluator.config`."""

    argv: tuple[str, ...] = ()
    script: str | None = None
    reward_file: str | None = None
    user: str | None = None


def read_config(config: Mapping[str, Json]) -> CommandConfig:
    """The config, or a refusal naming the field."""
    read = settings.read(config, CommandConfig)
    if bool(read.argv) == bool(read.script):
        raise Refused("the command evaluator needs either argv or script", path=settings.ROOT)
    if read.reward_file is not None:
        settings.absolute("reward_file", read.reward_file)
    return read


def check(config: Mapping[str, Json]) -> None:
    """Refuse at submission what would fail after the run."""
    read_config(config)


async def evaluate(finished: Finished) -> Verdict:
    """Run the test and read its verdict; a test that can not be judged raises EvaluatorError."""
    config = read_config(finished.config)
    if config.reward_file is not None:
        await reward_files.clear(finished.runtime, [config.reward_file], user=config.user)
    argv = config.argv or ("sh", "-c", config.script or "")
    ended = await finished.runtime.run(argv, user=config.user)
    await finished.runtime.end_processes()  # what the test started, and what of the agent's it may have woken, changes no reward any more
    if config.reward_file is None:
        return Verdict(reward=float(ended.exit_code == 0), metrics=_metrics(ended))
    return await _from_file(finished, config.reward_file, ended)


async def _from_file(finished: Finished, path: str, ended: Ended) -> Verdict:
    content = await reward_files.read(finished.runtime, path)
    if content is None:
        raise EvaluatorError(f"the test ended with exit code {ended.exit_code} and wrote no {path}: {_tail(ended)}")
    value = reward_files.parsed(content, path)
    if not isinstance(value, dict):
        return Verdict(reward=reward_files.finite(value, path, content), metrics=_metrics(ended))
    reward = reward_files.finite(value.get("reward"), path, content)
    return Verdict(reward=reward, metrics={**reward_files.without(value, "reward"), **_metrics(ended)})


def _metrics(ended: Ended) -> dict[str, Json]:
    return {"exit_code": ended.exit_code, "output_tail": _tail(ended)}


def _tail(ended: Ended) -> str:
    return (ended.stdout + ended.stderr).decode("utf-8", "replace")[-TAIL:]


EVALUATOR = Evaluator(name="command", evaluate=evaluate, check=check)
