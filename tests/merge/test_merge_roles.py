"""Who asks, and why a lineage starts: labels that must be certain, because side calls are not trained."""

import json

import pytest
from attrs import evolve
from merge_toys import Session, ask, said, system, told, user

from polarnode.core.conversation import Answer, Message, ToolCall
from polarnode.merge.builders import prefix_merging
from polarnode.merge.figures import SIDE_CALL_NOTE, note_word
from polarnode.merge.fingerprint import NO_KEY, Path
from polarnode.merge.roles import PathIndex, holds_summary

MAIN = Path(agent=NO_KEY, tools="t1", thinking="d", system="s1", opening="o1", key="k1")
CODEX_ASKS = "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary."
CLAUDE_ASKS = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools. <analysis>"
CLAUDE_TELLS = "This session is being continued from a previous conversation that ran out of context."


def heads(*paths: Path) -> PathIndex:
    made = PathIndex()
    for path in paths:
        made.note(path, "main")
    return made


def test_first_request_is_main() -> None:
    assert heads().classify(MAIN, (user(),)).role == "main"
    assert heads().root_reason(MAIN, (user(),)) == "first"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tools": "t2", "system": "s2", "opening": "o2"}, "tools"),
        ({"tools": NO_KEY, "system": "s2", "opening": "o2"}, "tools"),
        ({"thinking": "y", "system": "s2", "opening": "o2"}, "thinking"),
        ({"system": "s2", "opening": "o2"}, "system"),
        ({"opening": "o2"}, "conversation"),
        ({"key": "k2"}, "rewrite"),
    ],
)
def test_root_names_first_new_part(changes: dict[str, str], reason: str) -> None:
    assert heads(MAIN).root_reason(evolve(MAIN, **changes), (user(),)) == reason


def test_history_starting_with_summary_is_compaction() -> None:
    assert heads(MAIN).root_reason(evolve(MAIN, opening="o2"), (system(), user(CLAUDE_TELLS))) == "compaction"


def test_other_agent_is_subagent() -> None:
    cast = heads(MAIN).classify(evolve(MAIN, agent="a1"), (user(),))
    assert cast.role == "subagent"
    assert cast.note is not None
    assert heads(evolve(MAIN, agent="a1")).classify(evolve(MAIN, agent="a1"), (user(),)).role == "main"
    assert heads(evolve(MAIN, agent="a1")).classify(MAIN, (user(),)).role == "subagent"


def test_agent_without_tools_is_agent() -> None:
    bare = evolve(MAIN, tools=NO_KEY)
    assert heads(MAIN).classify(bare, (user(),)).role == "main"
    assert (
        heads(MAIN).classify(evolve(bare, system="s2"), (system("You are the critic."), user())).role
        == "main"
    )
    assert heads(bare).classify(MAIN, (user(),)).role == "main"
    made = heads(bare)
    made.note(evolve(MAIN, agent="a1"), "subagent")
    assert made.classify(bare, (user(),)).role == "main"


@pytest.mark.parametrize(
    "messages",
    [
        (system(), user(), user(CODEX_ASKS)),
        (system(), user(), user("\n" + CLAUDE_ASKS)),
        (
            system(
                "You are a context summarization assistant. Your task is to read a conversation between a user and an AI"
            ),
            user("long history"),
        ),
    ],
)
def test_summary_call_is_compaction(messages: tuple[Message, ...]) -> None:
    assert heads(MAIN).classify(MAIN, messages).role == "compaction"


@pytest.mark.parametrize(
    "messages",
    [
        (),
        (user(CODEX_ASKS), Message(role="assistant", text="done"), user("go on")),
        (user(f"what does '{CODEX_ASKS}' mean?"),),
        (user(), told("c", CODEX_ASKS)),
        (user(), Message(role="assistant", text=CODEX_ASKS)),
    ],
)
def test_summary_talk_is_no_compaction(messages: tuple[Message, ...]) -> None:
    assert heads(MAIN).classify(MAIN, messages).role == "main"


def test_only_user_message_holds_summary() -> None:
    assert holds_summary((system(), user(CLAUDE_TELLS), user("go on")))
    assert not holds_summary((system(CLAUDE_TELLS), told("c", CLAUDE_TELLS)))


