"""What a harness module is, and what every one of them sets.

A harness is an agent program we never change. Its module says: which image of `runtimes/` carries it, which version was measured, which APIs it
can be told to speak, whether its exit code can be believed, and how it is launched (argv, environment, files). Rule for whoever adds one: no
argument goes through a shell, the environment is written from nothing, telemetry and updates are off, and what the harness can not do (MCP
servers, skills) stays False here, so that a task that asks for it is refused. The node's own environment never reaches a harness.
"""

from collections.abc import Callable, Mapping

from attrs import frozen

from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.ports import HarnessOrder, Launch

DEFAULT_MODEL_NAME = "local-model"  # a name no harness knows gives the simplest behaviour (harnesses.md 14.16)
ARGUMENT_BYTES = 131_071  # Linux takes no longer single argument (MAX_ARG_STRLEN less its NUL)


@frozen(kw_only=True)
class Harness:
    """One agent program: its name, the version its image pins, the image, and its launch as a pure function.

    `apis` are the values of its setting `api`, the default first. `exit_code_honest` is False where the program ends with 0 having done
    nothing, or with 1 having done its work: then the session's turns have their say (`exits.py`).
    """

    name: str
    version: str | None
    image: str
    launch: Callable[[HarnessOrder], Launch]
    apis: tuple[str, ...] = ()
    exit_code_honest: bool = True
    mcp_servers: bool = False
    skills: bool = False


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


def argument(text: str, *, special: tuple[str, ...] = ("-", "@")) -> str:
    """An instruction as an argument: one that begins with what the harness takes for a flag, a file or a command gets a blank before it."""
    if len(text.encode()) >= ARGUMENT_BYTES:
        raise Refused(
            f"the instruction is longer than the {ARGUMENT_BYTES} bytes a program's argument may have: put it in a file of the workspace",
            path="$.instruction",
        )
    return f" {text}" if text.startswith(special) else text


def skill_files(order: HarnessOrder, folder: str) -> dict[str, bytes]:
    """The task's skills, each where this harness looks for them: `folder` is relative to the home."""
    return {f"{order.home}/{folder}/{name}/SKILL.md": text.encode() for name, text in order.skills.items()}


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
