"""Datasets in the shape of SWE-bench and SWE-Gym, from every format they lie in on disk; and that nothing of
a solution reaches the agent.
"""

import builtins
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sources_kit import DATA, items, refusal, task, tasks

from polarnode.core import codec
from polarnode.core.errors import ConfigError, Refused
from polarnode.core.ports import Endpoint
from polarnode.evaluators import swebench
from polarnode.harnesses import HARNESSES
from polarnode.rollouts.services import harness_order
from polarnode.sources import Overrides, SourcedTask, UnreadTask, read_source
from polarnode.sources.reading import rows
from polarnode.sources.swe import EVALUATOR_COLUMNS, INSTRUCTION
from polarnode.sources.swe import tasks as swe_tasks

FILE = DATA / "swe" / "rows.jsonl"
ROWS: list[dict[str, Any]] = [json.loads(line) for line in FILE.read_text().splitlines()]
SECRETS = (
    "THE-GOLD-PATCH",
    "THE-HIDDEN-TEST",
    "THE-HINT",
    "test_lib.py::test_two",
    "419a78300f7cd27611196e1e464d50fd0385ff27",
)


def by_name(*, path: Path = FILE, **overrides: Any) -> Mapping[str, SourcedTask | UnreadTask]:
    return {each.name: each for each in items(path, harness="pi", **overrides)}


def row(**changed: Any) -> dict[str, Any]:
    return {key: value for key, value in {**ROWS[0], **changed}.items() if value is not None}


def write(file: Path, *values: object) -> Path:
    file.write_text("".join(json.dumps(value) + "\n" for value in values))
    return file


# ── a row ─────────────────────────────────────────────────────────────────────


def test_row_becomes_task_of_image() -> None:
    spec = tasks(FILE, harness="pi", limit=1)[0].spec
    assert spec.runtime.image == "swebench/sweb.eval.x86_64.django_1776_django-11099:latest"
    assert (spec.runtime.workdir, spec.runtime.user, spec.runtime.add_harness) == ("/testbed", "root", True)
    assert spec.runtime.env["PATH"].startswith("/opt/miniconda3/envs/testbed/bin:")
    assert spec.instruction.startswith(
        "You are working in a checkout of the repository django/django, in /testbed."
    )
    assert "<issue>\nx is 1 and should be {two}.\n</issue>" in spec.instruction, (
        "what a row says is not read as a template"
    )
    assert spec.metadata == {
        "source": "swe",
        "instance_id": "django__django-11099",
        "repo": "django/django",
        "base_commit": "d26b2424437dabeeca94d7900b37d2df4410da0c",
        "version": "3.0",
    }
    assert spec.evaluator.name == "swebench"


def test_image_names_of_each_dataset() -> None:
    found = by_name()
    moto, unknown, own = (
        found[name] for name in ("getmoto__moto-5406", "somebody__else-1", "somebody__else-2")
    )
    assert isinstance(moto, SourcedTask)
    assert moto.spec.runtime.image == "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-5406:latest"
    assert isinstance(unknown, UnreadTask)
    assert "no convention is known for somebody/else: say --image-template" in str(unknown.refused)
    assert isinstance(own, SourcedTask)
    assert own.spec.runtime.image == "quay.example/else:2"
    assert "the column extra is not used: it has no meaning here" in own.notes


def test_template_names_any_image() -> None:
    images = [
        each.spec.runtime.image for each in tasks(FILE, harness="pi", image_template="mine/{id}:{version}")
    ]
    assert images[0] == "mine/django__django-11099:3.0"
    assert len(images) == len(ROWS)
    assert "names {which}, which is none of instance_id" in refusal(
        FILE, harness="pi", image_template="{which}", limit=1
    )
    assert "image is not an image's name" in refusal(
        FILE, harness="pi", image_template="{problem_statement}", limit=1
    )


def test_template_writes_any_instruction() -> None:
    [found] = tasks(FILE, harness="pi", limit=1, instruction_template="Fix {repo}: {problem_statement}")
    assert found.spec.instruction == "Fix django/django: x is 1 and should be {two}."
    assert "{patch}, which is none of" in refusal(
        FILE, harness="pi", instruction_template=INSTRUCTION + "{patch}", limit=1
    )