CLAUDE = "You are Claude Code, Anthropic's official CLI for Claude.\n"
SDK = "You are a Claude agent, built on Anthropic's Claude Agent SDK.\n"
ROUTER = "You are a specialized Task Routing AI. Your sole function is to analyze the user's request and"
# How the side calls of harnesses begin, in the words of their own code.
SIDE_CALLS = [
    ("compaction", "", CODEX_ASKS),
    ("auxiliary", "", "Analyze this rollout and produce JSON with `raw_memory`, `rollout_summary`, and"),
    ("compaction", "be good", CLAUDE_ASKS),
    ("compaction", f"{SDK}You are a helpful AI assistant tasked with summarizing conversations.", "go"),
    ("auxiliary", f"{CLAUDE}You are naming a coding session so the user can pick it out of a long list", "x"),
    ("auxiliary", f"{SDK}You are evaluating a stop-condition hook in Claude Code. Read the", "x"),
    ("auxiliary", f"{SDK}You run a web search for another Claude model, which is waiting", "Search: x"),
    ("auxiliary", CLAUDE, "\nWeb page content:\n---\n# A page"),
    (
        "auxiliary",
        f"{CLAUDE}many rules",
        "[SUGGESTION MODE: Suggest what the user might naturally type next into",
    ),
    (
        "auxiliary",
        f"{CLAUDE}many rules",
        "The user stepped away and is coming back. Recap in under 40 words, 1-2",
    ),
    (
        "compaction",
        "You are a context summarization assistant. Your task is to read a conversation between a user and an",
        "<conversation>",
    ),
    (
        "auxiliary",
        "x",
        "Based on this conversation, generate a short 1-2 word filename slug (lowercase, hyphen-",
    ),
    (
        "compaction",
        "\nYou are a specialized system component responsible for distilling chat history into a structured",
        "Generate a new <state_snapshot> based on the provided history.\n\nFirst, reason in your scratchpad.",
    ),
    (
        "compaction",
        "x",
        "A previous <state_snapshot> exists in the history. You MUST integrate all still-relevant",
    ),
    ("auxiliary", f"\n{ROUTER} assign a **Complexity Score** from 1 to 100.", "x"),
    ("auxiliary", f"\n{ROUTER} classify its complexity. Choose between `flash` (SIMPLE) or `pro`", "x"),
    (
        "auxiliary",
        "x",
        "Analyze *only* the content and structure of your immediately preceding response (your",
    ),
    (
        "compaction",
        "You are the component that summarizes internal chat history into a given structure.",
        "x",
    ),
    (
        "compaction",
        "\nYou are the component that summarizes a conversation when its context window is about to overflow.",
        "x",
    ),
    ("compaction", "x", "First, reason in your <analysis> block. Then, produce the <state_snapshot> XML."),
    ("compaction", "x", "First, reason in your scratchpad. Then, generate the <state_snapshot>."),
    (
        "compaction",
        'You are an expert Context Memory Manager. You maintain the long-term "Master State" of the AI agent\'s',
        "x",
    ),
    (
        "auxiliary",
        "You are a diagnostic agent that determines whether a conversational AI assistant is stuck in an",
        "x",
    ),
    (
        "auxiliary",
        "\nYou are an expert code-editing assistant specializing in debugging and correcting failed search-and-",
        "x",
    ),
    (
        "auxiliary",
        "\nYou are an expert code-editing assistant. Your task is to analyze a failed edit attempt and provide a",
        "x",
    ),
    (
        "auxiliary",
        "You are an expert context compressor. Your job is to drastically shorten the following history",
        "x",
    ),
    (
        "auxiliary",
        "",
        "Summarize the user's primary intent or goal in this conversation in ONE sentence (max 80 characters).",
    ),
    (
        "auxiliary",
        "You are an independent Goal Verifier. Judge the proposed terminal status only from the bounded JSON",
        "x",
    ),
    (
        "auxiliary",
        "Generate a concise, sentence-case title (3-7 words) that captures what this programming-assistant",
        "Conversation so far:",
    ),
    ("auxiliary", "You generate session recaps for a programming assistant CLI.", "x"),
    ("compaction", "You are maintaining a context-aware state summary for an interactive agent.", "<EVENT>"),
    (
        "auxiliary",
        "You are a helpful assistant that generates concise, descriptive titles for conversations with OpenHands.",
        "x",
    ),
    ("auxiliary", "You are a title generator. You output ONLY a thread title. Nothing else.", "x"),
    (
        "compaction",
        "You are a context summarization agent. You are given a conversation between a user and an agent.",
        "Here is the conversation so far:",
    ),
    ("compaction", "x", "Provide a detailed prompt for continuing our conversation above. Focus on"),
    (
        "auxiliary",
        "Generate a short, descriptive title (3-7 words) for a conversation that starts with the following",
        "User: x",
    ),
    ("compaction", "", "You are a summarization agent creating a context checkpoint. Treat the conversation"),
    (
        "auxiliary",
        "You will generate a short title based on the first message a user begins a conversation",
        "x",
    ),
]


