"""Where a request attaches: benign echoes keep tokens, a changed client message attaches above it, a path is
sound, and twins are told apart.
"""

from collections.abc import Callable

import pytest
from attrs import evolve
from merge_toys import Session, ask, renamed, rendered, said, system, told, user

from polarnode.core.conversation import Answer, Message, ToolCall
from polarnode.merge.attach import References, attach
from polarnode.merge.fingerprint import FingerprintCache
from polarnode.merge.ledger import Ledger

ARGUMENTS = '{"command": "ls -la", "timeout": 1.0, "quiet": true, "depth": 1}'


def two_steps() -> tuple[Session, list[Message]]:
    """A session of two turns with calls, and the history its client echoes."""
    session, messages = Session(), [system(), user()]
    for number in range(2):
        _, answer = session.say(
            ask(*messages),
            f"step {number}",
            [("bash", ARGUMENTS), ("bash", f'{{"n": {number}}}')],
            thinking="let me see",
        )
        messages += [answer, *(told(call, f"result {number} {k}") for k, call in enumerate(answer.calls))]
    return session, messages


def each(
    change: Callable[[Message], Message], role: str = "assistant"
) -> Callable[[list[Message]], list[Message]]:
    return lambda messages: [change(message) if message.role == role else message for message in messages]


def arguments(spell: Callable[[str], str]) -> Callable[[Message], Message]:
    return lambda message: evolve(
        message, calls=tuple(evolve(call, arguments=spell(call.arguments)) for call in message.calls)
    )


BENIGN: dict[str, Callable[[list[Message]], list[Message]]] = {
    "verbatim": lambda messages: messages,
    "text trimmed": each(lambda message: evolve(message, text=message.text.strip())),
    "text padded": each(lambda message: evolve(message, text=f"\n{message.text}  \n")),
    "thinking dropped": each(lambda message: evolve(message, thinking="")),
    "thinking changed": each(lambda message: evolve(message, thinking="something else")),
    "keys sorted": each(
        arguments(
            lambda text: text.replace(
                '"command": "ls -la", "timeout": 1.0', '"timeout": 1.0, "command": "ls -la"'
            )
        )
    ),
    "compact": each(arguments(lambda text: text.replace(": ", ":").replace(", ", ","))),
    "1.0 as 1": each(arguments(lambda text: text.replace("1.0", "1"))),
    "1 as 1.0": each(arguments(lambda text: text.replace('"depth": 1', '"depth": 1.00'))),
    "ids without underscore": lambda messages: [spelled(message, "_", "") for message in messages],
    "ids as toolu": lambda messages: [spelled(message, "call_", "toolu_") for message in messages],
    "ids gone": lambda messages: [
        spelled(message, message_id, "") for message in messages for message_id in [_id(message)]
    ],
    "call_id is None": each(lambda message: evolve(message, call_id=None), role="tool"),
}


def _id(message: Message) -> str:
    return message.call_id or (message.calls[0].id if message.calls else "none")


def spelled(message: Message, old: str, new: str) -> Message:
    call_id = None if message.call_id is None else message.call_id.replace(old, new)
    return evolve(renamed(message, old, new), call_id=call_id)


@pytest.mark.parametrize("change", BENIGN.values(), ids=BENIGN.keys())
def test_a_benign_echo_gives_the_same_prompt(change: Callable[[list[Message]], list[Message]]) -> None:
    session, messages = two_steps()
    plain = session.begin(ask(*messages, user("next")))
    echoed = session.begin(ask(*change(messages), user("next")))
    assert echoed.plan.parent == plain.plan.parent == 1
    assert echoed.plan.matched == len(messages) - 2
    assert echoed.prompt == plain.prompt
    assert echoed.plan.notes == ()


EXCUSED: dict[str, Callable[[Message], Message]] = {
    "text": lambda message: evolve(message, text=""),
    "arguments": arguments(lambda text: text.replace("ls -la", "ls")),
    "names of calls": lambda message: evolve(
        message, calls=tuple(evolve(call, name="invalid") for call in message.calls)
    ),
}


@pytest.mark.parametrize(("field", "change"), EXCUSED.items(), ids=EXCUSED.keys())
@pytest.mark.parametrize(("old", "new"), [("_", "_"), ("_", ""), ("call_", "toolu_")])
def test_call_ids_excuse_edited_answer(
    field: str, change: Callable[[Message], Message], old: str, new: str
) -> None:
    """Our own message is excused by its call ids, and the edit is noted."""
    session, messages = two_steps()
    plain = session.begin(ask(*messages, user("next")))
    edited = session.begin(ask(*[spelled(m, old, new) for m in each(change)(messages)], user("next")))
    assert edited.prompt == plain.prompt
    assert (
        [note.split(":")[0] for note in edited.plan.notes] == ["edited", "edited"]
        if field != "arguments"
        else ["edited"]
    )
    assert edited.plan.notes[0].startswith(
        f"edited: message 2 differs from turn 0's answer in {field}; its tokens are kept"
    )


