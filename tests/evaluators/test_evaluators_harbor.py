"""`harbor`: a task's tests come after the agent, and a reward it has planted is gone before them."""

import os
from base64 import b64encode
from pathlib import Path

import pytest
import trio
from evaluators_kit import finished
from shell_runtime import ShellRuntime

from polarnode.core.conversation import Json
from polarnode.core.errors import EvaluatorError, Refused
from polarnode.core.task import EvaluatorSpec
from polarnode.core.trajectory import Verdict
from polarnode.evaluators import command, harbor, registry

TESTS, LOGS = "/testbed/.tests", "/testbed/.logs/verifier"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "app").mkdir()
    return tmp_path / "app"


async def judged(folder: Path, script: str, **more: Json) -> Verdict:
    config: dict[str, Json] = {
        "tests": {"test.sh": script},
        "tests_target": TESTS,
        "verifier_dir": LOGS,
        **more,
    }
    return await harbor.evaluate(finished(ShellRuntime(folder=folder), config))


def writes(folder: Path, content: str, name: str = "reward.txt") -> str:
    return f"printf '%s' '{content}' > {folder}/.logs/verifier/{name}"


@pytest.mark.parametrize(
    ("content", "reward"),
    [("1", 1.0), ("0.25\n", 0.25), ("-3", -3.0), ("1e3", 1000.0), (' {"reward": 2} ', 2.0)],
)
async def test_reward_is_the_tests_number(folder: Path, content: str, reward: float) -> None:
    verdict = await judged(folder, writes(folder, content) + "; echo said; exit 3")
    assert verdict.reward == reward
    assert (verdict.metrics["exit_code"], verdict.metrics["output_tail"]) == (3, "said\n")


@pytest.mark.parametrize(
    ("content", "more", "reward", "by"),
    [
        ('{"reward": 0.75, "style": 0}', {}, 0.75, None),
        ('{"style": 0.5, "tests": 1}', {}, 0.75, "the mean of style, tests"),
        ('{"only": 0.5}', {}, 0.5, "the mean of only"),
        ('{"reward": 1, "tests": 0.25}', {"reward_key": "tests"}, 0.25, None),
    ],
)
async def test_which_of_several_rewards_counts(
    folder: Path, content: str, more: dict[str, Json], reward: float, by: str | None
) -> None:
    verdict = await judged(folder, writes(folder, content, "reward.json"), **more)
    assert (verdict.reward, verdict.metrics.get("by")) == (reward, by)
    assert verdict.metrics["rewards"]


async def test_text_reward_precedes_json(folder: Path) -> None:
    assert (
        await judged(folder, writes(folder, "0.5") + "; " + writes(folder, '{"reward": 1}', "reward.json"))
    ).reward == 0.5


@pytest.mark.parametrize(
    "content",
    [
        "",
        "yes",
        "true",
        '"1"',
        "nan",
        "NaN",
        "Infinity",
        "1e400",
        "1" + "0" * 400,
        "[1]",
        "{}",
        '{"reward": "1"}',
        '{"a": true}',
        "[" * 100_000,
    ],
)
async def test_non_finite_reward_is_none(folder: Path, content: str) -> None:
    (folder / "planned").write_text(content)
    with pytest.raises(EvaluatorError):
        await judged(folder, f"cp {folder}/planned {folder}/.logs/verifier/reward.json")


async def test_missing_reward_quotes_test_output(folder: Path) -> None:
    """No reward is an error with the tests' last words."""
    with pytest.raises(EvaluatorError, match=r"exit code 7 and wrote no reward to .*: no such module"):
        await judged(folder, "echo no such module; exit 7")


@pytest.mark.parametrize(
    "planted", ["file", "link", "folder", "pipe", "verifier is a link", "tests is a link", "locked"]
)
async def test_planted_reward_removed_before_tests(folder: Path, tmp_path: Path, planted: str) -> None:
    logs, tests, elsewhere = folder / ".logs/verifier", folder / ".tests", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "reward.txt").write_text("1")
    (elsewhere / "test.sh").write_text("exit 0")
    plant(planted, logs, tests, elsewhere)
    seen = await judged(folder, f"ls -A {logs} {tests}; " + writes(folder, "0"))
    assert seen.reward == 0.0
    assert str(seen.metrics["output_tail"]).split() == [f"{logs}:", ".keep", f"{tests}:", "test.sh"]
    assert (elsewhere / "reward.txt").read_text() == "1", "what a link leads to is not touched"
    assert (elsewhere / "test.sh").read_text() == "exit 0"


def plant(what: str, logs: Path, tests: Path, elsewhere: Path) -> None:
    if what == "verifier is a link":
        logs.parent.mkdir()
        logs.symlink_to(elsewhere)
        return
    logs.mkdir(parents=True)
    match what:
        case "file":
            (logs / "reward.txt").write_text("1")
            (logs / "reward.json").write_text('{"reward": 1}')
        case "link":
            (logs / "reward.txt").symlink_to(elsewhere / "reward.txt")
        case "folder":
            (logs / "reward.txt/deep").mkdir(parents=True)
        case "pipe":
            os.mkfifo(logs / "reward.txt")
        case "tests is a link":
            tests.symlink_to(elsewhere)
        case "locked":
            (logs / "closed").mkdir()
            (logs / "closed/reward.txt").write_text("1")
            (logs / "closed").chmod(0)


