"""What a task says to the `swebench` evaluator: a row of the dataset, and what the row or the package does not know.

The rule for whoever edits it: Polar's keys are taken as they are, and a row that can not be judged is refused when it is submitted.
"""

import json
from collections.abc import Mapping, Sequence

from attrs import frozen

from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.evaluators import settings


@frozen(kw_only=True)
class SwebenchConfig:
    """The shape of `evaluator.config`."""

    instance: Mapping[str, Json]
    test_command: str | None = None
    install_command: str | None = None
    log_parser: str | None = None
    repo_dir: str = "/testbed"
    patch_command: str | None = None
    exclude_patterns: tuple[str, ...] = ()
    apply_timeout: float = 300.0  # git needs seconds; on a machine with twenty times the load of its cores a minute, which is no fault of the agent
    test_timeout: float = 1800.0  # swebench's own for one instance; budgets.post_s holds as well
    user: str | None = None


def read_config(config: Mapping[str, Json]) -> SwebenchConfig:
    """The config, or a refusal naming the field."""
    read = settings.read(config, SwebenchConfig)
    settings.absolute("repo_dir", read.repo_dir)
    settings.seconds("apply_timeout", read.apply_timeout)
    settings.seconds("test_timeout", read.test_timeout)
    settings.command("test_command", read.test_command)
    settings.command("install_command", read.install_command)
    settings.command("patch_command", read.patch_command)
    return read


def text(instance: Mapping[str, Json], name: str, *, default: str | None = None) -> str:
    """A column of text."""
    value = instance.get(name)
    if isinstance(value, str) and value:
        return value
    if default is not None and value in (None, ""):
        return default
    raise _column(name, "must be a text" if value not in (None, "") else "is missing from this row")


def names(instance: Mapping[str, Json], name: str) -> tuple[str, ...]:
    """A column of tests: a list, or its JSON text as in the published datasets."""
    value: object = instance.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise _column(name, f"is no JSON: {error}") from error
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(each, str) for each in value):
        raise _column(name, "must be a list of names of tests")
    return tuple(value)


def _column(name: str, message: str) -> Refused:
    return Refused(f"instance.{name} {message}", path=f"{settings.ROOT}.instance.{name}")
