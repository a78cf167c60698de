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


def test_openclaw_last_message_goes() -> None:
    """OpenClaw's last message goes, so that each request extends the one before."""
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
def test_person_words_beside_context_stay(text: str, rest: str) -> None:
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
def test_question_or_other_text_stays(messages: tuple[Message, ...]) -> None:
    """A message that is no context, or is the question, stays."""
    assert without_volatile(messages) == (messages, False)


def test_unexplained_context_message_goes() -> None:
    """A last message of nothing else goes though nothing explains it."""
    assert without_volatile((PROMPT, CALLED, RESULT, user(CONTEXT))) == ((PROMPT, CALLED, RESULT), True)


def test_many_markers_take_linear_time() -> None:
    """Many marks cost no more than their length."""
    hostile = (OPENCLAW, PROMPT, user(f"{BEGIN}\n" * 100_000))
    before = process_time()
    assert without_volatile(hostile) == (hostile, False)
    assert process_time() - before < 5  # a fraction of a second; hours if each mark looked for its end


def test_only_billing_line_goes() -> None:
    """Claude Code's billing line goes, and no other."""
    assert without_billing_line("x-anthropic-billing-header: cc_version=2; cch=ab;\nYou code.") == "You code."
    assert without_billing_line("x-anthropic-billing-header: alone") == ""
    assert (
        without_billing_line("Say x-anthropic-billing-header: aloud.")
        == "Say x-anthropic-billing-header: aloud."
    )


# ── the marker of a resumed conversation ──────────────────────────────────────

DID_NOTHING = Message(role="assistant", text="No response requested.")
TALK = (OPENCLAW, PROMPT, CALLED, RESULT)


def test_resume_marker_goes_everywhere() -> None:
    """The marker goes wherever it stands, with what Claude put before it."""
    marker, answer = user(RESUME_MARKER), Message(role="assistant", text="The file is written.")
    assert without_marker((*TALK, marker)) == TALK
    assert without_marker((*TALK, DID_NOTHING, marker)) == TALK
    # in later requests, and in those of a fork of a fork
    later = (*TALK, DID_NOTHING, marker, CALLED, RESULT, marker, answer)
    assert without_marker(later) == (*TALK, CALLED, RESULT, answer)


def test_environment_update_goes_with_marker() -> None:
    """Claude's update on its environment goes only beside a marker."""
    update = Message(role="system", text="# Environment update\n - Is a git repository: true (was false)")
    marker, other = user(RESUME_MARKER), Message(role="system", text="ToolSearch is no longer available.")
    both = Message(role="system", text=f"{update.text}\n\n{other.text}")
    assert without_marker((*TALK, DID_NOTHING, marker, update, CALLED, RESULT)) == (*TALK, CALLED, RESULT)
    assert without_marker((*TALK, marker, both)) == (*TALK, other)
    # of another moment, or of something else
    assert without_marker((*TALK, update, marker, CALLED, update)) == (*TALK, update, CALLED, update)
    assert without_marker((*TALK, marker, other)) == (*TALK, other)


@pytest.mark.parametrize("times", [2, 3])
def test_adjacent_markers_all_go(times: int) -> None:
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
def test_text_beside_marker_stays(text: str, rest: str) -> None:
    """Other parts of the marker's message stay as they are."""
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
def test_only_marker_messages_go(messages: tuple[Message, ...]) -> None:
    """Nothing else goes with the marker."""
    assert without_marker(messages) == messages