@pytest.mark.parametrize(("role", "told", "asked"), SIDE_CALLS)
def test_side_calls_of_known_harnesses(role: str, told: str, asked: str) -> None:
    messages = (*([system(told)] if told else []), user("do it"), user(asked))
    for made in (heads(MAIN), heads()):
        found = made.classify(MAIN, messages)
        assert found.role == role
        assert found.note is not None
        assert note_word(found.note) == SIDE_CALL_NOTE


@pytest.mark.parametrize(
    ("told", "asked"),
    [
        ("You are the planner.", "Sort a list."),
        ("You are a helpful AI assistant tasked with summarizing conversations.", "Summarize the meeting."),
        ("You are naming a coding session so the user can pick it out of a long list", "x"),
        ("You are a security monitor for autonomous AI coding agents.", "Judge this call."),
        ("You are a title editor.", "Write a title for this conversation."),
        ("You are a summarizer.", "Please summarize the conversation above in 50 words."),
        ("You are an expert code-editing assistant. Your task is to write Rust.", "Sort a list."),
        ("You are an expert code-editing assistant specializing in Python.", "Sort a list."),
        ("You are a diagnostic agent that determines whether a pump is worn.", "It rattles."),
        ("You are a specialized Task Routing AI. Your sole function is to choose a worker.", "Fix it."),
        (f"{ROUTER} hand it on.", "Fix it."),
        (
            "You are a context summarization assistant. Your task is to read a conversation of doctors.",
            "<conversation>",
        ),
        ("You are an expert context compressor. Your job is to drastically cut search results.", "x"),
        ("You are an expert Context Memory Manager. You maintain the long-term notes of the crew.", "x"),
        (
            "You are a helpful assistant that generates concise, descriptive titles for conversations. Be brief.",
            "User: hi",
        ),
        ("You are a context summarization agent. You are given a conversation of two doctors.", "x"),
        ("You will generate a short title based on the first message of a forum thread.", "x"),
        ("Generate a concise, sentence-case title (3-7 words) that captures what this paper shows.", "x"),
        ("You are an independent Goal Verifier. Judge the proposed proof.", "x"),
        ("You solve puzzles.", "First, reason in your scratchpad. Then, generate a plan."),
        ("You listen.", "Summarize the user's primary intent or goal in this conversation in ONE word."),
        (f"{CLAUDE}You are evaluating answers of students.", "Web page: a"),
        (
            f"You judge agents.\n{CLAUDE}",
            "[SUGGESTION MODE: Suggest what the user might naturally type next into",
        ),
    ],
)
def test_similar_prompt_is_no_side_call(told: str, asked: str) -> None:
    assert heads(MAIN).classify(evolve(MAIN, tools=NO_KEY), (system(told), user(asked))).role == "main"


@pytest.mark.parametrize("kind", ["main", "subagent", "auxiliary", "compaction"])
def test_harness_hint_decides_role(kind: str) -> None:
    assert (
        heads(MAIN).classify(evolve(MAIN, agent="a1", tools=NO_KEY), (user(CODEX_ASKS),), kind).role == kind
    )


def test_unknown_hint_decides_nothing() -> None:
    assert heads(MAIN).classify(MAIN, (user(),), "turn").role == "main"


def test_conversation_after_summary_replaces_it() -> None:
    """A conversation that begins after a summary was asked for stands for the old one."""
    made = heads(MAIN)
    made.note(evolve(MAIN, key="k2"), "compaction")
    assert made.root_reason(evolve(MAIN, tools="t2"), (user(),)) == "tools"
    begun = evolve(MAIN, opening="o2", key="k3")
    assert made.root_reason(begun, (system(), user("in words nobody knows"))) == "compaction"
    made.note(begun, "main")
    assert made.root_reason(evolve(MAIN, opening="o3"), (user(),)) == "conversation"


