"""inspect: what a trainer will train on, seen at a glance, from a file as from a node."""

import io
import json
from pathlib import Path

import pytest
from attrs import evolve
from click.testing import CliRunner, Result
from rich.console import Console

from polarnode.cli import inspection
from polarnode.cli.main import main as command
from polarnode.cli.output import fork_text
from polarnode.core import codec
from polarnode.core.arrays import floats, ids
from polarnode.core.trajectory import ForkedFrom, Outcome, Trajectory, Turn, VersionSpan
from polarnode.merge.builders import prefix_merging
from polarnode.node.config import TINY_MODEL
from polarnode.tokens.tokenizer import LoadedTokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> LoadedTokenizer:
    return load_tokenizer(TINY_MODEL)


def turn(
    tokenizer: LoadedTokenizer, index: int, parent: Turn | None, prompt: str, sampled: str, **more: object
) -> Turn:
    delta, sample = ids(tokenizer.encode_plain(prompt)), ids(tokenizer.encode_plain(sampled))
    before = 0 if parent is None else parent.prompt_length + len(parent.sampled)
    said: dict[str, object] = {
        "session_id": "4f1c",
        "index": index,
        "provider": "anthropic",
        "lineage": 0,
        "parent": None if parent is None else parent.index,
        "kind": "root" if parent is None else "extend",
        "reason": "first" if parent is None else "appended",
        "prompt_delta": delta,
        "prompt_length": before + len(delta),
        "sampled": sample,
        "logprobs": floats([-0.5] * len(sample)),
        "version_spans": (VersionSpan(version="0", start=0, end=len(sample)),) if sample else (),
    }
    return Turn(**(said | more))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def session(tokenizer: LoadedTokenizer) -> Trajectory:
    """Two turns that extend one another, and one the engine failed."""
    first = turn(tokenizer, 0, None, "Read it.\n", "I read\n")
    second = turn(tokenizer, 1, first, "a file\x1b[31m\n", "Done.", matched=2, messages=3)
    failed = turn(tokenizer, 2, None, "Again.", "", state="failed", finish_reason="error")
    built = prefix_merging((first, second, failed), {})
    return Trajectory(
        session_id="4f1c09aa72be3d55",
        task_id="t",
        group_id="t",
        sample_index=0,
        outcome=Outcome(status="timeout", clock="turns", reason="its budget is spent"),
        reward=0.5,
        traces=built.traces,
        turns=(first, second, failed),
        left_out=built.left_out,
        harness="pi",
        harness_version="1",
        model="tiny",
    )


def printed(
    trajectory: Trajectory,
    tokenizer: LoadedTokenizer | None,
    *,
    plain: bool,
    width: int = 200,
    colour: bool = False,
) -> str:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colour, color_system="standard" if colour else None
    )
    rows = codec.turns_json(trajectory.turns, left_out=trajectory.left_out)
    console.print(inspection.shown(trajectory, rows, tokenizer, console=console, plain=plain))  # type: ignore[arg-type]
    text = console.file
    assert isinstance(text, io.StringIO)
    return text.getvalue()


def test_forks_and_parent_are_listed() -> None:
    whole = ForkedFrom(session_id="one", turn=3, got=3, by="resume")
    left = ForkedFrom(session_id="one", turn=3, got=1, by="replay", differs="turn 1: other words")
    assert fork_text(whole) == "one before turn 3 by resume"
    assert fork_text(left) == (
        "one before turn 3 by replay, in another state from turn 1 on: turn 1: other words"
    )
    fork = {"session_id": "two", "status": "completed", "reward": 0.5, "forked_from": codec.plain(whole)}
    [line] = [line.plain for line in inspection.fork_lines([fork])]
    assert line == "fork two before turn 3 by resume: completed, reward 0.5"


def test_snapshots_are_listed() -> None:
    each = {"turn": 3, "files": 12, "bytes": 1_500_000, "seconds": 0.25, "resumable": True, "why_not": None}
    other = each | {"turn": 7, "resumable": False, "why_not": "processes lived: a\x1b[31m"}
    lines = [line.plain for line in inspection.snapshot_lines([each, other])]
    assert lines[0] == "snapshot before turn 3: 12 files, 1.5 MB, its call held 0.25 s"
    assert lines[1].endswith("0.25 s; no harness can be resumed from it: processes lived: a␛[31m")
    assert [line.plain for line in inspection.snapshot_lines([each] * 52)][-1] == "and 2 more snapshots"


def test_plain_output_marks_trained_text(session: Trajectory, tokenizer: LoadedTokenizer) -> None:
    said = printed(session, tokenizer, plain=True)
    assert "Read it.\n«I read\n»a file␛[31m\n«Done.»" in said
    assert "trainable tokens are between « and »" in said
    assert "\x1b" not in said


def test_slices_and_missing_extras_are_shown(session: Trajectory, tokenizer: LoadedTokenizer) -> None:
    (trace,) = session.traces
    lacks = ("routed_experts: turn 1 has none: the sample was cut before its end",)
    sliced = evolve(trace, part=1, parts=3, offset=40, over_long=True, missing_extras=lacks)
    said = printed(evolve(session, traces=(sliced,)), tokenizer, plain=True)
    assert (
        "part 2 of 3, preceded by 40 tokens that are not shown, longer than its task's max_row_tokens, routed_experts:"
        " turn 1 has none" in said
    )
    assert "part" not in printed(session, tokenizer, plain=True)


