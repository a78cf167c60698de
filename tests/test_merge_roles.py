"""Who asks, and why a lineage starts: labels that must be certain, because side calls are not trained."""

import pytest
from attrs import evolve
from merge_toys import system, told, user

from polarnode.conversation import Message
from polarnode.merge.fingerprint import NONE, Path
from polarnode.merge.roles import Heads, asks_summary, tells_summary

MAIN = Path(agent=NONE, tools="t1", thinking="d", system="s1", opening="o1", key="k1")
CODEX_ASKS = "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary."
CLAUDE_ASKS = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools. <analysis>"
CLAUDE_TELLS = "This session is being continued from a previous conversation that ran out of context."


def heads(*paths: Path) -> Heads:
    made = Heads()
    for path in paths:
        made.note(path, "main")
    return made


def test_the_first_request_is_main_and_first() -> None:
    assert heads().cast(MAIN, (user(),)).role == "main"
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
    cast = heads(MAIN).cast(evolve(MAIN, agent="a1"), (user(),))
    assert cast.role == "subagent"
    assert cast.note is not None
    assert heads(evolve(MAIN, agent="a1")).cast(evolve(MAIN, agent="a1"), (user(),)).role == "main"
    assert heads(evolve(MAIN, agent="a1")).cast(MAIN, (user(),)).role == "subagent"


def test_a_call_without_tools_is_a_side_call_once_the_main_agent_has_some() -> None:
    bare = evolve(MAIN, tools=NONE)
    assert heads(MAIN).cast(bare, (user(),)).role == "auxiliary"
    assert heads().cast(bare, (user(),)).role == "main"
    assert heads(bare).cast(bare, (user(),)).role == "main"


def test_the_tools_of_a_subagent_say_nothing_about_main() -> None:
    made = heads(evolve(MAIN, tools=NONE))
    made.note(evolve(MAIN, agent="a1"), "subagent")
    assert made.cast(evolve(MAIN, tools=NONE), (user(),)).role == "main"


@pytest.mark.parametrize(
    "messages",
    [
        (system(), user(), user(CODEX_ASKS)),
        (system(), user(), user("\n" + CLAUDE_ASKS)),
        (system("You are a context summarization assistant. Read"), user("long history")),
    ],
)
def test_a_call_for_a_summary_is_a_compaction(messages: tuple[Message, ...]) -> None:
    assert asks_summary(messages)
    assert heads(MAIN).cast(MAIN, messages).role == "compaction"


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
    assert not asks_summary(messages)


def test_only_a_user_tells_a_summary() -> None:
    assert tells_summary((system(), user(CLAUDE_TELLS), user("go on")))
    assert not tells_summary((system(CLAUDE_TELLS), told("c", CLAUDE_TELLS)))
