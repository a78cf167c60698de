"""The role of each request (main, sub-agent, auxiliary, compaction), and why a request starts a new lineage.

The harness's own header decides first, then the sign of a side call, then the calling agent, then the content
of the request. Roles label reports and exclude side calls from training; they never change the tokens of a
prompt. A sign is a text that one harness is known to send. A missing tool list, or a single request, is no
sign, because agents may have both. An uncertain sign is worse than none, because turns with it are not
trained. A turn keeps the role that it was planned with.
"""

from collections.abc import Iterator, Sequence
from typing import Final, get_args

from attrs import define, evolve, field, frozen

from polarnode.core.codec.json import read_json
from polarnode.core.conversation import Answer, Json, Message
from polarnode.core.errors import Refused
from polarnode.core.trajectory import TurnRole
from polarnode.merge.figures import SIDE_CALL_NOTE
from polarnode.merge.fingerprint import NO_KEY, Path

_ROLES: Final[tuple[TurnRole, ...]] = get_args(TurnRole)


@frozen(kw_only=True)
class _SideCallSign:
    """How a side call of one harness begins: its system message, its last user message, or both. `systems`
    are the possible beginnings of the system message.
    """

    harness: str
    asks: str
    role: TurnRole
    systems: tuple[str, ...]
    user: str

    @property
    def note(self) -> str:
        return f"{SIDE_CALL_NOTE}: {self.harness} asks {self.asks}"


def _side_call(harness: str, asks: str, system: str = "", *, user: str = "") -> _SideCallSign:
    return _SideCallSign(harness=harness, asks=asks, role="auxiliary", systems=(system,), user=user)


def _summary(harness: str, system: str = "", *, user: str = "") -> _SideCallSign:
    return _SideCallSign(
        harness=harness, asks="for a summary of its history", role="compaction", systems=(system,), user=user
    )


# Claude Code begins every system prompt with one of these lines, also in its side calls.
_CLAUDE_LINES: Final = (
    "You are Claude Code, Anthropic's official CLI for Claude.",
    "You are Claude Code, Anthropic's official CLI for Claude, running within the Claude Agent SDK.",
    "You are a Claude agent, built on Anthropic's Claude Agent SDK.",
)


def _after_claude_line(sign: _SideCallSign) -> _SideCallSign:
    """The sign after Claude Code's own line. Without that line its words could be those of any agent."""
    after = [f"\n{system}" if system else "" for system in sign.systems]
    return evolve(sign, systems=tuple(line + words for line in _CLAUDE_LINES for words in after))


_CLAUDE: Final = "Claude Code"
_GEMINI: Final = "Gemini CLI"
_QWEN: Final = "Qwen Code"
_GEMINI_OR_QWEN: Final = "Gemini CLI or Qwen Code"
_FOR_TITLE: Final = "for a title"
_LABEL: Final = "for a label of what its tools did"
_NEXT_INPUT: Final = "what its user may type next"
_FOR_RECAP: Final = "for a recap"
_IS_CALL_SAFE: Final = "whether a tool call is safe"
_WHAT_TO_REMEMBER: Final = "what to remember"
_ROUTER_PROMPT: Final = (
    "You are a specialized Task Routing AI. Your sole function is to analyze the user's request and"
)

