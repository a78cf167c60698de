"""Lineages: how each request is planned and named, what a commit must agree with, and that all of it can be
rebuilt from the turns.
"""

from array import array

import pytest
from attrs import evolve
from merge_toys import BASH, SECRET, Pending, Session, ask, full, said, system, told, user

from polarnode.core.conversation import Message
from polarnode.core.errors import InvariantViolated
from polarnode.core.trajectory import Turn
from polarnode.merge.attach import Plan
from polarnode.merge.lineage import Lineages

CODEX_TELLS = "Another language model started to solve this problem and produced a summary"


def started() -> tuple[Session, Turn, Message]:
    session = Session()
    turn, answer = session.say(ask(system(), user()), "first", [("bash", "{}")])
    return session, turn, answer


def named(plan: Plan | Turn) -> tuple[str, str, int]:
    return plan.kind, plan.reason, plan.lineage


# ── kinds, reasons, lineages ──────────────────────────────────────────────────


def test_first_request_is_full_root() -> None:
    """The first request is a root of every message."""
    session = Session()
    pending = session.begin(ask(system(), user()))
    assert named(pending.plan) == ("root", "first", 0)
    assert pending.plan.new == (system(), user())
    assert (pending.plan.matched, pending.plan.total, pending.plan.parent) == (0, 2, None)
    assert list(pending.prompt) == full(ask(system(), user()))
    assert session.lineages.history(pending.plan) == array("i")


def test_appended_messages_extend_the_turn() -> None:
    session, turn, answer = started()
    result = told(answer.calls[0], "ok")
    pending = session.begin(ask(system(), user(), answer, result))
    assert named(pending.plan) == ("extend", "appended", 0)
    assert pending.plan.new == (result,)
    assert (pending.plan.matched, pending.plan.total) == (3, 4)
    assert session.lineages.history(pending.plan) == session.prompts[0] + turn.sampled


def test_nothing_new_resumes_cut_answer() -> None:
    session = Session()
    turn, answer = session.say(ask(user()), "half an", finish="length")
    pending = session.begin(ask(user(), answer))
    assert named(pending.plan) == ("continue", "cut_answer", 0)
    assert pending.plan.new == ()
    assert pending.prompt == session.prompts[0] + turn.sampled


def test_second_child_starts_a_branch() -> None:
    session, _, answer = started()
    first, _ = session.say(ask(system(), user(), answer, told(answer.calls[0], "ok")), "a")
    other = session.begin(ask(system(), user(), answer, told(answer.calls[0], "failed")))
    assert named(first) == ("extend", "appended", 0)
    assert named(other.plan) == ("branch", "sibling", 1)
    assert other.plan.parent == 0


def test_extended_turns_keep_their_lineage() -> None:
    session, _, answer = started()
    session.say(ask(system(), user(), answer, told(answer.calls[0], "ok")), "a")
    messages = [system(), user(), answer, told(answer.calls[0], "failed")]
    for number in range(3):
        turn, said_now = session.say(ask(*messages), f"b {number}")
        messages += [said_now, user("go on")]
        assert turn.lineage == 1
    assert session.begin(ask(user("elsewhere"))).plan.lineage == 2


@pytest.mark.parametrize(
    ("conversation", "reason"),
    [
        (ask(system(), user(), tools=(BASH, evolve(BASH, name="b"))), "tools"),
        (ask(system(), user(), tools=()), "tools"),
        (ask(system("you are a helper"), user()), "system"),
        (ask(system(), user(), thinking=False), "thinking"),
        (ask(system(), user("something else")), "conversation"),
        (ask(system(), user(), said("not what we said"), user("go on")), "rewrite"),
        (ask(system(), user(CODEX_TELLS), user("go on")), "compaction"),
    ],
)
def test_root_names_what_is_new(conversation, reason: str) -> None:  # type: ignore[no-untyped-def]
    session, _, _ = started()
    plan = session.lineages.plan(conversation)
    assert named(plan) == ("root", reason, 1)
    assert plan.new == conversation.messages


