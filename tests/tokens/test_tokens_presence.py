"""A text that a template leaves out is refused with its path; one that is trimmed or written as JSON is
there.
"""

import pytest

from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.tokens.rendering import TextGuard, check_present


def check(text: str, *messages: dict[str, Json], tools: tuple[dict[str, Json], ...] = ()) -> None:
    guard = TextGuard.over("<", [*messages, *tools])
    inert, inert_tools = (
        [{name: guard.hide(value) for name, value in shape.items()} for shape in shapes]
        for shapes in (messages, tools)
    )
    check_present(inert, inert_tools, str(guard.hide(text)), guard)


def user(text: str) -> dict[str, Json]:
    return {"role": "user", "content": text}


def tool(name: str, description: str) -> dict[str, Json]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {}}}


@pytest.mark.parametrize("said", ["a word", "  a word\n", "", " \n", "<a word>", 'a "word"\n<b>'])
def test_present_text_is_found(said: str) -> None:
    """Text that the prompt holds, trimmed or as JSON, is found."""
    check(f"... {said.strip()} ...", user(said))
    check('... "' + said.strip().replace('"', '\\"').replace("\n", "\\n") + '" ...', user(said))


def test_order_does_not_matter() -> None:
    check("second first", user("first"), user("second"), user("first"))


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ({"role": "system", "content": "gone"}, "system message 'gone'"),
        ({"role": "tool", "content": "g" * 50}, "tool message 'g+\\.\\.\\.'"),
        (
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "gone", "arguments": {}}}],
            },
            "call 'gone'",
        ),
    ],
)
def test_missing_text_is_refused(message: dict[str, Json], what: str) -> None:
    with pytest.raises(Refused, match=f"leaves out the {what}: the model would never see it") as caught:
        check("nothing of it", message)
    assert caught.value.path == "$.messages"


@pytest.mark.parametrize("shown", ["look", "Look about."])
def test_tool_needs_name_and_description(shown: str) -> None:
    check("look: Look about.", tools=(tool("look", "Look about."),))
    with pytest.raises(Refused, match="leaves out the tool") as caught:
        check(shown, tools=(tool("look", "Look about."),))
    assert caught.value.path == "$.tools"
