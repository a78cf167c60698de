"""An evaluator's `config` as a value. One reader, so that every refusal names its field in the words of the task that was submitted."""

from collections.abc import Mapping
from typing import TypeVar

from polarnode import wire
from polarnode.conversation import Json
from polarnode.errors import Refused

Config = TypeVar("Config")
ROOT = "$.evaluator.config"
COMMAND_BYTES = 100_000  # Linux takes 131,072 bytes of one argument, a script of ours around it


def read(config: Mapping[str, Json], shape: type[Config]) -> Config:
    """The config in its shape, an attrs class; a field that is unknown, missing or of another kind is refused."""
    try:
        return wire.structure(dict(config), shape, forbid_extra=True)
    except Refused as refused:
        raise Refused(str(refused), path=(refused.path or "$").replace("$", ROOT, 1)) from refused


def refused(name: str, message: str) -> Refused:
    """The refusal of one field."""
    return Refused(f"{name} {message}", path=f"{ROOT}.{name}")


def absolute(name: str, path: str) -> None:
    """Refuse what is no absolute path inside a runtime."""
    if not path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise refused(name, "must be an absolute path in the runtime, without ..")


def seconds(name: str, value: float) -> None:
    """Refuse what is no time."""
    if not 0 < value < 1e9:
        raise refused(name, "must be a number of seconds greater than 0")


def command(name: str, text: str | None) -> None:
    """Refuse what no shell runs: nothing, or more than fits into an argument."""
    if text is not None and (not text.strip() or "\0" in text):
        raise refused(name, "must be a command, not an empty text")
    if text is not None and len(text.encode()) > COMMAND_BYTES:
        raise refused(name, f"is longer than {COMMAND_BYTES} bytes: put it into a file of the runtime and run that")