def test_turn_and_lineage_rewards_are_shown(session: Trajectory, tokenizer: LoadedTokenizer) -> None:
    (trace,) = session.traces
    spans = (evolve(trace.turn_spans[0], reward=-0.25), *trace.turn_spans[1:])
    lines = printed(
        evolve(session, traces=(evolve(trace, turn_spans=spans, reward=0.75),)), tokenizer, plain=True
    ).splitlines()
    assert lines[1].split()[-1] == "reward"
    assert [line.split()[-1] for line in lines[2:4]] == ["-0.25", "–"]
    (facts,) = [line for line in lines if line.startswith("trace 0")]
    assert "reward 0.75" in facts
    plain = printed(session, tokenizer, plain=True).splitlines()
    assert "reward" not in plain[1]
    assert not any("reward" in line for line in plain if line.startswith("trace 0"))


def test_coloured_output_has_no_marks(session: Trajectory, tokenizer: LoadedTokenizer) -> None:
    said = printed(session, tokenizer, plain=False, colour=True)
    assert "«" not in said
    assert "\x1b[30;42mI read" in said
    assert "trainable tokens are green" in said


def test_each_turn_explains_its_exclusion(session: Trajectory, tokenizer: LoadedTokenizer) -> None:
    """Each turn says what it extends, and why it was left out."""
    lines = printed(session, tokenizer, plain=True).splitlines()
    assert lines[0] == "session 4f1c09aa72be3d55  pi 1  timeout  its budget is spent  reward 0.5"
    assert lines[1].split() == [*inspection.COLUMNS[:-1], "left", "out"]
    first, second = session.turns[:2]
    assert lines[2].split() == [
        "0",
        "0",
        "–",
        "root",
        "first",
        "main",
        "complete",
        "–",
        *map(str, lengths(first, first.prompt_length)),
        "stop",
    ]
    assert lines[3].split() == [
        "1",
        "0",
        "0",
        "extend",
        "appended",
        "main",
        "complete",
        "2/3",
        *map(str, lengths(second, len(second.prompt_delta))),
        "stop",
    ]
    reason = session.left_out[0].reason
    assert lines[4].rstrip().endswith(f"error   {reason}")
    assert f"turn 2 is left out: {reason}" in lines


def lengths(turn: Turn, new: int) -> tuple[int, int, int]:
    return turn.prompt_length, new, len(turn.sampled)


def test_narrow_terminal_cuts_no_figure(session: Trajectory, tokenizer: LoadedTokenizer) -> None:
    assert "…" not in printed(session, tokenizer, plain=True, width=80)


def test_ids_are_shown_without_tokenizer(session: Trajectory) -> None:
    said = printed(session, None, plain=True)
    sampled = " ".join(map(str, session.turns[0].sampled))
    assert f"«{sampled}» " in said
    assert "give --model FOLDER to decode them" in said


# ── from a file ───────────────────────────────────────────────────────────────


def inspect(*argv: str) -> Result:
    return CliRunner().invoke(command, ["inspect", *argv])


@pytest.mark.parametrize("turns", ["full", "table"])
def test_session_by_id_prefix_from_file(tmp_path: Path, session: Trajectory, turns: codec.Turns) -> None:
    file = tmp_path / "t.jsonl"
    other = evolve(session, session_id="4f2", model="elsewhere")
    file.write_bytes(
        b"\n".join(codec.dump_json(codec.trajectory_json(each, turns=turns)) for each in (session, other))
    )
    result = inspect("4f1", "--from", str(file))
    assert result.exit_code == 0, result.output
    assert "«I read\n»a file" in result.output
    assert "turn 2 is left out" in result.output
    assert inspect("4f2", "--from", str(file)).output.count("give --model") == 1
    assert "«I read" in inspect("4f2", "--from", str(file), "--model", str(TINY_MODEL)).output


def test_unknown_or_ambiguous_id_is_refused(tmp_path: Path, session: Trajectory) -> None:
    file = tmp_path / "t.jsonl"
    file.write_bytes(
        b"\n".join(
            codec.dump_json(codec.trajectory_json(evolve(session, session_id=name)))
            for name in ("4f1", "4f2")
        )
    )
    assert (
        f"2 sessions in {file} begin with 4f: give a longer prefix or the full id"
        in inspect("4f", "--from", str(file)).output
    )
    assert (
        f"0 sessions in {file} begin with 5: give the id of a session in it"
        in inspect("5", "--from", str(file)).output
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"session_id": "4f"}\nnot JSON', "line 2 of"),
        ("{}", "t.jsonl is no trajectory: give a trajectories.jsonl"),
        ("", "t.jsonl is empty: it holds no trajectory"),
        ("[1]", "line 1 of"),
        (json.dumps({"session_id": "4f"}), "task_id is missing"),
    ],
)
def test_foreign_file_is_refused(tmp_path: Path, content: str, sentence: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(content)
    result = inspect("4f", "--from", str(file))
    assert result.exit_code == 1
    assert sentence in result.output
    assert isinstance(result.exception, SystemExit)
