"""What the verbs print: whole at any width, harmless whatever a harness wrote."""

import io

import pytest
from attrs import evolve
from journal_samples import make_trajectory
from rich.console import Console
from rich.table import Table
from rich.text import Text

from polarnode.cli import output
from polarnode.core.status import LiveSessionStatus
from polarnode.core.trajectory import Outcome, Trajectory


def printed(table: Table, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(table)
    text = console.file
    assert isinstance(text, io.StringIO)
    return text.getvalue().splitlines()


def some(count: int = 3) -> list[Trajectory]:
    names = ("mini_swe_agent", "pi", "claude_code")
    made = [
        make_trajectory(f"{number:04d}f8e78004d8{number:02d}", turns=2, sampled=12345)
        for number in range(count)
    ]
    return [evolve(each, harness=names[number % 3]) for number, each in enumerate(made)]


def test_plain_table_has_session_per_line() -> None:
    lines = printed(output.result_table(some()), output.PLAIN_WIDTH)
    assert lines[0].split("  ")[0] == "session"
    for name in (
        "session",
        "harness",
        "outcome",
        "reward",
        "turns",
        "traces",
        "sampled tokens",
        "trainable",
        "merged ratio",
    ):
        assert name in lines[0]
    assert lines[1].split() == [
        "0000f8e78004d800",
        "mini_swe_agent",
        "completed",
        "1",
        "2",
        "1",
        "24690",
        "12345",
        "1.0×",
    ]
    assert len(lines) == 4


@pytest.mark.parametrize("width", [72, 80, 100])
def test_narrow_terminal_shortens_only_ids(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    lines = printed(
        output.fit_table(console, lambda narrow: output.result_table(some(), narrow=narrow)), width
    )
    text = "\n".join(lines)
    assert "…" not in text
    assert max(map(len, lines)) <= width
    assert text.count("24690") == text.count("12345") == 3
    assert {line.split()[0] for line in lines if "24690" in line} == {"0000f8e7", "0001f8e7", "0002f8e7"}


def test_wide_terminal_gets_whole_table() -> None:
    console = Console(file=io.StringIO(), width=140)
    assert "0000f8e78004d800" in "\n".join(
        printed(output.fit_table(console, lambda narrow: output.result_table(some(), narrow=narrow)), 140)
    )


def test_short_ids_stay_distinct() -> None:
    alike = [evolve(each, session_id=f"abcdefghij{number}xyz") for number, each in enumerate(some())]
    lines = printed(output.result_table(alike, narrow=True), 100)
    assert [line.split()[0] for line in lines[2:]] == ["abcdefghij0", "abcdefghij1", "abcdefghij2"]


def test_missing_traces_or_reward_are_dashes() -> None:
    bare = evolve(make_trajectory("s"), harness="pi", traces=(), reward=None)
    row = printed(output.result_table([bare]), 200)[1].split()
    assert row[3] == "–"
    assert row[-1] == "–"
    assert bare.trainable_tokens == 0
    assert bare.sampled_tokens == 3


def test_summary_counts_table_rows() -> None:
    assert (
        output.summary(some())
        == "3 sessions, 3 rewarded; 6 turns in 3 training sequences; 37035 of 74070 sampled tokens trainable"
    )
    assert (
        output.summary([])
        == "0 sessions, 0 rewarded; 0 turns in 0 training sequences; 0 of 0 sampled tokens trainable"
    )


def test_endings_show_failed_harness_output() -> None:
    """Each ending is told once, with the last line of a harness that failed."""
    failed = Outcome(
        status="failed",
        exit_code=2,
        reason="the harness ended with exit code 2",
        log_tail="Traceback\n\x1b[31mKeyError: 'x'\nError: read unixpacket @->/proc/self/fd/13: reset\n",
    )
    spent = Outcome(status="timeout", clock="turns", reason="its budget is spent")
    sessions = [evolve(each, outcome=failed) for each in some()] + [
        evolve(make_trajectory("x"), outcome=spent),
        make_trajectory("y"),
    ]
    said = [line.plain for line in output.endings(sessions)]
    assert said == [
        "3 × failed: the harness ended with exit code 2 · last log line: ␛[31mKeyError: 'x'",
        "1 × timeout: (turns) its budget is spent",
    ]


def status(number: int, phase: str = "run", outcome: str | None = None) -> LiveSessionStatus:
    return LiveSessionStatus(
        session_id=f"s{number}",
        task_id="t",
        harness="pi",
        phase=phase,
        turns=1,
        sampled_tokens=7,
        outcome=outcome,
        reward=None,
    )


def test_live_table_shows_running_first() -> None:
    sessions = [
        status(0, "ended", "completed"),
        status(1, "init"),
        status(2),
        status(3),
        status(4, "ended", "error"),
    ]
    lines = printed(output.live_table(sessions, rows=3), 80)
    assert [line.split()[0] for line in lines[1:4]] == ["s2", "s3", "s1"]
    assert lines[4].split() == ["…", "2", "more", "2", "of", "5", "done"]
    assert len(printed(output.live_table(sessions, rows=5), 80)) == 6


def test_control_characters_are_escaped() -> None:
    assert output.harmless("a\tb\nc") == "a\tb\nc"
    assert output.harmless("\x1b]0;title\x07\r\x7f\x9b31m") == "␛]0;title␇␍␡\ufffd31m"


def test_console_escapes_foreign_ids(capsys: pytest.CaptureFixture[str]) -> None:
    """Ids come from files and nodes that others wrote."""
    trajectory = make_trajectory("s\x1b]0;owned\x07")
    console = output.open_console()
    console.print(output.result_table([trajectory]))
    console.print("plain \x9b31m", Text("text \x1b[2J", style="red"))
    shown = capsys.readouterr().out
    assert "s␛]0;owned␇" in shown
    assert "plain \ufffd31m text ␛[2J" in shown
    assert all(character == "\n" or character.isprintable() for character in shown)


def test_console_ignores_markup_and_folding(capsys: pytest.CaptureFixture[str]) -> None:
    output.open_console().print("no file [/work/x] :smile: [bold]" + "y" * 200)
    assert capsys.readouterr().out == "no file [/work/x] :smile: [bold]" + "y" * 200 + "\n"
    output.open_console(stderr=True).print("aside")
    assert capsys.readouterr() == ("", "aside\n")
