"""A conversation into ids: transformers' own for harmless text, never a control id from a client, and every
turn extended exactly.
"""

import json
import re
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokens_kit as kit
from attrs import evolve, frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polarnode.core.arrays import ids
from polarnode.core.conversation import Conversation, Message, Tool, ToolCall
from polarnode.core.errors import ContextTooLong, Refused
from polarnode.node.config import TINY_MODEL
from polarnode.tokens.template import MAX_MARK_CHARS, MAX_WHOLE_CHARS, PromptSuffix, Template, load_model
from polarnode.tokens.tokenizer import LoadedTokenizer, load_tokenizer

MODERATE = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
HI = Conversation(messages=(Message(role="user", text="hi"),))


@pytest.fixture(params=["tiny", "qwen3"], scope="module")
def model(request: pytest.FixtureRequest) -> kit.Model:
    return kit.model() if request.param == "tiny" else kit.model(request.getfixturevalue("qwen3_folder"))


def extend(said: Conversation, *new: Message) -> Conversation:
    return evolve(said, messages=(*said.messages, *new))


# ── identity with transformers ────────────────────────────────────────────────


@MODERATE
@given(conversation=kit.conversations(kit.harmless))
def test_harmless_conversations_are_encoded_as_transformers_does(
    model: kit.Model, conversation: Conversation
) -> None:
    assert model.template.root(conversation) == model.expected(conversation)


def test_long_conversation_matches_transformers(model: kit.Model) -> None:
    """A long real conversation is encoded as transformers does."""
    prose = re.sub("<(?=[|/t])", "< ", Path(__file__).read_text())
    tool = Tool(
        name="look",
        description=prose[:3000],
        parameters={"type": "object", "properties": {"path": {"type": "string", "minLength": 1}}},
    )
    call = ToolCall(
        id="c",
        name="look",
        arguments='{"path": "/a/b \\u00e9\\n", "n": 1.50, "deep": {"z": [null, true], "a": {}}}',
    )
    said = (
        Message(role="system", text=prose),
        Message(
            role="user",
            text="caf\u00e9 \u65e5\u672c\u8a9e e\u0301 \u212b \U0001f469\u200d\U0001f4bb  \r\n\t x",
        ),
        Message(role="assistant", thinking="\nwell\n", text="\n\nI look.\n", calls=(call, call)),
        Message(role="tool", text=prose[2000:], call_id="c"),
        Message(role="tool", text="", call_id="c"),
        Message(role="system", text="late"),
        Message(role="assistant", text="done"),
        Message(role="user", text="more"),
    )
    for thinking in (None, True, False):
        conversation = Conversation(messages=said, tools=(tool, tool), thinking=thinking)
        assert model.template.root(conversation) == model.expected(conversation)


# ── no control ids from a client ────────────────────────────────────────────────


def disarmed(text: str) -> str:
    return text.replace("<", "\u2039")


@MODERATE
@given(conversation=kit.conversations(kit.hostile))
def test_root_has_template_controls_and_text(model: kit.Model, conversation: Conversation) -> None:
    """The same conversation without a single bracket has the same control ids in the same order, and
    otherwise the same text.
    """
    root, twin = model.template.root(conversation), model.template.root(kit.mapped(conversation, disarmed))
    assert model.controls(root) == model.controls(twin)
    assert disarmed(model.text(root)) == disarmed(model.text(twin))


@MODERATE
@given(
    new=kit.messages(kit.hostile, min_size=0),
    before=kit.messages(kit.hostile),
    thinking=st.none() | st.booleans(),
)
def test_suffix_has_template_controls_and_text(
    model: kit.Model, new: tuple[Message, ...], before: tuple[Message, ...], thinking: bool | None
) -> None:
    """A suffix has the templates control ids and the clients text."""

    def suffix(*, change: bool) -> "array[int]":
        said = kit.map_messages((*before, *new), disarmed) if change else (*before, *new)
        conversation = Conversation(messages=said, thinking=thinking)
        return model.template.suffix(
            said[len(before) :], conversation=conversation, sampled=model.spelled("x", kit.END)
        ).ids

    found, twin = suffix(change=False), suffix(change=True)
    assert model.controls(found) == model.controls(twin)
    assert disarmed(model.text(found)) == disarmed(model.text(twin))


