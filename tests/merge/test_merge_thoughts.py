"""The thinking policy `template` against a real Qwen3 template: every prompt is what transformers makes of
the conversation with its thoughts.
"""

from array import array

import pytest
from attrs import define, evolve, field
from family_fixtures import family_folder
from merge_toys import BASH, SECRET, ask, system, told, user, versions
from tokens_kit import Model, model

from polarnode.core.arrays import floats
from polarnode.core.conversation import Answer, Conversation, Message, TextPart, ThinkingPart, ToolCall
from polarnode.core.task import BuilderSpec
from polarnode.core.trajectory import Turn
from polarnode.merge.attach import THINKING_TEMPLATE, Plan
from polarnode.merge.builders import build
from polarnode.merge.invariants import check
from polarnode.merge.lineage import DropsThinking, Lineages

LS = ("bash", '{"command": "ls"}')


def qwen3() -> Model:
    return model(family_folder("qwen3"))


@define(eq=False)
class Talk:
    """A session whose harness drops thoughts: `truth` is the conversation with them, `echo` what the harness
    sends.
    """

    drops: DropsThinking | None = field(factory=lambda: qwen3().template.drops_thinking_before)
    truth: list[Message] = field(factory=list)
    echo: list[Message] = field(factory=list)
    prompts: dict[int, "array[int]"] = field(factory=dict)
    lineages: Lineages = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.lineages = Lineages(session_id="s", secret=SECRET, drops_thinking=self.drops)

    def add(self, *messages: Message) -> None:
        self.truth += messages
        self.echo += messages

    def say(
        self, thinking: str, text: str, *calls: tuple[str, str], request: Conversation | None = None
    ) -> Turn:
        """Ask with what the harness has, answer so, and go on from it."""
        conversation = request or ask(*self.echo)
        plan = self.lineages.plan(conversation)
        prompt, close = self.rendered(plan, conversation)
        made = tuple(
            ToolCall(id=self.lineages.references.call_id(plan.index, k), name=name, arguments=said)
            for k, (name, said) in enumerate(calls)
        )
        thought = (ThinkingPart(thinking),) if thinking else ()
        answer = Answer(
            parts=(*thought, *((TextPart(text),) if text else ()), *made),
            finish_reason="tool_calls" if made else "stop",
        )
        turn = self.turn(plan, prompt, close, answer)
        self.lineages.commit(turn)
        self.prompts[turn.index] = prompt
        self.truth.append(answer.as_message())
        self.echo.append(evolve(answer.as_message(), thinking=""))
        return turn

    def rendered(self, plan: Plan, conversation: Conversation) -> "tuple[array[int], int]":
        history, template = self.lineages.history(plan), qwen3().template
        if plan.parent is None:
            return template.root(evolve(conversation, messages=plan.new)), 0
        suffix = template.suffix(plan.new, conversation=conversation, sampled=history)
        return history + suffix.ids, suffix.close_length

    def turn(self, plan: Plan, prompt: "array[int]", close: int, answer: Answer) -> Turn:
        kept = {
            name: getattr(plan, name)
            for name in (
                "index",
                "parent",
                "kind",
                "reason",
                "lineage",
                "role",
                "before_key",
                "request_key",
                "notes",
            )
        }
        sampled = spelled(answer)
        return Turn(
            session_id="s",
            provider="toy",
            prompt_delta=prompt[len(self.lineages.history(plan)) :],
            prompt_length=len(prompt),
            close_length=close,
            sampled=sampled,
            logprobs=floats([-0.5] * len(sampled)),
            version_spans=versions(len(sampled), 1),
            finish_reason=answer.finish_reason,
            message_key=plan.after(answer),
            answer=answer,
            **kept,
        )

    def expected(self, *more: Message) -> "array[int]":
        """What transformers makes of the conversation with all its thoughts, before the last answer."""
        return qwen3().expected(ask(*self.truth[:-1], *more))


def spelled(answer: Answer) -> "array[int]":
    """An answer as the template writes it, so that its tokens are the canonical ones."""
    pieces = ["<think>", f"\n{answer.thinking}\n", "</think>", f"\n\n{answer.text}"]
    for place, call in enumerate(answer.calls):
        newline = ["\n"] if answer.text or place else []
        pieces += [
            *newline,
            "<tool_call>",
            f'\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n',
            "</tool_call>",
        ]
    return qwen3().spelled(*pieces, "<|im_end|>")


