"""Folders that travel with a task: files inline for an evaluator, and the digest by which an image built from a folder is known."""

import hashlib
import os
from base64 import b64encode
from pathlib import Path

from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.sources.reading import LARGEST_FILE, LARGEST_FOLDER, below, mode_of, read_bytes
from polarnode.sources.shapes import Build

TASK_IMAGES = "localhost/polarnode-task"  # Podman's own word for images no registry gave


def inline(folder: Path) -> dict[str, Json]:
    """The files below a folder as JSON: {relative path: {"text" or "base64", "mode"}}. Refused when they are too large to travel."""
    found: dict[str, Json] = {}
    total = 0
    for name, file in below(folder):
        content = read_bytes(file)
        total += len(content)
        if len(content) > LARGEST_FILE or total > LARGEST_FOLDER:
            raise Refused(f"{file} makes {folder} too large to travel with the task: put large data into the task's image")
        found[name] = {**_content(content), "mode": mode_of(file)}
    return found


def _content(content: bytes) -> dict[str, Json]:
    try:
        return {"text": content.decode()}
    except UnicodeDecodeError:
        return {"base64": b64encode(content).decode()}


def build_of(folder: Path, containerfile: str, *, limit_s: float) -> Build:
    """The image that this folder builds, called by the digest of all that makes it what it is."""
    return Build(folder=folder, containerfile=containerfile, image=f"{TASK_IMAGES}:{_digest(folder, containerfile)}", limit_s=limit_s)


def _digest(folder: Path, containerfile: str) -> str:
    """Links are their targets' names, as a builder copies them."""
    running = hashlib.sha256(containerfile.encode() + b"\0")
    for file in sorted(folder.rglob("*")):
        kind = b"link" if file.is_symlink() else b"file" if file.is_file() else b"folder"
        running.update(b"\0".join((file.relative_to(folder).as_posix().encode(), kind, oct(mode_of(file) if kind != b"link" else 0).encode())))
        content = os.readlink(file).encode() if kind == b"link" else _hashed(file) if kind == b"file" else b""
        running.update(b"\0" + content + b"\0")
    return running.hexdigest()[:24]


def _hashed(file: Path) -> bytes:
    """A file's own digest, read in pieces: an environment may hold gigabytes."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").digest()
    except OSError as error:
        raise Refused(f"{file} can not be read: {error.strerror}") from error
