"""Who asks, and why a lineage starts: labels that must be certain, because side calls are not trained."""

import json

import pytest
from attrs import evolve
from merge_toys import BASH, Session, ask, system, told, user

from polarnode.core.conversation import Answer, Message, ToolCall
from polarnode.merge.fingerprint import NONE, Path
from polarnode.merge.roles import PathIndex, holds_summary, reclassify_roles

MAIN = Path(agent=NONE, tools="t1", thinking="d", system="s1", opening="o1", key="k1")
CODEX_ASKS = "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary."
CLAUDE_ASKS = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools. <analysis>"
CLAUDE_TELLS = "This session is being continued from a previous conversation that ran out of context."


def heads(*paths: Path) -> PathIndex:
    made = PathIndex()
    for path in paths:
        made.note(path, "main")
    return made


def test_the_first_request_is_main_and_first() -> None:
    assert heads().classify(MAIN, (user(),)).role == "main"
    assert heads().why_root(MAIN, (user(),)) == "first"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tools": "t2", "system": "s2", "opening": "o2"}, "tools"),
        ({"tools": NONE, "system": "s2", "opening": "o2"}, "tools"),
        ({"thinking": "y", "system": "s2", "opening": "o2"}, "thinking"),
        ({"system": "s2", "opening": "o2"}, "system"),
        ({"opening": "o2"}, "conversation"),
        ({"key": "k2"}, "rewrite"),
    ],
)
def test_a_root_says_the_first_thing_that_is_new(changes: dict[str, str], reason: str) -> None:
    assert heads(MAIN).why_root(evolve(MAIN, **changes), (user(),)) == reason


def test_a_history_that_begins_with_its_summary_is_a_compaction() -> None:
    assert heads(MAIN).why_root(evolve(MAIN, opening="o2"), (system(), user(CLAUDE_TELLS))) == "compaction"


def test_another_agent_is_a_subagent() -> None:
    cast = heads(MAIN).classify(evolve(MAIN, agent="a1"), (user(),))
    assert cast.role == "subagent"
    assert cast.note is not None
    assert heads(evolve(MAIN, agent="a1")).classify(evolve(MAIN, agent="a1"), (user(),)).role == "main"
    assert heads(evolve(MAIN, agent="a1")).classify(MAIN, (user(),)).role == "subagent"


def test_a_call_without_tools_is_a_side_call_once_the_main_agent_has_some() -> None:
    bare = evolve(MAIN, tools=NONE)
    assert heads(MAIN).classify(bare, (user(),)).role == "auxiliary"
    assert heads().classify(bare, (user(),)).role == "main"
    assert heads(bare).classify(bare, (user(),)).role == "main"


def test_the_tools_of_a_subagent_say_nothing_about_main() -> None:
    made = heads(evolve(MAIN, tools=NONE))
    made.note(evolve(MAIN, agent="a1"), "subagent")
    assert made.classify(evolve(MAIN, tools=NONE), (user(),)).role == "main"


@pytest.mark.parametrize(
    "messages",
    [
        (system(), user(), user(CODEX_ASKS)),
        (system(), user(), user("\n" + CLAUDE_ASKS)),
        (system("You are a context summarization assistant. Read"), user("long history")),
    ],
)
def test_a_call_for_a_summary_is_a_compaction(messages: tuple[Message, ...]) -> None:
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
def test_talk_about_a_summary_is_none(messages: tuple[Message, ...]) -> None:
    assert heads(MAIN).classify(MAIN, messages).role == "main"


def test_only_a_user_tells_a_summary() -> None:
    assert holds_summary((system(), user(CLAUDE_TELLS), user("go on")))
    assert not holds_summary((system(CLAUDE_TELLS), told("c", CLAUDE_TELLS)))


