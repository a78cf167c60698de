"""Polar's task files: each field of a TaskRequest is said in our words, noted, or refused; none is lost."""

import json
import shutil
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
from attrs import fields
from hypothesis import given
from hypothesis import strategies as st
from sources_kit import DATA, items, refusal, task

from polarnode.core import codec
from polarnode.core.task import PrepareStep, VolumeSpec
from polarnode.evaluators import harbor, test_on_output
from polarnode.sources import UnreadTask
from polarnode.sources.polar import AGENT_CHANGING_SETTINGS, TaskNotes
from polarnode.sources.polar_spec import (
    PolarEvaluator,
    PolarRuntime,
    PolarTask,
    evaluator_value,
    runtime_value,
)

FILE = DATA / "polar" / "task.json"
CODEX: dict[str, Any] = {"harness": "codex"}


def write(folder: Path, **said: Any) -> Path:
    value = {"task_id": "t", "instruction": "Do it.", "agent": CODEX, **said}
    (folder / "t.json").write_text(json.dumps({key: each for key, each in value.items() if each is not None}))
    return folder / "t.json"


# ── a whole task ──────────────────────────────────────────────────────────────


def test_request_becomes_a_task() -> None:
    spec = task(FILE).spec
    assert (spec.task_id, spec.group_id, spec.num_samples, spec.priority) == ("calc-7", "g-7", 4, 70)
    assert spec.instruction == "Add a power operator to the calculator."
    assert (spec.harness.name, spec.harness.model_name, spec.harness.version, dict(spec.harness.env)) == (
        "codex",
        "policy",
        "0.171.0",
        {"DEBUG": "0"},
    )
    assert spec.harness.mcp_servers["search"].command == "search"
    assert spec.harness.mcp_servers["search"].args == ("--all",)
    assert "Look twice." in spec.harness.skills["careful"]
    assert (spec.builder.name, dict(spec.builder.config)) == ("prefix_merging", {})
    assert (spec.budgets.run_s, spec.budgets.max_turns) == (1200, None)
    assert (spec.group.early_stop_min, spec.callback_url) == (2, None)
    assert spec.metadata == {"group_id": "g-7", "policy_version": 3}


def test_runtime_files_steps_and_limits() -> None:
    runtime = task(FILE).spec.runtime
    assert (runtime.image, runtime.workdir, runtime.add_harness) == ("calculator:1", "/srv/calculator", True)
    assert (runtime.cpus, runtime.memory_mb, runtime.disk_mb) == (2, 4096, 10240)
    assert {file.path: codec.file_bytes(file) for file in runtime.files} == {
        "/srv/inputs/deep/raw.bin": b"\x00\x01",
        "/srv/inputs/notes.txt": b"take notes\n",
        "/srv/notes.txt": b"take notes\n",
    }
    assert runtime.prepare == (
        PrepareStep(argv=("env", "--chdir", "/srv/calculator", "QUIET=1", "bash", "-lc", "pip install -e .")),
        PrepareStep(argv=("bash", "-lc", "mkdir -p /polar/session/workspace")),
    )
    assert runtime.volumes == (VolumeSpec(source="/opt/cli", target="/opt/cli", write=False),)
    assert dict(runtime.env) == {"LEVEL": "3"}


def test_evaluator_gets_its_folders_files() -> None:
    evaluator = task(FILE).spec.evaluator
    read = harbor.read_config(evaluator.config)
    assert set(read.tests) == {"test.sh"}
    assert read.verifier_timeout == 240
    assert not evaluator.fresh_runtime


def test_meaningless_fields_are_noted() -> None:
    said = " | ".join(task(FILE).notes)
    for words in (
        "agent.settings.reasoning_effort is not used",
        "builder.config.end_of_turn_token_id is not needed",
        "timeout_seconds is Polar's one deadline",
        "callback_url is not called",
        "uploads files after a command",
        "max_attempts is not used",
        "it may reach the whole internet",
        "runtime.kwargs.binds is not used",
        "runtime.kwargs.volumes are mounted only where",
        "docker-daemon: is where Apptainer gets the image",
        "/polar/session is Polar's own folder",
    ):
        assert words in said, words


def test_yaml_and_shell_command_are_read() -> None:
    found = task(DATA / "polar" / "task.yaml")
    assert found.spec.harness.command == (
        "env",
        "--chdir",
        "/tmp",
        "WORD=done",
        "bash",
        "-lc",
        "sleep 1 && echo done",
    )
    assert found.spec.evaluator.name == "session_completed"
    assert found.spec.runtime.image == "agent"
    assert any(note.startswith("runtime: it has none") for note in found.notes)


