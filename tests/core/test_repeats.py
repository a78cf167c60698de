"""Equal turns in a row at the end of a conversation: what counts as one, and what never does."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarnode.core.conversation import Message, ToolCall
from polarnode.core.repeats import ERROR_END_CHARS, MAX_ERROR_CHARS, equal_turns

HEAD = (Message(role="system", text="work"), Message(role="user", text="begin"))
ANY = 1_000  # more than any run here

Step = tuple[str, Sequence[tuple[str, str, str]]]  # text, and the name, arguments and result of each call


def talk(*steps: Step, head: tuple[Message, ...] = HEAD) -> tuple[Message, ...]:
    """A conversation of turns with calls; every call has an id of its own."""
    messages = list(head)
    for number, (text, calls) in enumerate(steps):
        ids = [f"call_{number}_{place}" for place in range(len(calls))]
        made = tuple(
            ToolCall(id=one, name=name, arguments=arguments)
            for one, (name, arguments, _) in zip(ids, calls, strict=True)
        )
        messages.append(Message(role="assistant", text=text, thinking=f"thought {number}", calls=made))
        messages += (
            Message(role="tool", text=result, call_id=one)
            for one, (_, _, result) in zip(ids, calls, strict=True)
        )
    return tuple(messages)


def bash(result: str, command: str = "ls", text: str = "") -> Step:
    return text, [("bash", json.dumps({"command": command}), result)]


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["bash", "read"]), st.sampled_from(['{"a":1}', "{", '{"a":2}']), st.text(max_size=4)
    ),
    min_size=1,
    max_size=3,
)


@given(CALLS, st.lists(st.text(max_size=3), min_size=1, max_size=12), st.integers(1, 20))
def test_run_length_counts_equal_turns(
    calls: list[tuple[str, str, str]], texts: list[str], most: int
) -> None:
    """A run is as long as its equal turns whatever is written beside them."""
    assert equal_turns(talk(*((text, calls) for text in texts)), most) == min(most, len(texts))


@given(st.lists(st.sampled_from("abc"), max_size=30), st.integers(1, 30))
def test_run_matches_naive_count(results: list[str], most: int) -> None:
    """A run is what a naive reader counts."""
    run = 0
    for result in reversed(results):
        if result != results[-1]:
            break
        run += 1
    assert equal_turns(talk(*map(bash, results)), most) == min(most, run)


def test_only_final_turns_count() -> None:
    loop, other = bash("same"), bash("same", "pwd")
    assert equal_turns(talk(loop, loop, loop, other), ANY) == 1
    assert equal_turns(talk(loop, loop, other, loop, loop), ANY) == 2
    assert equal_turns(talk(*[loop, other] * 9), ANY) == 1  # a cycle is no run


@pytest.mark.parametrize(
    "messages",
    [
        (),
        HEAD,
        (*talk(bash("same"), bash("same")), Message(role="assistant", text="done")),  # nothing came back yet
        (Message(role="assistant", text="a prefix"),),
    ],
)
def test_no_run_without_final_result(messages: tuple[Message, ...]) -> None:
    """A conversation without a result at its end has no run."""
    assert equal_turns(messages, ANY) == 0


def test_arguments_compare_as_json_or_text() -> None:
    """Arguments are compared as JSON, and as text where they are none."""

    def of(*arguments: str) -> int:
        return equal_turns(talk(*(("", [("t", each, "r")]) for each in arguments)), ANY)

    assert of('{"a": 1, "b": [2]}', '{"b":[2],"a":1}') == 2
    assert of('{"a": 1}', '{"a": true}') == 1
    assert of('{"a": 1}', '{"a": 1.0}') == 1
    assert of("{", "{") == 2
    assert of("{", "[") == 1
    assert of("[" * 100_000, "[" * 100_001) == 1
    assert of("9" * 9_999, "9" * 10_000) == 1  # more digits than Python reads


def test_parallel_results_match_in_any_order() -> None:
    """Results of parallel calls belong to their calls in any order."""
    one = talk(("", [("a", "{}", "1"), ("b", "{}", "2")]))
    swapped = (*one[:-2], one[-1], one[-2])
    assert equal_turns((*one, *swapped[2:]), ANY) == 2
    crossed = talk(("", [("a", "{}", "2"), ("b", "{}", "1")]))
    assert equal_turns((*one, *crossed[2:]), ANY) == 1


def test_missing_result_is_not_empty() -> None:
    """A call without a result is not one with an empty result."""
    whole, call = talk(("", [("a", "{}", "")])), ToolCall(id="x", name="a", arguments="{}")
    lost = (Message(role="assistant", calls=(call,)), Message(role="user", text=""))
    assert equal_turns((*whole, *lost), ANY) == 1


def test_user_text_beside_result_counts() -> None:
    """A user's text beside a result is part of what came back."""

    def beside(*texts: str) -> int:
        messages = list(HEAD)
        for text in texts:
            messages += [*talk(bash("same"))[2:], Message(role="user", text=text)]
        return equal_turns(tuple(messages), ANY)

    assert beside("go on", "go on", "go on") == 3
    assert beside("go on", "go on", "look at the other file") == 1
    # what a harness adds about the moment is not
    assert beside("", "<system-reminder>12 turns left</system-reminder>", "") == 3


