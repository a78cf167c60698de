"""What a Dockerfile says of the place its container begins in: the workdir and the user of its last stage. Pure.

The rule for whoever edits it: only what is certain is told. A name with a variable in it is unknown, because its value is known to the
builder alone.
"""

import re
from collections.abc import Iterator
from posixpath import join, normpath

from attrs import evolve, frozen

CONTINUED = re.compile(r"\\[ \t]*\n")
HEREDOC = re.compile(r"<<-?\s*[\"']?(\w+)[\"']?")


@frozen(kw_only=True)
class Start:
    """Where and as whom a container of the image begins; None where the Dockerfile leaves it to its base."""

    workdir: str | None = None
    user: str | None = None


def read_dockerfile(text: str) -> Start:
    """The workdir and the user of the last stage."""
    stages: dict[str, Start] = {}
    now, name = Start(), ""
    for word, rest in _instructions(text):
        if word == "FROM":
            now, name = _stage(rest, stages)
        elif word == "WORKDIR":
            now = evolve(now, workdir=_known(normpath(join(now.workdir or "", rest.strip("\"'")))))
        elif word == "USER":
            now = evolve(now, user=_known(rest.split(":")[0]))
        stages[name] = now
    return Start(workdir=now.workdir if now.workdir and now.workdir.startswith("/") else None, user=now.user)


def _stage(rest: str, stages: dict[str, Start]) -> tuple[Start, str]:
    words = [word for word in rest.split() if not word.startswith("--")]
    base = words[0].lower() if words else ""
    named = len(words) == 3 and words[1].lower() == "as"
    return stages.get(base, Start()), words[2].lower() if named else str(len(stages))


def _known(text: str) -> str | None:
    return None if "$" in text or not text else text


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """Each instruction with its arguments; comments, continued lines and here-documents read over."""
    waiting: list[str] = []
    lines = "\n".join(line for line in text.replace("\r\n", "\n").split("\n") if not line.lstrip().startswith("#"))
    for line in CONTINUED.sub(" ", lines).split("\n"):
        if waiting:
            if line.strip() == waiting[0]:
                waiting.pop(0)
            continue
        word, _, rest = line.strip().partition(" ")
        waiting = HEREDOC.findall(rest) if word.upper() in ("RUN", "COPY", "ADD") else []
        if word:
            yield word.upper(), rest.strip()
