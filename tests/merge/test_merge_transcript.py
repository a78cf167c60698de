"""What was said, in words: each turn keeps what it heard, and a line of turns is the conversation its client
had.
"""

from attrs import evolve
from merge_toys import BASH, Session, ask, said, system, told, user

from polarnode.core import codec
from polarnode.core.codec.trajectories import READER, turns_json
from polarnode.core.conversation import Conversation, Message
from polarnode.core.trajectory import NewMessages, Turn
from polarnode.merge.figures import parse_tools, transcript


def talk(session: Session, index: int | None = None) -> Conversation | None:
    turns = {turn.index: turn for turn in session.turns}
    return transcript(turns, max(turns) if index is None else index)


def test_lineage_reads_as_clients_conversation() -> None:
    """A line of turns is the conversation that its client had."""
    session = Session()
    head = (system(), user())
    _, one = session.say(ask(*head), "looking", calls=[("bash", '{"command": "ls"}')], thinking="hm")
    result = told(one.calls[0], "a.txt")
    _, two = session.say(ask(*head, one, result), "done")
    found = talk(session)
    assert found == Conversation(messages=(*head, one, result, two), tools=(BASH,))
    assert talk(session, 0) == Conversation(messages=(*head, one), tools=(BASH,))


def test_turn_keeps_only_new_messages() -> None:
    """A turn keeps only what is new, and a root its head."""
    session = Session()
    first, one = session.say(ask(user("one"), thinking=False), "1")
    second, _ = session.say(ask(user("one"), one, user("two"), thinking=False), "2")
    assert first.new_messages is not None
    assert second.new_messages is not None
    assert (first.new_messages.messages, first.new_messages.thinking, parse_tools(first.new_messages)) == (
        (user("one"),),
        False,
        (BASH,),
    )
    assert (second.new_messages.messages, second.new_messages.thinking, second.new_messages.tools) == (
        (user("two"),),
        None,
        "",
    )


def test_resumed_answer_is_one_message() -> None:
    session = Session()
    turn, cut = session.say(ask(user()), "the beg", finish="length")
    after, _rest = session.say(ask(user(), cut), "inning")
    assert after.parent == turn.index
    assert talk(session) == Conversation(messages=(user(), said("the beginning")), tools=(BASH,))


def test_retried_answer_stands_once() -> None:
    session = Session()
    first = session.begin(ask(user()), request_key="k")
    session.end(first, session.answer(first.plan, "the beg", finish="abort"), state="partial")
    plan = session.lineages.resume(0, total=1)
    assert plan is not None
    again = evolve(
        session.turn(evolve(first, plan=plan), session.answer(plan, "the beginning")),
        prompt_delta=first.delta[:0],
    )
    again = evolve(
        again,
        new_messages=evolve(first.new_messages, messages=(), tools=""),
        prompt_length=session.turns[0].end,
    )
    session.lineages.commit(again)
    assert talk(session) == Conversation(messages=(user(), said("the beginning")), tools=(BASH,))


def test_unfinished_turn_has_no_answer() -> None:
    session = Session()
    pending = session.begin(ask(user()))
    session.end(pending, None, state="failed")
    assert talk(session) == Conversation(messages=(user(),), tools=(BASH,))


def test_references_are_no_words() -> None:
    session = Session()
    echoed = Message(role="assistant", text="elsewhere", refs=("0000000123456789",))
    turn, _ = session.say(ask(user(), echoed, user("go on")), "ok")
    assert turn.new_messages is not None
    assert turn.new_messages.messages[1] == said("elsewhere")


def test_lineage_with_gap_has_no_transcript() -> None:
    session = Session()
    _, one = session.say(ask(user()), "1")
    session.say(ask(user(), one, user("two")), "2")
    known = {turn.index: turn for turn in session.turns}
    assert transcript({1: known[1]}, 1) is None
    assert transcript({**known, 0: evolve(known[0], new_messages=None)}, 1) is None


def test_words_survive_the_journal() -> None:
    session = Session()
    first, _ = session.say(ask(user()), "ok", calls=[("bash", "{}")], thinking="t")
    odd = Message(
        role="assistant",
        text="\ud800 half, and \x00",
        calls=first.answer.calls if first.answer else (),
        thinking="hm",
    )
    turn = evolve(first, new_messages=NewMessages(messages=(odd, told("c1", "")), tools="[]", thinking=True))
    assert codec.unpack_turn(codec.pack_turn(turn)) == turn


def test_words_survive_full_row() -> None:
    session = Session()
    turn, _ = session.say(ask(system(), user(), thinking=True), "ok")
    for heard in (turn.new_messages, None):
        (row,) = turns_json((evolve(turn, new_messages=heard),), arrays="json")
        read = codec.read_json(codec.dump_json(row))
        assert isinstance(read, dict)
        assert (read["heard"] is None) == (heard is None)
        assert codec.structure({**read, "session_id": "s"}, Turn, converter=READER).new_messages == heard


def test_words_cost_beside_tokens() -> None:
    """Each message once: a session of n turns keeps n deltas, not n histories."""
    session = Session()
    history = [user("w " * 400)]
    for step in range(20):
        _, answer = session.say(ask(*history), f"step {step}", calls=[("bash", "{}")])
        history += [answer, told(answer.calls[0], "r " * 200)]
    with_words = sum(len(codec.pack_turn(turn)) for turn in session.turns)
    without = sum(len(codec.pack_turn(bare(turn))) for turn in session.turns)
    text = sum(len(message.text) for message in history)
    assert with_words - without < 1.3 * text + 100 * len(session.turns)


def bare(turn: Turn) -> Turn:
    return evolve(turn, new_messages=None)


def test_stop_string_stays_in_words() -> None:
    """The model wrote it, and reads it in the next prompt, whether or not the echo has it."""
    for ends in ("", "END"):
        session = Session()
        pending = session.begin(ask(user()))
        cut = evolve(session.answer(pending.plan, "one ", finish="stop_string"), stop_string="END")
        session.end(pending, cut)
        second, two = session.say(ask(user(), said(f"one {ends}"), user("more")), "two")
        assert second.parent == 0
        messages = (user(), said("one END"), user("more"), two)
        assert talk(session) == Conversation(messages=messages, tools=(BASH,))
        assert talk(session, 0) == Conversation(messages=messages[:2], tools=(BASH,))
