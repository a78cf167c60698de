"""Tasks written in TOML, whole or partial, as the JSON that `read_task` reads.

The shape is that of JSON, with two conveniences for a folder of files. This module opens no files: its caller
reads them.
"""

import tomllib
from base64 import b64encode
from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from typing import Any

from polarnode.core.codec.json import child, subject
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused


def read_toml_value(text: str, *, read_file: Callable[[str], bytes] | None = None) -> dict[str, Json]:
    """Read a TaskSpec written in TOML, whole or partial, and return its JSON.

    With `read_file` (a path as written → bytes), `instruction_file = "task.md"` stands for the instruction
    and `source = "tests/x.py"` of a `[[runtime.files]]` for its content, so that a task can be a folder. This
    module opens no files.
    """
    try:
        value = tomllib.loads(text)
        _refuse_dates(value, "$")
    except ValueError as error:  # tomllib also raises it for an integer of thousands of digits
        raise Refused(f"the task is not TOML: {error}") from None
    except RecursionError:
        raise Refused("the task is nested too deeply to be read: flatten it") from None
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
        files = [
            _with_content(file, f"$.runtime.files[{index}]", read_file)
            for index, file in enumerate(runtime["files"])
        ]
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