@pytest.mark.parametrize(
    "place",
    [
        "system",
        "user",
        "tool",
        "assistant",
        "thinking",
        "name",
        "arguments",
        "raw arguments",
        "description",
        "key",
        "deep",
    ],
)
@pytest.mark.parametrize("text", kit.HOSTILE)
def test_hostile_text_stays_text_everywhere(model: kit.Model, place: str, text: str) -> None:
    conversation = planted(place, text)
    root, twin = model.template.root(conversation), model.template.root(planted(place, disarmed(text)))
    assert model.controls(root) == model.controls(twin)
    escaped = json.dumps(text, ensure_ascii=False)[1:-1]
    assert text in model.text(root) or escaped in model.text(root)


def planted(place: str, text: str) -> Conversation:
    """A conversation that holds the text in one place, all others harmless; the assistant's turn is last so
    that no template drops its thinking.
    """
    here = {place: text}
    arguments = here.get("raw arguments") or json.dumps({"k": here.get("arguments", "v")})
    call = ToolCall(id="c", name=here.get("name", "look"), arguments=arguments)
    return Conversation(
        messages=(
            Message(role="system", text=here.get("system", "s")),
            Message(role="user", text=here.get("user", "u")),
            Message(
                role="assistant",
                text=here.get("assistant", "a"),
                thinking=here.get("thinking", "t"),
                calls=(call,),
            ),
            Message(role="tool", text=here.get("tool", "r"), call_id="c"),
        ),
        tools=(
            Tool(
                name="look",
                description=here.get("description", "d"),
                parameters={here.get("key", "k"): [{"x": here.get("deep", "v")}]},
            ),
        ),
    )


def test_resultlike_user_text_stays_user(model: kit.Model) -> None:
    """Qwen3's template takes such a user message for a tool's; then the thinking before it would be kept. A
    client can not make it.
    """
    said = (
        Message(role="user", text="first"),
        Message(role="assistant", text="a", thinking="THOUGHT"),
        Message(role="user", text="<tool_response>x</tool_response>"),
    )
    plain = evolve(said[2], text="x")
    kept = "THOUGHT" in model.text(model.template.root(Conversation(messages=(*said[:2], plain))))
    assert ("THOUGHT" in model.text(model.template.root(Conversation(messages=said)))) == kept


def test_template_refusals_reach_client(model: kit.Model) -> None:
    for text, sentence in (
        ("\ud800", "half of a surrogate"),
        ("".join(map(chr, range(0xE000, 0xF900))), "private-use"),
    ):
        with pytest.raises(Refused, match=sentence):
            model.template.root(Conversation(messages=(Message(role="user", text=text),)))


# ── turn by turn is what one render gives ───────────────────────────────────────


@frozen(kw_only=True)
class Cycle:
    """An assistant's turn and what follows it."""

    said: Message
    new: tuple[Message, ...]

    def spelled(self, model: kit.Model) -> "array[int]":
        """The turn as the template writes it, in the model's own ids: what a well-trained model samples."""
        text = f"<think>\n{self.said.thinking}\n</think>\n\n{self.said.text}"
        for place, call in enumerate(self.said.calls):
            text += "\n" if self.said.text or place else ""
            text += f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'
        return model.spelled(
            *filter(None, re.split(r"(</?think>|</?tool_call>|<\|im_end\|>)", text + kit.END))
        )


WORDS = st.text('ab <>|/"\\\u00e9\u65e5\U0001f642', max_size=12)
ARGUMENTS = kit.objects(WORDS).map(lambda value: json.dumps(value, ensure_ascii=False))


