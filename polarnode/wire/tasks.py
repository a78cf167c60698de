"""A TaskSpec from JSON or TOML, and back. What the shape can not say (ranges, names, paths) is said here, one line a law.

The rule for whoever edits it: every refusal names the field and what to write instead; a spec that passes here starts, unless the machine
itself lacks something. Unknown fields are refused, because a misspelt budget that is silently ignored costs a night of GPU time.
"""

import tomllib
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time
from typing import Any

from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.tasks import FileSpec, TaskSpec
from polarnode.wire.core import child, plain, structure, subject
from polarnode.wire.laws import Law, first_broken, task_laws


def read_task(value: Json) -> TaskSpec:
    """The TaskSpec that `value` says, with defaults where it is silent. Refused with the path of the first field that can not be."""
    spec = structure(value, TaskSpec, forbid_extra=True)
    broken = first_broken(_all_laws(spec))
    if broken is not None:
        raise Refused(f"{subject(broken.path)} {broken.sentence}", path=broken.path)
    return spec


def _all_laws(spec: TaskSpec) -> Iterator[Law]:
    yield from task_laws(spec)
    for index, file in enumerate(spec.runtime.files):
        yield from _content_laws(file, f"$.runtime.files[{index}]")


def _content_laws(file: FileSpec, path: str) -> Iterator[Law]:
    yield Law((file.text is None) != (file.base64 is None), path, "needs exactly one of text and base64")
    yield Law(_is_base64(file.base64), f"{path}.base64", "is not base64: encode the bytes with the standard alphabet and padding")


def _is_base64(text: str | None) -> bool:
    try:
        return text is None or b64decode(text, validate=True) is not None
    except (Base64Error, ValueError):
        return False


def file_bytes(file: FileSpec) -> bytes:
    """The content of a file that `read_task` accepted."""
    return (file.text or "").encode() if file.base64 is None else b64decode(file.base64, validate=True)


def task_json(spec: TaskSpec) -> dict[str, Json]:
    """`spec` as JSON with every default written out; `read_task` of it is `spec` again."""
    found: dict[str, Json] = plain(spec)
    return found


# ── TOML: the same shape, and two conveniences for a folder of files ──────────


def read_task_toml(text: str, *, read_file: Callable[[str], bytes] | None = None) -> TaskSpec:
    """A TaskSpec written in TOML.

    With `read_file` (a path as written → bytes), `instruction_file = "task.md"` stands for the instruction and `source = "tests/x.py"` of
    a `[[runtime.files]]` for its content, so that a task can be a folder. This module opens nothing itself.
    """
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Refused(f"the task is not TOML: {error}") from None
    _refuse_dates(value, "$")
    return read_task(_with_files(value, read_file) if read_file is not None else value)


def _refuse_dates(value: Any, path: str) -> None:
    if isinstance(value, date | datetime | time):
        raise Refused(f"{subject(path)} is a TOML date: write it as a string", path=path)
    if isinstance(value, dict):
        for key, part in value.items():
            _refuse_dates(part, child(path, key))
    if isinstance(value, list):
        for index, part in enumerate(value):
            _refuse_dates(part, child(path, index))


def _with_files(value: dict[str, Any], read_file: Callable[[str], bytes]) -> dict[str, Any]:
    task = dict(value)
    name = task.pop("instruction_file", None)
    if name is not None:
        task["instruction"] = _decoded(read_file(_name(name, "$.instruction_file")), "$.instruction_file")
    runtime = task.get("runtime")
    if isinstance(runtime, dict) and isinstance(runtime.get("files"), list):
        files = [_with_content(file, f"$.runtime.files[{index}]", read_file) for index, file in enumerate(runtime["files"])]
        task["runtime"] = {**runtime, "files": files}
    return task


def _with_content(file: Any, path: str, read_file: Callable[[str], bytes]) -> Any:
    if not isinstance(file, Mapping) or "source" not in file:
        return file
    rest = {key: value for key, value in file.items() if key != "source"}
    return {**rest, "base64": b64encode(read_file(_name(file["source"], f"{path}.source"))).decode()}


def _name(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise Refused(f"{subject(path)} must be a file's path, as a string", path=path)
    return value


def _decoded(content: bytes, path: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise Refused(f"{subject(path)} names a file that is not UTF-8 text", path=path) from None
