"""Task sources: which kind a path is, one bad task among good ones, and what a user lays over them. Each kind
has a file of its own.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sources_kit import DATA, items, refusal, task, tasks

from polarnode.core import codec
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.sources import KINDS, SourcedTask, UnreadTask, read_source
from polarnode.sources.reading import read_task_toml, read_yaml
from polarnode.sources.source import READERS, detect
from polarnode.sources.values import FoundTask, merge_over

SHELL: dict[str, Any] = {"name": "shell", "command": ["true"]}
LINE = {"instruction": "Do it.", "harness": {"name": "pi"}, "task_id": "one"}


# ten lines that are ten to the tenth strings when they are written out
LAUGHS = "l0: &l0 [ha]\n" + "\n".join(
    f"l{level}: &l{level} [{', '.join([f'*l{level - 1}'] * 10)}]" for level in range(1, 11)
)


def write_lines(file: Path, *lines: object) -> Path:
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


# ── which kind ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("harbor", "harbor"),
        ("harbor/hello", "harbor"),
        ("harbor/hello/task.toml", "harbor"),
        ("terminal_bench", "terminal_bench"),
        ("terminal_bench/simple", "terminal_bench"),
        ("terminal_bench/simple/task.yaml", "terminal_bench"),
        ("polar/task.json", "polar"),
        ("polar/task.yaml", "polar"),
        ("swe", "swe"),
        ("swe/rows.jsonl", "swe"),
    ],
)
def test_kind_is_detected_from_files(path: str, kind: str) -> None:
    assert detect(DATA / path) == kind


def test_own_files_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    own = tmp_path / "own" / "task.toml"
    own.write_text('instruction = "x"\nharness = { name = "pi" }\n')
    assert detect(own) == "task"
    assert detect(tmp_path / "own") == "task"
    assert task(tmp_path / "own").name == "own"
    (tmp_path / "t.json").write_text(json.dumps(LINE))
    assert detect(tmp_path / "t.json") == "task"
    assert detect(write_lines(tmp_path / "t.jsonl", LINE)) == "jsonl"
    assert (
        detect(write_lines(tmp_path / "p.jsonl", {"instruction": "x", "agent": {"harness": "pi"}})) == "polar"
    )


def test_every_kind_has_reader() -> None:
    assert set(READERS) == set(KINDS)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        (
            "notes.txt",
            "x",
            "cannot be detected by its name; name its kind with --kind (task, jsonl, harbor",
        ),
        ("t.jsonl", "", "is empty: it holds no task"),
        ("t.json", "[{}]", "is a list of neither dataset rows nor Polar's tasks: write tasks as JSONL"),
        ("t.yaml", "a: [", "it is not YAML"),
        ("t.yaml", "[" * 3000, "it is nested too deeply to be read"),
        ("t.yaml", "a: " + "[" * 110 + "]" * 110, "is nested more than 100 levels deep"),
        ("t.yaml", "a: &a [*a]", "is nested more than 100 levels deep"),
        ("t.yaml", LAUGHS, "it has more than 100,000 values"),
        ("t.yaml", "a: " + "1" * 5000, "cannot be read"),
        ("t.yaml", "a: !!bool perhaps", "cannot be read"),
        ("t.yaml", "a: .nan", "a is nan, which JSON has no form for"),
        ("t.yaml", "agent: 1\n2: 3", "it has the key 2, which is no string: quote it"),
        ("t.toml", "a = " + "[" * 3000 + "]" * 3000, "nested too deeply to be read"),
        ("t.toml", "a = " + "1" * 5000, "is not TOML"),
        ("t.toml", "a = [", "it is not TOML"),
        ("t.json", "{", "it is not JSON"),
    ],
)
def test_non_source_is_refused_at_once(tmp_path: Path, name: str, content: str, sentence: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(Refused) as refused:
        read_source(tmp_path / name)
    assert sentence in str(refused.value)
    assert str(tmp_path / name) in str(refused.value)


def test_empty_or_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="is no known folder of tasks"):
        read_source(tmp_path)
    with pytest.raises(Refused, match=r"there is no .*gone: give an existing file or folder"):
        read_source(tmp_path / "gone")


def test_yaml_creates_no_objects(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text("!!python/object/apply:os.system ['touch made']")
    with pytest.raises(Refused, match="it is not YAML"):
        read_yaml(tmp_path / "t.yaml")


# ── JSONL ─────────────────────────────────────────────────────────────────────


def test_bad_lines_are_numbered(tmp_path: Path) -> None:
    """Each line is a task, and each bad one is named by its number."""
    lines = [
        LINE,
        "",
        "# a comment",
        "{",
        {**LINE, "num_samples": 0},
        "[1]",
        {**LINE, "task_id": "six"},
        {"instruction": "x"},
    ]
    found = items(write_lines(tmp_path / "t.jsonl", *lines))
    assert [each.name for each in found] == ["one", "2", "3", "4", "one", "6", "six", "8"]
    said = [str(each.refused) for each in found if isinstance(each, UnreadTask)]
    file = tmp_path / "t.jsonl"
    assert said[:2] == [f"{file} line 2: the line is blank: remove it, each line is one task", said[1]]
    assert said[1] == f"{file} line 3: the line is a comment, which JSONL does not have: remove it"
    assert said[2].startswith(f"{file} line 4: the line is not JSON: ")
    assert "column" in said[2]
    assert said[3] == f"{file} line 5: num_samples must be 1 to 4096, not 0"
    assert said[4] == f"{file} line 6: a task is a JSON object, not list"
    assert said[5].startswith(f"{file} line 8: the task names no harness: give --harness")
    assert [each.refused.path for each in found if isinstance(each, UnreadTask)][3] == "$.num_samples"


def test_tasks_stop_at_first_bad_one(tmp_path: Path) -> None:
    source = read_source(write_lines(tmp_path / "t.jsonl", LINE, "{", LINE))
    reading = source.tasks()
    assert next(reading).name == "one", "what lies before it is read"
    with pytest.raises(Refused, match="line 2"):
        next(reading)


def test_source_is_read_lazily_and_repeatedly(tmp_path: Path) -> None:
    source = read_source(write_lines(tmp_path / "t.jsonl", LINE))
    assert [each.name for each in source.tasks()] == [each.name for each in source.tasks()] == ["one"]
    reading = source.items()
    write_lines(tmp_path / "t.jsonl", {**LINE, "task_id": "later"})
    assert next(reading).name == "later"


def test_tasks_chosen_by_name_and_number(tmp_path: Path) -> None:
    file = write_lines(
        tmp_path / "t.jsonl",
        *({**LINE, "task_id": f"{word}-{number}"} for number in range(3) for word in ("a", "b")),
    )
    assert [each.name for each in tasks(file, only="b-*")] == ["b-0", "b-1", "b-2"]
    assert [each.name for each in tasks(file, only="b-*", limit=2)] == ["b-0", "b-1"]
    assert [each.name for each in tasks(file, limit=1)] == ["a-0"]
    with pytest.raises(Refused, match="no task of it is called zz"):
        tasks(file, only="zz")


# ── what is laid over ─────────────────────────────────────────────────────────


def test_user_settings_win_flags_most(tmp_path: Path) -> None:
    """A user's words weigh more, and flags most."""
    file = write_lines(tmp_path / "t.jsonl", {**LINE, "budgets": {"run_s": 5, "post_s": 6}, "num_samples": 2})
    over: dict[str, Json] = {
        "budgets": {"run_s": 7},
        "num_samples": 3,
        "sampling": {"temperature": 0.5},
        "runtime": {"cpus": 2},
    }
    spec = task(file, over=over).spec
    assert (
        spec.budgets.run_s,
        spec.budgets.post_s,
        spec.num_samples,
        spec.sampling.temperature,
        spec.runtime.cpus,
    ) == (7, 6, 3, 0.5, 2)
    assert task(file, over=over, samples=9).spec.num_samples == 9
    assert task(file, harness="codex").spec.harness.name == "codex"