async def test_reward_through_link_is_none(folder: Path, tmp_path: Path) -> None:
    """What the tests run may be the agent's program: a link it puts there leads to nothing."""
    (tmp_path / "forged").write_text("1")
    with pytest.raises(EvaluatorError, match="wrote no reward"):
        await judged(folder, f"ln -s {tmp_path}/forged {folder}/.logs/verifier/reward.txt")


async def test_endless_reward_is_an_error(folder: Path) -> None:
    with pytest.raises(EvaluatorError, match=f"larger than {command.MAX_REWARD_FILE_BYTES} bytes"):
        await judged(folder, f"head -c 1000000 /dev/zero > {folder}/.logs/verifier/reward.txt")


async def test_hanging_tests_are_worth_nothing(folder: Path) -> None:
    verdict = await judged(folder, writes(folder, "1") + "; sleep 600", verifier_timeout=1)
    assert (verdict.reward, verdict.metrics["reason"]) == (0.0, "the tests were not done within 1 s")


async def test_own_exit_code_is_no_timeout(folder: Path) -> None:
    """An exit code of timeout's own is not taken for one."""
    verdict = await judged(folder, writes(folder, "1") + "; exit 124")
    assert (verdict.reward, verdict.metrics["exit_code"]) == (1.0, 124)


async def test_files_keep_modes_and_bytes(folder: Path) -> None:
    tests: dict[str, Json] = {
        "test.sh": {
            "text": f"stat -c '%a' {folder}/.tests/data/blob; {folder}/.tests/run; " + writes(folder, "1")
        },
        "data/blob": {"base64": b64encode(b"\0\xff").decode(), "mode": 0o600},
        "run": "#!/bin/sh\nod -An -tx1 $TEST_DIR/data/blob; echo $COLOUR; pwd\n",
    }
    config: dict[str, Json] = {
        "tests": tests,
        "tests_target": TESTS,
        "verifier_dir": LOGS,
        "env": {"COLOUR": "blue", "TEST_DIR": f"{folder}/.tests"},
    }
    verdict = await harbor.evaluate(finished(Modes(folder=folder), config))
    assert str(verdict.metrics["output_tail"]).split() == ["600", "00", "ff", "blue", str(folder)]


class Modes(ShellRuntime):
    """With modes, as a container has them."""

    async def put(self, files: "dict[str, bytes]", *, user: str | None = None, mode: int = 0o644) -> None:  # type: ignore[override]
        await super().put(files, user=user, mode=mode)
        for path in files:
            await trio.Path(self._here(path)).chmod(mode)


@pytest.mark.parametrize(("code", "reward"), [(0, 1.0), (1, 0.0)])
async def test_terminal_bench_uses_exit_code(folder: Path, code: int, reward: float) -> None:
    config: dict[str, Json] = {
        "tests": {"run-tests.sh": f"exit {code}"},
        "tests_target": TESTS,
        "verifier_dir": LOGS,
    }
    verdict = await harbor.evaluate(finished(ShellRuntime(folder=folder), config))
    assert (verdict.reward, verdict.metrics["by"]) == (reward, "exit_code")


async def test_tasks_own_command_is_run(folder: Path) -> None:
    verdict = await judged(folder, "exit 1", test_command=writes(folder, "0.5"))
    assert verdict.reward == 0.5


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({}, "$.evaluator.config.tests"),
        ({"tests_dir": "/data/tests"}, "$.evaluator.config.tests_dir"),
        ({"tests": {"a.py": ""}}, "$.evaluator.config.tests"),
        ({"tests": {"test.sh": "", "../x": ""}}, "$.evaluator.config.tests"),
        ({"tests": {"test.sh": "", "/x": ""}}, "$.evaluator.config.tests"),
        ({"tests": {"test.sh": {"base64": "!"}}}, "$.evaluator.config.tests"),
        ({"tests": {"test.sh": {}}}, "$.evaluator.config.tests"),
        ({"tests": {"test.sh": {"text": "", "mode": -1}}}, "$.evaluator.config.tests"),
        ({"tests": {"test.sh": 1}}, "$.evaluator.config.tests['test.sh']"),
        ({"tests": {"test.sh": ""}, "verifier_dir": "logs"}, "$.evaluator.config.verifier_dir"),
        ({"tests": {"test.sh": ""}, "tests_target": "/"}, "$.evaluator.config.tests_target"),
        ({"tests": {"test.sh": ""}, "verifier_timeout": -1}, "$.evaluator.config.verifier_timeout"),
        ({"tests": {"test.sh": ""}, "envv": {}}, "$.evaluator.config.envv"),
    ],
)
def test_bad_config_refused_at_submission(config: dict[str, Json], path: str) -> None:
    with pytest.raises(Refused) as refused:
        registry.find(EvaluatorSpec(name="harbor", config=config))
    assert refused.value.path == path
