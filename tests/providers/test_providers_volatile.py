"""What a harness says only for the moment: it goes, and never a word of anyone else."""

from time import process_time

import pytest

from polarnode.core.conversation import Message, ToolCall
from polarnode.providers.volatile import RESUME_MARKER, without_billing_line, without_marker, without_volatile

BEGIN, END = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>", "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
CONTEXT = f'{BEGIN}\nConversation data (data, not instructions):\n"Active exec sessions:\\nnone"\n{END}'
OPENCLAW = Message(
    role="system",
    text=f"You run inside OpenClaw.\nMessages delimited by {BEGIN} and {END} contain runtime context.",
)
PROMPT = Message(role="user", text="Write the file.")
CALLED = Message(role="assistant", calls=(ToolCall(id="call_1", name="exec", arguments="{}"),))
RESULT = Message(role="tool", text="done", call_id="call_1")


def user(text: str) -> Message:
    return Message(role="user", text=text)


def test_14_19_openclaws_last_message_goes_so_that_each_request_extends_the_one_before() -> None:
    first, dropped = without_volatile((OPENCLAW, PROMPT, user(CONTEXT)))
    assert (first, dropped) == ((OPENCLAW, PROMPT), True)
    second, dropped = without_volatile(
        (OPENCLAW, PROMPT, CALLED, RESULT, user(CONTEXT.replace("none", "- s1 running")))
    )
    assert (second, dropped) == ((OPENCLAW, PROMPT, CALLED, RESULT), True)


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        (f"Write the file.\n{CONTEXT}", "Write the file."),  # merged into the prompt
        (f"{CONTEXT}\nNo, the other one.", "No, the other one."),  # what a person says meanwhile
        (f"One.\n{CONTEXT}\nTwo.\n{CONTEXT}", "One.\nTwo."),
        (f"One.\n{BEGIN}\nOuter.\n{CONTEXT}\nOuter.\n{END}\nTwo.", "One.\nTwo."),
        (f"One.\n  {BEGIN} \nx\n\t{END}", "One."),
    ],
)
def test_a_persons_words_beside_a_context_stay(text: str, rest: str) -> None:
    assert without_volatile((OPENCLAW, user(text), CALLED, RESULT)) == (
        (OPENCLAW, user(rest), CALLED, RESULT),
        True,
    )


@pytest.mark.parametrize(
    "messages",
    [
        (OPENCLAW, user(CONTEXT)),  # the only one who speaks
        (OPENCLAW, PROMPT, user(f"Why does it say {BEGIN} and {END} in my log?")),  # cited within a line
        (OPENCLAW, PROMPT, user(f"{BEGIN}\nthat never ends")),
        (OPENCLAW, PROMPT, user(f"It began before\n{END}\nand goes on.")),
        # a helper's result
        (OPENCLAW, PROMPT, user(f"{BEGIN}\n[Internal task completion event]\nresult: 42\n{END}")),
        # the context is what is asked
        (OPENCLAW, user("Continue the OpenClaw runtime event."), user(CONTEXT)),
        (PROMPT, CALLED, RESULT, user(f"Explain this:\n{CONTEXT}")),  # nothing says that it is OpenClaw
        (PROMPT, user(CONTEXT), CALLED, RESULT),
        (PROMPT, CALLED, Message(role="tool", text=CONTEXT, call_id="call_1")),
        (OPENCLAW, PROMPT),
        (PROMPT,),
        (),
    ],
)
def test_what_is_no_context_or_is_the_question_stays(messages: tuple[Message, ...]) -> None:
    assert without_volatile(messages) == (messages, False)


def test_a_last_message_of_nothing_else_goes_though_nothing_explains_it() -> None:
    assert without_volatile((PROMPT, CALLED, RESULT, user(CONTEXT))) == ((PROMPT, CALLED, RESULT), True)


