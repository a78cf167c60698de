"""Read the files of a source: values, folders that travel with a task, Dockerfiles, polarnode's own task
files, and the rows of datasets (Parquet, Arrow as `save_to_disk` writes it, JSON, JSONL; one file or splits).

Every refusal names the file and the remedy. A user may name any of their files, but the content of a folder
may come from elsewhere, so `below` follows no link out of it. A Dockerfile gives the workdir and user of its
last stage; a value with a variable in it is unknown. In a task's TOML, `instruction_file` and the `source` of
`[[runtime.files]]` are relative to the folder of the task.

Rows are read one at a time, whatever the size of the file. Splits are never mixed: with several, one must be
named. pyarrow is imported only for files that need it.
"""

import hashlib
import os
import re
import stat
import tomllib
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from posixpath import join, normpath
from typing import Any, cast

from attrs import evolve, frozen

from polarnode.core import codec
from polarnode.core.codec.limits import CONFIG, check_value
from polarnode.core.conversation import Json
from polarnode.core.errors import ConfigError, Refused
from polarnode.sources.values import FoundTask, ImageBuild, Overrides, UnreadTask

# ── files ──────────────────────────────────────────────────────────────────────

# The limit on the bytes of one file that travels in a task. A spec is JSON in a journal, and a test suite is
# far smaller.
LARGEST_FILE = 16 << 20
# The limit on the bytes of one folder. As base64 it stays below what the control plane accepts in one
# request.
MAX_FOLDER_BYTES = 48 << 20
TOO_DEEP_FAULT = "it is nested too deeply to be read: flatten it"


def read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise Refused(f"{file} cannot be read: {error.strerror}") from error


def read_text(file: Path) -> str:
    try:
        return read_bytes(file).decode()
    except UnicodeDecodeError as error:
        raise Refused(f"{file}: it is not UTF-8 text ({error.reason} at byte {error.start})") from error


def read_json(file: Path) -> Json:
    content = read_bytes(file)
    if not content.strip():
        raise Refused(f"{file} is empty: it holds no task")
    try:
        return codec.read_json(content)
    except Refused as refused:
        raise Refused(f"{file}: {str(refused).replace('the body', 'it')}") from refused


def read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(file))
    except ValueError as error:  # An integer of thousands of digits raises it too.
        raise Refused(f"{file}: it is not TOML: {error}") from error
    except RecursionError:
        raise Refused(f"{file}: {TOO_DEEP_FAULT}") from None


