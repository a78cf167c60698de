"""submit, watch and export against a control plane on a real socket, over a real journal."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import trio
from attrs import evolve
from click.testing import CliRunner, Result
from control_plane_parts import Plane, open_plane
from journal_samples import make_spec, make_trajectory
from journal_writes import publish_end
from sources_kit import DATA, task

from polarnode.cli import remote, watching
from polarnode.cli.main import main as command
from polarnode.client import Event
from polarnode.core.trajectory import LeftOut, Trajectory
from polarnode.journal import queries
from polarnode.merge.figures import lineage_figures

TASK = 'instruction = "Do it."\nnum_samples = 3\nharness = { name = "pi" }\n'


async def invoke(plane: Plane, *argv: str) -> Result:
    def call() -> Result:
        return CliRunner().invoke(
            command, [*argv, "--url", plane.url, "--token", "secret"], prog_name="polarnode"
        )

    return await trio.to_thread.run_sync(call)


async def publish(plane: Plane, *trajectories: Trajectory) -> None:
    for trajectory in trajectories:
        for turn in trajectory.turns:
            plane.journal.writer.record_turn(turn)
        publish_end(plane.journal, trajectory)
    await plane.journal.writer.flush()


def of_task(task_id: str, *rewards: float | None) -> list[Trajectory]:
    made = [
        make_trajectory(f"{task_id}-{index}", task_id=task_id, sample_index=index, turns=2, reward=each)
        for index, each in enumerate(rewards)
    ]
    return [evolve(each, harness="pi") for each in made]


async def test_submit_prints_only_id_to_stdout(tmp_path: Path) -> None:
    file = tmp_path / "task.toml"
    file.write_text(f'task_id = "mine"\n{TASK}')
    async with open_plane(tmp_path / "journal") as plane:
        first, again = await invoke(plane, "submit", str(file)), await invoke(plane, "submit", str(file))
        other = await invoke(plane, "submit", str(file), "--samples", "2")
        known = await plane.journal.reader.query(queries.task, "mine")
    assert (first.stdout, first.exit_code) == ("mine\n", 0)
    assert first.stderr == "3 sessions; follow them with: polarnode watch --task mine\n"
    assert again.stdout == "mine\n"
    assert "(submitted before)" in again.stderr
    assert known is not None
    assert known.spec.num_samples == 3
    assert other.exit_code == 1
    assert "choose a new one" in other.stderr


async def test_submission_includes_named_files(tmp_path: Path) -> None:
    (tmp_path / "words.md").write_text("From a file.")
    file = tmp_path / "task.toml"
    file.write_text('task_id = "filed"\ninstruction_file = "words.md"\nharness = { name = "pi" }\n')
    async with open_plane(tmp_path / "journal") as plane:
        await invoke(plane, "submit", str(file))
        known = await plane.journal.reader.query(queries.task, "filed")
    assert known is not None
    assert known.spec.instruction == "From a file."


async def test_wrong_token_is_one_sentence(tmp_path: Path) -> None:
    async with open_plane(tmp_path / "journal", token="another") as plane:
        for argv in (("watch",), ("export",), ("inspect", "x")):
            result = await invoke(plane, *argv)
            assert result.exit_code == 1
            assert result.output.startswith(
                "Error: the token that was sent (polarnode's commands take --token"
            )
            assert "is another than this control plane's" in result.output


async def test_watch_ends_with_its_task(tmp_path: Path) -> None:
    async with open_plane(tmp_path / "journal") as plane:
        await plane.service.submit(make_spec(task_id="t", num_samples=2), idempotency_key=None)
        first, second = of_task("t", 1.0, None)
        await publish(plane, first)
        result: list[Result] = []
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                result.append(await invoke(plane, "watch", "--task", "t"))

            nursery.start_soon(watch)
            await trio.sleep(0.3)
            assert not result
            await publish(plane, second)
    assert result[0].exit_code == 0
    assert result[0].output.splitlines() == [
        "t-0 pi completed reward 1 turns 2 traces 1 trainable 3",
        "t-1 pi completed reward – turns 2 traces 1 trainable 3",
        (
            f"group {make_spec().group_id or 't'} is done, partial (some are missing: 1 of 2 sessions are"
            " usable (1 no reward)): rewards 1 –"
        ),
        "task t is done: 2 completed",
    ]


async def test_watch_reports_untrained_sessions(tmp_path: Path) -> None:
    async with open_plane(tmp_path / "journal") as plane:
        await plane.service.submit(make_spec(task_id="t"), idempotency_key=None)
        (found,) = of_task("t", 1.0)
        left_out = (LeftOut(turn=0, reason="auxiliary"), LeftOut(turn=1, reason="auxiliary"))
        figures = lineage_figures(found.turns, left_out, thinking="keep")
        await publish(plane, evolve(found, left_out=left_out, metrics={"lineage": figures}))
        lines = (await invoke(plane, "watch", "--task", "t")).output.splitlines()
        raw = json.loads((await invoke(plane, "watch", "--task", "t", "--json")).output.splitlines()[0])
    tokens = sum(len(turn.sampled) for turn in found.turns)
    assert lines[0].endswith(f"trainable 3, left out: auxiliary {tokens}")
    assert raw["left_out_tokens"] == {"auxiliary": tokens}


async def test_consumer_sees_each_event_once(tmp_path: Path) -> None:
    async with open_plane(tmp_path / "journal") as plane:
        await plane.service.submit(make_spec(task_id="t"), idempotency_key=None)
        await publish(plane, *of_task("t", 1.0))
        first = await invoke(plane, "watch", "--task", "t", "--consumer", "me")
        again = await invoke(plane, "watch", "--task", "t", "--consumer", "me")
    assert len(first.output.splitlines()) == 3
    assert again.output == ""


async def test_watch_refuses_unknown_task(tmp_path: Path) -> None:
    async with open_plane(tmp_path / "journal") as plane:
        result = await invoke(plane, "watch", "--task", "gone")
    assert result.exit_code == 1
    assert "no task 'gone' is in the log" in result.output


BROKEN = "Traceback (most recent call last):\n  File ...\nModuleNotFoundError: No module named 'yaml'\n"
COLLECTED = "E   ModuleNotFoundError: No module named 'yaml'\n=== 1 error in 0.1s ===\n"
FAILED = "Traceback (most recent call last):\nAssertionError: 3 != 4\n"


def of_tests(*tails: str | None, reward: float = 0.0) -> list[Event]:
    """The events of one group, each session with the output of its test."""
    values = [
        {
            "session_id": f"s-{index}",
            "outcome": {"status": "completed"},
            "reward": reward,
            "metrics": {} if tail is None else {"evaluation": {"exit_code": 1, "output_tail": tail}},
        }
        for index, tail in enumerate(tails)
    ]
    sessions = [{"session_id": each["session_id"]} for each in values]
    kinds = [("trajectory", each) for each in values] + [("group", {"sessions": sessions})]
    return [Event(seq=seq, kind=kind, key=kind, data=data) for seq, (kind, data) in enumerate(kinds)]


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (of_tests(BROKEN, BROKEN, COLLECTED), "all 3 samples"),
        (of_tests(BROKEN, FAILED), None),
        (of_tests(BROKEN, None), None),
        (of_tests(BROKEN), None),
        (of_tests(BROKEN, BROKEN, reward=0.5), None),
        (of_tests("FAILED: no luck", "FAILED: no luck"), None),
    ],
)
def test_tests_ending_in_same_traceback(events: list[Event], said: str | None) -> None:
    ends = watching.SameTestEnds()
    notes = [ends.note(each) for each in events]
    assert notes[:-1] == [None] * (len(events) - 1)
    assert (notes[-1] is None) is (said is None)
    if said is not None:
        assert notes[-1] == (
            f"the tests of {said} ended in the same traceback: ModuleNotFoundError: No module named 'yaml'"
        )


@pytest.mark.parametrize(
    "said",
    [
        "/usr/bin/python3: No module named pytest",
        "python3: can't open file '/work/test_a.py': [Errno 2] No such file or directory",
        "sh: 2: eval: jq: not found",
        "./test.sh: line 3: jq: command not found",
        'sh: 1: eval: Syntax error: "fi" unexpected (expecting "then")',
        "test.sh: line 1: syntax error near unexpected token `fi'",
        "ERROR: file or directory not found: tests/test_a.py",
        "make: *** No rule to make target 'test'.  Stop.",
        "make: *** [Makefile:2: test] Error 127",
        "Error: Cannot find module 'jest'",
    ],
)
def test_tests_all_missing_a_program(said: str) -> None:
    ends = watching.SameTestEnds()
    events = of_tests(f"collecting\n{said}\n", f"{said}\n")
    assert [ends.note(each) for each in events][-1] == (
        f"the tests of all 2 samples ended in the same line: {said}"
    )
    passed = of_tests(f"{said}\n", f"{said}\n", reward=1.0)
    assert [watching.SameTestEnds().note(each) for each in passed] == [None] * 3


async def test_watch_reports_a_broken_test(tmp_path: Path) -> None:
    broken = {"evaluation": {"exit_code": 1, "output_tail": BROKEN}}
    async with open_plane(tmp_path / "journal") as plane:
        await plane.service.submit(make_spec(task_id="t", num_samples=2), idempotency_key=None)
        await publish(plane, *(evolve(each, metrics=broken) for each in of_task("t", 0.0, 0.0)))
        lines = (await invoke(plane, "watch", "--task", "t")).output.splitlines()
        events = (await invoke(plane, "watch", "--task", "t", "--json")).output.splitlines()
    said = (
        "the tests of all 2 samples ended in the same traceback: ModuleNotFoundError: No module named 'yaml'"
    )
    assert lines[3] == said
    assert [json.loads(each).get("note") for each in events] == [None, None, said, None]


def test_every_event_is_one_line() -> None:
    gap = Event(seq=4, kind="gap", key="gap", data={"after": 0, "oldest": 5})
    assert watching.line(gap) == "events 0 to 5 are no longer kept: read more often"
    assert "older than the node" in watching.line(Event(seq=4, kind="weights", key="w", data={}))


async def test_export_writes_filtered_trajectories(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    async with open_plane(tmp_path / "journal") as plane:
        await plane.service.submit(make_spec(task_id="t", num_samples=3), idempotency_key=None)
        await publish(plane, *of_task("t", 1.0, 0.0, None))
        everything = await invoke(plane, "export")
        rewarded = await invoke(plane, "export", "--min-reward", "0.5", "--turns", "full", "-o", str(file))
        nothing = await invoke(plane, "export", "--task", "other")
        wrong = await invoke(plane, "export", "--outcome", "fine")
    assert [json.loads(line)["session_id"] for line in everything.stdout.splitlines()] == [
        "t-0",
        "t-1",
        "t-2",
    ]
    assert everything.stderr == "3 trajectories\n"
    lines = file.read_text().splitlines()
    assert len(lines) == 1
    assert json.loads(lines[0])["turns"][0]["sampled"] == [1000, 1001, 1002]
    assert rewarded.stderr == f"1 trajectories in {file}\n"
    assert nothing.stdout == ""
    assert "outcome must be one of completed, timeout" in wrong.output


async def test_export_in_another_format(tmp_path: Path) -> None:
    table, conversations = tmp_path / "rows.parquet", tmp_path / "sft.jsonl"
    async with open_plane(tmp_path / "journal") as plane:
        await plane.service.submit(make_spec(task_id="t", num_samples=2), idempotency_key=None)
        await publish(plane, *of_task("t", 1.0, 0.0))
        samples = await invoke(plane, "export", "--format", "slime", "--min-reward", "0.5")
        rows = await invoke(plane, "export", "--format", "parquet", "-o", str(table))
        said = await invoke(plane, "export", "--kind", "sft", "-o", str(conversations))
        wrong = await invoke(plane, "export", "--format", "slim", "-o", str(table))
    [line] = [json.loads(each) for each in samples.stdout.splitlines()]
    assert (line["format"], line["session_id"], line["value"][0]["status"]) == ("slime", "t-0", "completed")
    assert rows.stderr == f"token rows in {table}\n"
    # and is there still after what was refused
    assert pq.read_table(table).column("session_id").to_pylist() == ["t-0", "t-1"]
    assert said.stderr == f"{len(conversations.read_text().splitlines())} conversations in {conversations}\n"
    assert "format must be one of verl, slime" in wrong.output


async def test_failed_export_keeps_old_file(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    file.write_text("old")
    async with open_plane(tmp_path / "journal") as plane:
        result = await invoke(plane, "export", "--outcome", "fine", "-o", str(file))
    assert result.exit_code == 1
    assert file.read_text() == "old"


@pytest.mark.parametrize("plain", [(), ("--plain",)])
async def test_session_of_node_is_inspected(tmp_path: Path, plain: tuple[str, ...]) -> None:
    async with open_plane(tmp_path / "journal") as plane:
        await plane.service.submit(make_spec(task_id="t", num_samples=2), idempotency_key=None)
        await publish(plane, of_task("t", 1.0)[0])
        result = await invoke(plane, "inspect", "t-0", *plain)
        pending = await invoke(plane, "inspect", "t-1")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("session t-0  pi  completed  reward 1\n")
    assert "0 1 2 3 «1000 1001 1002»" in result.output
    assert "give --model" in result.output
    assert pending.output == "session t-1    not over  0 turns, 0 tokens sampled\n"


# ── sources ───────────────────────────────────────────────────────────────────


async def test_source_is_submitted_all_or_nothing(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    lines = [
        {"task_id": f"t-{number}", "instruction": "Do it.", "harness": {"name": "pi"}, "num_samples": 2}
        for number in range(3)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    async with open_plane(tmp_path / "journal") as plane:
        done = await invoke(plane, "submit", "--only", "t-[12]", str(file))
        again = await invoke(plane, "submit", str(file))
        file.write_text(file.read_text() + "{\n")
        torn = await invoke(plane, "submit", "--samples", "5", str(file))
    assert done.stdout == "t-1\nt-2\n"
    assert done.stderr == "2 tasks, 4 sessions; follow them with: polarnode watch\n"
    assert (
        again.stderr
        == "3 tasks, 6 sessions (2 tasks were submitted before); follow them with: polarnode watch\n"
    )
    assert torn.exit_code == 1
    assert torn.stdout == ""
    assert "line 4: the line is not JSON" in torn.stderr


async def test_source_is_submitted_with_overrides(tmp_path: Path) -> None:
    (tmp_path / "with.toml").write_text("[budgets]\nrun_s = 33\n")
    over = ("--harness", "codex", "--override", str(tmp_path / "with.toml"))
    async with open_plane(tmp_path / "journal") as plane:
        done = await invoke(plane, "submit", *over, "--only", "many", str(DATA / "harbor"))
        known = await plane.journal.reader.query(queries.task, done.stdout.strip())
    assert done.exit_code == 0, done.output
    assert "· environment.skills_dir is not used" in done.stderr
    assert known is not None
    assert (known.spec.harness.name, known.spec.budgets.run_s, known.spec.runtime.image) == (
        "codex",
        33,
        "quay.example/many:2",
    )


def test_images_for_remote_node_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    found = task(DATA / "harbor" / "hello", harness="pi")
    assert found.build is not None
    remote._list_images([found, found, task(DATA / "harbor" / "many", harness="pi")])
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"· the node's machine needs the image {found.build.image}, built from {found.build.folder}:"
        " run `polarnode convert --build`"
    )
    assert remote.RemoteNode(url="http://127.0.0.1:8080", token=None).local
    assert not remote.RemoteNode(url="http://gpu-7:8080", token=None).local
