"""A test that cannot run judges nothing: it is the task's error and never a reward of 0. What the agent did not
leave is a failed test.
"""

from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from evaluators_kit import finished
from shell_runtime import TESTBED_PATH, ShellRuntime

from polarnode.core.errors import EvaluatorError
from polarnode.core.ports import Ended
from polarnode.core.task import FileSpec
from polarnode.core.trajectory import Verdict
from polarnode.evaluators import command, harbor, patches, program_cases
from polarnode.evaluators import test_on_output as on_output
from polarnode.evaluators.contract import ProgramResult

NOT_FOUND = "exit code 127: a program was not found in its image"
NOT_EXECUTED = "exit code 126: a program could not be executed"
GIVEN = "#!/bin/sh\njq-nosuch . answer.json\n"


async def scripted(folder: Path, script: str, *brought: str, **config: Any) -> Verdict:
    done = finished(ShellRuntime(folder=folder), {"script": script, **config})
    files = {path: FileSpec(path=path, text=GIVEN, mode=0o755) for path in brought}
    return await command.evaluate(attrs.evolve(done, brought=files))


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("pytest-nosuch -q", NOT_FOUND),
        ("cd / && pytest-nosuch", NOT_FOUND),
        ("/nosuch/test.sh", NOT_FOUND),
        ("bash /nosuch/test.sh", NOT_FOUND),
        ("env pytest-nosuch", NOT_FOUND),
        ("exec pytest-nosuch", NOT_FOUND),
        ("exit 127", NOT_FOUND),
        ("/proc/version", NOT_EXECUTED),
        ("/tmp", NOT_EXECUTED),
    ],
)
async def test_unrunnable_script_is_an_error(tmp_path: Path, script: str, why: str) -> None:
    with pytest.raises(EvaluatorError, match=why):
        await scripted(tmp_path, script)


@pytest.mark.parametrize("script", ["./app", "bash ./app", "touch app; ./app"])
async def test_missing_work_fails_the_test(tmp_path: Path, script: str) -> None:
    verdict = await scripted(tmp_path, script)
    assert verdict.reward == 0.0
    assert "which the agent did not leave as a program" in str(verdict.metrics["reason"])


@pytest.mark.parametrize("run", ["bash run.sh", "./run.sh", "sh ./run.sh"])
async def test_agents_scripts_fail_the_test(tmp_path: Path, run: str) -> None:
    (tmp_path / "run.sh").write_text(GIVEN)
    (tmp_path / "run.sh").chmod(0o755)
    verdict = await scripted(tmp_path, run)
    assert verdict.reward == 0.0
    assert "run.sh, the agent's, ran jq-nosuch, which is not there" in str(verdict.metrics["reason"])
    with pytest.raises(EvaluatorError, match=NOT_FOUND):
        await scripted(tmp_path, run, f"{TESTBED_PATH}/run.sh")


@pytest.mark.parametrize(
    "run", ["./app", "cd . && ./app", "if true; then ./app; fi", f"{TESTBED_PATH}/app a"]
)
async def test_agent_program_cannot_fake_missing_test(tmp_path: Path, run: str) -> None:
    """A program of the agent's cannot make a test look missing."""
    (tmp_path / "app").write_text("#!/bin/sh\nexit 127\n")
    (tmp_path / "app").chmod(0o755)
    verdict = await scripted(tmp_path, run)
    assert verdict.reward == 0.0
    assert "app, the agent's, which ended with exit code 127" in str(verdict.metrics["reason"])
    with pytest.raises(EvaluatorError, match=NOT_FOUND):
        await scripted(tmp_path, f"cat ./app >/dev/null; pytest-nosuch 2>{TESTBED_PATH}/log")


async def test_task_files_are_no_work(tmp_path: Path) -> None:
    check = tmp_path / "check.sh"
    check.write_text("true\n")  # the mode that runs it was forgotten
    done = finished(ShellRuntime(folder=tmp_path), {"script": "./check.sh"})
    given = {f"{TESTBED_PATH}/check.sh": FileSpec(path="check.sh", text="true\n")}
    with pytest.raises(EvaluatorError, match=NOT_EXECUTED):
        await command.evaluate(attrs.evolve(done, brought=given))


@pytest.mark.parametrize(
    ("run", "act"),
    [
        ("./check.sh", "rm check.sh"),
        ("bash check.sh", "rm check.sh"),
        ("./check.sh", "chmod 644 check.sh"),
        ("./check.sh", "echo '#!/nosuch/sh' > check.sh"),
        ("./check.sh", "echo 'other-nosuch' > check.sh"),
    ],
)
async def test_spoilt_task_files_fail_it(tmp_path: Path, run: str, act: str) -> None:
    check = tmp_path / "check.sh"
    check.write_text(GIVEN)
    check.chmod(0o755)
    path = f"{TESTBED_PATH}/check.sh"
    with pytest.raises(EvaluatorError, match="jq-nosuch"):
        await scripted(tmp_path, run, path)
    await trio.run_process(act, shell=True, cwd=tmp_path)
    verdict = await scripted(tmp_path, run, path)
    assert (verdict.reward, verdict.metrics["reason"]) == (
        0.0,
        f"the test ran {path}, which the agent removed or changed",
    )