def test_signature_excuses_turn_without_calls() -> None:
    session = Session()
    turn, answer = session.say(ask(user()), "the answer", thinking="hm")
    signed = evolve(answer, text="", refs=(session.lineages.references.signature(turn.index),))
    assert session.lineages.plan(ask(user(), signed, user("next"))).parent == 0
    assert session.lineages.plan(ask(user(), evolve(signed, refs=()), user("next"))).parent is None
    assert (
        session.lineages.plan(ask(user(), evolve(signed, text="another answer"), user("next"))).parent is None
    )


def test_foreign_call_ids_excuse_nothing() -> None:
    session = Session()
    pending = session.begin(ask(user()))
    foreign = ToolCall(id="call_from_elsewhere", name="bash", arguments="{}")
    session.end(pending, Answer(parts=(foreign,), finish_reason="tool_calls"))
    edited = Message(
        role="assistant",
        calls=(evolve(foreign, name="invalid"),),
        refs=(session.lineages.references.signature(0),),
    )
    assert session.lineages.plan(ask(user(), edited, told(foreign, "ok"))).parent is None


REWRITES: dict[str, Callable[[Message], Message]] = {
    "text changed": lambda message: evolve(message, text=message.text + " and more"),
    "a call dropped": lambda message: evolve(message, calls=message.calls[:1]),
    "calls swapped": lambda message: evolve(message, calls=message.calls[::-1]),
    "a call added": lambda message: evolve(
        message, calls=(*message.calls, ToolCall(id="call_x", name="bash", arguments="{}"))
    ),
    "forged ids": lambda message: evolve(
        message,
        text="",
        calls=tuple(evolve(call, id=f"call_{k:018x}") for k, call in enumerate(message.calls)),
    ),
    "all dropped": lambda message: evolve(message, text="", calls=()),
}


@pytest.mark.parametrize("change", REWRITES.values(), ids=REWRITES.keys())
def test_rewritten_answer_rendered_as_shown(change: Callable[[Message], Message]) -> None:
    """A rewritten answer is rendered as the client shows it."""
    session, messages = two_steps()
    place = max(at for at, message in enumerate(messages) if message.role == "assistant")
    rewritten = [*messages[:place], change(messages[place]), *messages[place + 1 :], user("next")]
    pending = session.begin(ask(*rewritten))
    assert pending.plan.parent == 0
    assert pending.plan.new == tuple(rewritten[3:])
    assert (pending.plan.kind, pending.plan.reason) == ("branch", "rewrite")
    assert pending.plan.notes[0].startswith(f"rewritten: message {place} differs from turn 1's answer in ")
    assert list(pending.delta[:-3])[-len(rendered(rewritten[3:])) :] == rendered(rewritten[3:])


@pytest.mark.parametrize("place", range(7))
def test_changed_client_message_attaches_above(place: int) -> None:
    """A changed client message attaches strictly above it."""
    session, messages = two_steps()
    if messages[place].role == "assistant":
        pytest.skip("ours")
    changed = [*messages, user("next")]
    changed[place] = evolve(changed[place], text=changed[place].text + " ")
    pending = session.begin(ask(*changed))
    assert pending.plan.matched <= place
    assert pending.plan.parent == (None if place < 2 else 0 if place < 6 else 1)
    assert changed[place] in pending.plan.new
    assert (pending.plan.parent, pending.plan.reason) != (None, "rewrite") or place < 2


def test_empty_message_counts_in_path() -> None:
    """An empty result, and a turn that was only a call: without it the path is another."""
    session = Session()
    _, answer = session.say(ask(system(), user()), "", [("bash", "{}")])
    result = told(answer.calls[0], "")
    _, after = session.say(ask(system(), user(), answer, result), "done")
    assert session.begin(ask(system(), user(), answer, result, after, user("next"))).plan.parent == 1
    for left_out in (answer, result):
        kept = [
            message
            for message in (system(), user(), answer, result, after, user("next"))
            if message is not left_out
        ]
        assert session.begin(ask(*kept)).plan.parent != 1


def test_references_never_override_client_change() -> None:
    """References never override a changed client message."""
    session, messages = two_steps()
    changed = [messages[0], user("do something else"), *messages[2:]]
    assert session.lineages.plan(ask(*changed)).parent is None


def test_match_continues_past_foreign_message() -> None:
    """A foreign assistant message is no match, but later messages may be."""
    session = Session()
    shown = [system(), user("example"), said("like this"), user("now you")]
    first, answer = session.say(ask(*shown), "like that")
    assert first.kind == "root"
    assert first.notes == ("foreign: message 2 is an assistant message this session did not sample there",)
    pending = session.begin(ask(*shown, answer, user("next")))
    assert (pending.plan.parent, pending.plan.matched, pending.plan.notes) == (0, 5, ())


def test_deepest_match_wins() -> None:
    session, messages = two_steps()
    turn, answer = session.say(ask(*messages), "done")
    assert session.lineages.plan(ask(*messages, answer)).parent == turn.index
    assert session.lineages.plan(ask(*messages, answer, user("more"))).parent == turn.index