def test_other_program_drops_first_settings(tmp_path: Path) -> None:
    """Another program does not get the settings of the first."""
    file = write_lines(
        tmp_path / "t.jsonl",
        {
            **LINE,
            "harness": {**SHELL, "env": {"A": "1"}},
            "evaluator": {"name": "command", "config": {"argv": ["x"]}},
        },
    )
    assert task(file, harness="pi").spec.harness.command is None
    assert task(file, harness="pi").spec.harness.env == {}
    assert task(file, over={"harness": {"env": {"B": "2"}}}).spec.harness.env == {"A": "1", "B": "2"}
    assert task(file, over={"evaluator": {"name": "session_completed"}}).spec.evaluator.config == {}
    assert (
        task(file, over={"evaluator": {"parts": [{"name": "session_completed"}]}}).spec.evaluator.name
        == "session_completed"
    )


def test_override_may_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "words.md").write_text("Other words.")
    (tmp_path / "with.toml").write_text('instruction_file = "words.md"\n[budgets]\nrun_s = 3\n')
    spec = task(write_lines(tmp_path / "t.jsonl", LINE), over=read_task_toml(tmp_path / "with.toml")).spec
    assert (spec.instruction, spec.budgets.run_s) == ("Other words.", 3)
    (tmp_path / "with.toml").write_text("run_s = [\n")
    with pytest.raises(Refused, match=r"with\.toml: the task is not TOML"):
        read_task_toml(tmp_path / "with.toml")
    assert "budget is not a known field" in refusal(
        write_lines(tmp_path / "t.jsonl", LINE), over={"budget": {}}
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "b", "name"]), inner, max_size=3)
    ),
    max_leaves=6,
)
OBJECT = st.dictionaries(st.sampled_from(["a", "b", "c", "harness"]), JSON, max_size=3)