def test_lists_and_lines_hold_several(tmp_path: Path) -> None:
    value = json.loads(write(tmp_path).read_text())
    (tmp_path / "many.json").write_text(json.dumps([value, {**value, "task_id": "u"}, {"agent": CODEX}]))
    assert [each.name for each in items(tmp_path / "many.json")] == ["t", "u", "many"]
    (tmp_path / "many.jsonl").write_text(json.dumps(value) + "\n{\n")
    found = items(tmp_path / "many.jsonl")
    assert found[0].name == "t"
    assert isinstance(found[1], UnreadTask)
    assert "many.jsonl line 2: the line is not JSON" in str(found[1].refused)


def test_agent_timeout_sets_run_budget(tmp_path: Path) -> None:
    found = task(write(tmp_path, metadata={"agent_timeout": 77}))
    assert found.spec.budgets.run_s == 77
    assert not any("deadline" in note for note in found.notes)


# ── refusals ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"instruction": None}, "instruction is missing"),
        ({"agent": {"import_path": "a:b"}}, "a harness class of Polar's own kind cannot run here"),
        ({"agent": {"harness": "shell"}}, "the harness shell has no custom_shell"),
        (
            {
                "agent": {
                    "harness": "codex",
                    "mcp_servers": [{"name": "s", "transport": "sse", "url": "http://x"}],
                }
            },
            "the MCP server s speaks over sse",
        ),
        ({"agent": {"harness": "codex", "skills_path": "nowhere"}}, "nowhere holds no skill"),
        ({"builder": {"strategy": "a.b:C"}}, "a builder of Polar's own kind"),
        ({"runtime": {"image": "x.sif"}}, "x.sif is an image of Apptainer"),
        ({"runtime": {"image": "x", "gpus": 1}}, "it asks for GPUs in the container"),
        ({"runtime": {"image": "x", "import_path": "a:b"}}, "a runtime class of Polar's own kind"),
        (
            {
                "runtime": {
                    "image": "x",
                    "prepare": [{"type": "upload_file", "source": "gone", "target": "/x"}],
                }
            },
            "gone cannot be read",
        ),
        (
            {
                "runtime": {
                    "image": "x",
                    "prepare": [{"type": "upload_dir", "source": "gone", "target": "/x"}],
                }
            },
            "gone is no folder",
        ),
        (
            {"runtime": {"image": "x", "prepare": [{"type": "upload_file", "source": "gone"}]}},
            "upload_file needs a source and a target",
        ),
        ({"runtime": {"image": "x", "prepare": [{"type": "exec"}]}}, "exec needs a command"),
        ({"runtime": {"image": "x", "prepare": [{"type": "fly"}]}}, "runtime.prepare[0].type must be"),
        (
            {
                "runtime": {
                    "image": "x",
                    "eval_prepare": [{"type": "upload_dir", "source": "a", "target": "/x"}],
                }
            },
            "eval_prepare uploads files",
        ),
        (
            {"runtime": {"image": "x", "kwargs": {"volumes": ["all"]}}},
            "kwargs.volumes is no list of source:target",
        ),
        ({"evaluator": {"strategy": "harbor_rubric"}}, "the evaluator harbor_rubric is Polar's own"),
        ({"evaluator": {"strategy": "a.b:Class"}}, "the evaluator a.b:Class is Polar's own"),
        ({"evaluator": {"strategy": "harbor"}}, "the evaluator needs tests_dir"),
        ({"evaluator": {"strategy": "harbor", "config": {"tests_dir": "gone"}}}, "gone is no folder"),
        (
            {"evaluator": {"strategy": "swebench_harness", "config": {"instance": 3}}},
            "the instance is a dataset's row",
        ),
        (
            {"evaluator": {"strategy": "test_on_output", "env": {"A": "1"}}},
            "test_on_output has no env of its own",
        ),
    ],
)
def test_task_changing_field_is_refused(tmp_path: Path, said: dict[str, Any], sentence: str) -> None:
    text = refusal(write(tmp_path, **said), "polar")
    assert sentence in text
    assert text.startswith(str(tmp_path))


@pytest.mark.parametrize("name", AGENT_CHANGING_SETTINGS)
def test_agent_changing_setting_is_refused(tmp_path: Path, name: str) -> None:
    assert f"agent.settings.{name} makes it another agent" in refusal(
        write(tmp_path, agent={"harness": "codex", "settings": {name: "x"}})
    )


