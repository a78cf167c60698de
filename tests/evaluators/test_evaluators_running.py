"""How evaluators read their config, run a test for so many seconds, and read the file it wrote."""

from pathlib import Path

import pytest
import trio
from attrs import frozen
from evaluators_kit import finished
from shell_runtime import ShellRuntime

from polarnode.core.conversation import Json
from polarnode.core.errors import EvaluatorError, Refused
from polarnode.evaluators import command, contract
from polarnode.evaluators.contract import run_script


@frozen(kw_only=True)
class Shape:
    folder: str
    seconds: float = 1.0


@pytest.mark.parametrize(
    ("config", "path", "said"),
    [
        ({}, "$.evaluator.config.folder", "missing"),
        ({"folder": 1}, "$.evaluator.config.folder", "must be a string"),
        ({"folder": "/", "secnds": 1}, "$.evaluator.config.secnds", "seconds"),
    ],
)
def test_mistyped_config_refused_with_path(config: dict[str, Json], path: str, said: str) -> None:
    with pytest.raises(Refused, match=said) as refused:
        contract.read(config, Shape)
    assert refused.value.path == path


@pytest.mark.parametrize("path", ["relative", "/a/../b", "", "/a\0b"])
def test_path_must_be_absolute(path: str) -> None:
    with pytest.raises(Refused, match="folder must be an absolute path"):
        contract.absolute("folder", path)
    contract.absolute("folder", "/a/..b/c d")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_seconds_must_be_positive(value: float) -> None:
    with pytest.raises(Refused, match="greater than 0"):
        contract.seconds("seconds", value)
    contract.seconds("seconds", 0.5)


@pytest.mark.parametrize("text", ["", " \n", "a\0b", "x" * 100_001])
def test_command_must_be_runnable(text: str) -> None:
    with pytest.raises(Refused, match="test_command"):
        contract.command("test_command", text)
    contract.command("test_command", None)
    contract.command("test_command", "x" * 100_000)


# ── running ───────────────────────────────────────────────────────────────────


@pytest.fixture
def shell(tmp_path: Path) -> ShellRuntime:
    (tmp_path / "here").mkdir()
    return ShellRuntime(folder=tmp_path / "here")


async def test_both_streams_stay_in_order(shell: ShellRuntime) -> None:
    ran = await run_script(shell, "echo one; echo two >&2; printf '\\377'; exit 7", within_s=600)
    assert (ran.exit_code, ran.output, ran.timed_out) == (7, "one\ntwo\n\ufffd", False)
    assert ran.metrics == {"exit_code": 7, "output_tail": "one\ntwo\n\ufffd"}
    assert shell.ended == 1


async def test_flood_keeps_its_end_noted(shell: ShellRuntime) -> None:
    """The end of a flood of output is kept, and a note says so."""
    ran = await run_script(shell, "head -c 5000000 /dev/zero | tr '\\0' x; echo end", within_s=600)
    assert (len(ran.output), ran.output.endswith("xend\n"), ran.truncated) == (contract.LOG_BYTES, True, True)
    assert (ran.metrics["output_cut"], len(str(ran.metrics["output_tail"]))) == (True, contract.TAIL)


async def test_timeout_ends_every_started_process(shell: ShellRuntime) -> None:
    """A run that is out of time is ended with all that it started."""
    ran = await run_script(
        shell,
        f"echo $$ > {shell.folder}/pid; (sleep 4202771 & echo $! > {shell.folder}/child; wait); sleep"
        " 4202771",
        within_s=1,
    )
    assert (ran.exit_code, ran.timed_out, ran.metrics["timed_out"]) == (124, True, True)
    for name in ("pid", "child"):
        while runs(int((shell.folder / name).read_text())):  # noqa: ASYNC110 - the kernel tells nobody
            await trio.sleep(0.05)


def runs(pid: int) -> bool:
    """Whether a process runs; one that nobody has reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("code", [124, 137])
async def test_programs_exit_code_is_no_timeout(shell: ShellRuntime, code: int) -> None:
    """The program's own code is not taken for the clock's."""
    ran = await run_script(shell, f"echo timed out >&2; exit {code}", within_s=600)
    assert (ran.exit_code, ran.timed_out) == (code, False)


async def test_image_without_timeout_still_runs(shell: ShellRuntime, tmp_path: Path) -> None:
    for name in ("sh", "bash", "cat"):
        (tmp_path / name).symlink_to(f"/bin/{name}")
    ended = await shell.run(
        ["sh", "-c", contract.TIMED_SCRIPT, "sh", "5", "600", contract.RUN_STDIN_SCRIPT],
        env={"PATH": str(tmp_path)},
        stdin=b"echo $BASH_VERSION; cat /dev/null; exit 3",
    )
    assert ended.exit_code == 3
    assert ended.stdout.strip(), "bash, where there is one"


@pytest.mark.parametrize("shared", [False, True])
async def test_script_never_shows_on_command_line(shell: ShellRuntime, shared: bool) -> None:
    """The tested program is one: it would read the expected answer."""
    script = (
        "answer=SECRET_7351; for p in $PPID $$; do tr '\\0' ' ' < /proc/$p/cmdline; done;"
        ' sh -c \'tr "\\0" " " < /proc/$PPID/cmdline; env\'; test $answer = SECRET_7351 && exit 5'
    )
    if shared:
        ran = await run_script(shell, script, within_s=600)
        assert (ran.exit_code, "SECRET" in ran.output) == (5, False)
    else:
        verdict = await command.evaluate(finished(shell, {"script": script}))
        assert verdict.metrics["exit_code"] == 5
        assert "SECRET" not in str(verdict.metrics["output_tail"])
    assert not any("SECRET" in argument for argv in shell.ran for argument in argv)


async def test_environment_and_folder_are_given(shell: ShellRuntime) -> None:
    ran = await run_script(shell, "echo $COLOUR; pwd", within_s=600, env={"COLOUR": "blue"})
    assert ran.output.split() == ["blue", str(shell.folder)]


# ── reward files ──────────────────────────────────────────────────────────────


async def test_unremovable_file_is_an_error(shell: ShellRuntime) -> None:
    with pytest.raises(EvaluatorError, match="judge in a fresh_runtime"):
        await command.clear(shell, ["/proc/1/status"])
    await command.clear(shell, [str(shell.folder / "nothing")])


@pytest.mark.parametrize(("text", "value"), [(b"1", 1.0), (b" 0.5\n", 0.5), (b"-2e-3", -0.002)])
def test_numbers_are_read_as_rewards(text: bytes, value: float) -> None:
    assert command.finite(command.parsed(text, "f"), "f", text) == value


@pytest.mark.parametrize(
    "text", [b"", b"\xff", b"one", b"null", b"true", b"[]", b"NaN", b"-Infinity", b"1" + b"0" * 400]
)
def test_non_numbers_are_no_reward(text: bytes) -> None:
    with pytest.raises(EvaluatorError):
        command.finite(command.parsed(text, "f"), "f", text)
