"""What a harness module is, and what every one of them sets.

A harness is an agent program we never change. Its module says three things: which image of `runtimes/` carries it, which version was
measured, and how it is launched (argv, environment, files). Rule for whoever adds one: no argument goes through a shell, the environment is
written from nothing, and telemetry and updates are off. The node's own environment never reaches a harness.
"""

from collections.abc import Callable, Mapping

from attrs import frozen

from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.ports import HarnessOrder, Launch

DEFAULT_MODEL_NAME = "local-model"  # a name no harness knows gives the simplest behaviour (harnesses.md 14.16)


@frozen(kw_only=True)
class Harness:
    """One agent program: its name, the version its image pins, the image, and its launch as a pure function."""

    name: str
    version: str | None
    image: str
    launch: Callable[[HarnessOrder], Launch]


def model_name(order: HarnessOrder) -> str:
    """The name the harness is told; the node serves any name with its one model."""
    return order.model_name or DEFAULT_MODEL_NAME


def quiet_environment(order: HarnessOrder) -> dict[str, str]:
    """What every harness gets: a home, a plain terminal, no telemetry. The task's own `env` is laid over by `environment`."""
    return {
        "HOME": order.home,
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "DO_NOT_TRACK": "1",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }


def environment(order: HarnessOrder, own: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a harness: the quiet base, the harness's own variables, then the task's."""
    return {**quiet_environment(order), **own, **order.env}


def argument(text: str) -> str:
    """An instruction as a positional argument: one that begins like a flag or a file reference gets a blank before it."""
    return f" {text}" if text.startswith(("-", "@")) else text


def choice(settings: Mapping[str, Json], name: str, allowed: tuple[str, ...]) -> str:
    """A setting that must be one of `allowed`; the first is the default."""
    value = settings.get(name, allowed[0])
    if not isinstance(value, str) or value not in allowed:
        raise Refused(f"harness setting {name} must be one of {', '.join(allowed)}", path=f"$.harness.settings.{name}")
    return value


def only_settings(settings: Mapping[str, Json], known: tuple[str, ...]) -> None:
    """Refuse a setting this harness does not know, so that a misspelt one is never silently without effect."""
    for name in settings:
        if name not in known:
            listed = ", ".join(known) or "none"
            raise Refused(f"this harness has no setting {name}; it knows: {listed}", path=f"$.harness.settings.{name}")
