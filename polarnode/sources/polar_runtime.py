"""Polar's RuntimeSpec in our words: image, files, steps, limits, volumes."""

from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from posixpath import join

from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.sources.polar_shapes import PolarAction, PolarRuntime
from polarnode.sources.reading import LARGEST_FILE, below, mode_of, read_bytes

WORKDIR = "/work"
SESSION_FOLDER = "/polar/session"
TRANSPORTS = ("docker-daemon:", "docker://", "containers-storage:")  # where Apptainer gets an image from; its name is what follows

Note = Callable[[str], None]


def runtime_value(runtime: PolarRuntime, folder: Path, note: Note) -> dict[str, Json]:
    """A RuntimeSpec as JSON; files are read relative to the task's own folder."""
    _refuse_other_worlds(runtime)
    _note_the_rest(runtime, note)
    said: dict[str, Json] = {
        "image": _image(runtime.image, note),
        "workdir": runtime.workdir or WORKDIR,
        "user": "root",  # Polar's containers run as their image's user, which is root in nearly all of them
        "read_only": False,
        "files": [file for action in runtime.prepare for file in _files(action, folder)],
        "prepare": [_step(action, note) for action in runtime.prepare if action.type == "exec"],
        "eval_prepare": [_step(action, note) for action in runtime.eval_prepare or ()],
        "env": dict(runtime.env),
        "cpus": runtime.cpus,
        "memory_mb": runtime.memory_mb,
        "disk_mb": runtime.storage_mb,
        "volumes": list(_volumes(runtime, note)),
    }
    return {name: value for name, value in said.items() if value not in (None, [], {})}


def _refuse_other_worlds(runtime: PolarRuntime) -> None:
    if runtime.import_path is not None:
        raise Refused("a runtime class of Polar's own kind can not run here", path="$.runtime.import_path")
    if runtime.gpus:
        raise Refused("it asks for GPUs in the container, which has none: the node's GPUs serve the model", path="$.runtime.gpus")
    if runtime.image.endswith(".sif") or "oras://" in runtime.image:
        raise Refused(f"{runtime.image} is an image of Apptainer: name the OCI image it was made from", path="$.runtime.image")
    if any(action.type != "exec" for action in runtime.eval_prepare or ()):
        raise Refused("eval_prepare uploads files: place them with the evaluator, or under prepare", path="$.runtime.eval_prepare")


def _note_the_rest(runtime: PolarRuntime, note: Note) -> None:
    kinds = [action.type == "exec" for action in runtime.prepare]
    if True in kinds and False in kinds[kinds.index(True) :]:
        note("runtime.prepare uploads files after a command: here all files are placed before the first command")
    if runtime.eval_prepare is not None:
        note("runtime.eval_prepare runs after prepare's own steps in the evaluator's runtime; Polar runs it in their place")
    if runtime.allow_internet:
        note("it may reach the whole internet; here it reaches only the hosts of runtime.egress, which is empty")
    if runtime.direct_exec_init_command is not None:
        note("runtime.direct_exec_init_command is not used: it is for Apptainer alone")
    if runtime.internet_volumes:
        note("runtime.internet_volumes are not used: the network of a session is its door and runtime.egress")
    for name in sorted(set(runtime.kwargs) - {"volumes", "fakeroot"}):
        note(f"runtime.kwargs.{name} is not used: it is a setting of Polar's backend")
    if any(SESSION_FOLDER in (action.command or action.target or "") for action in runtime.prepare):
        note(f"{SESSION_FOLDER} is Polar's own folder; here it is a folder like any other, and empty at first")


def _image(name: str, note: Note) -> str:
    for transport in TRANSPORTS:
        if name.startswith(transport):
            note(f"{transport} is where Apptainer gets the image; here it is in the node's own store")
            return name.removeprefix(transport)
    return name


def _files(action: PolarAction, folder: Path) -> Iterator[Json]:
    if action.type == "exec":
        return
    if not action.source or not action.target:
        raise Refused(f"{action.type} needs a source and a target", path="$.runtime.prepare")
    source = folder / action.source
    if action.type == "upload_file":
        yield _file(source, action.target)
        return
    if not source.is_dir():
        raise Refused(f"{source} is no folder: upload_dir needs one", path="$.runtime.prepare")
    for name, file in below(source):
        yield _file(file, join(action.target, name))


def _file(file: Path, target: str) -> Json:
    content = read_bytes(file)
    if len(content) > LARGEST_FILE:
        raise Refused(f"{file} is too large to travel with the task: put it into the image", path="$.runtime.prepare")
    return {"path": target, "base64": b64encode(content).decode(), "mode": mode_of(file)}


def _step(action: PolarAction, note: Note) -> Json:
    if not action.command:
        raise Refused("exec needs a command", path="$.runtime.prepare")
    if action.max_attempts != 1:
        note("runtime.prepare: max_attempts is not used; a step that fails ends the session in INIT")
    env = [f"{name}={value}" for name, value in (action.env or {}).items()]
    moved = ["--chdir", action.cwd] if action.cwd else []
    return {"argv": [*(["env", *moved, *env] if env or moved else []), "bash", "-lc", action.command]}


def _volumes(runtime: PolarRuntime, note: Note) -> Iterator[Json]:
    """Docker's `source:target[:ro]`."""
    told = runtime.kwargs.get("volumes", [])
    if not isinstance(told, list) or not all(isinstance(each, str) and each.count(":") in (1, 2) for each in told):
        raise Refused("kwargs.volumes is no list of source:target[:ro]", path="$.runtime.kwargs.volumes")
    for each in told:
        source, target, *mode = str(each).split(":")
        yield {"source": source, "target": target, "write": mode != ["ro"]}
    if told:
        note("runtime.kwargs.volumes are mounted only where the node's own settings allow their folders")
