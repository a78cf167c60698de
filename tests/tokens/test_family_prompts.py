"""Every family's prompts: transformers' own for harmless text, no control id from a client, and turn by turn
what one render gives.

What follows a turn is kept readable in `data/prompts/BYTE_FAMILY.txt`; a file that is missing is written, and the
test fails once so that somebody looks at it.
"""

import json
import re
from array import array
from collections.abc import Sequence
from itertools import cycle as cycle_of
from pathlib import Path
from typing import Any

import pytest
import tokens_kit as kit
from attrs import evolve
from family_fixtures import FAMILIES, family_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polarnode.core.arrays import ids
from polarnode.core.conversation import Conversation, Json, Message, Role, Tool, ToolCall
from polarnode.core.errors import Refused
from polarnode.tokens.rendering import AnsweredTurn, TemplateRenderer, messages_shape, tools_shape
from polarnode.tokens.template import PromptSuffix

GOLDEN = Path(__file__).parents[1] / "data" / "prompts"
FEW = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
WORDS = st.text('ab /|~}é日🙂"\\', min_size=1, max_size=12).map(lambda text: f"w{text}w")
ASK = Message(role="user", text="q1")


@pytest.fixture(params=FAMILIES, scope="module")
def model(request: pytest.FixtureRequest) -> kit.Model:
    return kit.model(family_folder(request.param))


def conversation_of(model: kit.Model, text: Sequence[str], *, thinking: bool | None = None) -> Conversation:
    """A conversation of everything the family's template can be asked, with these texts in every place."""
    take = cycle_of(text)
    call = ToolCall(
        id="c1",
        name="look",
        arguments=(
            f'{{"a": {json.dumps(next(take), ensure_ascii=False)}, "n": 1.5, "deep": {{"z": [null, true]}}}}'
        ),
    )
    schema: dict[str, Json] = {
        "type": "object",
        "properties": {"a": {"type": "string", "description": next(take)}},
        "required": ["a"],
    }
    said: list[Message] = [Message(role="system", text=next(take)), Message(role="user", text=next(take))]
    said += [
        Message(role="assistant", text=next(take), thinking=next(take)),
        Message(role="user", text=next(take)),
    ]
    limits = model.template.limits
    if limits.allow((Message(role="assistant", calls=(call,)), Message(role="tool"))):
        said += [
            Message(role="assistant", thinking=next(take), calls=(call,)),
            Message(role="tool", text=next(take), call_id="c1"),
        ]
    if limits.allow((ASK, Message(role="system"))):
        said.insert(3, Message(role="system", text=next(take)))
    tools = (Tool(name="look", description=next(take), parameters=schema),)
    return Conversation(
        messages=tuple(said), tools=tools if limits.allow((), tools) else (), thinking=thinking
    )


def reference(model: kit.Model, conversation: Conversation, *, tokenize: bool, prompt: bool = True) -> Any:
    """What transformers makes of it."""
    options = (
        {}
        if conversation.thinking is None
        else {"enable_thinking": conversation.thinking, "thinking": conversation.thinking}
    )
    return model.reference.apply_chat_template(
        messages_shape(conversation.messages, manner=model.family.manner),
        tools=tools_shape(conversation.tools) or None,
        add_generation_prompt=prompt,
        tokenize=tokenize,
        **({"return_dict": False} if tokenize else {}),
        **options,
    )


# ── identity with transformers ────────────────────────────────────────────────


@pytest.mark.parametrize("thinking", [None, True, False])
def test_root_equals_transformers_prompt(model: kit.Model, thinking: bool | None) -> None:
    conversation = conversation_of(
        model, ["harmless", "caf\u00e9 { } \U0001f642", "two\nlines"], thinking=thinking
    )
    root = model.template.root(conversation)
    assert model.text(root) == reference(model, conversation, tokenize=False)
    assert list(root) == reference(model, conversation, tokenize=True)


@FEW
@given(texts=st.lists(WORDS, min_size=3, max_size=6))
def test_harmless_roots_are_what_transformers_writes(model: kit.Model, texts: list[str]) -> None:
    conversation = conversation_of(model, texts)
    assert list(model.template.root(conversation)) == reference(model, conversation, tokenize=True)


# ── no control ids from a client ────────────────────────────────────────────────


RECIPES = st.lists(
    st.lists(st.tuples(st.integers(0, 999), st.integers(0, 40), st.integers(0, 5)), min_size=1, max_size=3),
    min_size=3,
    max_size=6,
)