def test_evaluator_gets_its_fields() -> None:
    config = tasks(FILE, harness="pi", limit=1)[0].spec.evaluator.config
    instance = swebench.read_config(config).instance
    assert swebench.names(instance, "FAIL_TO_PASS") == ("test_lib.py::test_two",)
    assert instance["FAIL_TO_PASS"] == ["test_lib.py::test_two"], "JSON text in the dataset, a list here"
    assert set(instance) <= set(EVALUATOR_COLUMNS)
    assert "patch" not in instance, "the solution is nobody's to see"


@pytest.mark.parametrize("harness", sorted(HARNESSES))
def test_agent_container_lacks_the_solution(harness: str) -> None:
    """All that can reach it: the runtime's files, steps and environment, and what the harness is launched
    with.
    """
    over: dict[str, Any] = (
        {"harness": {"name": "shell", "command": ["sh", "-c", "{instruction}"]}} if harness == "shell" else {}
    )
    [found] = tasks(FILE, limit=1, harness=None if over else harness, over=over)
    spec = found.spec
    endpoint = Endpoint(base_url="http://127.0.0.1:8080", key="k", context_length=32768, model="m")
    launch = HARNESSES[harness].launch(
        harness_order(spec, endpoint, workdir=spec.runtime.workdir, home="/root")
    )
    shown = repr(
        (launch, spec.runtime, spec.harness, spec.instruction, spec.metadata, spec.group_id, spec.task_id)
    )
    for secret in SECRETS:
        assert secret in json.dumps(ROWS[0]) or secret in FILE.read_text()
        assert secret not in shown
    whole = codec.dump_json(codec.task_json(spec)).decode()
    assert "THE-GOLD-PATCH" not in whole
    assert "THE-HINT" not in whole
    assert "THE-HIDDEN-TEST" in whole, "the evaluator has the tests"


@given(
    st.dictionaries(
        st.sampled_from(["patch", "hints_text", "test_patch", "FAIL_TO_PASS"]),
        st.from_regex(r"SECRET[a-z]{8}", fullmatch=True),
        min_size=1,
    )
)
def test_no_column_of_a_solution_shows(secrets: dict[str, str]) -> None:
    value = row(**{name: [text] if name == "FAIL_TO_PASS" else text for name, text in secrets.items()})
    with tempfile.TemporaryDirectory() as folder:
        [found] = tasks(write(Path(folder) / "r.jsonl", value), harness="pi")
    spec = found.spec
    shown = repr((spec.runtime, spec.harness, spec.instruction, spec.metadata, found.notes))
    assert not [text for text in secrets.values() if text in shown]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"test_patch": None}, "the column test_patch is missing: rows are of the shape of SWE-bench"),
        ({"FAIL_TO_PASS": "[not json"}, "the column FAIL_TO_PASS is text, and no JSON list"),
        ({"PASS_TO_PASS": [1]}, "the column PASS_TO_PASS is no list of names of tests"),
    ],
)
def test_unjudgeable_row_is_named(tmp_path: Path, changed: dict[str, Any], sentence: str) -> None:
    said = refusal(write(tmp_path / "r.jsonl", row(**changed)), "swe", harness="pi")
    assert sentence in said
    assert said.startswith(f"{tmp_path / 'r.jsonl'} line 1 (django__django-11099): ")


# ── formats on disk ───────────────────────────────────────────────────────────


def table(values: list[dict[str, Any]]) -> pa.Table:
    names = sorted({name for value in values for name in value})
    text = [
        {
            name: json.dumps(value[name]) if isinstance(value.get(name), list) else value.get(name)
            for name in names
        }
        for value in values
    ]
    return pa.Table.from_pylist(text)


def write_arrow(file: Path, values: list[dict[str, Any]], *, stream: bool = True) -> Path:
    made = table(values)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(file), made.schema) as out:
        out.write_table(made, max_chunksize=1)
    return file


EXPECTED = ["django__django-11099", "getmoto__moto-5406", "somebody__else-1", "somebody__else-2"]


def names(path: Path, **overrides: Any) -> list[str]:
    return [each.name for each in items(path, harness="pi", **overrides)]