def test_interleaved_roots_keep_their_lineages() -> None:
    session = Session()
    lines = {name: [system(name), user()] for name in ("a", "b", "c")}
    for number in range(4):
        for name, messages in lines.items():
            turn, answer = session.say(ask(*messages), f"{name} {number}")
            messages += [answer, user("go on")]
            assert turn.lineage == "abc".index(name)
            assert turn.parent == (turn.index - 3 if number else None)


# ── retries ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("state", ["partial", "failed"])
def test_retry_after_failure_keeps_place(state) -> None:  # type: ignore[no-untyped-def]
    """The same path after a turn that did not end well is a retry in its place."""
    session, _, answer = started()
    conversation = ask(system(), user(), answer, told(answer.calls[0], "ok"))
    session.say(conversation, "hal", state=state)
    plan = session.lineages.plan(conversation)
    assert named(plan) == ("retry", "same_path", 0)
    assert plan.parent == 0


def test_retried_root_renders_as_root() -> None:
    session = Session()
    session.say(ask(user()), "hal", state="partial")
    pending = session.begin(ask(user()))
    assert named(pending.plan) == ("retry", "same_path", 0)
    assert pending.plan.parent is None
    assert pending.plan.new == (user(),)
    assert list(pending.prompt) == full(ask(user()))


def test_repeated_body_is_always_retry() -> None:
    """The same body again is a retry, even of a complete turn."""
    session = Session()
    session.say(ask(user()), "done", request_key="body-1")
    assert named(session.lineages.plan(ask(user()), request_key="body-1")) == ("retry", "same_request", 1)
    assert named(session.lineages.plan(ask(user("x")), request_key="body-2")) == ("root", "conversation", 2)


def test_same_path_after_completion_is_sample() -> None:
    """The same path after a complete turn is another sample."""
    session, _, answer = started()
    conversation = ask(system(), user(), answer, told(answer.calls[0], "ok"))
    session.say(conversation, "done")
    assert named(session.lineages.plan(conversation)) == ("branch", "sibling", 1)


def test_retry_of_extended_turn_starts_lineage() -> None:
    """A retry of a turn that was extended starts a lineage."""
    session = Session()
    _, half = session.say(ask(user()), "half", state="partial")
    session.say(ask(user(), half, user("go on")), "more")
    assert named(session.lineages.plan(ask(user()))) == ("retry", "same_path", 1)


def test_other_agents_path_is_no_retry() -> None:
    session = Session()
    session.say(ask(user()), "hal", state="partial")
    assert session.lineages.plan(ask(user()), hints={"agent": "a1"}).kind == "root"


def test_failed_turn_is_never_extended() -> None:
    """A failed turn is never extended, and takes no place."""
    session, _, answer = started()
    conversation = ask(system(), user(), answer, told(answer.calls[0], "ok"))
    failed, text = session.say(conversation, "broken", state="failed")
    assert failed.message_key == ""
    plan = session.lineages.plan(ask(*conversation.messages, text, user("go on")))
    assert plan.parent == 0
    assert (
        session.lineages.plan(ask(system(), user(), answer, told(answer.calls[0], "else"))).kind == "branch"
    )


def test_other_request_extends_past_failure() -> None:
    session, _, answer = started()
    session.say(ask(system(), user(), answer, told(answer.calls[0], "ok")), "broken", state="failed")
    assert named(session.lineages.plan(ask(system(), user(), answer, told(answer.calls[0], "shorter")))) == (
        "extend",
        "appended",
        0,
    )


def test_partial_turn_can_be_resumed() -> None:
    session = Session()
    turn, half = session.say(ask(user()), "half", state="partial")
    pending = session.begin(ask(user(), half, user("go on")))
    assert pending.plan.parent == turn.index
    assert pending.prompt[: len(session.prompts[0]) + len(turn.sampled)] == session.prompts[0] + turn.sampled


# ── requests in flight at once ────────────────────────────────────────────────


