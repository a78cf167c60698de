"""The command as a newcomer meets it: help that can be acted on, settings by weight, and every expected fault
as one sentence.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.exceptions import Exit
from click.testing import CliRunner, Result

from polarnode.cli import options
from polarnode.cli.main import CommandGroup
from polarnode.cli.main import main as command
from polarnode.core.errors import ConfigError, EngineError, PolarnodeError, Refused, RuntimeFault
from polarnode.node.config import NodeConfig

VERBS = (
    "check",
    "view",
    "run",
    "fleet",
    "generate",
    "convert",
    "submit",
    "fork",
    "watch",
    "export",
    "evaluate",
    "inspect",
    "replay",
    "merge",
    "gym-agent",
    "migrate",
    "doctor",
    "serve",
    "status",
    "tasks",
    "logs",
    "cancel",
    "pause",
    "resume",
    "weights",
    "consumers",
    "score",
    "completion",
    "image",
)
HEAVY = (
    "torch",
    "transformers",
    "tokenizers",
    "sglang",
    "trio",
    "quart",
    "hypercorn",
    "podman",
    "rich",
    "polarnode.node.node",
    "polarnode.node.opening",
)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLARNODE_PORT", "POLARNODE_TOKEN", "POLARNODE_URL", "POLARNODE_CPU", "POLARNODE_GPUS"):
        monkeypatch.delenv(name, raising=False)


def invoke(*argv: str) -> Result:
    return CliRunner().invoke(command, argv, prog_name="polarnode")


# ── help ──────────────────────────────────────────────────────────────────────


def test_help_names_every_verb() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    listed = result.output.partition("Commands:")[2]
    for verb in VERBS:
        assert verb in listed
    assert "..." not in listed
    assert set(command.commands) == set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_verb_help_has_example_and_options(verb: str) -> None:
    result = invoke(verb, "--help")
    assert result.exit_code == 0
    assert f"\n  polarnode {verb}" in result.output
    described = [each for each in command.commands[verb].params if isinstance(each, click.Option)]
    assert all(each.help for each in described)


def test_examples_use_existing_options() -> None:
    for verb in VERBS:
        for line in (command.commands[verb].help or "").splitlines():
            words = line.split()
            if words[:2] != ["polarnode", verb]:
                continue
            found = command.commands[verb]
            if isinstance(found, click.Group) and len(words) > 2:
                found = found.commands.get(words[2], found)
            known = {name for each in found.params for name in each.opts}
            assert {word for word in words if word.startswith("-") and word not in ("-1", "-")} <= known


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys\nfrom polarnode.cli import main\n"
        "try:\n    main(['run', '--help'], prog_name='polarnode')\nexcept SystemExit:\n    pass\n"
        f"print('loaded:', *[name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].strip() == "loaded:"


def test_runs_as_module_with_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "polarnode.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("polarnode, version ")


# ── settings ──────────────────────────────────────────────────────────────────


def test_flags_beat_environment_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "node.toml"
    file.write_text('cpu = true\nport = 1\nrun_limit = 1\nnode_id = "filed"\n')
    monkeypatch.setenv("POLARNODE_PORT", "2")
    monkeypatch.setenv("POLARNODE_RUN_LIMIT", "2")
    config = options.config_of({"config_file": file, "run_limit": 3, "port": None, "import_paths": ()})
    assert (config.cpu, config.node_id, config.port, config.run_limit) == (True, "filed", 2, 3)


def test_device_choice_overrides_weaker_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLARNODE_CPU", "true")
    assert options.config_of({"gpus": "0-1"}) == NodeConfig(gpus=(0, 1))
    monkeypatch.delenv("POLARNODE_CPU")
    monkeypatch.setenv("POLARNODE_GPUS", "[0]")
    assert options.config_of({"cpu": True}) == NodeConfig(cpu=True)
    with pytest.raises(ConfigError, match="--cpu and --gpus exclude each other"):
        options.config_of({"cpu": True, "gpus": "0"})


def test_import_prefixes_are_repeatable() -> None:
    assert options.config_of({"import_paths": ("a", "b.c")}).import_paths == ("a", "b.c")
    assert options.config_of({"import_paths": ()}).import_paths == ()


def test_verb_settings_beat_earlier_ones() -> None:
    found: dict[str, Any] = {}

    @click.group()
    @options.node_options
    def group(**given: Any) -> None: ...

    @group.command()
    @options.node_options
    @click.pass_context
    def verb(ctx: click.Context, /, **given: Any) -> None:
        found.update(options.merged_settings(ctx, given))

    CliRunner().invoke(
        group, ["--cpu", "--run-limit", "2", "verb", "--run-limit", "3"], catch_exceptions=False
    )
    assert found == {"cpu": True, "run_limit": 3}


@pytest.mark.parametrize(
    ("argv", "code", "sentence"),
    [
        ((), 2, "choose where the model runs: --gpus 0-7, --gpus 0 or --cpu; try: polarnode --cpu"),
        (("run", "FILE"), 2, "choose where the model runs"),
        (("run", "--cpu"), 2, "Missing argument 'SOURCES...'"),
        (("run", "--cpu", "--samples", "0", "FILE"), 2, "0 is not in the range"),
        (("run", "--cpu", "FILE"), 1, "no harness is called po; there are: claude_code"),
        (("--gpus", "0-", "run", "FILE"), 1, "--gpus 0-: give numbers and ranges"),
        (("--cpu", "--host", "0.0.0.0"), 1, "set a bearer token with POLARNODE_TOKEN"),
        (("--config", "FILE", "doctor"), 1, "harness is not a known field"),
        (("submit", "gone.toml"), 2, "Path 'gone.toml' does not exist"),
        (("submit", "FILE", "--url", "http://127.0.0.1:1"), 1, "http://127.0.0.1:1 does not answer"),
        (("watch", "--url", "http://127.0.0.1:1"), 1, "is the node running?"),
        (("export", "--url", "http://127.0.0.1:1"), 1, "is the node running?"),
        (("inspect", "4f", "--url", "http://127.0.0.1:1"), 1, "is the node running?"),
    ],
)
def test_mistake_is_one_sentence(tmp_path: Path, argv: tuple[str, ...], code: int, sentence: str) -> None:
    file = tmp_path / "task.toml"
    file.write_text('harness = { name = "po" }\ninstruction = "x"\n')
    result = invoke(*[str(file) if word == "FILE" else word for word in argv])
    assert result.exit_code == code, result.output
    assert sentence in result.output
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit)


# ── faults ────────────────────────────────────────────────────────────────────


def test_error_shows_field_path() -> None:
    assert options.sentence(ConfigError("set it")) == "set it"
    assert options.sentence(Refused("a.b must be 1", path="$.a.b")) == "a.b must be 1 (at $.a.b)"


def groups() -> Iterator[tuple[BaseException, int | None, str]]:
    fault, other = (
        EngineError("engine host 0 did not start: read its log"),
        RuntimeFault("podman is not installed"),
    )
    bug = ZeroDivisionError("a bug")
    yield fault, 1, str(fault)
    yield ExceptionGroup("outer", [ExceptionGroup("inner", [fault])]), 1, str(fault)
    yield (
        ExceptionGroup("outer", [fault, ExceptionGroup("inner", [other, EngineError(str(fault))])]),
        1,
        f"{fault}\n{other}",
    )
    yield ExceptionGroup("outer", [fault, bug]), None, ""
    yield bug, None, ""
    yield KeyboardInterrupt(), 130, ""
    yield BaseExceptionGroup("outer", [KeyboardInterrupt(), fault]), 130, ""
    yield BaseExceptionGroup("outer", [KeyboardInterrupt(), bug]), None, ""


@pytest.mark.parametrize(("error", "code", "said"), list(groups()), ids=lambda value: "")
def test_grouped_errors_become_exits(error: BaseException, code: int | None, said: str) -> None:
    told = options.command_exit(error)
    if code is None:
        assert told is None
        return
    assert told is not None
    assert told.exit_code == code
    assert isinstance(told, Exit) or told.message == said


@pytest.mark.parametrize(("error", "code", "said"), list(groups()), ids=lambda value: "")
def test_command_exit_code_and_message(error: BaseException, code: int | None, said: str) -> None:
    @click.group(cls=CommandGroup)
    def group() -> None: ...

    @group.command()
    def verb() -> None:
        raise error

    if code is None:
        with pytest.raises(type(error)) as raised:
            CliRunner().invoke(group, ["verb"], catch_exceptions=False)
        assert raised.value is error
        return
    result = CliRunner().invoke(group, ["verb"])
    assert result.exit_code == code
    assert result.output == (f"Error: {said}\n" if said else "")


def test_unreadable_config_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_bytes(b"\xff")
    with pytest.raises(PolarnodeError, match=r"node.toml cannot be read"):
        options.config_of({"config_file": file})


@pytest.mark.parametrize(("mode", "warned"), [(0o644, True), (0o640, True), (0o600, False)])
def test_readable_token_file_is_named(
    mode: int, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "node.toml"
    file.write_text('token = "sekret"\n')
    file.chmod(mode)
    assert options.config_of({"config_file": file}).token == "sekret"
    shown = capsys.readouterr().err
    assert ("chmod 600" in shown) is warned
    assert "sekret" not in shown


def test_labels_are_given_one_by_one() -> None:
    config = options.config_of({"labels": ("gpu=h100", "site=a=b")})
    assert config.labels == {"gpu": "h100", "site": "a=b"}
    with pytest.raises(ConfigError, match="--label gpu: write it as NAME=VALUE"):
        options.config_of({"labels": ("gpu",)})