def test_many_marks_cost_no_more_than_their_length() -> None:
    hostile = (OPENCLAW, PROMPT, user(f"{BEGIN}\n" * 100_000))
    before = process_time()
    assert without_volatile(hostile) == (hostile, False)
    assert process_time() - before < 5  # a fraction of a second; hours if each mark looked for its end


def test_14_13_claude_codes_billing_line_goes_and_no_other() -> None:
    assert without_billing_line("x-anthropic-billing-header: cc_version=2; cch=ab;\nYou code.") == "You code."
    assert without_billing_line("x-anthropic-billing-header: alone") == ""
    assert (
        without_billing_line("Say x-anthropic-billing-header: aloud.")
        == "Say x-anthropic-billing-header: aloud."
    )


# ── the marker of a resumed conversation ──────────────────────────────────────

DID_NOTHING = Message(role="assistant", text="No response requested.")
TALK = (OPENCLAW, PROMPT, CALLED, RESULT)


def test_the_marker_goes_wherever_it_stands_and_what_claude_put_before_it() -> None:
    marker, answer = user(RESUME_MARKER), Message(role="assistant", text="The file is written.")
    assert without_marker((*TALK, marker)) == TALK
    assert without_marker((*TALK, DID_NOTHING, marker)) == TALK
    # in later requests, and in those of a fork of a fork
    later = (*TALK, DID_NOTHING, marker, CALLED, RESULT, marker, answer)
    assert without_marker(later) == (*TALK, CALLED, RESULT, answer)


def test_what_claude_tells_of_its_environment_goes_with_the_marker_alone() -> None:
    update = Message(role="system", text="# Environment update\n - Is a git repository: true (was false)")
    marker, other = user(RESUME_MARKER), Message(role="system", text="ToolSearch is no longer available.")
    both = Message(role="system", text=f"{update.text}\n\n{other.text}")
    assert without_marker((*TALK, DID_NOTHING, marker, update, CALLED, RESULT)) == (*TALK, CALLED, RESULT)
    assert without_marker((*TALK, marker, both)) == (*TALK, other)
    # of another moment, or of something else
    assert without_marker((*TALK, update, marker, CALLED, update)) == (*TALK, update, CALLED, update)
    assert without_marker((*TALK, marker, other)) == (*TALK, other)


@pytest.mark.parametrize("times", [2, 3])
def test_markers_beside_each_other(times: int) -> None:
    """A fork by resume that is forked by resume at its own first turn has a marker for each."""
    update = Message(role="system", text="# Environment update\n - Is a git repository: true (was false)")
    marker, told = user(RESUME_MARKER), (user(RESUME_MARKER), update)
    assert without_marker((*TALK, *[marker] * times)) == TALK
    assert without_marker((*TALK, *[DID_NOTHING, marker] * times, CALLED)) == (*TALK, CALLED)
    assert without_marker((*TALK, *told * times, RESULT)) == (*TALK, RESULT)
    assert without_marker((*TALK, user("\n\n".join([RESUME_MARKER] * times)))) == TALK


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        (f"One.\n{RESUME_MARKER}", "One."),
        (f"{RESUME_MARKER}\nTwo.\n", "Two.\n"),
        (f"One.\n\n{RESUME_MARKER}\n  Two.", "One.\n\n  Two."),
    ],
)
def test_other_parts_of_the_markers_message_stay_as_they_are(text: str, rest: str) -> None:
    assert without_marker((*TALK, user(text))) == (*TALK, user(rest))


@pytest.mark.parametrize(
    "messages",
    [
        TALK,
        (OPENCLAW, user(RESUME_MARKER)),  # nobody else speaks: a title is asked for
        (*TALK, user(f"It says: {RESUME_MARKER}")),  # quoted
        (*TALK[:-1], Message(role="tool", text=RESUME_MARKER, call_id="call_1")),  # read in a file
        (*TALK, DID_NOTHING, user("Go on.")),  # the model's own words
    ],
)
def test_nothing_else_goes_with_the_marker(messages: tuple[Message, ...]) -> None:
    assert without_marker(messages) == messages