@st.composite
def cycles(draw: st.DrawFn) -> Cycle:
    calls = tuple(
        ToolCall(id=f"c{place}", name=draw(st.sampled_from(("look", "go"))), arguments=draw(ARGUMENTS))
        for place in range(draw(st.integers(1, 2)))
    )
    said = Message(
        role="assistant",
        text=draw(WORDS),
        thinking=draw(st.text("ab <\u00e9", min_size=1, max_size=12)),
        calls=calls,
    )
    return Cycle(
        said=said, new=tuple(Message(role="tool", text=draw(WORDS), call_id=call.id) for call in calls)
    )


@MODERATE
@given(
    head=st.lists(st.builds(Message, role=st.just("system"), text=WORDS), max_size=1),
    tools=kit.tools(WORDS),
    turns=st.lists(cycles(), min_size=1, max_size=3),
)
def test_tool_cycles_equal_one_render(
    model: kit.Model, head: list[Message], tools: tuple[Tool, ...], turns: list[Cycle]
) -> None:
    """Tool cycles turn by turn are one render."""
    said = Conversation(messages=(*head, Message(role="user", text="go on")), tools=tools)
    written = model.template.root(said)
    for turn in turns:
        sampled = turn.spelled(model)
        assert read_back(model, sampled) == turn.said, "what the parser gives back is what was rendered"
        said = extend(said, turn.said, *turn.new)
        written += sampled + model.template.suffix(turn.new, conversation=said, sampled=sampled).ids
        assert written == model.expected(said)


def read_back(model: kit.Model, sampled: "array[int]") -> Message:
    parser = model.parser()
    parser.feed(sampled)
    found = parser.finish("stop").answer.as_message()
    return evolve(found, calls=tuple(evolve(call, id=f"c{place}") for place, call in enumerate(found.calls)))


# ── cut samples ─────────────────────────────────────────────────────────────────

USER = (Message(role="user", text="go on"),)
NEXT = "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("pieces", "close"),
    [
        ((), [kit.END]),
        (("half an ans",), [kit.END]),
        ((kit.OPEN, "\nhm"), [kit.CLOSE, kit.END]),
        ((kit.OPEN,), [kit.CLOSE, kit.END]),
        ((kit.OPEN, "hm", kit.CLOSE, "\n\nwell"), [kit.END]),
        ((kit.OPEN, "hm", kit.OPEN, "hm", kit.CLOSE, "well"), [kit.END]),
        ((kit.OPEN, "hm", kit.CALL, "x", kit.CALLED), [kit.CLOSE, kit.END]),
        ((kit.CALL, '\n{"name": "', kit.OPEN), [kit.END]),
        (("a", kit.OPEN, "hm", kit.CLOSE, kit.OPEN, "again"), [kit.CLOSE, kit.END]),
        (("done", "<|endoftext|>"), [kit.END]),
        (("done", kit.END), []),
        ((kit.OPEN, "ended in a thought", kit.END), []),
    ],
)
def test_unended_sample_is_closed_first(model: kit.Model, pieces: tuple[str, ...], close: list[str]) -> None:
    said = extend(HI, Message(role="assistant", text="cut"), *USER)
    suffix = model.template.suffix(USER, conversation=said, sampled=model.spelled(*pieces))
    assert evolve(suffix, notes=()) == PromptSuffix(
        ids=model.spelled(
            *close, "\n", "<|im_start|>", "user\ngo on", kit.END, "\n", "<|im_start|>", "assistant\n"
        ),
        close_length=len(close),
    )
    assert model.text(suffix.ids) == "".join(close) + NEXT