async def test_zero_written_first_is_not_judgement(tmp_path: Path) -> None:
    reward = f"{TESTBED_PATH}/reward"
    with pytest.raises(EvaluatorError, match=NOT_FOUND):
        await scripted(tmp_path, "echo 0 > reward; pytest-nosuch && echo 1 > reward", reward_file=reward)
    with pytest.raises(EvaluatorError, match=NOT_FOUND):
        await scripted(tmp_path, "rm -f reward; pytest-nosuch", reward_file=reward)
    judged = await scripted(tmp_path, "echo 0.5 > reward; tidy-up-nosuch", reward_file=reward)
    assert judged.reward == 0.5


@attrs.define
class Executed(ShellRuntime):
    """Says what runc says of a program that it does not find."""

    said: str = ""

    async def run(self, argv: Any, **said: Any) -> Ended:
        if self.said and argv[0] != "rm":
            return Ended(exit_code=127, stdout=b"", stderr=self.said.encode())
        return await super().run(argv, **said)


RUNC = (
    "Error: runc: exec failed: unable to start container process: exec: {}: OCI runtime attempted to invoke a"
    " command that was not found"
)


async def test_program_missing_in_runc(tmp_path: Path) -> None:
    missing = RUNC.format('"pytest-nosuch": executable file not found in $PATH')
    runtime = Executed(folder=tmp_path, said=missing)
    with pytest.raises(EvaluatorError, match=f"{NOT_FOUND}.*pytest-nosuch"):
        await command.evaluate(finished(runtime, {"argv": ["pytest-nosuch", "-q"]}))
    with pytest.raises(EvaluatorError, match=f"{NOT_FOUND}.*pytest-nosuch"):
        await harbor.evaluate(finished(runtime, {"tests": {"run-tests.sh": "true"}}))
    runtime.said = RUNC.format('"./app": stat ./app: no such file or directory')
    assert (await command.evaluate(finished(runtime, {"argv": ["./app"]}))).reward == 0.0


async def test_unrunnable_harbor_tests_are_errors(tmp_path: Path) -> None:
    folders = {"tests_target": f"{TESTBED_PATH}/tests", "verifier_dir": f"{TESTBED_PATH}/logs"}
    zero = f"echo 0 > {TESTBED_PATH}/logs/reward.txt\npytest-nosuch\n"
    for tests in ({"test.sh": zero}, {"test.sh": "pytest-nosuch\n"}, {"run-tests.sh": "pytest-nosuch\n"}):
        with pytest.raises(EvaluatorError, match=NOT_FOUND):
            await harbor.evaluate(finished(ShellRuntime(folder=tmp_path), {"tests": tests, **folders}))


async def test_missing_program_of_cases(tmp_path: Path) -> None:
    cases = [{"stdin": "a", "stdout": "b"}, {"stdin": "b", "stdout": "b"}]
    runtime = ShellRuntime(folder=tmp_path)
    missing = Executed(folder=tmp_path, said=RUNC.format('"python9": executable file not found in $PATH'))
    with pytest.raises(EvaluatorError, match=NOT_FOUND):
        await program_cases.evaluate(finished(missing, {"argv": ["python9", "a.py"], "cases": cases}))
    own = await program_cases.evaluate(finished(runtime, {"argv": ["sh", "-c", "exit 127"], "cases": cases}))
    assert own.reward == 0.0, "a program that is there may end with any code"


async def test_patch_command_that_cannot_run(tmp_path: Path) -> None:
    runtime = ShellRuntime(folder=tmp_path)
    of = patches.Repository(folder=TESTBED_PATH, command="git-nosuch diff")
    with pytest.raises(EvaluatorError, match="the patch command ended with exit code 127"):
        await patches.extract(runtime, runtime, of)


def test_output_without_tests_is_error(tmp_path: Path) -> None:
    ran = ProgramResult(
        exit_code=127, output="bash: line 1: pytest: command not found\n", timed_out=False, truncated=False
    )
    done = finished(ShellRuntime(folder=tmp_path), {})
    with pytest.raises(EvaluatorError, match=NOT_FOUND):
        on_output.require_statuses(done, ran)
    assert (
        on_output.require_statuses(done, attrs.evolve(ran, output=f"{ran.output}PASSED a.py::test_a\n")) == {}
    )
