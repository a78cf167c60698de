"""`polarnode generate`: its words and tables; and for real, with containers: killed in the middle and gone on
with, empty sessions tried again.
"""

import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from attrs import evolve
from journal_samples import make_trajectory
from rich.console import Console

from polarnode.cli.generate import (
    MOST,
    ExportResult,
    TemplateComparison,
    acceptance_table,
    open_comparison,
    shown,
)
from polarnode.cli.generate_run import GenerationRun, duration, progress
from polarnode.node.config import TINY_MODEL
from polarnode.offline import GenerationTable, Split, judge, parse_acceptance
from polarnode.offline.rows import SftLine

# ── words and tables ──────────────────────────────────────────────────────────


def tallied() -> GenerationTable:
    tally, acceptance = GenerationTable(by="repo"), parse_acceptance("reward >= 1")
    for number in range(5):
        one = evolve(
            make_trajectory(f"s{number}", reward=float(number > 1)),
            metadata={"repo": "moto" if number else "my\x1b[2Jpy"},
        )
        tally.add(one, judge(acceptance, one))
    return tally


def test_table_has_literature_columns() -> None:
    console = Console(file=io.StringIO(), width=200, highlight=False, markup=False)
    words = TemplateComparison(render=None, seen=3)
    words.counts.update({"equal": 2, "differs": 1})
    exported = ExportResult(
        tally=tallied(),
        files={"sft.jsonl": 3, "table.json": 1},
        words=words,
        split=Split(by="repo", values=frozenset(["x"])),
        notes=(),
    )
    for line in shown(
        exported, GenerationRun(wall_s=100, stopped=False), parse_acceptance("reward >= 1"), console
    ):
        console.print(line)
    text = console.file
    assert isinstance(text, io.StringIO)
    said = [line.split() for line in text.getvalue().splitlines()]
    assert said[0] == ["repo", "attempts", "accepted", "%", "reward", "turns", "sampled", "tokens"]
    assert said[1] == ["moto", "4", "3", "75.0", "1", "4", "12"]
    assert said[3] == ["all", "5", "3", "60.0", "2", "5", "15"]
    assert "accepted by reward >= 1: 3 of 5 sessions (60.0 %)" in text.getvalue()
    assert (
        "of 3 conversations, the chat template renders 2 to exactly the model's tokens, 1 to others"
        in text.getvalue()
    )
    assert "\x1b" not in text.getvalue()
    assert acceptance_table(tallied(), narrow=True).columns[-1].header == "sampled\ntokens"


class Sized:
    """What a line of progress reads."""

    done, accepted, ended, running, total, started = 12, 5, 6, 8, 40, 100.0


def test_progress_shows_what_remains() -> None:
    running: Any = Sized()
    assert (
        progress(running, 220.0)
        == "12 of 40 sessions done, 5 accepted (42 %), 8 running, 3.0 a minute, about 9 min left"
    )
    running.done = running.ended = 0
    assert progress(running, 220.0) == "0 of 40 sessions done, 8 running"
    assert [duration(seconds) for seconds in (89, 600, 9000)] == ["89 s", "10 min", "2.5 h"]


def line(*messages: Mapping[str, Any]) -> SftLine:
    return SftLine(
        body={"messages": [dict(each) for each in messages], "tools": [], "session_id": "s"},
        token_ids=(),
        thinking=False,
    )