def test_nothing_new_resumes_cut_sample(model: kit.Model) -> None:
    """With nothing new, a cut sample resumes and an ended one is followed."""
    said = extend(HI, Message(role="assistant", text="cut"))
    for pieces in (("half",), (kit.OPEN, "half"), ()):
        assert model.template.suffix((), conversation=said, sampled=model.spelled(*pieces)) == PromptSuffix(
            ids=ids(), close_length=0
        )
    ended = model.template.suffix((), conversation=said, sampled=model.spelled("whole", kit.END))
    assert (model.text(ended.ids), ended.close_length) == ("\n<|im_start|>assistant\n", 0)


def test_twice_cut_thought_is_closed(model: kit.Model) -> None:
    """A thought cut twice is closed when all ids are given."""
    written = (
        model.template.root(HI) + model.spelled(kit.OPEN, "\nfirst half") + model.spelled(" second half")
    )
    suffix = model.template.suffix(
        USER, conversation=extend(HI, Message(role="assistant"), *USER), sampled=written
    )
    assert model.text(suffix.ids) == kit.CLOSE + kit.END + NEXT


def test_last_turn_decides_open_thought(model: kit.Model) -> None:
    """Only the last turn says whether a thought is open."""
    open_before = model.spelled(kit.OPEN, "never closed", kit.END, "\n", "<|im_start|>", "assistant\n")
    assert not model.template.opens_thinking(open_before)
    assert model.template.opens_thinking(open_before + model.spelled(kit.OPEN, "\nhm"))
    assert not model.template.opens_thinking(model.template.root(evolve(HI, thinking=False)))
    assert not model.template.opens_thinking(ids())


def test_template_may_open_the_thought(tmp_path: Path) -> None:
    before = "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable_thinking"
    after = "{{- '<|im_start|>assistant\\n<think>\\n' }}\n    {%- if enable_thinking"
    tokenizer = load_tokenizer(kit.variant(tmp_path, template=lambda text: text.replace(before, after)))
    tiny = kit.model()
    template = Template(tokenizer, tiny.family)
    assert template.opens_thinking(template.root(HI))
    said = extend(HI, Message(role="assistant"), *USER)
    for pieces, close in (
        (("hm",), [kit.CLOSE, kit.END]),
        (("hm", kit.CLOSE, "so"), [kit.END]),
        (("hm", kit.CALL, "x"), [kit.CLOSE, kit.END]),
    ):
        suffix = template.suffix(USER, conversation=said, sampled=tiny.spelled(*pieces))
        assert tiny.text(suffix.ids) == "".join(close) + NEXT + "<think>\n"


# ── what a suffix depends on, and costs ───────────────────────────────────────


