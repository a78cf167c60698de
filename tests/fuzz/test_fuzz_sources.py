"""Task files and folders from elsewhere: whatever they hold, a source gives tasks, or says of each why it cannot be
read; and nothing from outside a folder gets into a task.
"""

import json
import os
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from adapters_kit import write_adapter
from fuzz_json import anything, changed, mutated, toml, torn, torn_bytes
from fuzz_kit import Target, check_sentence, play, watched
from fuzz_tasks import CAPTURES, ENDS, TASKS
from hypothesis import strategies as st
from sources_kit import DATA

from polarnode.core.codec.json import dump_json, read_json
from polarnode.core.codec.tasks import read_capture, read_capture_end, read_task, task_json
from polarnode.core.errors import PolarnodeError, Refused
from polarnode.engine.checkpoints import (
    CONFIG,
    TENSORS,
    AdapterLimits,
    BadCheckpoint,
    check_adapter,
    head,
    manifest,
)
from polarnode.node.config import TINY_MODEL
from polarnode.sources import Overrides, UnreadTask, read_source

SECRET = "OUTSIDE-OF-THE-FOLDER"
OVERRIDES = Overrides(harness="pi")

# ── task files ────────────────────────────────────────────────────────────────

NAMES = tuple(TASKS[1])


def read_value(value: tuple[str, bytes]) -> None:
    """A task, a capture or its end as the control plane reads it: refused with a path, or written and read
    again the same.
    """
    kind, body = value
    read: Callable[[Any], Any] = {"task": read_task, "capture": read_capture, "end": read_capture_end}[kind]
    with watched(len(body)):
        try:
            found = read(read_json(body))
        except Refused as refused:
            check_sentence(str(refused))
            return
        if kind == "task":
            assert read_task(read_json(dump_json(task_json(found)))) == found


VALUES = (
    st.tuples(st.just("task"), mutated(TASKS) | torn(TASKS) | anything(NAMES))
    | st.tuples(st.just("capture"), mutated(CAPTURES))
    | st.tuples(st.just("end"), mutated(ENDS))
)

# ── folders ───────────────────────────────────────────────────────────────────

HARBOR = [tomllib.loads((DATA / "harbor" / name / "task.toml").read_text()) for name in ("hello", "many")]
ROWS = [json.loads(line) for line in (DATA / "swe" / "rows.jsonl").read_text().splitlines()]
POLAR = [
    json.loads((DATA / "polar" / "task.json").read_text()),
    yaml.safe_load((DATA / "polar" / "task.yaml").read_text()),
]
BENCH = [yaml.safe_load((DATA / "terminal_bench" / "simple" / "task.yaml").read_text())]
COMPOSE = [yaml.safe_load((DATA / "terminal_bench" / "simple" / "docker-compose.yaml").read_text())]
# What JSON cannot say, and what some readers of TOML and YAML fall over.
TOML_PUT = (
    b"x = 0x" + b"f" * 4000, b"x = " + b"9" * 5000, b"x = " + b"[" * 1200, b"x = 1979-05-27T07:32:00Z", b"x = nan", b"x = -inf", b'x = "\\ud800"',
    b"[a.b.c]\nx = 1", b"[[a]]\n[[a]]", b"x.y.z = 1", b"instruction_file = '../../outside'",
)  # fmt: skip
# a few hundred bytes that are nine to the seventh values, all of them one list in memory
BOMB = b"\n".join(b"b%d: &b%d [%b]" % (n + 1, n + 1, b",".join([b"*b%d" % n] * 9)) for n in range(6))
BOMB = b"b0: &b0 [x]\n" + BOMB + b"\nmetadata: {x: [*b6, *b6]}"
YAML_PUT = (
    b"x: &a [*a]", b"x: 0x" + b"f" * 4000, b"x: " + b"9" * 5000, b"x: " + b"[" * 1200, b"x: 2001-99-99", b"x: 2001-12-14", b"x: !!bool perhaps",
    b"x: !!timestamp never", b"x: !!int x", b"x: !!float x", b"x: !!binary AAEC", b"x: !!set {a, b}", b"1: 2", b"? [a]\n: b", b"x: .nan", b"<<: 3",
    BOMB,
    b"x: !!python/object:os.system {}", b"x: \x01", b"--- {}\n--- {}", b"x: 190:20:30", b"x: 1_000", b"x: ~",
)  # fmt: skip
# How a file of a folder is not what it should be: done to it by name.
ODD_FILES = (
    *("link out", "link to itself", "link nowhere", "fifo", "folder", "empty", "bytes", "removed"),
    *("odd name", "closed", "large"),
)