# These texts are from the code of codex 0.169.0, claude-code 2.1.328, qwen-code 0.24.4, gemini-cli 0.61.0, pi
# 0.73.1 and 1.5.2, openclaw 2026.9.6, opencode 1.18.33, openhands-sdk 1.58.0 and hermes-agent 0.19.0. Those
# marked "earlier" are from earlier releases of these harnesses; Crush's is from its tests. mini-swe-agent has
# no side calls. Each text is long enough to contain words that only that harness uses. Another agent may also
# be a code-editing assistant, a diagnostic agent or a writer of titles, and would otherwise be left out of
# training altogether.
_SIGNS: Final = (
    _summary("Codex", user="You are performing a CONTEXT CHECKPOINT COMPACTION"),
    _side_call("Codex", _WHAT_TO_REMEMBER, user="Analyze this rollout and produce JSON with `"),
    _summary(_CLAUDE, user="CRITICAL: Respond with TEXT ONLY. Do NOT call any tools"),
    _after_claude_line(
        _summary(_CLAUDE, "You are a helpful AI assistant tasked with summarizing conversations.")
    ),
    _after_claude_line(
        _side_call(_CLAUDE, _FOR_TITLE, "You are naming a coding session so the user can pick it out of")
    ),
    _after_claude_line(
        _side_call(_CLAUDE, _FOR_TITLE, user="Generate a short kebab-case name (2-4 words) that captures")
    ),
    _after_claude_line(
        _side_call(_CLAUDE, _LABEL, "Write a short summary label describing what these tool calls")
    ),
    _after_claude_line(
        _side_call(_CLAUDE, _LABEL, user="Describe your most recent action in 3-5 words using present")
    ),
    _after_claude_line(
        _side_call(_CLAUDE, _FOR_RECAP, user="The user stepped away and is coming back. Recap in under")
    ),
    _after_claude_line(
        _side_call(_CLAUDE, _NEXT_INPUT, user="[SUGGESTION MODE: Suggest what the user might naturally type")
    ),
    _after_claude_line(
        _side_call(_CLAUDE, _WHAT_TO_REMEMBER, user="You are now acting as the memory extraction subagent.")
    ),
    _after_claude_line(
        _side_call(_CLAUDE, "what the web says", "You run a web search for another Claude model, which")
    ),
    _after_claude_line(_side_call(_CLAUDE, "what a web page says", user="Web page content:\n---\n")),
    _after_claude_line(
        _side_call(_CLAUDE, "whether a hook's condition holds", "You are evaluating a stop-condition hook in")
    ),
    _after_claude_line(
        _side_call(_CLAUDE, "whether a hook's condition holds", "You are evaluating a hook in Claude Code.")
    ),
    _after_claude_line(
        _side_call(_CLAUDE, _IS_CALL_SAFE, "You are a security monitor for autonomous AI coding agents.")
    ),
    _summary(
        "Pi or OpenClaw",
        "You are a context summarization assistant. Your task is to read a conversation between a user and",
    ),
    _side_call(
        "OpenClaw", "for a file's name", user="Based on this conversation, generate a short 1-2 word filename"
    ),
    _summary(_GEMINI, "You are a specialized system component responsible for distilling chat history"),
    _summary(
        _GEMINI,
        'You are an expert Context Memory Manager. You maintain the long-term "Master State" of the AI',
    ),
    _summary(_GEMINI, user="Generate a new <state_snapshot> based on the provided history."),
    _summary(_GEMINI, user="A previous <state_snapshot> exists in the history. You MUST integrate"),
    _side_call(_GEMINI, "which model to ask", f"{_ROUTER_PROMPT} assign a **Complexity Score**"),
    _side_call(_GEMINI, "which model to ask", f"{_ROUTER_PROMPT} classify its complexity."),
    _side_call(
        _GEMINI,
        "whether it repeats itself",
        "You are a diagnostic agent that determines whether a conversational AI assistant is stuck in an",
    ),
    _side_call(
        _GEMINI,
        "for the repair of an edit",
        "You are an expert code-editing assistant specializing in debugging and correcting failed search-and",
    ),
    _side_call(
        _GEMINI,
        "for the repair of an edit",
        "You are an expert code-editing assistant. Your task is to analyze a failed edit attempt and provide",
    ),
    _side_call(
        _GEMINI,
        "for a shorter text",
        "You are an expert context compressor. Your job is to drastically shorten the following",
    ),
    _side_call(_GEMINI, "for a shorter text", user="Summarize the following tool output to be a maximum of "),
    _side_call(
        _GEMINI,
        _FOR_TITLE,
        user="Summarize the user's primary intent or goal in this conversation in ONE sentence (max 80",
    ),
    _side_call(
        _GEMINI_OR_QWEN,
        "who speaks next",
        user="Analyze *only* the content and structure of your immediately",
    ),
    _summary(_GEMINI_OR_QWEN, "You are the component that summarizes internal chat history"),  # earlier
    _summary(
        _GEMINI_OR_QWEN, user="First, reason in your scratchpad. Then, generate the <state_snapshot>."
    ),  # earlier
    _summary(_QWEN, "You are the component that summarizes a conversation when its context window"),
    _summary(_QWEN, user="First, reason in your <analysis> block. Then, produce the <state_snapshot> XML."),
    _side_call(
        _QWEN,
        _FOR_TITLE,
        "Generate a concise, sentence-case title (3-7 words) that captures what this programming-assistant",
    ),
    _side_call(_QWEN, _LABEL, "Write a short summary label describing what these tool calls accomplished."),
    _side_call(_QWEN, _FOR_RECAP, "You generate session recaps for a programming assistant CLI."),
    _side_call(
        _QWEN, _NEXT_INPUT, user="[SUGGESTION MODE: Suggest what the user might naturally type next.]"
    ),
    _side_call(
        _QWEN, _IS_CALL_SAFE, "You are a security classifier for an AI coding agent operating in auto mode."
    ),
    _side_call(
        _QWEN,
        "whether its goal is reached",
        "You are an independent Goal Verifier. Judge the proposed terminal status only",
    ),
    _side_call(
        _QWEN,
        _WHAT_TO_REMEMBER,
        "You are now acting as the managed memory extraction subagent for an AI coding",
    ),
    _summary("OpenHands", "You are maintaining a context-aware state summary for an interactive agent"),
    _summary("OpenHands", user="You are maintaining a context-aware state summary"),  # earlier
    _side_call(
        "OpenHands",
        _FOR_TITLE,
        "You are a helpful assistant that generates concise, descriptive titles for conversations with Open",
    ),
    _summary(
        "opencode",
        "You are a context summarization agent. You are given a conversation between a user and an agent.",
    ),
    _summary("opencode", user="Provide a detailed prompt for continuing our conversation above"),  # earlier
    _side_call("opencode", _FOR_TITLE, "You are a title generator. You output ONLY a thread title."),
    _side_call(
        "opencode", _FOR_TITLE, "Summarize what was done in this conversation. Write like a pull request"
    ),
    _summary("Hermes", user="You are a summarization agent creating a context checkpoint."),
    _side_call(
        "Hermes", _FOR_TITLE, "Generate a short, descriptive title (3-7 words) for a conversation that starts"
    ),
    _side_call(
        "Crush", _FOR_TITLE, "You will generate a short title based on the first message a user begins a"
    ),
)
# The first words of a user message that replaces the history which it summarises.
_SUMMARY_STARTS: Final = (
    "Another language model started to solve this problem",  # Codex
    "This session is being continued from a previous conversation",  # Claude Code
    "The conversation history before this point was compacted into",  # Pi
    "<state_snapshot>",  # Gemini CLI, Qwen Code
)