# ── sub-agents without a mark ─────────────────────────────────────────────────

TASK = "count the files in the source folder"


def delegated() -> tuple[Session, Message]:
    session = Session()
    _, answer = session.say(
        ask(system(), user()), "", [("agent", json.dumps({"description": "count", "prompt": TASK}))]
    )
    return session, answer


def test_delegated_task_marks_subagent() -> None:
    """A fresh conversation whose request is the argument of a tool call is a subagent."""
    session, answer = delegated()
    conversation = system("you are a helper"), user(f"<context>\n{TASK}")
    first, said = session.say(ask(*conversation), "5")
    assert (first.role, first.kind, first.lineage) == ("subagent", "root", 1)
    second, _ = session.say(ask(*conversation, said, user("sure?")), "yes")
    assert (second.role, second.lineage) == ("subagent", 1)
    retried, _ = session.say(ask(*conversation), "6")
    assert retried.role == "subagent"
    back, _ = session.say(ask(system(), user(), answer, told(answer.calls[0], "5")), "done")
    assert (back.role, back.lineage) == ("main", 0)


def test_subagent_only_tool_is_a_sign() -> None:
    other = evolve(MAIN, system="s2", tools="t2")
    assert heads(MAIN).classify(other, (user(),), tools=["read", "complete_task"]).role == "subagent"
    assert heads(MAIN).classify(MAIN, (user(),), tools=["complete_task"]).role == "main"
    assert heads().classify(other, (user(),), tools=["complete_task"]).role == "main"


def test_similar_conversation_is_no_subagent() -> None:
    session, _ = delegated()
    assert session.lineages.plan(ask(system(), user(TASK))).role == "main", "the main head"
    assert session.lineages.plan(ask(system("other"), user("count"))).role == "main", "a short text"
    other = ask(system("other"), user(TASK), Message(role="assistant", text="x"), user())
    assert session.lineages.plan(other).role == "main", "a history"


def test_unreadable_arguments_are_no_task() -> None:
    made = heads(MAIN)
    calls = [
        ToolCall(id="c", name="x", arguments=text)
        for text in ("[" * 1000, '"' + "\ud800" * 30 + '"', "[" * 900 + "]" * 900, '{"a": ' * 40)
    ]
    made.note_answer(Answer(parts=tuple(calls), finish_reason="tool_calls"))
    assert made.classify(evolve(MAIN, system="s2"), (user("[" * 100),)).role == "main"


def test_side_call_with_tool_calls() -> None:
    """What answers a side call's tools is that side call; a conversation that goes on from it is an agent's."""
    session = Session()
    remember = user(
        "You are now acting as the memory extraction subagent. Analyze the most recent ~4 messages"
    )
    asked = system(f"{CLAUDE}many rules"), user(), said("done"), remember
    first, answer = session.say(ask(*asked), "", [("bash", '{"command": "ls"}')])
    result = told(answer.calls[0], "a b")
    second, _ = session.say(ask(*asked, answer, result), "noted")
    assert (first.role, second.role, second.parent) == ("auxiliary", "auxiliary", 0)
    assert session.lineages.plan(ask(*asked, answer, result, user("and now?"))).role == "main"


# ── crews ─────────────────────────────────────────────────────────────────────


def test_crew_agents_are_all_trained() -> None:
    session = Session()
    planner = system("You are the planner."), user("Sort a list.")
    _, plan = session.say(ask(*planner, tools=()), "First look, then sort.")
    coder = system("You are the coder."), user("Plan: First look, then sort.")
    _, look = session.say(ask(*coder), "", [("bash", '{"command": "ls"}')])
    session.say(ask(*coder, look, told(look.calls[0], "a b")), "sorted")
    session.say(ask(*planner, plan, user("The coder is done. Next?"), tools=()), "Nothing.")
    session.say(ask(system("You are the critic."), user("Judge: sorted"), tools=()), "Good.")
    assert {turn.role for turn in session.turns} <= {"main", "subagent"}
    assert prefix_merging(session.turns, {}).left_out == ()