@st.composite
def toml_files(draw: st.DrawFn, good: list[dict[str, Any]]) -> bytes:
    data = toml(draw(st.sampled_from(good) | changed(good)))
    if draw(st.booleans()):
        data += b"\n" + draw(st.sampled_from(TOML_PUT))
    return draw(torn_bytes(data)) if draw(st.integers(0, 3)) == 0 else data


@st.composite
def yaml_files(draw: st.DrawFn, good: list[Any]) -> bytes:
    value = draw(st.sampled_from(good) | changed(good))
    try:
        data = yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "replace")
    except (yaml.YAMLError, RecursionError):
        data = json.dumps(value, default=str).encode()
    if draw(st.booleans()):
        data += b"\n" + draw(st.sampled_from(YAML_PUT))
    return draw(torn_bytes(data)) if draw(st.integers(0, 3)) == 0 else data


def spoil(file: Path, how: str, outside: Path) -> None:
    """Make one file or folder of a task something else."""
    if how == "odd name":
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / os.fsdecode(b"\xff\xfe\n.txt")).write_text("x")
        return
    if file.is_dir():
        if how == "link out":
            file.rename(file.with_name("moved"))
            file.symlink_to(outside)
        return
    data = file.read_bytes() if file.is_file() else b""
    file.unlink(missing_ok=True)
    match how:
        case "link out":
            file.symlink_to(outside / "secret.txt")
        case "link to itself":
            file.symlink_to(file.name)
        case "link nowhere":
            file.symlink_to("nowhere")
        case "fifo":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case "empty":
            file.write_bytes(b"")
        case "bytes":
            file.write_bytes(b"\xff\x00\xfe" + data)
        case "closed":
            file.write_bytes(data)
            file.chmod(0)
        case "large":
            with file.open("wb") as opened:
                opened.truncate(17 << 20)


def folder_of(kind: str, to: Path, main: bytes) -> tuple[Path, list[str]]:
    """A folder of this kind with this file, and the names of its parts."""
    match kind:
        case "harbor":
            files = {
                "instruction.md": "Do it.",
                "tests/test.sh": "true",
                "tests/data.txt": "x",
                "environment/Dockerfile": "FROM a\nWORKDIR /w\n",
            }
            name = "task.toml"
        case "terminal_bench":
            files = {"Dockerfile": "FROM a\n", "run-tests.sh": "true", "tests/check.py": "x"}
            name = "task.yaml"
        case _:
            files = {
                "instruction.md": "Do it.",
                "inputs/notes.txt": "x",
                "tests/test.sh": "true",
                "skills/careful/SKILL.md": "Careful.",
            }
            name = {
                "task": "task.toml",
                "jsonl": "tasks.jsonl",
                "swe": "rows.jsonl",
                "swe_json": "rows.json",
                "polar": "task.yaml",
                "polar_json": "task.json",
                "json": "task.json",
            }[kind]
    for path, text in files.items():
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        (to / path).write_text(text)
    (to / name).write_bytes(main)
    parts = [name, *files, *{path.partition("/")[0] for path in files if "/" in path}]
    return (to if kind in ("harbor", "terminal_bench", "task") else to / name), sorted(parts)


