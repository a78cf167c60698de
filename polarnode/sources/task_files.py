"""polarnode's own tasks: one in a TOML or JSON file, or one a line in JSONL.

In TOML, `instruction_file` and the `source` of a `[[runtime.files]]` are read relative to the task's own folder, wherever they lead: it is
the user's own file.
"""

from collections.abc import Iterator
from pathlib import Path

from polarnode import wire
from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.sources.reading import lines, named, read_bytes, read_json, read_text
from polarnode.sources.shapes import Found, Overrides, Unread


def one(path: Path, overrides: Overrides) -> Iterator[Found | Unread]:
    """The task of one file, or of a folder with a task.toml."""
    file = path / "task.toml" if path.is_dir() else path
    name = path.name if path.is_dir() else path.stem
    try:
        value = read_json(file) if file.suffix == ".json" else task_value(file)
    except Refused as refused:
        yield Unread(name=name, origin=str(file), refused=named(refused, str(file)))
        return
    yield _found(value, name=name, origin=str(file))


def task_value(file: Path) -> dict[str, Json]:
    """A TOML file as the JSON of a TaskSpec, whole or partial."""
    try:
        return wire.read_toml_value(read_text(file), read_file=lambda name: read_bytes(file.parent / name))
    except Refused as refused:
        raise named(refused, str(file)) from refused


def jsonl(path: Path, overrides: Overrides) -> Iterator[Found | Unread]:
    """Each line a TaskSpec."""
    for number, line in lines(path):
        origin = f"{path} line {number}"
        try:
            value = read_line(line)
        except Refused as refused:
            yield Unread(name=str(number), origin=origin, refused=named(refused, origin))
            continue
        yield _found(value, name=str(number), origin=origin)


def read_line(line: bytes) -> Json:
    """The JSON value of a line."""
    if not line.strip():
        raise Refused("the line is blank: remove it, each line is one task")
    if line.lstrip().startswith((b"#", b"//")):
        raise Refused("the line is a comment, which JSONL does not have: remove it")
    try:
        return wire.read_json(line)
    except Refused as refused:
        raise Refused(str(refused).replace("the body is not JSON", "the line is not JSON").replace("line 1, ", "")) from refused


def _found(value: Json, *, name: str, origin: str) -> Found | Unread:
    if not isinstance(value, dict):
        return Unread(name=name, origin=origin, refused=Refused(f"{origin}: a task is a JSON object, not {type(value).__name__}"))
    known = value.get("task_id")
    return Found(name=known if isinstance(known, str) else name, origin=origin, value=value)