# ── evaluators ────────────────────────────────────────────────────────────────


def judge(strategy: str, config: dict[str, Any], **more: Any) -> tuple[dict[str, Any], list[str]]:
    notes: list[str] = []
    told = PolarEvaluator(strategy=strategy, config=config, **more)
    return evaluator_value(told, DATA / "polar", notes.append), notes


def test_output_test_keeps_its_config() -> None:
    config = {
        "test_command": "pytest -rA",
        "expected_output_json": '{"a": "PASSED"}',
        "exclude_patterns": [".venv/**"],
    }
    found, notes = judge("test_on_output", config, refresh_runtime=True)
    assert test_on_output.expected(test_on_output.read_config(found["config"])) == {"a": "PASSED"}
    assert notes == []
    assert "judges in a clean runtime" in judge("test_on_output", config)[1][0]


@pytest.mark.parametrize("strategy", ["swebench_harness", "swegym_git_diff"])
def test_instance_solution_is_left_out(strategy: str) -> None:
    row = json.loads((DATA / "swe" / "rows.jsonl").read_text().splitlines()[0])
    found, _ = judge(strategy, {"instance": row, "patch_command": "git diff"}, refresh_runtime=True)
    assert found["name"] == "swebench"
    assert found["config"]["patch_command"] == "git diff"
    assert "THE-GOLD-PATCH" not in json.dumps(found)
    assert found["config"]["instance"]["FAIL_TO_PASS"] == ["test_lib.py::test_two"]


def test_missing_evaluator_and_harbor_env(tmp_path: Path) -> None:
    notes: list[str] = []
    assert evaluator_value(None, tmp_path, notes.append) == {}
    assert "it has none" in notes[0]
    found, _ = judge("harbor", {"tests_dir": "tests"}, env={"A": "1"}, refresh_runtime=True)
    assert found["fresh_runtime"] is True
    assert harbor.read_config(found["config"]).env == {"A": "1"}


# ── nothing is lost ───────────────────────────────────────────────────────────


@given(
    st.from_regex(r"[a-z_]{3,20}", fullmatch=True).filter(
        lambda name: name not in {field.name for field in fields(PolarTask)}
    )
)
def test_an_unknown_field_is_noted(name: str) -> None:
    from polarnode.sources.polar import _note_unknown  # the one law of this reader

    notes = TaskNotes()
    _note_unknown({"instruction": "x", name: 1}, notes)
    assert notes.texts == [f"{name} is not used: no TaskRequest has such a field"]


SAID: dict[str, Any] = {
    "cpus": 3,
    "memory_mb": 512,
    "storage_mb": 99,
    "workdir": "/w",
    "env": {"A": "1"},
    "allow_internet": True,
    "direct_exec_init_command": "true",
    "internet_volumes": ("/x",),
    "kwargs": {"binds": 1},
    "eval_prepare": (),
}


@pytest.mark.parametrize("name", sorted(SAID))
def test_runtime_field_changes_or_is_noted(name: str) -> None:
    """Each field of a runtime changes the task or is noted."""

    def made(**said: Any) -> tuple[dict[str, Any], list[str]]:
        notes: list[str] = []
        return runtime_value(
            PolarRuntime(image="x", **{"allow_internet": False, **said}), DATA, notes.append
        ), notes

    assert made() != made(**{name: SAID[name]})


def test_file_read_from_task_folder() -> None:
    [first, *_] = task(FILE).spec.runtime.files
    assert first.base64 is not None
    assert b64decode(first.base64) == b"\x00\x01"


def test_unknown_fields_of_parts_are_noted(tmp_path: Path) -> None:
    said = {
        "agent": {**CODEX, "mood": 1},
        "runtime": {"image": "x", "workdir": "/x", "colour": 1, "allow_internet": False},
    }
    notes = task(write(tmp_path, **said, metadata={"agent_timeout": 5})).notes
    assert "agent.mood is not used: no TaskRequest has such a field" in notes
    assert "runtime.colour is not used: no TaskRequest has such a field" in notes
    assert len(notes) == 3, "and that it has no evaluator"


def test_outside_skill_is_refused(tmp_path: Path) -> None:
    shutil.copytree(DATA / "polar", tmp_path / "polar")
    (tmp_path / "secret.txt").write_text("key")
    skill = tmp_path / "polar" / "skills" / "careful" / "SKILL.md"
    skill.unlink()
    skill.symlink_to(tmp_path / "secret.txt")
    assert "is a link that leads out of" in refusal(tmp_path / "polar" / "task.json", harness="pi")
