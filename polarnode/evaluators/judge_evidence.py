"""The parts of a session that a judge sees: transcript, last answer, files, and changes to a repository.

Evidence is read from what the harness left and is limited in characters. Turns keep their order and numbers,
and every omission is stated with its size. Invariant: in the transcript, every line that the agent or its
programs wrote begins with QUOTE and no other line does, so that an answer cannot pose as a tool result or as
another turn.
"""

import re
from collections.abc import AsyncIterator, Iterator, Sequence

from attrs import field, frozen

from polarnode.core import codec
from polarnode.core.conversation import Answer, Message, TextPart, ThinkingPart, ToolCall
from polarnode.core.errors import Refused
from polarnode.core.ports import Runtime
from polarnode.core.trajectory import Turn
from polarnode.evaluators.contract import ROOT, Finished, stderr_tail
from polarnode.evaluators.patches import EXTRACT_SCRIPT, TREE

# ── transcript ─────────────────────────────────────────────────────────────────

# The beginning gets this share of the limit. The end gets the rest, because the last turns show most of the
# work.
HEAD = 0.3
QUOTE_MARK = "| "
SHOWN_ROLES = ("main", "subagent")  # titles, routing and summaries are not the agent's work


def clipped(text: str, most: int) -> str:
    """The beginning and end of a text, with the number of omitted characters between them."""
    head, omitted, tail = _split_ends(text, most)
    return f"{head}\n{_left_out(omitted)}\n{tail}" if omitted else text


def quoted(text: str, most: int) -> str:
    """Like `clipped`, with QUOTE in front of each line. Every character that any reader treats as a line end
    ends a line here.
    """
    head, omitted, tail = _split_ends(text, most)
    return "\n".join([*_lines(head), _left_out(omitted), *_lines(tail)] if omitted else _lines(text))


def _lines(text: str) -> list[str]:
    return [f"{QUOTE_MARK}{line}" for line in text.splitlines() or [""]]


def _split_ends(text: str, most: int) -> tuple[str, int, str]:
    if len(text) <= most:
        return text, 0, ""
    head = int(most * HEAD)
    return text[:head], len(text) - most, text[len(text) - most + head :]


def _left_out(count: int) -> str:
    return f"[… {count} characters are left out …]"


def _clipped_lines(text: str, most: int) -> str:
    """Clip a text at whole lines, so that every quoted line keeps its mark."""
    head, omitted, tail = _split_ends(text, most)
    if not omitted:
        return text
    kept, _, cut = head.rpartition("\n")
    lost, _, rest = tail.partition("\n")
    return "\n".join(filter(None, (kept, _left_out(omitted + len(cut) + len(lost)), rest)))


def shown_turns(turns: Sequence[Turn]) -> list[Turn]:
    """The turns of the agent's own work, in order."""
    return [turn for turn in turns if turn.role in SHOWN_ROLES]


@frozen
class TurnText:
    """A turn rendered as text."""

    index: int
    lineage: int
    text: str = field(repr=False)


def turn_texts(turns: Sequence[Turn], *, message_most: int, thinking: bool) -> list[TurnText]:
    """The agent's own turns as text, each message clipped to `message_most` characters."""
    shown = shown_turns(turns)
    return [
        TurnText(turn.index, turn.lineage, turn_text(turn, message_most=message_most, thinking=thinking))
        for turn in shown
    ]


def transcript(turns: Sequence[TurnText], *, most: int) -> str:
    """These turns in about `most` characters: whole turns from the beginning and the end."""
    texts = [turn.text for turn in turns]
    if sum(map(len, texts)) <= most:
        return "\n\n".join(texts)
    # The texts are clipped first, so that the last turn always fits.
    texts = [_clipped_lines(text, most - int(most * HEAD)) for text in texts]
    first = _count_fitting(texts, int(most * HEAD))
    last = _count_fitting(texts[first:][::-1], most - sum(map(len, texts[:first])))
    omitted = turns[first : len(turns) - last]
    if not omitted:
        return "\n\n".join(texts)
    between = f"[… turns {omitted[0].index} to {omitted[-1].index} are left out …]"
    return "\n\n".join([*texts[:first], between, *texts[len(texts) - last :]])


