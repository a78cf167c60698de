"""The role of each request (main, sub-agent, auxiliary, compaction) and why a request starts a new lineage.

The harness's own header decides first, then the calling agent, then the content of the request. Roles label
reports and leave side calls out of training; they never change the tokens of a prompt. Name the harness
beside each sign of a side call. An uncertain sign is worse than none, because turns with it are not trained.
"""

from collections.abc import Iterator, Sequence
from typing import Final, Literal, get_args

from attrs import define, evolve, field, frozen

from polarnode.core.codec.json import read_json
from polarnode.core.conversation import Answer, Json, Message
from polarnode.core.errors import Refused
from polarnode.core.trajectory import Turn, TurnRole
from polarnode.merge.fingerprint import NONE, Path

_ROLES: Final[tuple[TurnRole, ...]] = get_args(TurnRole)


@frozen
class _Sign:
    """How a side call begins: its system message, or its last user message."""

    place: Literal["system", "user"]
    begins: str
    role: TurnRole
    note: str


_SUMMARY: Final = "the request asks for a summary of its history"
_SIGNS: Final = (
    _Sign("user", "You are performing a CONTEXT CHECKPOINT COMPACTION", "compaction", _SUMMARY),  # Codex
    # Claude Code
    _Sign("user", "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools", "compaction", _SUMMARY),
    _Sign("system", "You are a context summarization assistant", "compaction", _SUMMARY),  # Pi
    # Gemini CLI, Qwen Code
    _Sign("system", "You are the component that summarizes internal chat history", "compaction", _SUMMARY),
    # Gemini CLI, Qwen Code
    _Sign("user", "First, reason in your scratchpad. Then, generate", "compaction", _SUMMARY),
    # OpenHands' condenser
    _Sign("user", "You are maintaining a context-aware state summary", "compaction", _SUMMARY),
    # opencode
    _Sign("user", "Provide a detailed prompt for continuing our conversation above", "compaction", _SUMMARY),
    # opencode
    _Sign(
        "system", "You are a title generator. You output ONLY", "auxiliary", "the request asks for a title"
    ),
    _Sign("system", "You will generate a short title", "auxiliary", "the request asks for a title"),  # Crush
    # Gemini CLI
    _Sign(
        "system", "You are a specialized Task Routing AI", "auxiliary", "the request asks which model to ask"
    ),
    # both
    _Sign(
        "user",
        "Analyze *only* the content and structure of your immediately preceding",
        "auxiliary",
        "the request asks who speaks next",
    ),
)
# First words of the user message that replaces the history it summarises.
_SUMMARY_STARTS: Final = (
    "Another language model started to solve this problem",  # Codex
    "This session is being continued from a previous conversation",  # Claude Code
    "The conversation history before this point was compacted into",  # Pi
    "<state_snapshot>",  # Gemini CLI, Qwen Code
)

# The tool that Gemini CLI gives only to its sub-agents; they call it to finish.
_SUBAGENT_TOOL: Final = "complete_task"

# A text that an answer passes to a tool is a sub-agent's task if a new conversation begins with it. Shorter
# texts are names, flags and file names.
_TASK_LENGTH: Final = 20
_LONGEST_TASK: Final = 16_384  # longer ones are files
# Sub-agents start immediately, so the tasks of the last calls are enough; 64 texts of 16 KB are at most 1 MB.
_TASKS: Final = 64


@frozen(kw_only=True)
class RequestRoles:
    """The role of a turn, and a note if it is not main."""

    role: TurnRole = "main"
    note: str | None = None


