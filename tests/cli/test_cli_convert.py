"""`polarnode convert`: a source as a table or as JSONL, one sentence for each task that can not be had."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sources_kit import DATA, task

from polarnode.cli import sources
from polarnode.cli.main import main as command
from polarnode.cli.sources import SourceSelection, note_lines
from polarnode.core import codec
from polarnode.node.config import NodeConfig
from polarnode.sources import Overrides, read_source

LINE: dict[str, Any] = {"instruction": "Do it.", "harness": {"name": "pi"}, "task_id": "one"}


def invoke(*argv: object) -> Result:
    return CliRunner().invoke(command, ["convert", *map(str, argv)], prog_name="polarnode")


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Good tasks around one that is unreadable and one whose evaluator can not work."""
    file = tmp_path / "tasks.jsonl"
    bad = {**LINE, "task_id": "judgeless", "evaluator": {"name": "command"}}
    file.write_text(
        "".join(
            f"{each}\n"
            for each in (json.dumps(LINE), "{", json.dumps(bad), json.dumps({**LINE, "task_id": "two"}))
        )
    )
    return file


def test_source_is_shown_with_notes() -> None:
    result = invoke("--harness", "codex", DATA / "harbor")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["task", "harness", "image", "evaluator", "run", "post", "samples", "notes"]
    assert lines[1].startswith("hello  codex    localhost/polarnode-task:")
    assert " + harness  harbor     120 s  150 s  1" in lines[1]
    assert lines[2].startswith("many   codex    quay.example/many:2 + harness")
    assert lines[2].rstrip().endswith("1 2 3 4")
    assert lines[3].startswith("note 1: environment.allowed_hosts: 192.0.2.1 is an address")
    assert lines[-1] == f"hello: image is built from {DATA / 'harbor' / 'hello' / 'environment'}"


def test_jsonl_gives_same_tasks(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    result = invoke("--harness", "codex", "--samples", "3", "--out", out, DATA / "harbor")
    assert result.exit_code == 0, result.output
    assert f"2 tasks in {out}" in result.stderr
    assert "192.0.2.1 is an address, and only names of hosts can be reached (1 of 2 tasks)" in result.stderr
    again = [each.spec for each in read_source(out).tasks()]
    assert again == [
        each.spec
        for each in read_source(DATA / "harbor", overrides=Overrides(harness="codex", samples=3)).tasks()
    ]
    piped = invoke("--harness", "codex", "--samples", "3", "--out", "-", DATA / "harbor")
    assert [codec.read_task(json.loads(line)) for line in piped.stdout.splitlines()] == again


def test_each_invalid_task_is_one_sentence(mixed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    result = invoke("--out", out, mixed)
    assert result.exit_code == 1
    assert not out.exists(), "nothing is written unless it is asked for"
    said = result.stderr.splitlines()
    assert said[0].startswith(f"Error: {mixed} line 2: the line is not JSON")
    assert said[1].startswith(f"Error: {mixed} line 3: ")
    assert "needs either argv or script" in said[1]
    assert said[2] == "2 of 4 tasks cannot be converted; --skip-invalid continues without them"


def test_skip_invalid_writes_the_others(mixed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    result = invoke("--skip-invalid", "--out", out, mixed)
    assert result.exit_code == 1, "a script is told that some are missing"
    assert [json.loads(line)["task_id"] for line in out.read_text().splitlines()] == ["one", "two"]
    assert len([line for line in result.stderr.splitlines() if line.startswith("Error: ")]) == 2


def test_only_and_limit_select_tasks(mixed: Path) -> None:
    result = invoke("--out", "-", "--only", "two", mixed)
    assert result.exit_code == 0
    assert [json.loads(line)["task_id"] for line in result.stdout.splitlines()] == ["two"]
    assert invoke("--limit", "1", "--out", "-", mixed).exit_code == 0
    none = invoke("--only", "zz", mixed)
    assert none.exit_code == 1
    assert "no task found, or none whose name matches --only" in none.output


def test_several_sources_with_an_override(mixed: Path, tmp_path: Path) -> None:
    (tmp_path / "with.toml").write_text("[budgets]\nrun_s = 11\n")
    result = invoke(
        "--override",
        tmp_path / "with.toml",
        "--only",
        "calc-7",
        "--out",
        "-",
        mixed,
        DATA / "polar" / "task.json",
    )
    assert result.exit_code == 0, result.output
    [value] = [json.loads(line) for line in result.stdout.splitlines()]
    assert (value["task_id"], value["budgets"]["run_s"]) == ("calc-7", 11)


def test_given_kind_is_used(tmp_path: Path) -> None:
    (tmp_path / "tasks.txt").write_text(json.dumps(LINE) + "\n")
    assert invoke(tmp_path / "tasks.txt").exit_code == 1
    assert invoke("--kind", "jsonl", "--out", "-", tmp_path / "tasks.txt").exit_code == 0
    assert invoke("--kind", "zip", tmp_path / "tasks.txt").exit_code == 2


def test_shared_note_is_shown_once() -> None:
    found = [task(DATA / "harbor" / "many", harness="pi")] * 2
    assert len(note_lines(found)) == 4
    assert "(" not in note_lines(found)[0].replace("198.51.100.0/24", "")


def test_narrow_terminal_shortens_only_names(
    mixed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    code = sources.convert(
        SourceSelection(paths=(mixed,), overrides=Overrides(limit=1)),
        NodeConfig(),
        out=None,
        skip=False,
        build=False,
    )
    shown = capsys.readouterr().out
    assert code == 0
    assert "1800 s" in shown
    assert "300 s" in shown