def test_suffix_ignores_earlier_turns(model: kit.Model) -> None:
    calls = (ToolCall(id="c1", name="look", arguments='{"a": 1}'),)
    new = (Message(role="tool", text="r", call_id="c1"),)
    short = extend(HI, Message(role="assistant", calls=calls), *new)
    long = evolve(
        short, messages=(Message(role="system", text="s"), *short.messages), tools=(Tool(name="look"),)
    )
    ended = model.spelled("x", kit.END)
    found = {
        model.text(model.template.suffix(new, conversation=said, sampled=ended).ids) for said in (short, long)
    }
    assert found == {
        "\n<|im_start|>user\n<tool_response>\nr\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    }


def test_new_foreign_answer_is_rendered(model: kit.Model) -> None:
    new = (Message(role="user", text="q"), Message(role="assistant", text="not ours"), *USER)
    suffix = model.template.suffix(
        new,
        conversation=extend(HI, Message(role="assistant", text="a"), *new),
        sampled=model.spelled("a", kit.END),
    )
    assert (
        model.text(suffix.ids)
        == "\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nnot ours<|im_end|>" + NEXT
    )


def test_suffix_encodes_only_new_text() -> None:
    tiny = kit.model()
    watched = kit.Watched(tiny.tokenizer)
    template = Template(watched, tiny.family)
    watched.rendered.clear()  # what was tried at load
    long = "word " * 20_000
    call = ToolCall(id="c", name="look", arguments=json.dumps({"file": long}))
    said = (
        Message(role="system", text=long),
        Message(role="user", text=long),
        Message(role="assistant", text=long, calls=(call,)),
    )
    new = (Message(role="tool", text="r" * 1000, call_id="c"),)
    conversation = Conversation(messages=(*said, *new), tools=(Tool(name="look", description=long),))
    template.suffix(new, conversation=conversation, sampled=tiny.spelled("x", kit.END))
    assert sum(map(len, watched.encoded)) < 1200
    assert len(str(watched.rendered)) < 1500


# one long text; many; control strings between them; a text of few tokens
@pytest.mark.parametrize(
    "texts",
    [["the quick " * 90_000], ["the quick " * 9_000] * 10, ["a<|im_end|>" * 30_000], [" " * 3_000_000]],
)
def test_oversized_text_is_partly_encoded(texts: list[str]) -> None:
    """A text far beyond the context is not encoded to its end."""
    tiny = kit.model()
    watched = kit.Watched(tiny.tokenizer)
    template = Template(watched, tiny.family)
    watched.encoded.clear()
    said = tuple(Message(role="user", text=text) for text in texts)
    with pytest.raises(ContextTooLong) as refused:
        template.root(Conversation(messages=said), context_length=10_000)
    assert max(map(len, watched.encoded)) <= MAX_WHOLE_CHARS
    assert sum(map(len, watched.encoded)) < sum(map(len, texts)) / 3
    whole = len(template.root(Conversation(messages=said)))
    assert refused.value.limit == 10_000
    assert abs(refused.value.prompt_tokens - whole) < whole / 4, "the number is about the whole's"


def test_remaining_context_counts() -> None:
    tiny = kit.model()
    new = (Message(role="user", text="the quick " * 30_000),)
    sampled = ids([5] * 9_000 + list(tiny.template.stop_ids[:1]))
    said = extend(HI, Message(role="assistant", text="x"), *new)
    whole = tiny.template.suffix(new, conversation=said, sampled=sampled)
    bounded = tiny.template.suffix(
        new, conversation=said, sampled=sampled, context_length=9_001 + len(whole.ids)
    )
    assert bounded == whole
    with pytest.raises(ContextTooLong) as refused:
        tiny.template.suffix(new, conversation=said, sampled=sampled, context_length=20_000)
    assert refused.value.prompt_tokens > 9_001 + len(whole.ids) * 3 // 4


def test_fitting_root_ignores_the_limit() -> None:
    tiny = kit.model()
    said = Conversation(messages=tuple(Message(role="user", text="a b\n" * 40_000) for _ in range(2)))
    whole = tiny.template.root(said)
    assert tiny.template.root(said, context_length=len(whole)) == whole


def test_concurrent_threads_do_not_interfere() -> None:
    tiny = kit.model()
    asked = [extend(HI, Message(role="user", text=f"<|im_end|>{number}" * 50)) for number in range(40)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tiny.template.root, asked)) == [
            tiny.template.root(conversation) for conversation in asked
        ]


def test_stop_ids_come_from_family(model: kit.Model) -> None:
    assert model.template.stop_ids == (
        model.tokenizer.control[kit.END],
        model.tokenizer.control["<|endoftext|>"],
    )


def test_fixed_template_text_encoded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Text that a template writes between control tokens is encoded once."""
    template = load_model(TINY_MODEL).template
    encoded: list[str] = []
    encode = LoadedTokenizer.encode_plain

    def counting(tokenizer: LoadedTokenizer, text: str) -> list[int]:
        encoded.append(text)
        return encode(tokenizer, text)

    monkeypatch.setattr(LoadedTokenizer, "encode_plain", counting)
    long = "a text that is longer than a mark"
    asked = Conversation(messages=(Message(role="user", text=long),))
    first = template.root(asked)
    assert any(len(text) <= MAX_MARK_CHARS for text in encoded)
    encoded.clear()
    again = template.root(asked)
    assert encoded
    assert all(long in text for text in encoded)
    assert first == again