def hostile(model: kit.Model, recipes: Sequence[Sequence[tuple[int, int, int]]]) -> list[str]:
    """Control strings, their beginnings and their ends: what alone or beside the template's own text could
    become one.
    """
    control = sorted(model.tokenizer.control)

    def piece(which: int, cut: int, kind: int) -> str:
        word = control[which % len(control)]
        cut %= len(word)
        return (word, word[:cut], word[cut:], word + word, f"x{word}y", f"\n{word}\n")[kind]

    return ["a" + "".join(piece(*step) for step in recipe) + "z" for recipe in recipes]


def disarmed(model: kit.Model, text: str) -> str:
    firsts = {ord(word[0]): "\u2039" for word in model.tokenizer.control}
    return text.translate(firsts)


@FEW
@given(recipes=RECIPES)
def test_client_text_no_control_ids_in_root(
    model: kit.Model, recipes: list[list[tuple[int, int, int]]]
) -> None:
    """A client writes no control id in a root."""
    texts = hostile(model, recipes)
    root = model.template.root(conversation_of(model, texts))
    twin = model.template.root(conversation_of(model, [disarmed(model, text) for text in texts]))
    assert model.controls(root) == model.controls(twin)
    assert disarmed(model, model.text(root)) == disarmed(model, model.text(twin))


@FEW
@given(recipes=RECIPES)
def test_client_text_no_control_ids_in_suffix(
    model: kit.Model, recipes: list[list[tuple[int, int, int]]]
) -> None:
    """A client writes no control id in a suffix."""
    texts = hostile(model, recipes)

    def suffix(said: list[str]) -> "array[int]":
        conversation, new = following(model, said[0], said[1:])
        return model.template.suffix(new, conversation=conversation, sampled=model.spelled("x")).ids

    found, twin = suffix(texts), suffix([disarmed(model, text) for text in texts])
    assert model.controls(found) == model.controls(twin)
    assert disarmed(model, model.text(found)) == disarmed(model, model.text(twin))


def following(model: kit.Model, name: str, texts: Sequence[str]) -> tuple[Conversation, tuple[Message, ...]]:
    """A turn and what follows it: a tool's result where the family has calls, and a question."""
    call = ToolCall(id=f"i{name}", name=name, arguments="{}")
    calls = (call,) if model.family.call_syntax != "none" else ()
    results = (Message(role="tool", text=texts[0], call_id=call.id),) if calls else ()
    new = (*results, Message(role="user", text=texts[1]))
    return (
        Conversation(
            messages=(ASK, Message(role="assistant", text="" if calls else "said", calls=calls), *new)
        ),
        new,
    )


# ── turn by turn is what one render gives ───────────────────────────────────────

SAID = "SAID9"


@pytest.mark.parametrize("kind", ["tool", "two", "user", "system"])
@FEW
@given(texts=st.lists(WORDS, min_size=3, max_size=3))
def test_turn_and_suffix_are_one_render(model: kit.Model, kind: str, texts: list[str]) -> None:
    """The sample is what the template itself writes of the answer, so that prompt, sample and suffix must be
    the render of it all.
    """
    answer, new = cycle(kind, texts)
    before = conversation_of(model, texts)
    before = evolve(before, messages=before.messages[:2])  # the template must keep what is behind
    if not allowed(model, answer, new):
        return
    after = evolve(before, messages=(*before.messages, answer, *new))
    prompt, whole = model.template.root(before), str(reference(model, after, tokenize=False))
    sample, rest = sampled(model, whole, model.text(prompt))
    suffix = model.template.suffix(new, conversation=after, sampled=sample)
    assert suffix.close_length == 0
    assert model.text(sample + suffix.ids) == rest
    if whole.startswith(model.text(prompt)):
        assert model.text(prompt + sample + suffix.ids) == whole
    else:
        assert "<think>" in model.text(prompt)[-30:], "only a prompt that opens a thought is not shown again"


def cycle(kind: str, texts: list[str]) -> tuple[Message, tuple[Message, ...]]:
    names = {"tool": ("look",), "two": ("look", "go")}.get(kind, ())
    calls = tuple(
        ToolCall(id=f"c{name}", name=name, arguments=f'{{"a": "{SAID}"}}' if name == names[-1] else "{}")
        for name in names
    )
    answer = Message(role="assistant", text="" if calls else SAID, thinking="hm", calls=calls)
    if calls:
        return answer, tuple(
            Message(role="tool", text=text, call_id=call.id) for text, call in zip(texts, calls, strict=False)
        )
    return answer, (Message(role="system" if kind == "system" else "user", text=texts[0]),)


def allowed(model: kit.Model, answer: Message, new: Sequence[Message]) -> bool:
    if len(answer.calls) > 1 and model.family.manner.one_call:
        return False
    return model.template.limits.allow((answer, *new), follows=True)