def render_every_turn(turns: Sequence[TurnText], *, most: int) -> str:
    """Render all of these turns, and clip the longest ones until they fit, because a judge that scores each
    turn must see each.
    """
    cap = _clip_length([len(turn.text) for turn in turns], most)
    return "\n\n".join(_clipped_lines(turn.text, cap) for turn in turns)


def _clip_length(lengths: Sequence[int], most: int) -> int:
    """Return the length to which longer texts are clipped so that the total is at most `most`."""
    room = most
    for place, length in enumerate(sorted(lengths)):
        cap = room // (len(lengths) - place)
        if length > cap:
            return max(1, cap)
        room -= length
    return max(lengths, default=1)


def _count_fitting(texts: Sequence[str], most: int) -> int:
    """How many of these texts fit together, counted from the first."""
    length = 0
    for count, text in enumerate(texts):
        length += len(text)
        if length > most:
            return count
    return len(texts)


def turn_text(turn: Turn, *, message_most: int, thinking: bool) -> str:
    """One turn as text: the new messages of its prompt, and its answer."""
    received = (
        ["(its words were not kept)"]
        if turn.new_messages is None
        else [_message(each, message_most) for each in turn.new_messages.messages]
    )
    answer = (
        ["(no answer)"] if turn.answer is None else list(_parts(turn.answer, message_most, thinking=thinking))
    )
    return "\n".join([f"── turn {turn.index}{_whose(turn)} ──", *received, *answer, *_ends(turn)])


def _whose(turn: Turn) -> str:
    of = f", a sub-agent's (lineage {turn.lineage})" if turn.role == "subagent" else ""
    return of if turn.parent is None or turn.parent == turn.index - 1 else f"{of}, after turn {turn.parent}"


def _message(message: Message, most: int) -> str:
    calls = [_call(call, most) for call in message.calls]
    return "\n".join([f"[{message.role}]", quoted(message.text, most), *calls])


def _parts(answer: Answer, most: int, *, thinking: bool) -> Iterator[str]:
    for part in answer.parts:
        match part:
            case TextPart(text):
                yield f"[agent]\n{quoted(text, most)}"
            case ThinkingPart(text):
                if thinking:
                    yield f"[agent thinks]\n{quoted(text, most)}"
            case ToolCall():
                yield _call(part, most)


def _call(call: ToolCall, most: int) -> str:
    return f"[agent calls a tool]\n{quoted(f'{call.name} {call.arguments}', most)}"


def _ends(turn: Turn) -> Iterator[str]:
    """Facts about the turn's end that its text does not show."""
    if turn.finish_reason not in ("stop", "tool_calls"):
        yield f"(the answer ended by {turn.finish_reason})"
    if turn.answer is not None and turn.answer.malformed_calls:
        yield f"({turn.answer.malformed_calls} tool calls in it could not be read)"


# ── evidence ───────────────────────────────────────────────────────────────────

MOST_FILES = 64  # each file is a call into the runtime
MAX_PATCH_BYTES = 2 << 20  # limit of the patch that is read; much less of it is shown
MAX_FILE_KIB = 1024  # limit of an untracked file in the patch; a larger one is not readable text
COMMIT_PATTERN = re.compile(r"HEAD|[0-9a-f]{40}|[0-9a-f]{64}")
LARGEST_SHOWN = 4_000_000  # characters, about a million tokens: more than judges read


@frozen(kw_only=True)
class ShowConfig:
    """What is shown, and how much of it. Limits count characters; `file_bytes` counts bytes."""

    transcript: bool = True
    thinking: bool = False  # include sampled thoughts in the transcript
    answer: bool = True  # the main agent's last text
    files: tuple[str, ...] = ()  # relative to the workdir or absolute
    # A commit such as HEAD. The changes to the workdir's repository since then are shown, with untracked
    # files.
    patch: str | None = None
    # The characters of each message, from its beginning and its end. The last lines of long outputs matter
    # most.
    message_chars: int = 2_000
    file_bytes: int = 16_384  # per file
    max_chars: int = (
        60_000  # in total: about 15 000 tokens, which fit a judge with a 32k context together with the rubric
    )


@frozen(kw_only=True)
class EvidencePart:
    """One piece of evidence: its `name` in the node's words, and its text, which the agent may have
    written.
    """

    name: str
    text: str = field(repr=False)