def test_requests_in_flight_become_siblings() -> None:
    session, _, answer = started()
    pending = [
        session.begin(ask(system(), user(), answer, told(answer.calls[0], text))) for text in ("a", "b", "c")
    ]
    assert [named(p.plan) for p in pending] == [
        ("extend", "appended", 0),
        ("branch", "sibling", 1),
        ("branch", "sibling", 2),
    ]
    for one in reversed(pending):
        session.end(one, session.answer(one.plan, f"answer {one.plan.index}"))
    assert [turn.parent for turn in session.turns] == [None, 0, 0, 0]
    assert [turn.index for turn in session.turns] == [0, 1, 2, 3]


def test_twin_in_flight_starts_lineage() -> None:
    """The same request twice in flight is a retry in a lineage of its own."""
    session = Session()
    first, second = session.begin(ask(user())), session.begin(ask(user()))
    assert named(first.plan) == ("root", "first", 0)
    assert named(second.plan) == ("retry", "same_path", 1)


def test_turns_exclude_requests_in_flight() -> None:
    session = Session()
    first, second = session.begin(ask(user())), session.begin(ask(user("else")))
    session.end(second, session.answer(second.plan, "done"))
    assert [turn.index for turn in session.turns] == [1]
    session.end(first, session.answer(first.plan, "done"))
    assert [turn.index for turn in session.turns] == [0, 1]


def test_abandoned_plan_leaves_only_number() -> None:
    session, _, answer = started()
    conversation = ask(system(), user(), answer, told(answer.calls[0], "far too long"))
    plan = session.lineages.plan(conversation)
    session.lineages.abandon_plan(plan)
    session.lineages.abandon_plan(plan)
    after = session.lineages.plan(ask(system(), user(), answer, told(answer.calls[0], "short")))
    assert (plan.index, after.index) == (1, 2)
    assert after.kind == "extend"
    with pytest.raises(InvariantViolated, match="no plan of that number is under way"):
        session.end(Pending(plan=plan, prompt=array("i"), delta=array("i")), None)


def test_refused_first_request_is_not_first() -> None:
    session = Session()
    session.lineages.abandon_plan(
        session.lineages.plan(ask(user("far too long"), tools=()), hints={"agent": "a1"})
    )
    plan = session.lineages.plan(ask(user()))
    assert (plan.reason, plan.role) == ("first", "main")


# ── roles ─────────────────────────────────────────────────────────────────────


def test_agents_are_told_apart_by_hints() -> None:
    session = Session()
    assert session.say(ask(system(), user()), "a")[0].role == "main"
    helper, _ = session.say(ask(system("help"), user()), "b", hints={"agent": "a1", "other": "x"})
    assert helper.role == "subagent"
    assert "the request comes from another agent of the harness than the first one" in helper.notes
    assert session.lineages.plan(ask(system(), user("more"))).role == "main"


def test_title_call_is_side_call() -> None:
    session, _, _ = started()
    asks = system("You are a title generator. You output ONLY a thread title.")
    title, _ = session.say(ask(asks, user(), tools=()), "A title")
    assert (title.role, title.reason) == ("auxiliary", "tools")
    assert "side call: opencode asks for a title" in title.notes


def test_summary_call_extends_and_is_marked() -> None:
    session, _, answer = started()
    wanted = user("CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.")
    plan = session.lineages.plan(ask(system(), user(), answer, told(answer.calls[0], "ok"), wanted))
    assert (plan.parent, plan.kind, plan.role) == (0, "extend", "compaction")


# ── commits ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("changes", "said_wrong"),
    [
        ({"session_id": "s-2"}, "session_id 's-2' instead of 's-1'"),
        ({"parent": None}, "parent None instead of 0"),
        ({"kind": "branch"}, "kind 'branch' instead of 'extend'"),
        ({"lineage": 4}, "lineage 4 instead of 0"),
        ({"role": "subagent"}, "role 'subagent' instead of 'main'"),
        ({"request_key": "x"}, "request_key 'x' instead of ''"),
        ({"before_key": ""}, "before_key '' instead of"),
        ({"message_key": ""}, "message_key '' instead of"),
        ({"prompt_length": 5}, "prompt_length 5 instead of"),
        ({"prompt_delta": array("i", [1])}, "prompt_length .* instead of"),
    ],
)
def test_turn_unlike_its_plan_is_refused(changes: dict[str, object], said_wrong: str) -> None:
    session, _, answer = started()
    pending = session.begin(ask(system(), user(), answer, told(answer.calls[0], "ok")))
    turn = session.turn(pending, session.answer(pending.plan, "done"))
    with pytest.raises(InvariantViolated, match=said_wrong):
        session.lineages.commit(evolve(turn, **changes))
    assert len(session.turns) == 1
    session.lineages.commit(turn)
    assert len(session.turns) == 2