def sampled(model: kit.Model, whole: str, prompt: str) -> "tuple[array[int], str]":
    """What the model would have sampled of a render, and the render from there on: with the boundary, if that
    ends the turn.
    """
    renderer = TemplateRenderer(model.tokenizer, model.family)
    ended, tail = renderer.after(SAID, whole)
    start = len(prompt) if whole.startswith(prompt) else whole.index(SAID)
    boundary = next(
        (
            word
            for word, token in model.tokenizer.control.items()
            if token in model.family.boundaries and tail.startswith(word)
        ),
        "",
    )
    text = whole[start : len(whole) - len(tail)] + boundary
    words = sorted(model.tokenizer.control, key=len, reverse=True)
    pieces = re.split("(" + "|".join(map(re.escape, words)) + ")", text)
    assert ended or boundary or model.family.turn_end is None
    return model.spelled(*filter(None, pieces)), whole[start:]


# ── what follows a turn, readable ─────────────────────────────────────────────

CASES: dict[str, tuple[tuple[str, ...], tuple[tuple[Role, str], ...]]] = {
    "a result": (("look",), (("tool", "r1"),)),
    "two results": (("look", "go"), (("tool", "r1"), ("tool", "r2"))),
    "a result and a question": (("look",), (("tool", "r1"), ("user", "q2"))),
    "a question": ((), (("user", "q2"),)),
    "a late system message": ((), (("system", "s2"),)),
    "another's answer": ((), (("user", "q2"), ("assistant", "a2"), ("user", "q3"))),
    "nothing new": ((), ()),
}


def golden(model: kit.Model) -> str:
    lines = []
    for case, (names, said) in CASES.items():
        calls = tuple(
            ToolCall(id=f"c{place}", name=name, arguments="{}") for place, name in enumerate(names, start=1)
        )
        new = tuple(
            Message(role=role, text=text, call_id=f"c{text[1:]}" if role == "tool" else None)
            for role, text in said
        )
        found: dict[str, list[str]] = {}
        for thinking in (None, True, False):
            found.setdefault(shown(model, calls, new, thinking), []).append(str(thinking))
        lines += [
            f"{case}{', thinking ' + ' or '.join(those) if len(found) > 1 else ''}: {text}"
            for text, those in found.items()
        ]
    return "\n".join(lines) + "\n"


def shown(
    model: kit.Model, calls: tuple[ToolCall, ...], new: tuple[Message, ...], thinking: bool | None
) -> str:
    """The stop id that fits best, and what follows it."""
    conversation = Conversation(
        messages=(ASK, Message(role="assistant", text="" if calls else "a", calls=calls), *new),
        thinking=thinking,
    )
    template = model.template

    def after(stop: int) -> PromptSuffix:
        return template.suffix(new, conversation=conversation, sampled=model.spelled("a") + ids((stop,)))

    try:
        stop, suffix = min(
            ((stop, after(stop)) for stop in template.stop_ids),
            key=lambda found: len(found[1].notes) + found[1].close_length,
        )
    except Refused as refused:
        return f"refused: {refused}"
    return f"{model.text(ids((stop,)))} | {model.text(suffix.ids)!r}" + "".join(
        f"\n    note: {note}" for note in suffix.notes
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_suffix_after_a_turn(name: str) -> None:
    path, found = GOLDEN / f"{name}.txt", golden(kit.model(family_folder(name)))
    if not path.exists():
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(found)
        pytest.fail(f"{path} is written anew: look at it")
    assert found == path.read_text()


# ── kimi's ids ────────────────────────────────────────────────────────────────


def test_kimi_results_keep_its_ids() -> None:
    """Kimi is shown results under the ids that it gave its calls."""
    model = kit.model(family_folder("kimi_k2"))
    first, second = (ToolCall(id=f"call_{name}", name=name, arguments="{}") for name in ("look", "go"))
    new = tuple(
        Message(role="tool", text=f"r{place}", call_id=call.id) for place, call in enumerate((first, second))
    )
    early = ToolCall(id="call_early", name="early", arguments="{}")
    before = (
        ASK,
        Message(role="assistant", calls=(early,)),
        Message(role="tool", text="r", call_id="call_early"),
    )
    conversation = Conversation(messages=(*before, Message(role="assistant", calls=(first, second)), *new))
    marks = (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    )
    section, begin, argument, end, over = marks
    spoken = (
        section,
        begin,
        "functions.look:7",
        argument,
        "{}",
        end,
        begin,
        "functions.go:8",
        argument,
        "{}",
        end,
        over,
        "<|im_end|>",
    )
    text = model.text(
        model.template.suffix(new, conversation=conversation, sampled=model.spelled(*spoken)).ids
    )
    assert "## Return of functions.look:7\nr0" in text
    assert "## Return of functions.go:8\nr1" in text
    root = model.text(model.template.root(conversation))
    assert [f"## Return of functions.{name}" in root for name in ("early:0", "look:1", "go:2")] == [
        True,
        True,
        True,
    ]
    assert "call_look" not in text + root


# ── thinking ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "opens"),
    [
        ("qwen3", (False, False, False)),
        ("qwen3_5", (True, True, False)),
        ("qwen3_5_nothink", (False, True, False)),
        ("qwen3_6", (True, True, False)),
        ("nemotron_3_nano", (True, True, False)),
        ("glm4", (False, False, False)),
        ("glm5", (True, True, False)),
        ("kimi_k2_5", (True, True, False)),
        ("gptoss", (False, False, False)),
        ("deepseek_v3", (True, True, True)),
        ("deepseek_r1_distill", (True, True, True)),
        ("deepseek_v3_1", (False, True, False)),
        ("minimax_m2", (True, True, True)),
        ("gemma4", (False, False, False)),
    ],
)
def test_prompt_knows_if_thought_opens(name: str, opens: tuple[bool, bool, bool]) -> None:
    """A prompt says whether it opens a thought."""
    model = kit.model(family_folder(name))
    roots = [
        model.template.root(Conversation(messages=(ASK,), thinking=thinking))
        for thinking in (None, True, False)
    ]
    assert tuple(map(model.template.opens_thinking, roots)) == opens