def check_show(show: ShowConfig) -> None:
    """Refuse a config that asks for something that cannot be shown."""
    path = f"{ROOT}.show"
    for place, name in enumerate(show.files):
        if not name.strip("/") or ".." in name.split("/") or "\0" in name:
            raise Refused(
                "files must name files, relative to the workdir or absolute, without ..",
                path=f"{path}.files[{place}]",
            )
    if len(show.files) > MOST_FILES:
        raise Refused(f"files are {len(show.files)}, and {MOST_FILES} are the most", path=f"{path}.files")
    for name in ("message_chars", "file_bytes", "max_chars"):
        if not 1 <= getattr(show, name) <= LARGEST_SHOWN:
            raise Refused(f"{name} must be 1 to {LARGEST_SHOWN}", path=f"{path}.{name}")
    if show.patch is not None and not COMMIT_PATTERN.fullmatch(show.patch):
        raise Refused("patch must be HEAD or a commit's id in full", path=f"{path}.patch")
    if not (show.transcript or show.answer or show.files or show.patch):
        raise Refused(
            "nothing is shown: choose at least one of transcript, answer, files and patch", path=path
        )


async def evidence(finished: Finished, show: ShowConfig) -> list[EvidencePart]:
    """Collect everything that is shown, the task first. Short pieces get their room first; the transcript
    gets the rest.
    """
    room = show.max_chars
    found = [
        EvidencePart(
            name="the task the agent was given", text=clipped(finished.instruction, max(1, room // 4))
        )
    ]
    room -= len(found[0].text)
    rest: list[EvidencePart] = []
    async for each in _left_evidence(finished, show):
        text = clipped(each.text, max(1, room // 2))
        room -= len(text)
        rest.append(EvidencePart(name=each.name, text=text))
    if show.transcript:
        turns = turn_texts(finished.turns, message_most=show.message_chars, thinking=show.thinking)
        text = transcript(turns, most=max(1, room))
        found.append(
            EvidencePart(name="what the agent did, turn by turn", text=text or "(it never called its model)")
        )
    return found + rest


async def _left_evidence(finished: Finished, show: ShowConfig) -> AsyncIterator[EvidencePart]:
    for name in show.files:
        yield EvidencePart(name=f"the file {name!r}", text=await _file(finished.left, name, show.file_bytes))
    if show.patch is not None:
        yield EvidencePart(
            name=f"what changed in the repository since {show.patch}",
            text=await _repository_changes(finished.left, show.patch),
        )
    if show.answer:
        yield EvidencePart(name="the agent's last answer", text=last_answer(finished) or "(none)")


def last_answer(finished: Finished) -> str:
    """The main agent's last text."""
    texts = (
        turn.answer.text
        for turn in reversed(finished.turns)
        if turn.role == "main" and turn.answer is not None
    )
    return next((text for text in texts if text.strip()), "")


async def _file(runtime: Runtime, name: str, most: int) -> str:
    found = await runtime.read(codec.in_workdir(name, runtime.workdir), limit=most + 1)
    if found is None:
        return "(there is no such file)"
    return found[:most].decode("utf-8", "replace") + (
        "\n[… the rest is left out …]" if len(found) > most else ""
    )


async def _repository_changes(runtime: Runtime, commit: str) -> str:
    """Return the diff between the commit and the worktree. If the repository or the commit is missing, the
    text says so instead.
    """
    found = await runtime.run(["sh", "-c", TREE, "sh", runtime.workdir, commit], workdir="/")
    if found.exit_code != 0:
        return (
            "(the workdir is no git repository with such a commit:"
            f" {stderr_tail(found.stderr) or f'exit code {found.exit_code}'})"
        )
    tree = found.stdout.decode("ascii", "replace").strip()
    ended = await runtime.run(
        ["sh", "-c", EXTRACT_SCRIPT, "sh", runtime.workdir, tree, f"{MAX_PATCH_BYTES}", f"{MAX_FILE_KIB}"],
        workdir="/",
    )
    await runtime.end_processes()
    if ended.exit_code != 0:
        return (
            f"(the changes could not be read: {stderr_tail(ended.stderr) or f'exit code {ended.exit_code}'})"
        )
    return ended.stdout.decode("utf-8", "replace") or "(nothing)"