def test_turn_is_committed_exactly_once() -> None:
    """A turn is committed once, and only if planned."""
    session, turn, _ = started()
    with pytest.raises(InvariantViolated, match="turn 0 of session s-1 ends, but no plan"):
        session.lineages.commit(turn)
    with pytest.raises(InvariantViolated, match="turn 9"):
        session.lineages.commit(evolve(turn, index=9))


def test_turn_failed_before_rendering_is_kept() -> None:
    session, _, answer = started()
    pending = session.begin(ask(system(), user(), answer, told(answer.calls[0], "ok")))
    bare = Pending(plan=pending.plan, prompt=session.lineages.history(pending.plan), delta=array("i"))
    session.end(bare, None, state="failed")
    assert session.turns[1].state == "failed"


def test_exchange_may_add_plan_notes() -> None:
    session, _, answer = started()
    pending = session.begin(ask(system(), user(), answer, told(answer.calls[0], "ok")))
    session.lineages.commit(
        evolve(session.turn(pending, session.answer(pending.plan, "x")), notes=("repaired",))
    )
    assert session.turns[1].notes == ("repaired",)


# ── histories and restoring ───────────────────────────────────────────────────


def test_caller_may_change_its_history() -> None:
    session, _, answer = started()
    plan = session.lineages.plan(ask(system(), user(), answer, told(answer.calls[0], "ok")))
    first = session.lineages.history(plan)
    first.append(7)
    assert session.lineages.history(plan) == first[:-1]


def busy() -> tuple[Session, list[Message]]:
    session, _, answer = started()
    messages = [system(), user(), answer, told(answer.calls[0], "ok")]
    session.say(ask(*messages), "hal", state="partial")
    session.say(ask(*messages), "lost", state="failed")
    _, second = session.say(ask(*messages), "second")
    session.say(ask(system("title"), user(), tools=()), "Title")
    session.say(ask(system("help"), user()), "helped", hints={"agent": "a1"})
    _, cut = session.say(ask(*messages, second, user("more")), "cut", finish="length")
    session.say(ask(*messages, second, user("more"), cut), " and on")
    return session, [*messages, second, user("more"), evolve(cut, text="cut and on")]


def restored(session: Session) -> Lineages:
    return Lineages.restore(session_id=session.session_id, secret=SECRET, turns=session.turns[::-1])


def test_restored_lineages_plan_the_same() -> None:
    session, messages = busy()
    asked = [
        (ask(*messages, user("next")), {}),
        (ask(*messages), {}),
        (ask(*messages[:4]), {}),
        (ask(*messages[:5], user("else")), {}),
        (ask(system("title"), user("again"), tools=()), {}),
        (ask(system("help"), user(), said("helped"), user("more")), {"agent": "a1"}),
        (ask(system("brand new"), user()), {}),
        (ask(system(), user(), said("rewritten"), user("more")), {}),
        (ask(system(), user(CODEX_TELLS)), {}),
        (ask(system(), user(), thinking=True), {"agent": "a2"}),
    ]
    again = restored(session)
    for conversation, hints in asked:
        plan = session.lineages.plan(conversation, hints=hints)
        assert again.plan(conversation, hints=hints) == plan
        assert again.history(plan) == session.lineages.history(plan)
    assert again.turns == session.turns


@pytest.mark.parametrize("change", [{"index": 0}, {"parent": 40}, {"before_key": ""}])
def test_inconsistent_turns_are_not_restored(change: dict[str, object]) -> None:
    session, _ = busy()
    turns = [*session.turns[:3], evolve(session.turns[3], **change)]
    with pytest.raises(InvariantViolated, match="cannot be restored"):
        Lineages.restore(session_id="s-1", secret=SECRET, turns=turns)