def test_all_formats_hold_same_tasks(tmp_path: Path) -> None:
    pq.write_table(table(ROWS), tmp_path / "r.parquet", row_group_size=1)
    write_arrow(tmp_path / "stream.arrow", ROWS)
    write_arrow(tmp_path / "file.arrow", ROWS, stream=False)
    (tmp_path / "r.json").write_text(json.dumps(ROWS))
    expected = [
        codec.task_json(each.spec) for each in items(FILE, harness="pi") if isinstance(each, SourcedTask)
    ]
    for name in ("r.parquet", "stream.arrow", "file.arrow", "r.json"):
        found = items(tmp_path / name, harness="pi")
        assert [each.name for each in found] == EXPECTED, name
        assert [codec.task_json(each.spec) for each in found if isinstance(each, SourcedTask)] == expected, (
            name
        )


def test_table_row_named_by_number(tmp_path: Path) -> None:
    pq.write_table(table(ROWS), tmp_path / "r.parquet")
    found = items(tmp_path / "r.parquet", harness="pi", only="*else-1")
    assert isinstance(found[0], UnreadTask)
    assert str(found[0].refused).startswith(f"{tmp_path / 'r.parquet'} row 3 (somebody__else-1): ")


def test_saved_dataset_is_read(tmp_path: Path) -> None:
    single, several = tmp_path / "single", tmp_path / "several"
    for folder in (single, several / "test", several / "dev"):
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
        (folder / "dataset_info.json").write_text("{}")
        write_arrow(folder / "data-00000-of-00002.arrow", ROWS[:1])
        write_arrow(folder / "data-00001-of-00002.arrow", ROWS[1:])
        write_arrow(folder / "cache-1234.arrow", ROWS)
    (several / "dataset_dict.json").write_text('{"splits": ["test", "dev"]}')
    assert names(single) == EXPECTED
    assert names(several / "dev") == EXPECTED
    assert names(several, split="test") == EXPECTED
    with pytest.raises(Refused, match=r"has several splits \(dev, test\): name one with --split"):
        names(several)
    with pytest.raises(Refused, match="has no split train: there are dev, test"):
        names(several, split="train")


def test_hub_snapshot_read_by_splits(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "README.md").write_text("words")
    for split, part in (("test", ROWS[:2]), ("dev", ROWS[2:])):
        pq.write_table(table(part), tmp_path / "data" / f"{split}-00000-of-00001.parquet")
    assert names(tmp_path, split="test") == EXPECTED[:2]
    assert names(tmp_path, split="dev") == EXPECTED[2:]


def test_torn_file_is_refused(tmp_path: Path) -> None:
    for name, words in (("r.parquet", "cannot be read as Parquet"), ("r.arrow", "cannot be read as Arrow")):
        (tmp_path / name).write_bytes(b"PAR1 nothing of the kind")
        with pytest.raises(Refused, match=words):
            names(tmp_path / name)


def test_bad_lines_and_values_named(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(json.dumps(ROWS[0]) + "\n\n[]\n")
    found = list(rows(tmp_path / "r.jsonl", split=None))
    assert [each.refused is None for each in found] == [True, False, False]
    assert "line 2: the line is blank" in str(found[1].refused)
    assert "line 3: a row is a JSON object, not list" in str(found[2].refused)
    assert [type(each).__name__ for each in swe_tasks(tmp_path / "r.jsonl", Overrides())] == [
        "FoundTask",
        "UnreadTask",
        "UnreadTask",
    ]


def test_rows_are_read_in_batches(tmp_path: Path) -> None:
    pq.write_table(
        table([row(instance_id=f"django__django-{number}") for number in range(300)]), tmp_path / "r.parquet"
    )
    reading = read_source(tmp_path / "r.parquet", overrides=Overrides(harness="pi")).items()
    assert next(reading).name == "django__django-0"
    (tmp_path / "r.parquet").unlink()
    assert sum(1 for _ in reading) == 299, "what was opened is read to its end"


def test_missing_pyarrow_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(table(ROWS), tmp_path / "r.parquet")
    imported = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "pyarrow":
            raise ImportError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ConfigError, match=r"reading \.parquet needs pyarrow: pip install 'polarnode\[data\]'"
    ):
        names(tmp_path / "r.parquet")


def test_empty_dataset_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(Refused, match="holds no data"):
        names(tmp_path)
    shutil.copy(FILE, tmp_path / "rows.jsonl")
    assert names(tmp_path) == EXPECTED
    assert task(tmp_path, harness="pi", limit=1).name == EXPECTED[0]