# ── twins ─────────────────────────────────────────────────────────────────────


def twins(calls: bool) -> tuple[Session, list[Message]]:
    session = Session()
    made = [session.say(ask(user()), "same", [("bash", "{}")] if calls else [])[1] for _ in range(3)]
    return session, made


@pytest.mark.parametrize("which", [0, 1, 2])
def test_call_ids_tell_twins_apart(which: int) -> None:
    session, made = twins(calls=True)
    pending = session.begin(ask(user(), made[which], told(made[which].calls[0], "ok")))
    assert pending.plan.parent == which
    assert pending.plan.notes == ()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_result_or_signature_tells_twins_apart(which: int) -> None:
    session, made = twins(calls=True)
    bare = renamed(made[0], made[0].calls[0].id, "")
    assert session.begin(ask(user(), bare, told(made[which].calls[0], "ok"))).plan.parent == 2, (
        "the result is not yet in the matched path"
    )
    signed = evolve(bare, refs=(session.lineages.references.signature(which),))
    assert session.begin(ask(user(), signed, told("", "ok"))).plan.parent == which


def test_twins_without_references_take_latest() -> None:
    """Twins without references are ambiguous, and the latest is taken."""
    session, made = twins(calls=False)
    plan = session.lineages.plan(ask(user(), made[0], user("next")))
    assert plan.parent == 2
    assert plan.notes == ("ambiguous: turns 0, 1, 2 fit equally well, the latest is taken",)


def test_forged_reference_chooses_no_twin() -> None:
    session, made = twins(calls=False)
    forged = References("another session", b"x").signature(0)
    assert session.lineages.plan(ask(user(), evolve(made[0], refs=(forged,)), user("next"))).parent == 2


def test_parents_tell_twins_apart() -> None:
    session, made = twins(calls=True)
    children = [
        session.say(ask(user(), twin, told(twin.calls[0], "ok")), "then this")[1] for twin in made[:2]
    ]
    for which, child in enumerate(children):
        plan = session.lineages.plan(
            ask(user(), made[which], told(made[which].calls[0], "ok"), child, user("next"))
        )
        assert plan.parent == 3 + which
        assert plan.notes == ()


# ── the pass itself ───────────────────────────────────────────────────────────


def test_empty_session_matches_nothing() -> None:
    found = attach(
        ask(system(), user()),
        "agent-1",
        ledger=Ledger(),
        references=References("s", b"k"),
        memo=FingerprintCache(),
    )
    assert (found.parent, found.matched, found.notes) == (None, 0, ())
    assert found.path.agent != "-"
    assert found.path.opening == found.path.key[:8]


def test_key_labels_depend_on_beginning() -> None:
    session, messages = two_steps()
    one = session.lineages.plan(ask(*messages)).before_key.split(".")
    other = session.lineages.plan(ask(*messages, user("x"))).before_key.split(".")
    assert one[:5] == other[:5]
    assert one[5] != other[5]
    changed = session.lineages.plan(ask(system("be bad"), *messages[1:])).before_key.split(".")
    assert changed[:3] == one[:3]
    assert changed[3] != one[3]
    assert changed[4] != one[4]


# ── where a request leaves an earlier one ─────────────────────────────────────


def diverged(*messages: Message) -> tuple[str, ...]:
    """The notes of a request of these messages, in a session whose one conversation went on for two turns."""
    session = Session()
    _, one = session.say(ask(system(), user()), "one", [("bash", "{}")])
    result = told(one.calls[0], "a.txt")
    _, two = session.say(ask(system(), user(), one, result), "two")
    session.say(ask(system(), user(), one, result, two, user("more")), "three")
    known = {"one": one, "result": result, "two": two}
    return session.begin(
        ask(
            *(
                known.get(message.text, message) if message.role == "assistant" else message
                for message in messages
            )
        )
    ).plan.notes


@pytest.mark.parametrize(
    ("messages", "note"),
    [
        (
            (system(), user(), said("one"), told("x", "[cleared]"), said("two"), user("on")),
            "diverged: message 3 (tool) is not",
        ),
        (
            (system(), user(), said("one"), told("x", "a.txt"), said("two"), user("else")),
            "diverged: message 5 (user) is not",
        ),
        ((system(), user(), said("one"), user("interrupted")), "diverged: message 3 (user) is not"),
    ],
)
def test_first_differing_message_is_noted(messages: tuple[Message, ...], note: str) -> None:
    assert any(found.startswith(note) for found in diverged(*messages))


@pytest.mark.parametrize(
    "messages",
    [
        (system(), user("another task")),
        (system("other"), user()),
        (system(), user(), said("one"), told("x", "a.txt")),
        (system(), user(), said("one"), told("x", "a.txt"), said("rewritten"), user("on")),
    ],
)
def test_unchanged_message_is_not_noted(messages: tuple[Message, ...]) -> None:
    """Messages that differ in nothing of the client's are not noted as changed."""
    assert not any(found.startswith("diverged") for found in diverged(*messages))