def test_unfinished_plan_is_not_restored() -> None:
    session, messages = busy()
    session.begin(ask(*messages, user("in flight")))
    again = restored(session)
    assert again.plan(ask(*messages, user("in flight"))).kind == "extend"


# ── a user message that is taken out again ────────────────────────────────────


def test_dropped_user_message_keeps_lineage() -> None:
    """A request without the last user message stays in its lineage."""
    session = Session()
    first, one = session.say(ask(system(), user("task"), user("volatile 1")), "step 1")
    second, two = session.say(ask(system(), user("task"), one, user("volatile 2")), "step 2")
    third, _ = session.say(ask(system(), user("task"), one, two, user("volatile 3")), "step 3")
    assert [(turn.kind, turn.reason, turn.lineage) for turn in (first, second, third)] == [
        ("root", "first", 0),
        ("branch", "volatile", 0),
        ("branch", "volatile", 0),
    ]
    assert third.parent is None
    assert list(session.prompts[2]) == full(ask(system(), user("task"), one, two, user("volatile 3")))
    assert third.notes == (
        (
            "volatile: the user message that turn 1 answered is gone or changed, so its answer is rendered as"
            " the request shows it"
        ),
    )


def test_text_before_volatile_keeps_tokens() -> None:
    """Text before the first volatile message keeps its tokens."""
    session = Session()
    _, one = session.say(ask(system(), user("task")), "step 1")
    second, two = session.say(ask(system(), user("task"), one, user("volatile")), "step 2")
    third, _ = session.say(ask(system(), user("task"), one, two, user("more")), "step 3")
    assert (second.kind, third.kind, third.parent, third.lineage) == ("extend", "branch", 0, 0)


def test_first_continuation_without_message_keeps_lineage() -> None:
    """Only the first to go on without it stays in the lineage."""
    session = Session()
    _, one = session.say(ask(system(), user("task"), user("volatile")), "step 1")
    _, _ = session.say(ask(system(), user("task"), one, user("a")), "x", state="failed")
    again, _ = session.say(ask(system(), user("task"), one, user("b")), "x")
    other, _ = session.say(ask(system(), user("task"), one, user("c")), "x")
    assert named(again) == ("branch", "volatile", 0)
    assert (other.kind, other.lineage) == ("root", 1)


def test_reworded_user_message_keeps_lineage() -> None:
    """A last user message may come back with other words."""
    session = Session()
    _, one = session.say(ask(system(), user("task, and now a volatile word")), "step 1")
    second, two = session.say(ask(system(), user("task"), one, user("go on")), "step 2")
    third, _ = session.say(ask(system(), user("task"), one, user("go on"), two, user("more")), "step 3")
    assert (named(second), named(third)) == (("branch", "volatile", 0), ("extend", "appended", 0))


def test_earlier_edit_starts_a_root() -> None:
    session = Session()
    _, one = session.say(ask(system(), user("task")), "step 1")
    _, two = session.say(ask(system(), user("task"), one, user("go on")), "step 2")
    assert (
        named(session.lineages.plan(ask(system(), user("edited"), one, user("go on"), two, user("more"))))[0]
        == "root"
    )


def test_foreign_answer_follows_nothing() -> None:
    session = Session()
    session.say(ask(system(), user("task")), "step 1")
    assert session.lineages.plan(ask(system(), user("edited"), said("another"), user("go on"))).kind == "root"


def test_foreign_assistant_message_only_extends() -> None:
    """An assistant message of the harness's own is only more to read."""
    session, _, answer = started()
    new = told(answer.calls[0], "ok"), said("noted by the harness"), user("go on")
    turn, _ = session.say(ask(system(), user(), answer, *new), "then this")
    assert (named(turn), turn.parent) == (("extend", "appended", 0), 0)
    assert turn.notes == ("foreign: message 4 is an assistant message this session did not sample there",)
    again, _ = session.say(
        ask(system(), user(), answer, *new[:1], said("what we said there, rewritten"), user("x")), "y"
    )
    assert named(again) == ("branch", "rewrite", 1)
