"""Who asks, and why a request starts a lineage of its own: words for reports and for leaving side calls out of training.

Nothing here decides which tokens a prompt has. Whoever adds a sign by which a side call is known writes down whose it is; a sign that is
not certain is worse than none, because its turns are not trained.
"""

from collections.abc import Sequence
from typing import Final

from attrs import define, evolve, field, frozen

from polarnode.conversation import Message
from polarnode.merge.fingerprint import NONE, Path
from polarnode.records import Turn, TurnRole

# How the request for a summary begins (its last user message, or its system message).
_ASKS_SUMMARY: Final = (
    "You are performing a CONTEXT CHECKPOINT COMPACTION",  # Codex
    "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools",  # Claude Code
    "You are a context summarization assistant",  # pi
)
# How the user message begins that stands for the history it replaced.
_TELLS_SUMMARY: Final = (
    "Another language model started to solve this problem",  # Codex
    "This session is being continued from a previous conversation",  # Claude Code
)


@frozen(kw_only=True)
class Cast:
    """The part a turn plays, and a sentence when it is not the main one."""

    role: TurnRole = "main"
    note: str | None = None


@define(eq=False)
class Heads:
    """How the session's paths began: enough to say what is new about one that attaches to nothing."""

    _seen: set[str] = field(factory=set)
    _first_agent: str | None = None
    _main_has_tools: bool = False

    def note(self, path: Path, role: TurnRole) -> None:
        """Remember a path that was asked."""
        self._seen |= _marks(path)
        if self._first_agent is None:
            self._first_agent = path.agent
        self._main_has_tools |= role == "main" and path.tools != NONE

    def cast(self, path: Path, messages: tuple[Message, ...]) -> Cast:
        """The role of a request, by who asks and what it can call."""
        if asks_summary(messages):
            return Cast(role="compaction", note="the request asks for a summary of its history")
        if self._first_agent not in (None, path.agent):
            return Cast(role="subagent", note="another agent of the harness asks than at first")
        if path.tools == NONE and self._main_has_tools:
            return Cast(role="auxiliary", note="the request has no tools while the session's main conversation has some")
        return Cast()

    def why_root(self, path: Path, messages: tuple[Message, ...]) -> str:
        """What is new about a path that extends nothing: first, compaction, tools, thinking, system, rewrite or conversation."""
        if not self._seen:
            return "first"
        if tells_summary(messages):
            return "compaction"
        news = (("tools", f"t{path.tools}"), ("thinking", f"k{path.tools}{path.thinking}"), ("system", f"s{path.system}"))
        for reason, mark in news:
            if mark not in self._seen:
                return reason
        return "rewrite" if f"o{path.opening}" in self._seen else "conversation"


def recast(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """The turns with the roles that only the whole session tells: a side call that came first is one too.

    A title is asked for before the conversation it names, and is then taken for the main one. The journal keeps what was known at the time;
    who builds, reports or publishes a session's turns casts them again.
    """
    if not any(turn.role == "main" and _has_tools(turn) for turn in turns):
        return tuple(turns)
    return tuple(evolve(turn, role="auxiliary") if turn.role == "main" and not _has_tools(turn) else turn for turn in turns)


def _has_tools(turn: Turn) -> bool:
    return bool(turn.before_key) and Path.read(turn.before_key).tools != NONE


def asks_summary(messages: tuple[Message, ...]) -> bool:
    """Whether a request is a harness's call for a summary of the conversation."""
    last_said = [message for message in messages[-1:] if message.role == "user"]
    first_told = [message for message in messages[:1] if message.role == "system"]
    return any(message.text.lstrip().startswith(_ASKS_SUMMARY) for message in last_said + first_told)


def tells_summary(messages: tuple[Message, ...]) -> bool:
    """Whether a history begins again from a summary of itself."""
    return any(message.role == "user" and message.text.lstrip().startswith(_TELLS_SUMMARY) for message in messages)


def _marks(path: Path) -> set[str]:
    return {f"t{path.tools}", f"k{path.tools}{path.thinking}", f"s{path.system}", f"o{path.opening}"}