def lines(values: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    odd = st.sampled_from((b"", b"# x", b"// x", b"[]", b"1", b"\xff", b"{", b"null"))
    return st.lists(values.map(lambda line: line.replace(b"\n", b" ")) | odd, max_size=4).map(b"\n".join)


MAINS: dict[str, st.SearchStrategy[bytes]] = {
    "harbor": toml_files(HARBOR),
    "task": toml_files([*TASKS, {"instruction_file": "instruction.md", "runtime": {"files": [{"path": "a", "source": "inputs/notes.txt"}]}}]),
    "terminal_bench": yaml_files(BENCH),
    "polar": yaml_files(POLAR),
    "polar_json": mutated(POLAR) | torn(POLAR),
    "json": mutated(TASKS) | torn(TASKS),
    "jsonl": lines(mutated(TASKS) | torn(TASKS)),
    "swe": lines(mutated(ROWS) | torn(ROWS)),
    "swe_json": st.lists(changed(ROWS), max_size=3).map(lambda rows: json.dumps(rows).encode()),
}  # fmt: skip


@st.composite
def folders(draw: st.DrawFn) -> tuple[str, bytes, tuple[int, str] | None, bool]:
    """A kind, its main file, which part of the folder is spoiled and how, and whether the kind is named."""
    kind = draw(st.sampled_from(sorted(MAINS)))
    whole = {"harbor": toml(HARBOR[0]), "terminal_bench": yaml.safe_dump(BENCH[0]).encode()}
    spoiled = draw(st.none() | st.tuples(st.integers(0, 9), st.sampled_from(ODD_FILES)))
    if spoiled is not None and spoiled[1] == "fifo" and kind not in whole:
        spoiled = spoiled[0], "removed"  # a user's own file may be a pipe, and is then waited for
    main = whole[kind] if spoiled is not None and kind in whole else draw(MAINS[kind])
    return kind, main, spoiled, draw(st.booleans())


def read_folder(value: tuple[str, bytes, tuple[int, str] | None, bool]) -> None:
    kind, main, spoiled, named = value
    with tempfile.TemporaryDirectory() as scratch:
        inside, outside = Path(scratch, "task"), Path(scratch, "outside")
        inside.mkdir()
        outside.mkdir()
        (outside / "secret.txt").write_text(SECRET)
        path, parts = folder_of(kind, inside, main)
        part = parts[spoiled[0] % len(parts)] if spoiled is not None else ""
        if spoiled is not None:
            spoil(inside / part, spoiled[1], outside)
        # A user may name any file or folder in a task of their own; what is inside such a folder is no one's.
        own = kind in ("task", "json", "jsonl") or (kind.startswith("polar") and "/" not in part)
        with watched(len(main) + (40 << 20 if spoiled else 0)):
            try:
                kinds: Any = {"swe_json": "swe", "polar_json": "polar", "json": "task"}.get(kind, kind)
                found = list(read_source(path, kind=kinds if named else None, overrides=OVERRIDES).items())
            except PolarnodeError as error:
                check_sentence(str(error))
                return
        for item in found:
            if isinstance(item, UnreadTask):
                check_sentence(str(item.refused))
                continue
            body = dump_json(task_json(item.spec))
            assert read_task(read_json(body)) == item.spec
            assert own or SECRET.encode() not in body, "a file from outside of the folder is in the task"


# ── adapters ──────────────────────────────────────────────────────────────────

LIMITS = AdapterLimits(rank=8, modules=("q_proj", "v_proj"))
MODEL = manifest(TINY_MODEL)
with tempfile.TemporaryDirectory() as made:
    WHOLE = write_adapter(Path(made) / "a", modules=LIMITS.modules)
    CONFIGS = [json.loads((WHOLE / CONFIG).read_bytes())]
    HEADERS = [head(WHOLE / TENSORS)]
    VALUES_OF_TENSORS = (WHOLE / TENSORS).read_bytes()[-40_000:]


def read_adapter(value: tuple[bytes, bytes]) -> None:
    """The two files of an adapter: refused with a sentence, or what the engine can load."""
    config, header = value
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / CONFIG).write_bytes(config)
        whole = len(header).to_bytes(8, "little") + header + VALUES_OF_TENSORS
        (Path(temporary) / TENSORS).write_bytes(whole)
        with watched(len(config) + len(whole)):
            try:
                check_adapter(Path(temporary), MODEL, LIMITS)
            except BadCheckpoint as refused:
                check_sentence(str(Refused(str(refused))))


ADAPTERS = st.tuples(
    st.just(json.dumps(CONFIGS[0]).encode()) | mutated(CONFIGS) | torn(CONFIGS),
    st.just(json.dumps(HEADERS[0]).encode()) | mutated(HEADERS) | torn(HEADERS),
)

TARGETS = (
    Target(name="adapters", inputs=ADAPTERS, check=read_adapter, examples=200),
    Target(name="task_values", inputs=VALUES, check=read_value, examples=300),
    Target(name="sources", inputs=folders(), check=read_folder, examples=300),
)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_any_source_read_or_refused(target: Target) -> None:
    """A source of anything is read or refused."""
    play(target)
