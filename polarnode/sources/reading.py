"""Files of a source as values: bytes, text, JSON, TOML, YAML; every refusal names the file and what to do.

The rule for whoever edits it: a source is its user's own files, wherever they lie, but what a downloaded folder holds is somebody else's:
`below` follows no link out of it.
"""

import os
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polarnode import wire
from polarnode.conversation import Json
from polarnode.errors import Refused

LARGEST_FILE = 16 << 20  # bytes of one file that travels in a task: a spec is JSON in a journal, and a test suite is far smaller
LARGEST_FOLDER = 48 << 20  # bytes of one folder: as base64 it stays below what the control plane takes in one request


def read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise Refused(f"{file} can not be read: {error.strerror}") from error


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
        return wire.read_json(content)
    except Refused as refused:
        raise Refused(f"{file}: {str(refused).replace('the body', 'it')}") from refused


def read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(file))
    except tomllib.TOMLDecodeError as error:
        raise Refused(f"{file}: it is not TOML: {error}") from error


def read_yaml(file: Path) -> Any:
    import yaml  # only such files need it, and a verb's help should not wait for it

    try:
        return yaml.safe_load(read_text(file))
    except yaml.YAMLError as error:
        raise Refused(f"{file}: it is not YAML: {' '.join(str(error).split())}") from error


def lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers, one at a time: a source may be larger than memory."""
    try:
        with file.open("rb") as opened:
            yield from enumerate(opened, start=1)
    except OSError as error:
        raise Refused(f"{file} can not be read: {error.strerror}") from error


def named(refused: Refused, origin: str) -> Refused:
    """A refusal that says where it was met, once."""
    text = str(refused)
    return refused if text.startswith(origin) else Refused(f"{origin}: {text}", path=refused.path)


def below(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files below a folder by their relative name, sorted. Refused for what is no file of that folder: links that lead out, devices."""
    root = folder.resolve()
    for file in sorted(folder.rglob("*")):
        if file.is_dir() and not file.is_symlink():
            continue
        if not file.resolve().is_relative_to(root):
            raise Refused(f"{file} is a link that leads out of {folder}: put the file itself there")
        if file.is_dir():
            raise Refused(f"{file} is a link to a folder: put the folder itself there")
        if not file.is_file():
            raise Refused(f"{file} is neither a file nor a folder: remove it")
        yield file.relative_to(folder).as_posix(), file


def mode_of(file: Path) -> int:
    return stat.S_IMODE(os.stat(file).st_mode) & 0o777