@given(OBJECT, OBJECT)
def test_overlay_wins_and_is_idempotent(value: dict[str, Json], over: dict[str, Json]) -> None:
    """What is laid over stands and laying it twice changes nothing."""
    once = merge_over(value, over)
    assert merge_over(once, over) == once
    assert merge_over(value, {}) == value
    assert set(once) == set(value) | set(over)
    assert all(once[key] == value[key] for key in value if key not in over)
    assert all(
        once[key] == over[key]
        for key in over
        if not (isinstance(over[key], dict) and isinstance(value.get(key), dict))
    )


SPECS = st.fixed_dictionaries(
    {
        "instruction": st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(
            lambda text: bool(text.strip())
        ),
        "harness": st.sampled_from([{"name": "pi"}, SHELL, {"name": "codex", "env": {"A": "\u2028\n"}}]),
        "num_samples": st.integers(1, 4096),
        "metadata": st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
        "budgets": st.fixed_dictionaries({"run_s": st.floats(1, 1e6)}),
    }
)


@given(st.lists(SPECS, min_size=1, max_size=3))
def test_convert_writes_same_tasks(values: list[Any]) -> None:
    """What convert writes is a source of the same tasks."""
    specs = [codec.read_task(value) for value in values]
    body = b"".join(codec.dump_json(codec.task_json(spec)) + b"\n" for spec in specs)
    assert [codec.read_task(codec.read_json(line)) for line in body.split(b"\n") if line] == specs


def test_task_names_its_origin(tmp_path: Path) -> None:
    found = task(write_lines(tmp_path / "t.jsonl", LINE))
    assert found == SourcedTask(spec=found.spec, name="one", origin=f"{tmp_path / 't.jsonl'} line 1")
    assert FoundTask(name="x", origin="y", value={}).foreign is False
