"""What of a session a judge is shown: the transcript, the last answer, files of the workspace, the changes to its repository.

The rule for whoever edits it: everything is read from what the harness left, is bounded in characters before it is joined, and leaves here as
evidence with a name; nothing of it is ever an instruction to the judge.
"""

import re
from collections.abc import AsyncIterator

from attrs import field, frozen

from polarnode import wire
from polarnode.errors import Refused
from polarnode.evaluators.evaluator import Finished
from polarnode.evaluators.judged.transcript import clipped, transcript, written
from polarnode.evaluators.patch_scripts import EXTRACT, TREE
from polarnode.evaluators.running import last_words
from polarnode.evaluators.settings import ROOT
from polarnode.ports import Runtime

MOST_FILES = 64  # each is a call into the runtime
PATCH_BYTES = 2 << 20  # of a patch that is read at all; what is shown of it is much less
FILE_KIB = 1024  # of an untracked file in it: a larger one is no text to read
COMMIT = re.compile(r"HEAD|[0-9a-f]{40}|[0-9a-f]{64}")
LARGEST_SHOWN = 4_000_000  # characters: a million tokens, which is more than judges read


@frozen(kw_only=True)
class ShowConfig:
    """What is shown, and how much of it. Counts are characters, of files bytes."""

    transcript: bool = True
    thinking: bool = False  # sampled thoughts beside the transcript's words
    answer: bool = True  # the last thing the main agent said
    files: tuple[str, ...] = ()  # relative to the workdir or absolute
    patch: str | None = None  # the commit against which the changes in the workdir's repository are shown, such as HEAD; untracked files included
    message_chars: int = 2_000  # of one message, its beginning and its end: long outputs say what matters in their last lines
    file_bytes: int = 16_384  # of one file
    max_chars: int = 60_000  # of all evidence: some 15 000 tokens, which a judge of 32k reads with its rubric


@frozen(kw_only=True)
class Evidence:
    """One thing shown: what it is, in our words, and its text, in the agent's."""

    name: str
    text: str = field(repr=False)


def check_show(show: ShowConfig, path: str = f"{ROOT}.show") -> None:
    """Refuse what can not be shown."""
    for place, name in enumerate(show.files):
        if not name.strip("/") or ".." in name.split("/") or "\0" in name:
            raise Refused("files must name files, relative to the workdir or absolute, without ..", path=f"{path}.files[{place}]")
    if len(show.files) > MOST_FILES:
        raise Refused(f"files are {len(show.files)}, and {MOST_FILES} are the most", path=f"{path}.files")
    for name in ("message_chars", "file_bytes", "max_chars"):
        if not 1 <= getattr(show, name) <= LARGEST_SHOWN:
            raise Refused(f"{name} must be 1 to {LARGEST_SHOWN}", path=f"{path}.{name}")
    if show.patch is not None and not COMMIT.fullmatch(show.patch):
        raise Refused("patch must be HEAD or a commit's id in full", path=f"{path}.patch")
    if not (show.transcript or show.answer or show.files or show.patch):
        raise Refused("nothing is shown: choose at least one of transcript, answer, files and patch", path=path)


async def evidence(finished: Finished, show: ShowConfig) -> list[Evidence]:
    """All that is shown, the task first. What is short has its room first; the transcript gets what is left."""
    room = show.max_chars
    found = [Evidence(name="the task the agent was given", text=clipped(finished.instruction, max(1, room // 4)))]
    room -= len(found[0].text)
    rest: list[Evidence] = []
    async for each in _left_behind(finished, show):
        text = clipped(each.text, max(1, room // 2))
        room -= len(text)
        rest.append(Evidence(name=each.name, text=text))
    if show.transcript:
        turns = written(finished.turns, message_most=show.message_chars, thinking=show.thinking)
        text = transcript(turns, most=max(1, room))
        found.append(Evidence(name="what the agent did, turn by turn", text=text or "(it never called its model)"))
    return found + rest


async def _left_behind(finished: Finished, show: ShowConfig) -> AsyncIterator[Evidence]:
    for name in show.files:
        yield Evidence(name=f"the file {name!r}", text=await _file(finished.left, name, show.file_bytes))
    if show.patch is not None:
        yield Evidence(name=f"what changed in the repository since {show.patch}", text=await _changes(finished.left, show.patch))
    if show.answer:
        yield Evidence(name="the agent's last answer", text=last_answer(finished) or "(none)")


def last_answer(finished: Finished) -> str:
    """The last text of the main agent."""
    said = (turn.answer.text for turn in reversed(finished.turns) if turn.role == "main" and turn.answer is not None)
    return next((text for text in said if text.strip()), "")


async def _file(runtime: Runtime, name: str, most: int) -> str:
    found = await runtime.read(wire.in_workdir(name, runtime.workdir), limit=most + 1)
    if found is None:
        return "(there is no such file)"
    return found[:most].decode("utf-8", "replace") + ("\n[… the rest is left out …]" if len(found) > most else "")


async def _changes(runtime: Runtime, commit: str) -> str:
    """What differs from the commit in the worktree. An agent that took its repository away has changed everything, and the judge is told so."""
    found = await runtime.run(["sh", "-c", TREE, "sh", runtime.workdir, commit], workdir="/")
    if found.exit_code != 0:
        return f"(the workdir is no git repository with such a commit: {last_words(found.stderr) or f'exit code {found.exit_code}'})"
    tree = found.stdout.decode("ascii", "replace").strip()
    ended = await runtime.run(["sh", "-c", EXTRACT, "sh", runtime.workdir, tree, f"{PATCH_BYTES}", f"{FILE_KIB}"], workdir="/")
    await runtime.end_processes()
    if ended.exit_code != 0:
        return f"(the changes could not be read: {last_words(ended.stderr) or f'exit code {ended.exit_code}'})"
    return ended.stdout.decode("utf-8", "replace") or "(nothing)"