def read_yaml(file: Path) -> Any:
    """The value of a YAML file as JSON. A date is the text that was written."""
    try:
        import yaml  # Only such files need it, and the help of a command should not wait for it.
    except ModuleNotFoundError as missing:
        raise ConfigError(f"{file}: reading YAML needs pyyaml: pip install pyyaml") from missing

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml is not typed
        """Loads YAML's safe types except dates, which JSON does not have."""

    Loader.add_constructor("tag:yaml.org,2002:timestamp", Loader.construct_yaml_str)
    try:
        value = yaml.load(read_text(file), Loader)
    except yaml.YAMLError as error:
        raise Refused(f"{file}: it is not YAML: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise Refused(f"{file}: {TOO_DEEP_FAULT}") from None
    # The causes are an unreadable number, such as an integer of five thousand digits, or a tag that does not
    # fit its text.
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise Refused(f"{file}: it has a value that cannot be read: {error}") from error
    try:
        # Parts that refer to each other are small in memory, and endless when they are written.
        check_value(value, "$", CONFIG)
    except Refused as refused:
        raise Refused(f"{file}: {str(refused).replace('the body', 'it')}", path=refused.path) from None
    return value


def lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers, one at a time, because a source may be larger than memory."""
    try:
        with file.open("rb") as opened:
            yield from enumerate(opened, start=1)
    except OSError as error:
        raise Refused(f"{file} cannot be read: {error.strerror}") from error


def named(refused: Refused, origin: str) -> Refused:
    """A refusal that begins with its origin, which is added only once."""
    text = str(refused)
    return refused if text.startswith(origin) else Refused(f"{origin}: {text}", path=refused.path)


def check_part(folder: Path, name: str) -> Path:
    """The path of a file or folder of a task's folder, which may come from elsewhere. The part may be absent.
    Raises Refused for a link that leads out of the folder, for anything that is neither a file nor a folder,
    and for a file that is too large to travel.
    """
    part = folder / name
    if not _resolved(part).is_relative_to(_resolved(folder)):
        raise Refused(f"{part} is a link that leads out of {folder}: put the file itself there")
    _check_readable(part, folder)
    return part


def _check_readable(part: Path, folder: Path) -> None:
    """Check a file before it is opened, because reading a pipe would wait, and a sparse file would take all
    memory.
    """
    try:
        found = part.stat()
    except OSError:
        return  # The code that reads it reports why it cannot be read.
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise Refused(f"{part} is neither a file nor a folder: remove it")
    if stat.S_ISREG(found.st_mode) and found.st_size > LARGEST_FILE:
        raise Refused(
            f"{part} makes {folder} too large to travel with the task: put large data into the task's image"
        )


def _resolved(path: Path) -> Path:
    return Path(os.path.realpath(path))  # `Path.resolve` raises RuntimeError for a link to itself


def below(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files below a folder with their relative names, sorted. Raises Refused for devices and for links
    that lead out of the folder.
    """
    root = _resolved(folder)
    for file in sorted(folder.rglob("*")):
        if file.is_dir() and not file.is_symlink():
            continue
        if not _resolved(file).is_relative_to(root):
            raise Refused(f"{file} is a link that leads out of {folder}: put the file itself there")
        if file.is_dir():
            raise Refused(f"{file} is a link to a folder: put the folder itself there")
        if not file.is_file():
            raise Refused(f"{file} is neither a file nor a folder: remove it")
        yield _relative_name(file, folder), file


def _relative_name(file: Path, folder: Path) -> str:
    """The name of a file below a folder. Raises Refused if it is not UTF-8, because a task is JSON."""
    name = file.relative_to(folder).as_posix()
    try:
        name.encode()
    except UnicodeEncodeError:
        raise Refused(f"{folder} holds a file named {name!a}: give it a name in UTF-8") from None
    return name


def file_mode(file: Path) -> int:
    return stat.S_IMODE(os.stat(file).st_mode) & 0o777


# ── folders ────────────────────────────────────────────────────────────────────

TASK_IMAGE_NAME = (
    "localhost/polarnode-task"  # "localhost" is Podman's word for images that come from no registry
)


def inline(folder: Path) -> dict[str, Json]:
    """The files below a folder as JSON: {relative path: {"text" or "base64", "mode"}}. Raises Refused if they
    are too large to travel.
    """
    found: dict[str, Json] = {}
    total = 0
    for name, file in below(folder):
        _check_readable(file, folder)
        content = read_bytes(file)
        total += len(content)
        if len(content) > LARGEST_FILE or total > MAX_FOLDER_BYTES:
            raise Refused(
                f"{file} makes {folder} too large to travel with the task: put large data into the task's"
                " image"
            )
        found[name] = {**_content(content), "mode": file_mode(file)}
    return found


def _content(content: bytes) -> dict[str, Json]:
    try:
        return {"text": content.decode()}
    except UnicodeDecodeError:
        return {"base64": b64encode(content).decode()}


def make_build(folder: Path, containerfile: str, *, limit_s: float) -> ImageBuild:
    """The image that this folder builds. Its name has the digest of everything that determines it."""
    return ImageBuild(
        folder=folder,
        containerfile=containerfile,
        image=f"{TASK_IMAGE_NAME}:{_digest(folder, containerfile)}",
        limit_s=limit_s,
    )


def _digest(folder: Path, containerfile: str) -> str:
    """The digest of a folder. A link counts as its target's name, because a builder copies links."""
    running = hashlib.sha256(containerfile.encode() + b"\0")
    for file in sorted(folder.rglob("*")):
        kind = b"link" if file.is_symlink() else b"file" if file.is_file() else b"folder"
        running.update(
            b"\0".join(
                (
                    os.fsencode(file.relative_to(folder)),
                    kind,
                    oct(file_mode(file) if kind != b"link" else 0).encode(),
                )
            )
        )
        content = (
            os.fsencode(os.readlink(file))
            if kind == b"link"
            else _file_digest(file)
            if kind == b"file"
            else b""
        )
        running.update(b"\0" + content + b"\0")
    return running.hexdigest()[:24]


def _file_digest(file: Path) -> bytes:
    """The digest of a file, which is read in pieces because an environment may hold gigabytes."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").digest()
    except OSError as error:
        raise Refused(f"{file} cannot be read: {error.strerror}") from error


# ── Dockerfiles ────────────────────────────────────────────────────────────────

CONTINUED_PATTERN = re.compile(r"\\[ \t]*\n")
HEREDOC_PATTERN = re.compile(r"<<-?\s*[\"']?(\w+)[\"']?")


@frozen(kw_only=True)
class ContainerStart:
    """The workdir and the user with which a container of the image begins; None where the Dockerfile leaves
    it to its base.
    """

    workdir: str | None = None
    user: str | None = None


def read_dockerfile(text: str) -> ContainerStart:
    """The workdir and the user of the last stage."""
    stages: dict[str, ContainerStart] = {}
    now, name = ContainerStart(), ""
    for word, rest in _read_instructions(text):
        if word == "FROM":
            now, name = _begin_stage(rest, stages)
        elif word == "WORKDIR":
            now = evolve(now, workdir=_known_value(normpath(join(now.workdir or "", rest.strip("\"'")))))
        elif word == "USER":
            now = evolve(now, user=_known_value(rest.split(":")[0]))
        stages[name] = now
    return ContainerStart(
        workdir=now.workdir if now.workdir and now.workdir.startswith("/") else None, user=now.user
    )


def _begin_stage(rest: str, stages: dict[str, ContainerStart]) -> tuple[ContainerStart, str]:
    words = [word for word in rest.split() if not word.startswith("--")]
    base = words[0].lower() if words else ""
    named = len(words) == 3 and words[1].lower() == "as"
    return stages.get(base, ContainerStart()), words[2].lower() if named else str(len(stages))


def _known_value(text: str) -> str | None:
    return None if "$" in text or not text else text


def _read_instructions(text: str) -> Iterator[tuple[str, str]]:
    """Each instruction with its arguments. Comments and here-documents are skipped, and continued lines
    joined.
    """
    waiting: list[str] = []
    lines = "\n".join(
        line for line in text.replace("\r\n", "\n").split("\n") if not line.lstrip().startswith("#")
    )
    for line in CONTINUED_PATTERN.sub(" ", lines).split("\n"):
        if waiting:
            if line.strip() == waiting[0]:
                waiting.pop(0)
            continue
        word, _, rest = line.strip().partition(" ")
        waiting = HEREDOC_PATTERN.findall(rest) if word.upper() in ("RUN", "COPY", "ADD") else []
        if word:
            yield word.upper(), rest.strip()


# ── task files ─────────────────────────────────────────────────────────────────


def one(path: Path, overrides: Overrides) -> Iterator[FoundTask | UnreadTask]:
    """The task of one file, or of a folder with a task.toml."""
    file = path / "task.toml" if path.is_dir() else path
    name = path.name if path.is_dir() else path.stem
    try:
        value = read_json(file) if file.suffix == ".json" else read_task_toml(file)
    except Refused as refused:
        yield UnreadTask(name=name, origin=str(file), refused=named(refused, str(file)))
        return
    yield _found(value, name=name, origin=str(file))


def read_task_toml(file: Path) -> dict[str, Json]:
    """A TOML file as the JSON of a TaskSpec, whole or partial."""
    try:
        return codec.read_toml_value(read_text(file), read_file=lambda name: read_bytes(file.parent / name))
    except Refused as refused:
        raise named(refused, str(file)) from refused


def read_jsonl(path: Path, overrides: Overrides) -> Iterator[FoundTask | UnreadTask]:
    """The task of each line, a TaskSpec as JSON."""
    for number, line in lines(path):
        origin = f"{path} line {number}"
        try:
            value = read_line(line)
        except Refused as refused:
            yield UnreadTask(name=str(number), origin=origin, refused=named(refused, origin))
            continue
        yield _found(value, name=str(number), origin=origin)


def read_line(line: bytes) -> Json:
    """The JSON value of a line."""
    if not line.strip():
        raise Refused("the line is blank: remove it, each line is one task")
    if line.lstrip().startswith((b"#", b"//")):
        raise Refused("the line is a comment, which JSONL does not have: remove it")
    try:
        return codec.read_json(line)
    except Refused as refused:
        raise Refused(
            str(refused).replace("the body is not JSON", "the line is not JSON").replace("line 1, ", "")
        ) from refused


def _found(value: Json, *, name: str, origin: str) -> FoundTask | UnreadTask:
    if not isinstance(value, dict):
        return UnreadTask(
            name=name,
            origin=origin,
            refused=Refused(f"{origin}: a task is a JSON object, not {type(value).__name__}"),
        )
    task_id = value.get("task_id")
    return FoundTask(name=task_id if isinstance(task_id, str) else name, origin=origin, value=value)


FORMATS = (".parquet", ".arrow", ".jsonl", ".ndjson", ".json")
BATCH = 64  # rows read at once; a row of SWE-bench is some 20 kB of text
# The files that the library `datasets` writes beside its data.
METADATA_FILES = ("dataset_info.json", "state.json", "dataset_dict.json", "dataset_infos.json")


@frozen(kw_only=True)
class DatasetRow:
    """A row with its origin (the file and the number, from 1), or the reason why it cannot be read."""

    origin: str
    value: Mapping[str, Json] | None = None
    refused: Refused | None = None


def is_dataset(folder: Path) -> bool:
    """Whether a folder looks like a dataset on disk."""
    return any((folder / name).is_file() for name in METADATA_FILES) or bool(_data_files(folder))


def rows(path: Path, *, split: str | None) -> Iterator[DatasetRow]:
    """The rows of a file, or of one split of a folder. Raises Refused if there are several splits and none is
    named.
    """
    files = [path] if path.is_file() else _split_files(path, split)
    for file in files:
        yield from _rows_of(file)


# ── files of a dataset ──────────────────────────────────────────────────────────────────────


def _split_files(folder: Path, split: str | None) -> Sequence[Path]:
    splits = _files_by_split(folder)
    if not splits:
        raise Refused(f"{folder} holds no data: no file of it ends in {', '.join(FORMATS)}")
    if split is None and len(splits) > 1:
        raise Refused(f"{folder} has several splits ({', '.join(sorted(splits))}): name one with --split")
    chosen = next(iter(splits)) if split is None else split
    if chosen not in splits:
        raise Refused(f"{folder} has no split {chosen}: there are {', '.join(sorted(splits))}")
    return splits[chosen]


def _files_by_split(folder: Path) -> Mapping[str, Sequence[Path]]:
    """The data files by split. A split is a folder of its own (DatasetDict), or the beginning of the files'
    names (`test-00000-of-00001.parquet`).
    """
    found: dict[str, list[Path]] = {}
    for file in _data_files(folder):
        owner = file.parent
        own = (owner / "state.json").is_file() or (owner / "dataset_info.json").is_file()
        of_dict = own and owner != folder
        name = owner.name if of_dict else "data" if own else file.name.split("-")[0].removesuffix(file.suffix)
        found.setdefault(name, []).append(file)
    return found


def _data_files(folder: Path) -> list[Path]:
    """The data files of a folder, of its `data/`, and of its folders of splits."""
    return sorted(file for level in ("*", "*/*") for file in folder.glob(level) if _is_data(file))


def _is_data(file: Path) -> bool:
    return (
        file.suffix in FORMATS
        and file.name not in METADATA_FILES
        and not file.name.startswith((".", "cache-"))
        and file.is_file()
    )


# ── rows ───────────────────────────────────────────────────────────────────────


def _rows_of(file: Path) -> Iterator[DatasetRow]:
    match file.suffix:
        case ".jsonl" | ".ndjson":
            yield from _read_line_rows(file)
        case ".json":
            value = read_json(file)
            for number, each in enumerate(value if isinstance(value, list) else [value], start=1):
                yield _row(each, f"{file} row {number}")
        case _:
            batches = _parquet(file) if file.suffix == ".parquet" else _read_arrow(file)
            for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
                yield DatasetRow(origin=f"{file} row {number}", value=cast(Mapping[str, Json], row))


def _read_line_rows(file: Path) -> Iterator[DatasetRow]:
    for number, line in lines(file):
        origin = f"{file} line {number}"
        try:
            yield _row(read_line(line), origin)
        except Refused as refused:
            yield DatasetRow(origin=origin, refused=named(refused, origin))


def _row(value: Json, origin: str) -> DatasetRow:
    if isinstance(value, dict):
        return DatasetRow(origin=origin, value=value)
    return DatasetRow(
        origin=origin, refused=Refused(f"{origin}: a row is a JSON object, not {type(value).__name__}")
    )


def _parquet(file: Path) -> Iterator[Any]:
    pyarrow = _import_pyarrow(file)
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as opened:
            yield from opened.iter_batches(batch_size=BATCH)
    except (OSError, pyarrow.ArrowException) as error:
        raise Refused(f"{file} cannot be read as Parquet: {error}") from error


def _read_arrow(file: Path) -> Iterator[Any]:
    """Arrow's stream format, which `datasets` writes, or its file format."""
    pyarrow = _import_pyarrow(file)
    try:
        with pyarrow.memory_map(str(file)) as opened:
            try:
                reader: Any = pyarrow.ipc.open_stream(opened)
                yield from reader
            except pyarrow.ArrowInvalid:
                opened.seek(0)
                whole = pyarrow.ipc.open_file(opened)
                yield from (whole.get_batch(index) for index in range(whole.num_record_batches))
    except (OSError, pyarrow.ArrowException) as error:
        raise Refused(f"{file} cannot be read as Arrow: {error}") from error


def _import_pyarrow(file: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError(
            f"{file}: reading {file.suffix} needs pyarrow: pip install 'polarnode[data]'"
        ) from error
    return pyarrow