def test_template_refusal_is_no_error() -> None:
    words = open_comparison(TINY_MODEL)
    words.compare(line({"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}))
    assert (words.counts["differs"], words.why) == (1, None)

    def refuses(_: SftLine) -> list[int]:
        raise TypeError("no such role")

    refusing = TemplateComparison(render=refuses)
    for _ in range(MOST + 5):
        refusing.compare(line())
    assert (refusing.seen, refusing.counts["refused"]) == (MOST, MOST)
    assert "no such role" in (refusing.sentence() or "")


# ── for real ──────────────────────────────────────────────────────────────────

AGENT = """
import json, os, sys, time, urllib.request
base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
tools = [{"type": "function", "function": {"name": "bash", "description": "run", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}}]
messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": sys.argv[1]}]
for step in range(3):
    body = json.dumps({"model": "m", "messages": messages, "tools": tools, "max_tokens": 400}).encode()
    asked = urllib.request.Request(base + "/chat/completions", body, {"content-type": "application/json", "authorization": "Bearer " + key})
    answer = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]
    messages.append(answer)
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in answer.get("tool_calls") or ()]
    time.sleep(float(sys.argv[2]))
    if not answer.get("tool_calls"):
        break
open("/work/out", "w").write(sys.argv[1][-1])
"""


def source(
    folder: Path, *, tasks: int, samples: int, pause: float = 0.0, command: list[str] | None = None
) -> Path:
    """Tasks whose name ends in a digit; the even ones are rewarded."""
    file = folder / "tasks.jsonl"
    with file.open("w") as out:
        for number in range(tasks):
            task = {
                "task_id": f"demo__{number}",
                "instruction": f"Say {number}",
                "num_samples": samples,
                "harness": {
                    "name": "shell",
                    "command": command or ["python3", "/work/agent.py", "{instruction}", str(pause)],
                },
                "runtime": {"files": [{"path": "agent.py", "text": AGENT}], "memory_mb": 256},
                "evaluator": {
                    "name": "command",
                    "config": {"script": "test $(( $(cat /work/out) % 2 )) = 0"},
                },
                "metadata": {"repo": ["moto", "mypy", "dask"][number % 3]},
            }
            out.write(json.dumps(task) + "\n")
    (folder / "node.toml").write_text(
        f'engine = "simulated"\nrun_limit = 2\nnode_id = "generate-{os.getpid()}"\n[simulated]\ntokens_per_s'
        " = 2000\ncalling_turns = 2\n"
    )
    return file


@contextmanager
def started(folder: Path, *more: str) -> "Iterator[subprocess.Popen[str]]":
    argv = [
        sys.executable,
        "-m",
        "polarnode.cli",
        "generate",
        "--config",
        str(folder / "node.toml"),
        "--out",
        str(folder / "out"),
        *more,
    ]
    with subprocess.Popen(
        [*argv, str(folder / "tasks.jsonl")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def ran(folder: Path, *more: str, code: int = 0) -> str:
    with started(folder, *more) as child:
        said = child.communicate()[0]
    assert child.returncode == code, said
    assert "Traceback" not in said
    return said


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in file.read_text().splitlines()]


def listed(folder: Path) -> list[dict[str, Any]]:
    return [each for name in ("accepted", "rejected") for each in lines(folder / "out" / f"{name}.jsonl")]


def ended(folder: Path) -> set[str]:
    """The sessions that the journal of a node that may be running says are over; none while it is made."""
    with sqlite3.connect(f"file:{folder / 'out' / 'state' / 'journal.sqlite'}?mode=ro", uri=True) as db:
        made = db.execute("SELECT name FROM sqlite_master WHERE name = 'sessions'").fetchone()
        over = db.execute("SELECT session_id FROM sessions WHERE outcome IS NOT NULL") if made else ()
        found = {each for (each,) in over}
    db.close()
    return found


@pytest.mark.podman
@pytest.mark.usefixtures("podman")
def test_killed_run_continues(tmp_path: Path) -> None:
    source(tmp_path, tasks=3, samples=3, pause=1.0)
    with started(tmp_path) as child:
        while not (tmp_path / "out" / "state" / "journal.sqlite").exists() or len(ended(tmp_path)) < 2:
            assert child.poll() is None, child.communicate()[0]
            time.sleep(0.2)
        child.send_signal(signal.SIGKILL)
    before = ended(tmp_path)
    assert len(before) < 9
    assert not (tmp_path / "out" / "accepted.jsonl").exists()

    said = ran(tmp_path, "--held-out-by", "repo")
    assert f"9 sessions, {len(before)} of them already done" in said
    rows = listed(tmp_path)
    assert {(each["task_id"], each["sample_index"]) for each in rows} == {
        (f"demo__{task}", sample) for task in range(3) for sample in range(3)
    }
    assert before <= {each["session_id"] for each in rows}
    assert [each["reason"] for each in rows].count("accepted") == 6

    table = json.loads((tmp_path / "out" / "table.json").read_text())
    assert (table["rows"][-1]["attempts"], table["rows"][-1]["accepted"], table["rows"][-1]["reasons"]) == (
        9,
        6,
        {"reward": 3},
    )
    check_files(tmp_path / "out", table)

    everything = ended(tmp_path)
    said = ran(tmp_path, "--accept", "turns >= 1", "--rows", "none")
    assert "accepted by turns >= 1: 9 of 9 sessions (100.0 %)" in said
    assert ended(tmp_path) == everything
    assert "was begun otherwise" in ran(tmp_path, "--samples", "4", code=1)


def check_files(out: Path, table: dict[str, Any]) -> None:
    """Conversations and rows of the accepted, each session on one side only."""
    sides = [lines(out / f"sft{side}.jsonl") for side in ("", ".held-out")]
    said = [{each["session_id"] for each in side} for side in sides]
    accepted = {each["session_id"] for each in lines(out / "accepted.jsonl")}
    assert said[0] | said[1] == accepted
    assert not said[0] & said[1]
    assert {each["metadata"]["repo"] for each in sides[1]} <= set(table["held_out"]["values"])
    assert [message["role"] for message in sides[0][0]["messages"]][:3] == ["system", "user", "assistant"]
    assert sides[0][0]["tools"][0]["function"]["name"] == "bash"
    for side, sessions in zip(("", ".held-out"), said, strict=True):
        rows = pq.read_table(out / f"rows{side}.parquet").to_pylist()
        assert {row["session_id"] for row in rows} == sessions
        for row in rows:
            assert len(row["token_ids"]) == len(row["loss_mask"]) == len(row["logprobs"])
            assert sum(row["loss_mask"]) == sum(span["end"] - span["start"] for span in row["turn_spans"])
            assert all(
                logprob == 0
                for logprob, trained in zip(row["logprobs"], row["loss_mask"], strict=True)
                if not trained
            )


@pytest.mark.podman
@pytest.mark.usefixtures("podman")
def test_silent_session_is_rerun_once(tmp_path: Path) -> None:
    source(tmp_path, tasks=1, samples=1, command=["true"])
    said = ran(tmp_path, "--accept", "True")
    assert "accepted by True: 0 of 1 sessions (0.0 %)" in said
    assert len(ended(tmp_path)) == 2
    (row,) = listed(tmp_path)
    assert (row["reason"], row["because"]) == ("empty", "no turn of it has an answer")
    assert ended(tmp_path) == (ran(tmp_path, "--accept", "True"), ended(tmp_path))[1]


@pytest.mark.podman
@pytest.mark.usefixtures("podman")
def test_interrupt_keeps_finished_sessions(tmp_path: Path) -> None:
    """One interrupt ends it with what there is, and the rest is run next time."""
    source(tmp_path, tasks=2, samples=2, pause=20.0)
    with started(tmp_path) as child:
        while not (tmp_path / "out" / "state" / "sessions").exists() or not any(
            (tmp_path / "out" / "state" / "sessions").iterdir()
        ):
            assert child.poll() is None, child.communicate()[0]
            time.sleep(0.2)
        child.send_signal(signal.SIGINT)
        said = child.communicate()[0]
    assert child.returncode == 1, said
    assert "run the same command again to resume" in said
    assert all(each["reason"] == "cancelled" for each in listed(tmp_path))


@pytest.mark.engine
@pytest.mark.podman
@pytest.mark.harness
@pytest.mark.usefixtures("podman")
def test_harness_conversations_render_with_model(tmp_path: Path) -> None:
    out = tmp_path / "out"
    demo = Path(__file__).parents[2] / "examples" / "demo" / "pi.toml"
    argv = [
        sys.executable,
        "-m",
        "polarnode.cli",
        "generate",
        "--cpu",
        "--samples",
        "2",
        "--accept",
        "turns >= 1",
        "--out",
        str(out),
        str(demo),
    ]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    table = json.loads((out / "table.json").read_text())
    assert table["rows"][-1]["accepted"] == 2
    assert table["words"]["refused"] == 0
    assert table["words"]["compared"] == len(lines(out / "sft.jsonl")) >= 2
    for each in lines(out / "sft.jsonl"):
        assert each["tools"]
        assert each["messages"][-1]["role"] == "assistant"
