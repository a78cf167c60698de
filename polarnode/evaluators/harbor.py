"""`harbor`: run the tests of a Harbor task after the agent has ended, and read the reward they write.

As in Harbor, `tests/` is at /tests, and `bash /tests/test.sh` runs in the workdir and writes
/logs/verifier/reward.txt (a number) or reward.json (an object of numbers). Tests of the older Terminal-Bench
(`run-tests.sh`, no reward file) are judged by their exit code. Invariant: /tests and /logs/verifier are
emptied before the tests, and no link is followed, because the agent may have written there.
"""

from base64 import b64decode
from collections.abc import Mapping
from functools import partial

from attrs import field, frozen

from polarnode.core.conversation import Json
from polarnode.core.errors import EvaluatorError
from polarnode.core.trajectory import Verdict
from polarnode.evaluators import agent_programs, command, contract
from polarnode.evaluators.agent_programs import SeparateConfig
from polarnode.evaluators.contract import Evaluator, Finished, ProgramResult, run_script

TEST_SCRIPT, OLD_TEST_SCRIPT = "test.sh", "run-tests.sh"  # Harbor's, and Terminal-Bench's before it
MODE = 0o755  # of a file given as text alone: any test file may execute another


@frozen(kw_only=True)
class HarborFile:
    """A file of the tests, as text, or as base64 for bytes."""

    text: str | None = None
    base64: str | None = None
    mode: int = MODE


@frozen(kw_only=True)
class HarborConfig:
    """The shape of `evaluator.config`."""

    tests: Mapping[str, str | HarborFile]
    test_command: str | None = None
    tests_target: str = "/tests"
    verifier_dir: str = "/logs/verifier"
    verifier_timeout: float = 600.0  # Harbor's own where a task names none
    env: Mapping[str, str] = field(factory=dict)
    reward_key: str | None = None
    user: str | None = None
    separate: SeparateConfig | None = None


def read_config(config: Mapping[str, Json]) -> HarborConfig:
    """The config, or a refusal naming the field."""
    if "tests_dir" in config:
        raise contract.refused(
            "tests_dir",
            "is a folder of the trainer's machine: put its files into tests, by name, as `polarnode run`"
            " does",
        )
    read = contract.read(config, HarborConfig)
    for path, content in read.tests.items():
        _check_file(path, content)
    if read.test_command is None and not {TEST_SCRIPT, OLD_TEST_SCRIPT} & read.tests.keys():
        raise contract.refused(
            "tests", f"has neither {TEST_SCRIPT} nor {OLD_TEST_SCRIPT}: give one of them, or a test_command"
        )
    contract.command("test_command", read.test_command)
    contract.absolute("tests_target", read.tests_target)
    contract.absolute("verifier_dir", read.verifier_dir)
    contract.seconds("verifier_timeout", read.verifier_timeout)
    if read.tests_target.strip("/") == "" or read.verifier_dir.strip("/") == "":
        raise contract.refused(
            "tests_target", "and verifier_dir are emptied before the tests, and cannot be the root"
        )
    agent_programs.check(read.separate)
    return read


def _check_file(path: str, file: str | HarborFile) -> None:
    if not path or path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise contract.refused(
            "tests", f"names {path!r:.80}: a path must be relative to the tests, without .."
        )
    if isinstance(file, HarborFile):
        if (file.text is None) == (file.base64 is None):
            raise contract.refused("tests", f"has at {path:.80} neither or both of text and base64: give one")
        if not 0 <= file.mode <= 0o7777:
            raise contract.refused(
                "tests", f"has at {path:.80} the mode {file.mode}, which is none of a file"
            )
        _bytes(path, file)


def _bytes(path: str, file: str | HarborFile) -> bytes:
    if isinstance(file, str):
        return file.encode()
    if file.base64 is None:
        return (file.text or "").encode()
    try:
        return b64decode(file.base64, validate=True)
    except ValueError as error:
        raise contract.refused("tests", f"has no base64 at {path:.80}: {error}") from error


def check(config: Mapping[str, Json]) -> None:
    """Refuse at submission what would fail after the run."""
    read_config(config)


async def evaluate(finished: Finished) -> Verdict:
    """Put the tests into the container, run them, and read the reward."""
    config = read_config(finished.config)
    return await agent_programs.judged(
        finished, config.separate, config.user, partial(_tested, finished, config)
    )


async def _tested(finished: Finished, config: HarborConfig) -> Verdict:
    await _place(finished, config)
    name = TEST_SCRIPT if TEST_SCRIPT in config.tests else OLD_TEST_SCRIPT
    ran = await run_script(
        finished.runtime,
        config.test_command or f"bash {config.tests_target.rstrip('/')}/{name}",
        within_s=config.verifier_timeout,
        user=config.user,
        env={"TEST_DIR": config.tests_target, **config.env},
    )
    if ran.timed_out:
        reason = f"the tests were not done within {config.verifier_timeout:g} s"
        return Verdict(reward=0.0, metrics={"reason": reason, **ran.metrics})
    return await _verdict(finished, config, ran)


async def _place(finished: Finished, config: HarborConfig) -> None:
    runtime, target, verifier = (
        finished.runtime,
        config.tests_target.rstrip("/"),
        config.verifier_dir.rstrip("/"),
    )
    await command.clear(runtime, [target, verifier], user=config.user)
    for path, file in config.tests.items():
        mode = MODE if isinstance(file, str) else file.mode
        await runtime.put({f"{target}/{path}": _bytes(path, file)}, user=config.user, mode=mode)
    # This makes the folder, with the test's user as its owner.
    await runtime.put({f"{verifier}/.keep": b""}, user=config.user)


async def _verdict(finished: Finished, config: HarborConfig, ran: ProgramResult) -> Verdict:
    """Read the reward. reward.txt is looked for first, as in Harbor."""
    for name in ("reward.txt", "reward.json"):
        path = f"{config.verifier_dir.rstrip('/')}/{name}"
        content = await command.read(finished.runtime, path)
        if content is not None:
            reward, more = _read(content, path, config)
            why = contract.require_test_ran(finished, ran.exit_code, ran.tail) if reward == 0 else {}
            return Verdict(reward=reward, metrics={**more, **why, **ran.metrics})
    why = contract.require_test_ran(finished, ran.exit_code, ran.tail)
    if config.test_command is None and TEST_SCRIPT not in config.tests:
        metrics: dict[str, Json] = {"by": "exit_code", **why, **ran.metrics}
        return Verdict(reward=float(ran.exit_code == 0), metrics=metrics)
    raise EvaluatorError(
        f"the tests ended with exit code {ran.exit_code} and wrote no reward to {config.verifier_dir}:"
        f" {ran.tail}"
    )


def _read(content: bytes, path: str, config: HarborConfig) -> tuple[float, dict[str, Json]]:
    """Return a single number, or one of several: the number called `reward` or named by `reward_key`, else
    the mean of all numbers, which the metrics then state.
    """
    value = command.parsed(content, path)
    if not isinstance(value, dict):
        return command.finite(value, path, content), {}
    key = config.reward_key or ("reward" if "reward" in value else None)
    if key is not None:
        return command.finite(value.get(key), path, content), {"rewards": value}
    if not value:
        raise EvaluatorError(f"{path} holds no number: {content[:80]!r}")
    numbers = [command.finite(part, path, content) for part in value.values()]
    return sum(numbers) / len(numbers), {"rewards": value, "by": f"the mean of {', '.join(sorted(value))}"}


EVALUATOR = Evaluator(name="harbor", evaluate=evaluate, check=check, separates=agent_programs.asked)