def cycle(talk: Talk, name: str) -> tuple[Turn, Turn]:
    """One user message, answered with a call and then without."""
    talk.add(user(f"please {name}"))
    first = talk.say(f"I look for {name}", "Looking.", LS)
    assert list(talk.prompts[first.index]) == list(talk.expected())
    talk.add(told(talk.truth[-1].calls[0], f"found {name}"))
    second = talk.say(f"I saw {name}", f"There is {name}.")
    assert list(talk.prompts[second.index]) == list(talk.expected())
    return first, second


def test_prompts_match_template_with_thoughts() -> None:
    """Every prompt is what the template makes of the conversation with its thoughts."""
    talk = Talk()
    talk.add(system())
    cycles = [cycle(talk, name) for name in ("one", "two", "three")]
    assert [(turn.kind, turn.reason, turn.lineage) for pair in cycles for turn in pair] == [
        ("root", "first", 0),
        ("extend", "appended", 0),
        ("branch", THINKING_TEMPLATE, 0),
        ("extend", "appended", 0),
        ("branch", THINKING_TEMPLATE, 0),
        ("extend", "appended", 0),
    ]
    assert cycles[2][0].notes == (
        (
            "thinking: the template leaves out the thoughts of messages 2, 4, 6, 8, so the model did not see"
            " them"
        ),
    )
    built = build(BuilderSpec(), talk.lineages.turns)
    assert check(talk.lineages.turns, built).trainable == sum(
        len(turn.sampled) for turn in talk.lineages.turns
    )
    assert len(built.traces) == 3


def test_keep_policy_extends_by_default() -> None:
    talk = Talk(drops=None)
    talk.add(user("one"))
    talk.say("thought", "One.")
    talk.add(user("two"))
    turn = talk.say("again", "Two.")
    assert (turn.kind, turn.parent, turn.notes) == ("extend", 0, ())
    assert "thought" in qwen3().text(talk.prompts[1])


def test_turn_without_thoughts_is_extended() -> None:
    talk = Talk()
    talk.add(user("one"))
    talk.say("", "One.")
    talk.add(user("two"))
    assert talk.say("", "Two.").kind == "extend"
    talk.add(user("three"))
    assert talk.say("thought", "Three.").kind == "extend"
    talk.add(user("four"))
    assert talk.say("", "Four.").reason == THINKING_TEMPLATE
    talk.add(user("five"))
    assert talk.say("", "Five.").kind == "extend"


def test_rewritten_history_regains_cycle_thoughts() -> None:
    """The harness changes its tools in the middle of a cycle: no key is the same, but the calls name their
    turns.
    """
    talk = Talk()
    talk.add(user("go"))
    talk.say("hidden from the harness", "Looking.", LS)
    talk.add(told(talk.truth[-1].calls[0], "a.txt"))
    more = (BASH, evolve(BASH, name="read"))
    turn = talk.say("then", "Done.", request=ask(*talk.echo, tools=more))
    assert (turn.kind, turn.reason) == ("root", "tools")
    assert list(talk.prompts[1]) == list(qwen3().expected(ask(*talk.truth[:-1], tools=more)))
    assert turn.notes[-1] == "thinking: shown the thoughts of messages 1"
    talk.add(user("more"))
    assert talk.say("", "Yes.", request=ask(*talk.echo, tools=more)).reason == THINKING_TEMPLATE


def test_prompt_thoughts_count_without_own() -> None:
    """Thoughts in a prompt count though its own turn has none."""
    talk = Talk()
    talk.add(user("go"))
    talk.say("hidden", "Looking.", LS)
    talk.add(told(talk.truth[-1].calls[0], "a.txt"))
    talk.say("", "Done.", request=ask(*talk.echo, tools=()))
    talk.add(user("more"))
    turn = talk.say("", "Yes.", request=ask(*talk.echo, tools=()))
    assert turn.reason == THINKING_TEMPLATE
    assert "hidden" not in qwen3().text(talk.prompts[2])


