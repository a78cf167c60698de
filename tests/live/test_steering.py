"""What the steered engine is made to say: the script in the model's own language, chosen from the prompt
alone. No engine, no container.
"""

import json
from array import array

import pytest
from matrix_cases import CASES, LED, LONG, Case, Step
from steering import BESIDE, Said, Script, decoded

from polarnode.core.arrays import ids
from polarnode.core.conversation import Answer, Conversation, Message, Tool
from polarnode.harnesses import HARNESSES
from polarnode.node.config import TINY_MODEL
from polarnode.tokens.parser import Parser
from polarnode.tokens.template import load_model


@pytest.fixture(scope="module")
def script() -> Script:
    return Script(load_model(TINY_MODEL))


def opening(case: Case, *, tools: bool = True, thinking: bool | None = None) -> Conversation:
    """What a harness asks at first: it speaks of calls itself, and names the case."""
    messages = (
        Message(role="system", text="Write <tool_call> to call."),
        Message(role="user", text=case.task()["instruction"]),
    )
    return Conversation(
        messages=messages,
        tools=(Tool(name=case.shell_tool),) if tools and case.shell_tool else (),
        thinking=thinking,
    )


def told(script: Script, prompt: "array[int]") -> tuple[Said, Answer]:
    """What the script says, and how the node reads it."""
    said = script.answer(prompt)
    assert said is not None
    model = script.model
    in_thought = model.template.opens_thinking(prompt)
    parser = Parser(tokenizer=model.tokenizer, family=model.family, call_id=str, opens_thinking=in_thought)
    parser.feed(ids(said.ids))
    return said, parser.finish("stop").answer


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_node_parses_each_scripted_step(script: Script, case: Case) -> None:
    """Turn after turn, each prompt holding what was said before: the steps in their order, with their calls
    as they stand in the case.
    """
    prompt = script.model.template.root(opening(case))
    for number, step in enumerate(case.steps):
        said, answer = told(script, prompt)
        assert (said.case, said.step) == (case.name, number)
        assert said.ids[-1] == script.model.family.turn_end
        assert answer.text.strip() == step.text
        assert answer.malformed_calls == 0
        assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [
            (call.name, call.arguments) for call in step.calls
        ]
        prompt = after(script, prompt, said)


def after(script: Script, prompt: "array[int]", said: Said) -> "array[int]":
    """The next prompt: something is told back, and the model is asked again."""
    sampled = prompt + ids(said.ids)
    new = Message(role="user", text="<tool_call> is only a word here.")
    return (
        sampled
        + script.model.template.suffix(
            (new,), conversation=Conversation(messages=(new,)), sampled=sampled
        ).ids
    )


def test_thought_opened_by_template_is_closed(script: Script) -> None:
    prompt = script.model.template.root(opening(CASES[0]))
    assert script.model.family.think_open is not None
    said, answer = told(script, prompt + ids([script.model.family.think_open]))
    assert (answer.text.strip(), len(answer.calls)) == (CASES[0].steps[0].text, 1)
    assert script.model.family.think_close in said.ids


def test_call_without_tools_is_beside(script: Script) -> None:
    said, answer = told(script, script.model.template.root(opening(CASES[0], tools=False)))
    assert (said.step, answer.text, answer.calls) == (None, BESIDE, ())


def test_conversation_without_case_is_free(script: Script) -> None:
    assert (
        script.answer(
            script.model.template.root(Conversation(messages=(Message(role="user", text="Hello."),)))
        )
        is None
    )


@pytest.mark.parametrize("case", LED, ids=lambda case: case.name)
def test_script_releases_its_harness(script: Script, case: Case) -> None:
    """Behind the scripted turns the policy is free, and stays so."""
    prompt = script.model.template.root(opening(case))
    for step in case.steps[:-1]:
        said, answer = told(script, prompt)
        assert [call.name for call in answer.calls] == [call.name for call in step.calls]
        prompt = after(script, prompt, said)
    assert script.answer(prompt) is None
    called = script._written(case.steps[0], prompt)
    assert script.answer(after(script, prompt, Said(case=case.name, step=None, ids=called))) is None


def test_cut_answer_is_continued(script: Script) -> None:
    prompt = script.model.template.root(opening(LONG))
    whole = told(script, prompt)[0].ids
    begun, rest = whole[:100], script.answer(prompt + ids(whole[:100]))
    assert rest is not None
    assert begun + rest.ids == whole


def test_last_step_is_repeated(script: Script) -> None:
    """A harness may ask again after the last word; it gets the same."""
    case = CASES[0]
    prompt = script.model.template.root(opening(case))
    for _ in range(len(case.steps) + 1):
        said, _ = told(script, prompt)
        prompt = after(script, prompt, said)
    assert said.step == len(case.steps) - 1


def test_cases_are_distinguished_by_name(script: Script) -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        assert script.answer(script.model.template.root(opening(case))).case == case.name  # type: ignore[union-attr]


def test_every_harness_api_has_a_case() -> None:
    plain = {case.name for case in CASES}
    assert {
        f"{name}.{api}" for name, harness in HARNESSES.items() if name != "shell" for api in harness.apis
    } <= plain
    assert {case.harness["name"] for case in CASES} == HARNESSES.keys() - {"shell"}
    assert {case.provider for case in CASES if case.in_ci} == {
        "openai_chat",
        "openai_responses",
        "anthropic",
        "google",
    }
    assert sum(case.in_ci for case in CASES) >= 6


def test_decoded_prompt_shows_rendered_text(script: Script) -> None:
    prompt = script.model.template.root(opening(CASES[0]))
    text = decoded(prompt, script.model.tokenizer)
    assert CASES[0].task()["instruction"] in text
    assert text.endswith("<|im_start|>assistant\n")
    assert Step("x") == Step(text="x")
