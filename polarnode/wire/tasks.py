"""A TaskSpec from JSON or TOML, and back; a capture's from JSON. What the shape can not say (ranges, names, paths) is said here, one line a law.

The rule for whoever edits it: every refusal names the field and what to write instead; a spec that passes here starts, unless the machine
itself lacks something. Unknown fields are refused, because a misspelt budget that is silently ignored costs a night of GPU time.
"""

import tomllib
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, datetime, time
from typing import Any

from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.tasks import CaptureEnd, CaptureSpec, FileSpec, TaskSpec
from polarnode.wire.core import child, plain, structure, subject
from polarnode.wire.laws import Law, capture_end_laws, capture_laws, first_broken, task_laws


def read_task(value: Json) -> TaskSpec:
    """The TaskSpec that `value` says, with defaults where it is silent. Refused with the path of the first field that can not be."""
    spec = structure(value, TaskSpec, forbid_extra=True)
    _hold(_all_laws(spec))
    return spec


def read_capture(value: Json) -> CaptureSpec:
    """The CaptureSpec that `value` says. Refused as a task is."""
    spec = structure(value, CaptureSpec, forbid_extra=True)
    _hold(capture_laws(spec))
    return spec


def read_capture_end(value: Json) -> CaptureEnd:
    """How a capture ends, as `value` says. Refused as a task is."""
    end = structure(value, CaptureEnd, forbid_extra=True)
    _hold(capture_end_laws(end))
    return end


def _hold(laws: Iterable[Law]) -> None:
    broken = first_broken(laws)
    if broken is not None:
        raise Refused(f"{subject(broken.path)} {broken.sentence}", path=broken.path)


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


def in_workdir(path: str, workdir: str) -> str:
    """A path that is relative to the workdir or absolute, as an absolute one."""
    return path if path.startswith("/") else f"{workdir.rstrip('/')}/{path}"


def task_json(spec: TaskSpec) -> dict[str, Json]:
    """`spec` as JSON with every default written out; `read_task` of it is `spec` again."""
    found: dict[str, Json] = plain(spec)
    return found


# ── TOML: the same shape, and two conveniences for a folder of files ──────────


def read_task_toml(text: str, *, read_file: Callable[[str], bytes] | None = None) -> TaskSpec:
    """A TaskSpec written in TOML, as `read_toml_value` reads it."""
    return read_task(read_toml_value(text, read_file=read_file))


def read_toml_value(text: str, *, read_file: Callable[[str], bytes] | None = None) -> dict[str, Json]:
    """A TaskSpec written in TOML, whole or partial, as its JSON.

    With `read_file` (a path as written → bytes), `instruction_file = "task.md"` stands for the instruction and `source = "tests/x.py"` of
    a `[[runtime.files]]` for its content, so that a task can be a folder. This module opens nothing itself.
    """
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Refused(f"the task is not TOML: {error}") from None
    _refuse_dates(value, "$")
    return _with_files(value, read_file) if read_file is not None else value


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
