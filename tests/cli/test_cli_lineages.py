"""What sessions' lineages came to, printed: of one session, and of a file of many."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from click.testing import CliRunner, Result
from merge_toys import Session, ask, system, told, user
from rich.console import Console

from polarnode.cli.inspection import SessionLineage, figures_of, lineage_notes, lineage_text, summary, totals
from polarnode.cli.main import main as command
from polarnode.core import codec
from polarnode.core.task import HarnessSpec, TaskSpec
from polarnode.core.trajectory import Outcome, Trajectory
from polarnode.merge.trajectory import Identity, assemble
from polarnode.merge.trajectory import Result as Ended


def trajectory(session_id: str = "s-1", *, turns: int = 3) -> Trajectory:
    """A session of a call whose arguments came back changed, and answers after it."""
    session = Session(session_id)
    _, one = session.say(ask(system(), user()), "looking", [("bash", '{"command": "ls"}')])
    repaired = evolve(one, calls=(evolve(one.calls[0], arguments='{"command": "ls -la"}'),))
    history = [system(), user(), repaired, told(one.calls[0], "a.txt")]
    for number in range(turns - 1):
        _, answer = session.say(ask(*history), f"step {number}")
        history += [answer, user("more")]
    who = Identity(
        session_id=session_id,
        task_id="t",
        group_id="t",
        sample_index=0,
        harness="pi",
        harness_version=None,
        model="m",
        node="n",
    )
    spec = TaskSpec(instruction="i", harness=HarnessSpec(name="pi"))
    return assemble(who, spec, session.turns, Ended(outcome=Outcome(status="completed")))


def text_of(renderable: Any, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_session_figures_in_words() -> None:
    figures = figures_of(codec.trajectory_json(trajectory()))
    assert figures is not None
    said = text_of(lineage_text(figures))
    assert "lineage: 3 turns in 1 lineages with 1 leaves, thinking keep" in said
    assert f"{100 * figures['prefix_hit_rate']:.1f} % of them reused" in said
    assert "kinds: extend 2, root 1" in said
    assert "reasons: appended 2, first 1" in said
    assert "notes: edited 2" in said
    assert "left out" not in said


def test_omissions_are_counted_by_reason() -> None:
    figures = {**(figures_of(codec.trajectory_json(trajectory())) or {})}
    said = text_of(
        lineage_text({**figures, "left_out": {"auxiliary": 2}, "left_out_tokens": {"auxiliary": 9}})
    )
    assert "left out: auxiliary 2" in said
    assert "left out tokens: auxiliary 9" in said


def test_lineage_notes_show_their_turn() -> None:
    rows = [
        {"index": 4, "notes": ["edited: a\x1b[31mb", "ignored: $.user", "side call: x asks"]},
        {"index": 5},
    ]
    assert [line.plain for line in lineage_notes(rows)] == [
        "turn 4: edited: a␛[31mb",
        "turn 4: side call: x asks",
    ]


def test_many_sessions_are_summed_in_table() -> None:
    counted = [
        SessionLineage(name, figures_of(codec.trajectory_json(trajectory(name, turns=turns))) or {})
        for name, turns in (("a", 3), ("b", 5))
    ]
    said = text_of(summary(counted, totals(counted)))
    lines = said.splitlines()
    assert lines[1].split()[:5] == ["a", "keep", "3", "1", "1"]
    assert lines[2].split()[:5] == ["b", "keep", "5", "1", "1"]
    assert "2 sessions" in said
    assert "lineage: 8 turns in 2 lineages with 2 leaves" in said


@pytest.mark.parametrize("value", [{}, {"metrics": None}, {"metrics": {"lineage": 3}}])
def test_old_trajectories_have_no_figures(value: dict[str, Any]) -> None:
    assert figures_of(value) is None


def inspect(*argv: str) -> Result:
    return CliRunner().invoke(command, ["inspect", *argv])


def test_file_without_session_id_is_summed(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    old = {**codec.trajectory_json(trajectory("c")), "metrics": {}}
    lines = [codec.dump_json(codec.trajectory_json(trajectory(name))) for name in ("a", "b")]
    file.write_bytes(b"\n".join([*lines, codec.dump_json(old)]))
    result = inspect("--from", str(file))
    assert result.exit_code == 0, result.output
    assert "lineage: 6 turns" in result.output
    assert "1 more sessions have no lineage figures" in result.output
    one = inspect("a", "--from", str(file))
    assert "lineage: 3 turns" in one.output
    assert (
        "turn 1: edited: message 2 differs from turn 0's answer in arguments; its tokens are kept"
        in one.output
    )


def test_invalid_input_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps({"session_id": "x"}))
    assert "none of the 1 trajectories" in inspect("--from", str(file)).output
    assert "name a SESSION" in inspect().output
