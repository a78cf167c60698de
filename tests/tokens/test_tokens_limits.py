"""What each family's template can not be asked, and that a request with such a thing is refused with its
path.
"""

import pytest
import tokens_kit as kit
from family_fixtures import FAMILIES, family_folder

from polarnode.core.arrays import ids
from polarnode.core.conversation import Conversation, Message, Tool, ToolCall
from polarnode.core.errors import Refused
from polarnode.tokens.audit import Kind, Limits

CALL = ToolCall(id="c", name="look", arguments="{}")
ASK, ANSWER = Message(role="user", text="q"), Message(role="assistant", text="a")
LATE, TWO = ["late system", "two systems"], ["two systems"]
REFUSED: dict[str, list[str]] = {
    "qwen3_5": LATE,
    "qwen3_5_nothink": LATE,
    "qwen3_6": LATE,
    "llama3": ["tools", "calls"],
    "gptoss": LATE,
    "deepseek_v3": ["tools", "late system"],
    "deepseek_r1_distill": ["tools", "calls", "tool", *LATE],
    "deepseek_v3_1": ["late system"],
    "minimax_m2": LATE,
    "gemma3": ["tools", "calls", "tool", *LATE],
    "smollm2": ["tools", "calls"],
}


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_names_its_limits(name: str) -> None:
    assert list(kit.model(family_folder(name)).template.limits.sentences) == REFUSED.get(name, [])


@pytest.mark.parametrize(
    ("kind", "conversation", "path"),
    [
        ("tools", Conversation(messages=(ASK,), tools=(Tool(name="look"),)), "$.tools"),
        ("calls", Conversation(messages=(ASK, Message(role="assistant", calls=(CALL,)), ASK)), "$.messages"),
        ("tool", Conversation(messages=(ASK, Message(role="tool", text="r", call_id="c"))), "$.messages"),
        (
            "late system",
            Conversation(messages=(ASK, ANSWER, Message(role="system", text="s"), ASK)),
            "$.messages",
        ),
    ],
)
def test_unsupported_request_is_refused(kind: Kind, conversation: Conversation, path: str) -> None:
    template = kit.model(family_folder("gemma3")).template
    with pytest.raises(Refused) as caught:
        template.root(conversation)
    assert (str(caught.value), caught.value.path) == (template.limits.sentences[kind], path)
    assert list(kit.model(family_folder("kimi_k2")).template.root(conversation))


def test_system_after_turn_is_late() -> None:
    limits = Limits({"late system": "no"})
    head = (Message(role="system", text="s"),)
    limits.check(head)
    assert limits.allow(head)
    assert not limits.allow(head, follows=True)
    with pytest.raises(Refused, match="no"):
        limits.check(head, follows=True)


def test_suffix_is_refused_like_root() -> None:
    model = kit.model(family_folder("gemma3"))
    new = (Message(role="system", text="s"),)
    with pytest.raises(Refused, match="does not leave a system message where it stands"):
        model.template.suffix(
            new,
            conversation=Conversation(messages=(ASK, ANSWER, *new)),
            sampled=model.spelled("a", "<end_of_turn>"),
        )


@pytest.mark.parametrize(
    "name", [name for name, kinds in REFUSED.items() if "late system" in kinds and name != "gemma3"]
)
def test_late_system_becomes_user_message(name: str) -> None:
    """Claude Code and others put reminders there, and a refusal would end the run."""
    model = kit.model(family_folder(name))
    late, users = Message(role="system", text="s"), Message(role="user", text="s")
    said, shown = ((ASK, ANSWER, message, ASK) for message in (late, users))
    assert model.template.root(Conversation(messages=said)) == model.template.root(
        Conversation(messages=shown)
    )
    (note,) = model.template.limits.notes(said)
    assert "the model sees a user's message there" in note
    sampled = model.spelled("a", model.text(ids([model.family.stop_ids[0]])))
    after, plain = (
        model.template.suffix(
            (message,), conversation=Conversation(messages=(ASK, ANSWER, message)), sampled=sampled
        )
        for message in (late, users)
    )
    assert after.ids == plain.ids
    assert after.notes == (*plain.notes, note)


@pytest.mark.parametrize("name", [name for name, kinds in REFUSED.items() if "two systems" in kinds])
def test_two_leading_systems_are_joined(name: str) -> None:
    """Two system messages at the head are one where the template takes one."""
    template = kit.model(family_folder(name)).template
    one, other = (Message(role="system", text=text) for text in "st")
    both = Message(role="system", text="s\n\nt")
    assert template.root(Conversation(messages=(one, other, ASK))) == template.root(
        Conversation(messages=(both, ASK))
    )
    assert [note for note in template.limits.notes((one, other, ASK)) if "both as one" in note]
    assert template.limits.notes((both, ASK)) == ()


def test_gemma_keeps_result_without_call() -> None:
    """Gemma 4's template writes results only behind the calls it was shown."""
    model = kit.model(family_folder("gemma4"))
    new = (Message(role="tool", text="found it", call_id="another"),)
    conversation = Conversation(messages=(ASK, Message(role="assistant", calls=(CALL,)), *new))
    with pytest.raises(Refused, match="leaves out the tool message 'found it'"):
        model.template.suffix(new, conversation=conversation, sampled=model.spelled("a", "<turn|>"))


def test_gpt_oss_result_without_its_call() -> None:
    """In gpt-oss no result is shown under the name of another call."""
    model = kit.model(family_folder("gptoss"))
    calls = (CALL, ToolCall(id="d", name="other", arguments="{}"))
    new = tuple(Message(role="tool", text="r", call_id=call.id) for call in calls)
    conversation = Conversation(messages=(ASK, Message(role="assistant", calls=calls), *new))
    with pytest.raises(Refused, match="under the name of the last call"):
        model.template.suffix(new, conversation=conversation, sampled=model.spelled("a", "<|call|>"))
    assert "functions.look to=assistant" in model.text(model.template.root(conversation)), (
        "a root shows them one after another"
    )