def test_branch_shows_repeated_turns_thoughts() -> None:
    """Old tool results are cleared: the branch starts at the deepest untouched turn, and the turns behind it
    keep their thoughts.
    """
    talk = Talk()
    talk.add(user("go"))
    for name in ("one", "two", "three"):
        talk.say(f"thought of {name}", f"{name}.", LS)
        talk.add(told(talk.truth[-1].calls[0], f"result {name}"))
    cleared = evolve(talk.truth[4], text="[cleared]")
    talk.truth[4] = talk.echo[4] = cleared
    turn = talk.say("last", "Done.")
    assert (turn.kind, turn.reason, turn.parent) == ("branch", "rewrite", 1)
    assert list(talk.prompts[turn.index]) == list(talk.expected())
    assert "thinking: shown the thoughts of messages 5" in turn.notes


def test_call_ids_choose_the_twins_thoughts() -> None:
    talk = Talk()
    talk.add(user("go"))
    first = talk.say("thought of the first", "Looking.", LS)
    request = ask(talk.truth[0])
    talk.say("thought of the second", "Looking.", LS, request=request)
    del talk.truth[2:], talk.echo[2:]
    talk.add(told(talk.truth[1].calls[0], "a.txt"))
    talk.say("", "Done.", request=ask(*talk.echo, tools=()))
    text = qwen3().text(talk.prompts[2])
    assert first.answer is not None
    assert "thought of the first" in text
    assert "thought of the second" not in text


def test_rerendered_edit_is_shown_as_requested() -> None:
    """An edit is shown as the request has it, where the prompt is rendered anew."""
    talk = Talk()
    talk.add(user("go"))
    talk.say("hidden", "Looking.", LS)
    repaired = evolve(
        talk.echo[-1], calls=(evolve(talk.echo[-1].calls[0], arguments='{"command": "ls -la"}'),)
    )
    talk.echo[-1] = repaired
    talk.add(told(repaired.calls[0], "a.txt"), user("more"))
    turn = talk.say("", "Done.")
    assert turn.reason == THINKING_TEMPLATE
    assert (
        turn.notes[0]
        == "edited: message 1 differs from turn 0's answer in arguments; the model sees it as the request"
        " shows it"
    )
    assert "ls -la" in qwen3().text(talk.prompts[1])


@pytest.mark.parametrize("forged", ["call_0000000000000000", "toolu_000000ffffffffff00"])
def test_forged_messages_get_no_thoughts(forged: str) -> None:
    talk = Talk()
    talk.add(user("go"))
    talk.say("secret thought", "Looking.", LS)
    mine = Message(
        role="assistant", text="Looking.", calls=(ToolCall(id=forged, name="bash", arguments="{}"),)
    )
    talk.say("", "x", request=ask(user("another"), mine, told(forged, "r")))
    assert "secret thought" not in qwen3().text(talk.prompts[1])


def test_changed_words_get_no_thoughts() -> None:
    talk = Talk()
    talk.add(user("go"))
    talk.say("secret thought", "Looking.", LS)
    (call,) = talk.echo[-1].calls
    other = Message(role="assistant", text="Other words.", calls=(call,))
    talk.say("", "x", request=ask(user("another"), other, told(call, "r")))
    assert "secret thought" not in qwen3().text(talk.prompts[1])


def test_restored_session_plans_the_same() -> None:
    talk = Talk()
    talk.add(system())
    for name in ("one", "two"):
        cycle(talk, name)
    again = Lineages.restore(
        session_id="s", secret=SECRET, turns=talk.lineages.turns, drops_thinking=talk.drops
    )
    for more in (user("three"), told("x", "r")):
        assert again.plan(ask(*talk.echo, more)) == talk.lineages.plan(ask(*talk.echo, more))


def test_lookup_renders_what_plan_would() -> None:
    talk = Talk()
    talk.add(user("one"))
    talk.say("thought", "One.")
    talk.add(user("two"))
    history, new, _ = talk.lineages.look(ask(*talk.echo))
    assert history is None
    assert new == talk.lineages.plan(ask(*talk.echo)).new
    assert [message.thinking for message in new] == ["", "thought", ""]
