"""Each harness's prompt before the model's first token, with everything that varies between machines varied.

The prose is the harness's own, from a capture. Date, installation path, kernel and the like are drawn at
random for every prompt, so the policy cannot rely on them.
"""

import random
import re
from dataclasses import dataclass
from functools import cache

from examples.tiny_policy.capture import PROMPT, captured
from examples.tiny_policy.endpoint import Json

Messages = list[Json]

_PI_HOMES = (
    "/usr/local/lib",
    "/usr/lib",
    "/opt/harness/pi",
    "/opt/pi",
    "/home/agent/.local/lib",
    "/home/agent",
    "/opt/node",
    "/srv/harness",
    "/usr/share",
    "/opt/harnesses",
    "/root",
    "/app",
)
_WORKDIRS = ("/work",) * 17 + ("/home/agent/work", "/workspace", "/tmp/task")
CROPPED = 0.2
_KERNEL = re.compile(r"(?<=<system_information>\n).*")
_PI_PREFIX = re.compile(r"(?<= )/\S*(?=/node_modules/)")


@dataclass(frozen=True)
class Prompt:
    """The first request of a session: its messages and tools, as the node hands them to the template."""

    messages: Messages
    tools: Messages


@cache
def _first(harness: str) -> tuple[tuple[tuple[str, str], ...], tuple[Json, ...]]:
    request = captured(harness)[0]
    messages = tuple((m["role"], plain(m["content"])) for m in request["messages"])
    return messages, tuple(tool(t) for t in request["tools"])


def plain(content: object) -> str:
    """A message's content as text, whether it came as text or in parts."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return str(content or "")


def tool(given: Json) -> Json:
    """A tool as the node passes it on: three keys, in this order."""
    function = given["function"]
    return {"type": "function", "function": {k: function[k] for k in ("name", "description", "parameters")}}


def _kernel(rng: random.Random) -> str:
    version = f"{rng.randrange(4, 8)}.{rng.randrange(0, 20)}.{rng.randrange(0, 200)}"
    flavour = rng.choice(
        ("", "-amd64", "-generic", f"-{rng.randrange(9, 99)}-generic", "-cloud-amd64", "-fc")
    )
    stamp = rng.choice(
        (
            "",
            f" Debian {version}-1",
            " @0",
            f" ({_date(rng)})",
            f" Sat Nov {rng.randrange(1, 29)} 10:00:00 UTC 2026",
        )
    )
    return (
        f"Linux {version}{flavour} #{rng.randrange(1, 99)} SMP PREEMPT_DYNAMIC{stamp}"
        f" {rng.choice(('x86_64', 'x86_64', 'aarch64'))}"
    )


def _date(rng: random.Random) -> str:
    return f"20{rng.randrange(25, 30)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"


def vary(text: str, rng: random.Random) -> str:
    """The harness's prose as another machine, on another day, would have it."""
    home = rng.choice(_PI_HOMES) + rng.choice(("", "", "/lib", "/npm"))
    text = _PI_PREFIX.sub(home, text)
    text = re.sub(r"(?<=Current date: ).*", _date(rng), text)
    text = re.sub(r"(?<=Current working directory: ).*", rng.choice(_WORKDIRS), text)
    kernel = _kernel(rng)
    return _KERNEL.sub(lambda _: kernel, text)


def crop(text: str, rng: random.Random, keep: int) -> str:
    """The prose without most of its lines: the first, the task's own, and a stretch of at most `keep`
    others.
    """
    lines = text.split("\n")
    start = rng.randrange(len(lines))
    return "\n".join(
        line for i, line in enumerate(lines) if i == 0 or PROMPT in line or start <= i < start + keep
    )


def bare(given: Json) -> Json:
    """A tool reduced to its name."""
    function = {"name": given["function"]["name"], "description": "", "parameters": {}}
    return {"type": "function", "function": function}


def shorten(given: Prompt, rng: random.Random) -> Prompt:
    """A prompt with little in it but the task, to learn from before the real ones."""
    messages = [{**m, "content": crop(m["content"], rng, rng.randrange(24))} for m in given.messages]
    return Prompt(messages, [bare(t) for t in given.tools])


def prompt(harness: str, instruction: str, rng: random.Random | None = None, brief: bool = False) -> Prompt:
    """The first request for `instruction`: as captured or, given `rng`, varied and now and then shortened."""
    pairs, tools = _first(harness)
    messages = [{"role": role, "content": vary(text, rng) if rng else text} for role, text in pairs]
    made = Prompt(messages, list(tools))
    if rng and brief:
        made = shorten(made, rng)
    elif rng and rng.random() < CROPPED:
        made = Prompt(
            [{**m, "content": crop(m["content"], rng, rng.randrange(100))} for m in made.messages], made.tools
        )
    return Prompt(
        [{**m, "content": m["content"].replace(PROMPT, instruction)} for m in made.messages], made.tools
    )
