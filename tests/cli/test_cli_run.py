"""`polarnode run`: what it takes, what it writes, what it makes of what came out; and once for real, stopped
by a signal.
"""

import io
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from attrs import evolve
from journal_samples import make_spec, make_trajectory
from rich.console import Console
from sources_kit import DATA

from polarnode.cli import run as running
from polarnode.cli.sources import SourceSelection, checked, written_whole
from polarnode.core import codec
from polarnode.core.errors import InvariantViolated, PolarnodeError, Refused, RuntimeFault
from polarnode.core.task import HarnessSpec, TaskSpec
from polarnode.core.trajectory import Outcome, Trajectory
from polarnode.node.config import NodeConfig
from polarnode.sources import Overrides

CONFIG = NodeConfig(cpu=True, import_paths=("*",))


def only_task(file: Path, samples: int | None = None) -> TaskSpec:
    [task] = SourceSelection(paths=(file,), overrides=Overrides(samples=samples)).tasks()
    return task.spec


def checked_file(file: Path) -> TaskSpec:
    [task] = SourceSelection(paths=(file,)).tasks()
    return checked(task, config=CONFIG, here=True).spec


def report(
    *trajectories: Trajectory, expect_reward: bool = False, sessions: int | None = None
) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=400, highlight=False, markup=False)
    count = len(trajectories) if sessions is None else sessions
    code = running.report(
        trajectories, Path("out/t.jsonl"), expect_reward=expect_reward, sessions=count, console=console
    )
    text = console.file
    assert isinstance(text, io.StringIO)
    return code, text.getvalue()


def ended(status: str, **more: object) -> Trajectory:
    return evolve(make_trajectory(f"s-{status}", reward=None), outcome=Outcome(status=status, **more))  # type: ignore[arg-type]


def test_success_exits_0_and_names_file() -> None:
    code, said = report(make_trajectory("a"), make_trajectory("b", reward=0.0), expect_reward=True)
    assert code == 0
    assert "out/t.jsonl" in said
    assert "2 sessions, 1 rewarded" in said


@pytest.mark.parametrize("status", ["timeout", "failed", "interrupted"])
def test_harness_failure_is_no_fault(status: str) -> None:
    code, said = report(ended(status, reason="so it was"))
    assert code == 0
    assert f"1 × {status}: so it was" in said


def test_error_exits_1_with_boundary() -> None:
    code, said = report(
        make_trajectory("a"), ended("error", boundary="runtime", reason="podman went away [/x]")
    )
    assert code == 1
    assert "s-error: error of runtime: podman went away [/x]" in said


def test_broken_invariant_is_our_bug() -> None:
    code, said = report(
        ended("error", boundary=InvariantViolated.boundary, reason="law 2: 3 of the 5 sampled tokens")
    )
    assert code == 1
    assert "a token invariant is broken: this is a bug in polarnode" in said


def test_missing_expected_reward_exits_1() -> None:
    poor = make_trajectory("a", reward=0.0)
    assert report(poor)[0] == 0
    code, said = report(poor, expect_reward=True)
    assert code == 1
    assert said.rstrip().endswith("no session has a reward above 0 (--expect-reward)")


def test_stopped_or_lost_session_exits_1() -> None:
    code, said = report(ended("cancelled", reason="cancelled in run"))
    assert code == 1
    assert "1 sessions were cancelled before they ended" in said
    assert report(make_trajectory("a"), ended("cancelled", reason="early stop in run"))[0] == 0, (
        "their task asked for it"
    )
    code, said = report(make_trajectory("a"), sessions=3)
    assert code == 1
    assert "2 of 3 sessions have no trajectory" in said


def test_progress_is_one_plain_line() -> None:
    assert running.progress(3, 8, ["run", "run", "init"]) == "· 3 of 8 sessions done; 2 run, 1 init"
    assert running.progress(8, 8, []) == "· 8 of 8 sessions done"
    waiting = running.progress(0, 16, ["init"] * 16, waits_for="building mini_swe_agent, 60 s")
    assert waiting == "· 0 of 16 sessions done; 16 init (building mini_swe_agent, 60 s)"