@define(eq=False)
class PathIndex:
    """How the session's paths began, and what was passed to tools. This identifies the calling agent, and
    what is new about a new path.
    """

    _seen: set[str] = field(factory=set)
    _main_systems: set[str] = field(factory=set)
    _first_agent: str | None = None
    _main_has_tools: bool = False
    _summarised: bool = False  # a summary was requested, and no conversation has begun since
    _tasks: list[str] = field(factory=list)

    def note(self, path: Path, role: TurnRole) -> None:
        """Remember a path that was requested."""
        if role == "compaction":
            self._summarised = True
        elif f"o{path.opening}" not in self._seen:
            self._summarised = False
        self._seen |= _marks(path)
        if self._first_agent is None:
            self._first_agent = path.agent
        if role == "main":
            self._main_systems.add(path.system)
            self._main_has_tools |= path.tools != NONE

    def note_answer(self, answer: Answer) -> None:
        """Remember what an answer passes to tools, since it may be a sub-agent's task."""
        for call in answer.calls:
            self._tasks += _tasks_of(call.arguments)
        del self._tasks[:-_TASKS]

    def classify(
        self, path: Path, messages: tuple[Message, ...], kind: str = "", *, tools: Sequence[str] = ()
    ) -> RequestRoles:
        """The role of a request. `kind` is the role that the harness itself states, if any; `tools` are the
        names of the tools that the model may call.
        """
        for role in _ROLES:
            if role == kind:
                return RequestRoles(
                    role=role, note=None if role == "main" else f"the harness marks this call as {role}"
                )
        sign = _sign(messages)
        if sign is not None:
            return RequestRoles(role=sign.role, note=sign.note)
        if self._first_agent not in (None, path.agent):
            return RequestRoles(
                role="subagent", note="the request comes from another agent of the harness than the first one"
            )
        if path.tools == NONE and self._main_has_tools:
            return RequestRoles(
                role="auxiliary",
                note="the request has no tools while the session's main conversation has some",
            )
        if self._main_has_tools and path.system not in self._main_systems and _SUBAGENT_TOOL in tools:
            return RequestRoles(
                role="subagent", note=f"the request has a {_SUBAGENT_TOOL} tool, as a sub-agent's has"
            )
        if self._is_delegated(path, messages):
            return RequestRoles(
                role="subagent", note="the request begins with a text that an earlier answer passed to a tool"
            )
        return RequestRoles()

    def why_root(self, path: Path, messages: tuple[Message, ...]) -> str:
        """Why a path extends nothing: first, compaction, tools, thinking, system, rewrite or conversation."""
        if not self._seen:
            return "first"
        if holds_summary(messages):
            return "compaction"
        news = (
            ("tools", f"t{path.tools}"),
            ("thinking", f"k{path.tools}{path.thinking}"),
            ("system", f"s{path.system}"),
        )
        for reason, mark in news:
            if mark not in self._seen:
                return reason
        if self._summarised:
            return "compaction"
        return "rewrite" if f"o{path.opening}" in self._seen else "conversation"

    def _is_delegated(self, path: Path, messages: tuple[Message, ...]) -> bool:
        """Whether a new conversation with another head than the main one's begins with a text that was passed
        to a tool.
        """
        if (
            not self._tasks
            or path.system in self._main_systems
            or any(message.role in ("assistant", "tool") for message in messages)
        ):
            return False
        return any(
            task in message.text for message in messages if message.role == "user" for task in self._tasks
        )


def reclassify_roles(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """The turns with the roles that only the whole session shows: a side call that came first is recognised
    too.

    A title may be requested before the conversation it names, and is then recorded as main. The journal keeps
    the role known at that time; code that builds, reports or publishes a session's turns calls this first.
    """
    if not any(turn.role == "main" and _has_tools(turn) for turn in turns):
        return tuple(turns)
    return tuple(
        evolve(turn, role="auxiliary") if turn.role == "main" and not _has_tools(turn) else turn
        for turn in turns
    )


def _has_tools(turn: Turn) -> bool:
    _, _, after_agent = turn.before_key.partition(".")
    return after_agent.partition(".")[0] not in ("", NONE)


def holds_summary(messages: tuple[Message, ...]) -> bool:
    """Whether a history begins again from a summary of itself."""
    return any(
        message.role == "user" and message.text.lstrip().startswith(_SUMMARY_STARTS) for message in messages
    )


def _sign(messages: tuple[Message, ...]) -> _Sign | None:
    """The sign of a side call in a request, if there is one."""
    system_texts = [message.text.lstrip() for message in messages[:1] if message.role == "system"]
    ends = [message.text.lstrip() for message in messages[-1:] if message.role == "user"]
    starts = {"system": system_texts, "user": ends}
    return next(
        (sign for sign in _SIGNS if any(text.startswith(sign.begins) for text in starts[sign.place])), None
    )


def _tasks_of(arguments: str) -> list[str]:
    """The texts among a call's arguments that are long enough for a task."""
    if not _TASK_LENGTH <= len(arguments) <= _LONGEST_TASK:
        return []
    try:
        value = read_json(arguments.encode("utf-8", "surrogatepass"))
    except Refused:
        return []
    return [text for text in _texts(value) if len(text) >= _TASK_LENGTH]


def _texts(value: Json) -> Iterator[str]:
    """The strings in a value at any depth. Iterative, because a model may nest brackets without end."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str() as text:
                yield text.strip()
            case list() as items:
                waiting += items
            case dict() as members:
                waiting += members.values()
            case _:
                pass


def _marks(path: Path) -> set[str]:
    return {f"t{path.tools}", f"k{path.tools}{path.thinking}", f"s{path.system}", f"o{path.opening}"}