def test_gemma_prompt_opens_thought_after_result() -> None:
    model = kit.model(family_folder("gemma4"))
    conversation, new = following(model, "look", ["r", "q"])
    sample = model.spelled("<|tool_call>", "call:look{}", "<tool_call|>", "<|tool_response>")
    suffixes = [
        model.template.suffix(
            new[:1],
            conversation=evolve(conversation, messages=conversation.messages[:-1], thinking=t),
            sampled=sample,
        )
        for t in (True, False)
    ]
    assert [model.template.opens_thinking(sample + suffix.ids) for suffix in suffixes] == [True, False]


@pytest.mark.parametrize(
    ("name", "drops"),
    [
        ("qwen3", {"user"}),
        ("qwen3_5", {"user"}),
        ("nemotron_3_nano", {"user"}),
        ("nemotron_3_ultra", {"user"}),
        ("glm4", {"user"}),
        ("kimi_k2_5", {"user"}),
        ("gptoss", {"user"}),
        ("minimax_m2", {"user"}),
        ("gemma4", {"user"}),
        ("qwen3_2507", {"user", "tool"}),
        ("kimi_k2", {"user", "tool"}),
    ],
)
def test_which_messages_drop_earlier_thoughts(name: str, drops: set[str]) -> None:
    template = kit.model(family_folder(name)).template
    new = {
        "user": (Message(role="user", text="<odd>"),),
        "tool": (Message(role="tool", text="r", call_id="any"),),
    }
    assert {role for role, messages in new.items() if template.drops_thinking_before(messages)} == drops
    # which drops the thoughts before calls when an answer comes behind them, not a question
    if name not in ("gptoss", "kimi_k2_5"):
        assert template.drops_thinking_before((*new["tool"], *new["user"]))


def test_cut_call_is_not_closed() -> None:
    """A call that is cut stays open, and the turn is closed."""
    for name, pieces, close in (
        ("kimi_k2", ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.lo"), "<|im_end|>"),
        ("glm4", ("<tool_call>", "look\n"), ""),
        (
            "gptoss",
            ("<|channel|>", "commentary to=functions.look ", "<|constrain|>", "json", "<|message|>", '{"a'),
            "<|end|>",
        ),
        ("gptoss", ("<|channel|>", "anal"), "<|message|><|end|>"),
        ("gptoss", ("<|channel|>", "analysis", "<|message|>", "hm", "<|end|>"), ""),
    ):
        model = kit.model(family_folder(name))
        new = (Message(role="user", text="q2"),)
        conversation = Conversation(messages=(ASK, Message(role="assistant", text="cut"), *new))
        suffix = model.template.suffix(new, conversation=conversation, sampled=model.spelled(*pieces))
        assert model.text(suffix.ids[: suffix.close_length]) == close
        assert (
            model.template.suffix((), conversation=conversation, sampled=model.spelled(*pieces)).ids
            == model.spelled()
        )


def test_renderer_gives_the_suffix_too() -> None:
    model = kit.model(family_folder("glm4"))
    rendered = TemplateRenderer(model.tokenizer, model.family).following(
        (ASK,), answered=AnsweredTurn(), thinking=False
    )
    assert (rendered.ended, rendered.guard.show(rendered.text)) == (
        "",
        "<|user|>\nq1/nothink<|assistant|>\n<think></think>",
    )