async def test_images_build_beside_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first run waits for the longer of both, not for one after the other."""
    config = NodeConfig(engine="simulated", state_dir=str(tmp_path), log="dbname=shared")
    begun, built = trio.Event(), list[str]()

    class Building:
        step = None

        def __init__(self, **_: object) -> None: ...

        async def ensure(self, name: str) -> None:
            begun.set()
            await trio.lowlevel.checkpoint()
            built.append(name)
            if name == "mini_swe_agent":
                raise RuntimeFault("no network")  # told by the session that needs it

    @asynccontextmanager
    async def engine(config: NodeConfig, *, report: object, images: Building) -> AsyncIterator[Building]:
        assert config.log is None, "a run is on its own"
        with trio.fail_after(10):
            await begun.wait()
        yield images

    async def work(node: Any, stop: object) -> Any:
        await trio.testing.wait_all_tasks_blocked()
        return node

    monkeypatch.setattr(running, "Images", Building)
    monkeypatch.setattr(running, "open_node", engine)
    specs = [make_spec(harness=HarnessSpec(name=name)) for name in ("pi", "mini_swe_agent", "pi")]
    found = await running.on_own_node(config, Console(quiet=True), work, specs=specs)
    assert isinstance(found, Building), "sessions wait for the same builds"
    assert built == ["pi", "mini_swe_agent"]


# ── files ─────────────────────────────────────────────────────────────────────


def test_trajectories_written_and_read_back(tmp_path: Path) -> None:
    first = running.write(tmp_path, [make_trajectory("a")])
    path = running.write(tmp_path, [make_trajectory("b", turns=2), make_trajectory("c")])
    assert path == first
    values = [json.loads(line) for line in path.read_text().splitlines()]
    assert [value["session_id"] for value in values] == ["b", "c"]
    assert codec.read_trajectory(values[0]).turns[1].sampled == make_trajectory("b", turns=2).turns[1].sampled
    assert [entry.name for entry in tmp_path.iterdir()] == ["trajectories.jsonl"]


def test_failed_write_keeps_old_file(tmp_path: Path) -> None:
    file = tmp_path / "kept"
    file.write_bytes(b"old")

    def break_off() -> None:
        with written_whole(file) as out:
            out.write(b"new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_off()
    assert file.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]
    with (
        pytest.raises(Refused, match="cannot be written: No such file"),
        written_whole(tmp_path / "no" / "file"),
    ):
        pass


def test_output_to_device_keeps_it(tmp_path: Path) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))  # never tried on /dev/null itself
        with device.open("wb"):
            pass
    except PermissionError:
        pytest.skip("only root makes devices, and not on a file system mounted nodev")
    (tmp_path / "link").symlink_to(device)
    for file in (device, tmp_path / "link"):
        with written_whole(file) as out:
            out.write(b"into the device")
        assert stat.S_ISCHR(device.stat().st_mode)
    assert (tmp_path / "link").is_symlink()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link", "null"]


def test_output_to_pipe_keeps_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with written_whole(pipe) as out:
            out.write(b"through the pipe")
        assert os.read(reader, 100) == b"through the pipe"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_output_link_keeps_file_mode(tmp_path: Path) -> None:
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.parent.mkdir()
    target.write_bytes(b"old")
    target.chmod(0o640)
    link.symlink_to("folder/target")
    with written_whole(link) as out:
        out.write(b"new")
        assert target.read_bytes() == b"old"  # replaced at the end, as a whole
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    dangling = tmp_path / "dangling"
    dangling.symlink_to("folder/later")
    with written_whole(dangling) as out:
        out.write(b"made")
    assert (tmp_path / "folder" / "later").read_bytes() == b"made"
    circle = tmp_path / "circle"
    circle.symlink_to("circle")
    with pytest.raises(Refused, match=r"circle cannot be written: Too many levels"), written_whole(circle):
        pass


def test_dev_stdout_means_stdout(tmp_path: Path) -> None:
    """`-o /dev/stdout >> file` appends: the file is not replaced below the shell. The link is one of the
    test's own: a fault must not replace the machine's.
    """
    kept, stdout = tmp_path / "kept", tmp_path / "stdout"
    stdout.symlink_to("/proc/self/fd/1")
    kept.write_bytes(b"before\n")
    program = (
        "from pathlib import Path\n"
        "from polarnode.cli.sources import written_whole\n"
        f"with written_whole(Path({str(stdout)!r})) as out:\n"
        "    out.write(b'after\\n')\n"
    )
    with kept.open("ab") as appended:
        subprocess.run([sys.executable, "-c", program], stdout=appended, check=True)
    assert kept.read_bytes() == b"before\nafter\n"


def test_each_run_has_own_state(tmp_path: Path) -> None:
    state = running.make_state_folder(tmp_path / "out")
    assert state.is_dir()
    assert state.parent == tmp_path / "out" / "state"
    assert state.name.endswith(f"-{os.getpid()}")


def test_impossible_output_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PolarnodeError, match=r"--out .*file cannot be written"):
        running.make_state_folder(tmp_path / "file")


def test_task_may_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "words.md").write_text("Do it.")
    (tmp_path / "shared.bin").write_bytes(b"\xff\0")
    file = tmp_path / "task" / "task.toml"
    file.write_text(
        'instruction_file = "words.md"\nharness = { name = "pi" }\n[[runtime.files]]\npath = "x"\nsource ='
        ' "../shared.bin"\n'
    )
    spec = only_task(file, samples=5)
    assert (spec.instruction, spec.num_samples) == ("Do it.", 5)
    assert codec.file_bytes(spec.runtime.files[0]) == b"\xff\0"


def test_task_may_be_json(tmp_path: Path) -> None:
    file = tmp_path / "task.json"
    file.write_text('{"instruction": "Do it.", "harness": {"name": "pi"}, "num_samples": 2}')
    assert only_task(file).num_samples == 2


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        (
            "t.toml",
            b'instruction = "x"\nharness = { name = "pi" }\nbudget = 3',
            "t.toml: budget is not a known field: did you mean budgets",
        ),
        ("t.toml", b"instruction = ", "t.toml: it is not TOML"),
        ("t.toml", b"\xff", "t.toml: it is not UTF-8 text"),
        (
            "t.toml",
            b'instruction_file = "gone.md"\nharness = { name = "pi" }',
            "gone.md cannot be read: No such file or directory",
        ),
        ("t.json", b"{", "t.json: it is not JSON"),
        ("t.toml", b'instruction = "x"\nharness = { name = "po" }', "t.toml: no harness is called po"),
        (
            "t.toml",
            b'instruction = "x"\nharness = { name = "pi" }\nevaluator = { name = "command" }',
            "needs either argv or script",
        ),
        (
            "t.toml",
            b'instruction = "x"\nharness = { name = "pi" }\nbuilder = { name = "zz" }',
            "there is no builder 'zz'",
        ),
        (
            "t.toml",
            b'instruction = "x"\nharness = { name = "pi" }\nruntime = { egress = ["a.b"] }',
            "does not let tasks reach a.b",
        ),
        (
            "t.toml",
            (
                b'instruction = "x"\nharness = { name = "pi" }\nruntime = { volumes = [{ source = "/x",'
                b' target = "/x" }] }'
            ),
            "/x",
        ),
    ],
)
def test_refusals_come_before_engine_start(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Refused) as refused:
        checked_file(tmp_path / name)
    assert sentence in str(refused.value)
    assert str(refused.value).startswith(str(tmp_path))


def test_valid_task_is_used_unchanged(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(
        'instruction = "x"\nharness = { name = "pi" }\nbuilder = { name = "per_request" }'
    )
    assert checked_file(tmp_path / "t.toml").builder.name == "per_request"


# ── for real ──────────────────────────────────────────────────────────────────


@pytest.mark.engine
@pytest.mark.podman
@pytest.mark.usefixtures("podman")
def test_interrupt_ends_sessions_with_results(tmp_path: Path) -> None:
    """One interrupt ends the sessions with what they have."""
    task = tmp_path / "sleep.toml"
    task.write_text(
        'instruction = "x"\nharness = { name = "shell", command = ["sh", "-c", "echo up; sleep 600"] }\n'
    )
    running.write(tmp_path, [make_trajectory("old")])
    with started(task, tmp_path) as child:
        wait_for(child, "1 run")
        child.send_signal(signal.SIGINT)
        said = child.communicate()[0]
    assert child.returncode == 1, said
    assert "1 × cancelled" in said
    assert "Traceback" not in said
    lines = (tmp_path / "trajectories.jsonl").read_text().splitlines()
    assert [json.loads(line)["outcome"]["status"] for line in lines] == ["cancelled"]


@pytest.mark.engine
def test_early_interrupt_exits_at_once(tmp_path: Path) -> None:
    task = tmp_path / "t.toml"
    task.write_text('instruction = "x"\nharness = { name = "pi" }\n')
    with started(task, tmp_path / "out") as child:
        wait_for(child, "starting the engine")
        child.send_signal(signal.SIGINT)
        said = child.communicate()[0]
    assert child.returncode == 130, said
    assert "stopped before any session began" in said
    assert "Traceback" not in said


@contextmanager
def started(task: Path, out: Path) -> "Iterator[subprocess.Popen[str]]":
    argv = [sys.executable, "-m", "polarnode.cli", "run", "--cpu", "--out", str(out), str(task)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def wait_for(child: "subprocess.Popen[str]", words: str) -> None:
    assert child.stdout is not None
    said = []
    for line in child.stdout:
        said.append(line)
        if words in line:
            return
    pytest.fail(f"it ended before it said {words!r}: {''.join(said)}")


# ── a Harbor directory as it is ───────────────────────────────────────────────


@pytest.mark.podman
@pytest.mark.usefixtures("podman")
@pytest.mark.parametrize(
    ("script", "reward"),
    [
        ("getent passwd agent; echo 'Hello, world!' > hello.txt", 1.0),
        (
            (
                "cat given.txt; test ! -e /tests; test ! -e /solution; echo 1 > reward.txt; mkdir -p"
                " /logs/verifier; echo 1 > /logs/verifier/reward.txt"
            ),
            0.0,
        ),
    ],
    ids=["solved", "forged"],
)
def test_harbor_directory_runs_unchanged(tmp_path: Path, script: str, reward: float) -> None:
    """A harbor directory is run as it is."""
    over = (
        '[harness]\nname = "shell"\ncommand = ["sh", "-c",'
        f" {json.dumps(f'set -e; {script}')}]\n[runtime]\nadd_harness = true\n"
    )
    (tmp_path / "with.toml").write_text(over)
    argv = [
        sys.executable,
        "-m",
        "polarnode.cli",
        "run",
        "--engine",
        "simulated",
        "--override",
        str(tmp_path / "with.toml"),
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(
        [*argv, str(DATA / "harbor" / "hello")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [value] = [
        json.loads(line) for line in (tmp_path / "out" / "trajectories.jsonl").read_text().splitlines()
    ]
    assert (value["outcome"]["status"], value["reward"]) == ("completed", reward), value["outcome"]
    assert value["outcome"]["exit_code"] == 0
