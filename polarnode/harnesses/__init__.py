"""Harnesses, one module each: how the program is started and pointed at its model endpoint."""

from polarnode.core.errors import Refused
from polarnode.core.plugins import load_value
from polarnode.core.spelling import remedy
from polarnode.core.task import HarnessSpec
from polarnode.harnesses import (
    claude_code,
    codex,
    gemini_cli,
    hermes,
    mini_swe_agent,
    openclaw,
    opencode,
    openhands_sdk,
    pi,
    qwen_code,
    shell,
)
from polarnode.harnesses.harness import Harness

_BUILTIN_HARNESSES: tuple[Harness, ...] = (
    claude_code.HARNESS,
    codex.HARNESS,
    gemini_cli.HARNESS,
    hermes.HARNESS,
    mini_swe_agent.HARNESS,
    openclaw.HARNESS,
    opencode.HARNESS,
    openhands_sdk.HARNESS,
    pi.HARNESS,
    qwen_code.HARNESS,
    shell.HARNESS,
)
HARNESSES = {harness.name: harness for harness in _BUILTIN_HARNESSES}


def find(spec: HarnessSpec, *, allowed_imports: tuple[str, ...] = ()) -> Harness:
    """The harness of a task. An import path must name a `Harness` value, under a prefix that the node's
    config allows.
    """
    if spec.import_path is None:
        harness = _named(spec)
    else:
        harness = load_value(spec.import_path, Harness, allowed=allowed_imports, path="$.harness.import_path")
    for name, requested, supported in (
        ("mcp_servers", spec.mcp_servers, harness.mcp_servers),
        ("skills", spec.skills, harness.skills),
    ):
        if requested and not supported:
            able = ", ".join(sorted(each.name for each in HARNESSES.values() if getattr(each, name)))
            raise Refused(
                f"{harness.name} takes no {name}: leave them out, or use one of {able}",
                path=f"$.harness.{name}",
            )
    return harness


def _named(spec: HarnessSpec) -> Harness:
    harness = HARNESSES.get(spec.name)
    if harness is None:
        raise Refused(
            f"no harness is called {spec.name}; {remedy(spec.name, HARNESSES)}",
            path="$.harness.name",
        )
    if spec.version not in (None, harness.version):
        pinned = f"pins {harness.version}" if harness.version else "has no version"
        raise Refused(
            f"the image of {spec.name} {pinned}, not {spec.version}: leave version out",
            path="$.harness.version",
        )
    return harness
