"""What a session's lineages came to, counted, and the sums over many sessions."""

from attrs import evolve
from merge_toys import Session, ask, system, told, user

from polarnode.core.task import BuilderSpec
from polarnode.core.trajectory import LeftOut
from polarnode.merge.builders import build
from polarnode.merge.figures import ALONE, WORD_COUNTS, lineage_figures, summed


def played() -> Session:
    """Five turns: a root, one that extends it, a sibling, a side call, and one that the engine failed."""
    session = Session()
    _, one = session.say(ask(system(), user()), "looking", [("bash", '{"command": "ls"}')])
    results = told(one.calls[0], "a.txt")
    session.say(ask(system(), user(), one, results), "done")
    session.say(ask(system(), user(), one, told(one.calls[0], "b.txt")), "other")
    session.say(
        ask(system("You are a title generator. You output ONLY a thread title."), user("x"), tools=()),
        "A title",
    )
    session.say(ask(system(), user("y")), "", state="failed")
    return session


def test_figures_count_a_session() -> None:
    turns = played().turns
    built = build(BuilderSpec(), turns)
    found = lineage_figures(turns, built.left_out, thinking="keep")
    assert (found["thinking"], found["turns"], found["leaves"], found["lineages"]) == ("keep", 5, 3, 4)
    assert found["kinds"] == {"branch": 1, "extend": 1, "root": 3}
    assert found["reasons"] == {"appended": 1, "conversation": 1, "first": 1, "sibling": 1, "tools": 1}
    assert found["roles"] == {"auxiliary": 1, "main": 4}
    assert found["states"] == {"complete": 4, "failed": 1}
    assert found["left_out"] == {"auxiliary": 1, "failed": 1}
    assert found["left_out_tokens"] == {"auxiliary": len(turns[3].sampled), "failed": len(turns[4].sampled)}
    assert found["tokens_in"] == sum(turn.prompt_length for turn in turns)
    assert found["tokens_new"] == sum(len(turn.prompt_delta) for turn in turns)
    assert found["tokens_sampled"] == sum(len(turn.sampled) for turn in turns)
    assert 0 < found["prefix_hit_rate"] < 1  # type: ignore[operator]


def test_notes_and_malformed_calls_are_counted() -> None:
    (first, *_) = played().turns
    assert first.answer is not None
    turn = evolve(first, notes=("edited: a", "thinking: b"), answer=evolve(first.answer, malformed_calls=2))
    found = lineage_figures([turn], [], thinking="template")
    assert (found["notes"], found["malformed_calls"]) == ({"edited": 1, "thinking": 1}, 2)


def test_empty_session_has_every_name() -> None:
    found = lineage_figures([], [], thinking="keep")
    assert set(found) == {*ALONE, *WORD_COUNTS, "thinking", "prefix_hit_rate"}
    assert found["prefix_hit_rate"] == 0.0


def test_sums_equal_one_long_session() -> None:
    turns = played().turns
    left = [LeftOut(turn=3, reason="auxiliary")]
    one, two = lineage_figures(turns[:2], [], thinking="keep"), lineage_figures(turns, left, thinking="keep")
    both = summed([one, two])
    assert both["turns"] == 7
    assert both["kinds"] == {"branch": 1, "extend": 2, "root": 4}
    assert both["left_out"] == {"auxiliary": 1}
    assert both["thinking"] == "keep"
    rate = 1 - both["tokens_new"] / both["tokens_in"]  # type: ignore[operator]
    assert abs(both["prefix_hit_rate"] - rate) < 1e-4  # type: ignore[operator]


def test_unknown_figure_counts_nothing() -> None:
    strange = {"turns": "many", "kinds": ["root"], "reasons": {"first": "one"}, "thinking": "template"}
    found = summed([strange, lineage_figures([], [], thinking="keep")])
    assert (found["turns"], found["kinds"], found["reasons"], found["thinking"]) == (
        0,
        {},
        {"first": 0},
        "mixed",
    )