@pytest.mark.parametrize(
    ("role", "messages"),
    [
        (
            "compaction",
            (
                system("You are the component that summarizes internal chat history into a given structure."),
                user(),
            ),
        ),
        (
            "compaction",
            (user(), user("First, reason in your scratchpad. Then, generate the <state_snapshot>.")),
        ),
        (
            "compaction",
            (user("You are maintaining a context-aware state summary for an interactive agent."),),
        ),
        (
            "compaction",
            (system(), user("Provide a detailed prompt for continuing our conversation above. Focus")),
        ),
        (
            "auxiliary",
            (system("You are a title generator. You output ONLY a thread title. Nothing else."), user()),
        ),
        ("auxiliary", (system("You will generate a short title based on the first message"), user())),
        ("auxiliary", (system("\nYou are a specialized Task Routing AI. Your sole function"), user())),
        (
            "auxiliary",
            (user(), user("Analyze *only* the content and structure of your immediately preceding response")),
        ),
    ],
)
def test_a_side_call_is_known_by_how_it_begins(role: str, messages: tuple[Message, ...]) -> None:
    assert heads(MAIN).classify(MAIN, messages).role == role
    assert heads().classify(MAIN, messages).role == role


@pytest.mark.parametrize("kind", ["main", "subagent", "auxiliary", "compaction"])
def test_what_the_harness_says_decides(kind: str) -> None:
    assert heads(MAIN).classify(evolve(MAIN, agent="a1", tools=NONE), (user(CODEX_ASKS),), kind).role == kind


def test_a_word_that_is_no_role_decides_nothing() -> None:
    assert heads(MAIN).classify(MAIN, (user(),), "turn").role == "main"


def test_what_begins_after_a_summary_was_asked_for_stands_for_it() -> None:
    made = heads(MAIN)
    made.note(evolve(MAIN, key="k2"), "compaction")
    assert made.why_root(evolve(MAIN, tools="t2"), (user(),)) == "tools"
    begun = evolve(MAIN, opening="o2", key="k3")
    assert made.why_root(begun, (system(), user("in words nobody knows"))) == "compaction"
    made.note(begun, "main")
    assert made.why_root(evolve(MAIN, opening="o3"), (user(),)) == "conversation"


# ── sub-agents without a mark ─────────────────────────────────────────────────

TASK = "count the files in the source folder"


def delegated() -> tuple[Session, Message]:
    session = Session()
    _, answer = session.say(
        ask(system(), user()), "", [("agent", json.dumps({"description": "count", "prompt": TASK}))]
    )
    return session, answer


def test_a_fresh_conversation_that_asks_for_what_a_tool_was_given_is_a_subagent() -> None:
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


def test_a_tool_that_only_subagents_have_is_a_sign() -> None:
    other = evolve(MAIN, system="s2", tools="t2")
    assert heads(MAIN).classify(other, (user(),), tools=["read", "complete_task"]).role == "subagent"
    assert heads(MAIN).classify(MAIN, (user(),), tools=["complete_task"]).role == "main"
    assert heads().classify(other, (user(),), tools=["complete_task"]).role == "main"


def test_a_conversation_that_only_looks_like_it_is_none() -> None:
    session, _ = delegated()
    assert session.lineages.plan(ask(system(), user(TASK))).role == "main", "the main head"
    assert session.lineages.plan(ask(system("other"), user("count"))).role == "main", "a short text"
    other = ask(system("other"), user(TASK), Message(role="assistant", text="x"), user())
    assert session.lineages.plan(other).role == "main", "a history"


def test_arguments_that_are_no_json_or_have_no_end_are_no_task() -> None:
    made = heads(MAIN)
    calls = [
        ToolCall(id="c", name="x", arguments=text)
        for text in ("[" * 1000, '"' + "\ud800" * 30 + '"', "[" * 900 + "]" * 900, '{"a": ' * 40)
    ]
    made.note_answer(Answer(parts=tuple(calls), finish_reason="tool_calls"))
    assert made.classify(evolve(MAIN, system="s2"), (user("[" * 100),)).role == "main"


# ── what only the whole session tells ─────────────────────────────────────────


def test_a_side_call_that_came_first_is_cast_again() -> None:
    session = Session()
    title, _ = session.say(ask(system("name it"), user(), tools=()), "a title")
    main, _ = session.say(ask(system(), user(), tools=(BASH,)), "hello")
    assert [turn.role for turn in session.turns] == ["main", "main"]
    assert [turn.role for turn in reclassify_roles(session.turns)] == ["auxiliary", "main"]
    assert reclassify_roles((title,)) == (title,)
    assert reclassify_roles((main,)) == (main,)