def nag(*turns: tuple[str, str]) -> tuple[Message, ...]:
    return (
        *HEAD,
        *(
            message
            for text, reply in turns
            for message in (Message(role="assistant", text=text), Message(role="user", text=reply))
        ),
    )


def test_callless_turns_compare_text_and_reply() -> None:
    """Turns without calls are equal with the same text and the same reply."""
    assert equal_turns(nag(*[("I am done.", "Call a tool.")] * 4), ANY) == 4
    assert equal_turns(nag(("I am done.", "Call a tool."), ("I give up.", "Call a tool.")), ANY) == 1
    assert equal_turns(nag(("Yes.", "And 2?"), ("Yes.", "And 3?")), ANY) == 1
    assert equal_turns(nag(("a", "Format error: no action"), ("b", "Format error: no action")), ANY) == 2


def test_split_answer_is_one_turn() -> None:
    """Halves of one answer are one turn."""
    halves = (Message(role="assistant", text="I am"), Message(role="assistant", text=" done."))
    reply = Message(role="user", text="Call a tool.")
    assert equal_turns((*nag(("I am done.", "Call a tool.")), *halves, reply), ANY) == 2


# ── the same error ────────────────────────────────────────────────────────────

ERRORS = [
    "bash: foo: command not found",
    "<tool_use_error>String to replace\nis missing</tool_use_error>",
    'Traceback (most recent call last):\n  File "a.py", line 1\nTypeError: no',
    "cat: state.txt: No such file or directory",
    "Error: it failed",
    "File does not exist.",
    "the file doesn't exist",
    '{"error": "permission denied"}',
    "failed to parse function arguments: EOF",
    "unsupported call: browse",
    "Exit code 2\nfatal: not a git repository",
    "x" * 2 * ERROR_END_CHARS + "\nAssertionError",
]
# what agents that make progress get turn after turn
HARMLESS = [
    "",
    "ok",
    "File written.",
    "The file has been updated successfully.",
    "No matches found",
    "No files found",
    "Exit code 1",
    '{\n  "returncode": 1,\n  "output": ""\n}',
    "10 passed, 0 failed",
    "no errors",
    '{"returncode": 0, "output": "0 lines, error.log"}',
    "<returncode>0</returncode> error.log",
    "error.log\nProcess exited with code 0",
    "x" * ERROR_END_CHARS + " error " + "x" * ERROR_END_CHARS,  # in the middle of an output
    "Error: " + "x" * MAX_ERROR_CHARS,
]


@pytest.mark.parametrize("error", ERRORS)
def test_same_error_counts_whatever_called(error: str) -> None:
    steps = [
        bash(error, "first"),
        bash(error, "second"),
        ("", [("read", "{}", error)]),
        ("", [("read", "{}", error), ("list", "[1]", error)]),
    ]
    assert equal_turns(talk(*steps), ANY) == 4
    assert equal_turns(talk(bash("ok", "0"), *steps), ANY) == 4
    assert equal_turns(talk(*steps, bash(error + "!", "fifth")), ANY) == 1  # another one
    assert equal_turns(talk(*steps, ("", [("a", "{}", error), ("b", "{}", "ok")])), ANY) == 1


@pytest.mark.parametrize("result", HARMLESS)
def test_progress_result_is_no_error(result: str) -> None:
    """A result that shows progress is no error."""
    assert equal_turns(talk(*(bash(result, f"step {number}") for number in range(9))), ANY) == 1
    assert equal_turns(talk(*[bash(result)] * 9), ANY) == 9  # but the same call again is a repeat


def test_runs_of_kinds_count_apart() -> None:
    """A run of one kind does not lengthen a run of the other."""
    failing = [bash("Error: no", f"step {number}") for number in range(3)]
    same = [bash("ok", "step 2")] * 2
    assert equal_turns(talk(*failing, *same), ANY) == 2
    assert equal_turns(talk(*same, *failing), ANY) == 3
    # the longer of both: equal turns are equal errors too
    assert equal_turns(talk(*failing, *[failing[2]] * 2), ANY) == 5


# ── what differs each time ────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1 failed in 0.12s", "1 failed in 10.03s"),
        ("Ran 3 tests in 0.001s\nFAILED", "Ran 3 tests in 0.012s\nFAILED"),
        ("Time: 1.5 seconds", "Time: 0.7 seconds"),
        ("took 3.25 ms", "took 4.5 ms"),
        (
            "Chunk ID: 0a1b2c\nWall time: 0.0456 seconds\nOutput:\nno",
            "Chunk ID: ffffff\nWall time: 1.2 seconds\nOutput:\nno",
        ),
        ("Process Group PGID: 32", "Process Group PGID: 57"),
        (f"[/tmp/pi-bash-{'0' * 16}.log]", f"[/tmp/pi-bash-{'f' * 16}.log]"),
        ("text", "text\n<system-reminder>\nnow\n</system-reminder>"),
    ],
)
def test_time_does_not_change_result(one: str, other: str) -> None:
    """The same result at another time is the same."""
    assert equal_turns(talk(bash(one), bash(other)), ANY) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("waited 10 s", "waited 20 s"),  # a poll that makes progress
        ("loss 0.51", "loss 0.49"),
        ("version 1.2 shipped", "version 1.3 shipped"),
        ("3 failed", "2 failed"),
        ("a", "A"),
    ],
)
def test_other_result_breaks_the_run(one: str, other: str) -> None:
    assert equal_turns(talk(bash(one), bash(other)), ANY) == 1