# Gemini CLI gives this tool only to its sub-agents, which call it to finish.
_SUBAGENT_TOOL: Final = "complete_task"

# A text that an answer passes to a tool is the task of a sub-agent if a new conversation begins with it.
# Shorter texts are names, flags and file names.
_MIN_TASK_CHARS: Final = 20
_MAX_TASK_CHARS: Final = 16_384  # Longer texts are files.
# The number of tasks kept. Sub-agents start at once, so the tasks of the last calls are enough; 64 texts of
# 16 KB are 1 MB at most.
_MAX_TASKS: Final = 64


@frozen(kw_only=True)
class RequestRole:
    """The role of a request, and a note if the role is not main."""

    role: TurnRole = "main"
    note: str | None = None


@define(eq=False)
class PathIndex:
    """How the session's paths began, and which texts were passed to tools. From this the calling agent is
    recognised, and what is new about a new path.
    """

    _seen: set[str] = field(factory=set)
    _main_systems: set[str] = field(factory=set)
    _first_agent: str | None = None
    _main_has_tools: bool = False
    _summary_requested: bool = False  # whether a summary was requested and no conversation has begun since
    _tasks: list[str] = field(factory=list)

    def note(self, path: Path, role: TurnRole) -> None:
        """Remember a path that was requested."""
        if role == "compaction":
            self._summary_requested = True
        elif f"o{path.opening}" not in self._seen:
            self._summary_requested = False
        self._seen |= _marks(path)
        if self._first_agent is None:
            self._first_agent = path.agent
        if role == "main":
            self._main_systems.add(path.system)
            self._main_has_tools |= path.tools != NO_KEY

    def note_answer(self, answer: Answer) -> None:
        """Remember the texts that an answer passes to tools, because each may be the task of a sub-agent."""
        for call in answer.calls:
            self._tasks += _task_texts(call.arguments)
        del self._tasks[:-_MAX_TASKS]

    def classify(
        self, path: Path, messages: tuple[Message, ...], kind: str = "", *, tools: Sequence[str] = ()
    ) -> RequestRole:
        """The role of a request. `kind` is the role that the harness itself states, if it does. `tools` are
        the names of the tools that the model may call.
        """
        for role in _ROLES:
            if role == kind:
                return RequestRole(
                    role=role, note=None if role == "main" else f"the harness marks this call as {role}"
                )
        sign = _find_sign(messages)
        if sign is not None:
            return RequestRole(role=sign.role, note=sign.note)
        if self._first_agent not in (None, path.agent):
            return RequestRole(
                role="subagent", note="the request comes from another agent of the harness than the first one"
            )
        if self._main_has_tools and path.system not in self._main_systems and _SUBAGENT_TOOL in tools:
            return RequestRole(
                role="subagent", note=f"the request has a {_SUBAGENT_TOOL} tool, as a sub-agent's has"
            )
        if self._is_delegated(path, messages):
            return RequestRole(
                role="subagent", note="the request begins with a text that an earlier answer passed to a tool"
            )
        return RequestRole()

    def root_reason(self, path: Path, messages: tuple[Message, ...]) -> str:
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
        if self._summary_requested:
            return "compaction"
        return "rewrite" if f"o{path.opening}" in self._seen else "conversation"

    def _is_delegated(self, path: Path, messages: tuple[Message, ...]) -> bool:
        """Whether a conversation is new, has another system prompt than the main one, and contains a text
        that was passed to a tool.
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


def holds_summary(messages: tuple[Message, ...]) -> bool:
    """Whether a history starts again from a summary of itself."""
    return any(
        message.role == "user" and message.text.lstrip().startswith(_SUMMARY_STARTS) for message in messages
    )


def _find_sign(messages: tuple[Message, ...]) -> _SideCallSign | None:
    """The sign of a side call that a request has; None if it has none."""
    system = next((message.text.lstrip() for message in messages[:1] if message.role == "system"), "")
    user = next((message.text.lstrip() for message in messages[-1:] if message.role == "user"), "")
    return next(
        (sign for sign in _SIGNS if system.startswith(sign.systems) and user.startswith(sign.user)), None
    )


def _task_texts(arguments: str) -> list[str]:
    """The texts among a call's arguments that are long enough to be a task."""
    if not _MIN_TASK_CHARS <= len(arguments) <= _MAX_TASK_CHARS:
        return []
    try:
        value = read_json(arguments.encode("utf-8", "surrogatepass"))
    except Refused:
        return []
    return [text for text in _texts(value) if len(text) >= _MIN_TASK_CHARS]


def _texts(value: Json) -> Iterator[str]:
    """The strings in a value at any depth. Iterative, because a model may nest brackets without limit."""
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
