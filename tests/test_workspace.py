"""What lies in a runtime: files and steps before the harness, the workspace in a fresh runtime after it, and verdicts that can be kept."""

# ruff: noqa: F811 (fixtures come by import)

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import trio
from attrs import define, field
from fakes_runtime import MemoryRuntime
from podman_parts import LIFETIME_S, SMALL, podman, runtimes  # noqa: F401

from polarnode.errors import EvaluatorError, Refused
from polarnode.ports import Ended
from polarnode.records import Outcome, Verdict
from polarnode.shell import workspace
from polarnode.shell.podman import Runtimes
from polarnode.tasks import EvaluatorSpec, FileSpec, HarnessSpec, PrepareStep, RuntimeSpec, TaskSpec


@define(eq=False)
class Folder:
    """A runtime whose workdir is a folder of this machine and whose programs are its own: `sh`, `tar` and `dd` as they are."""

    workdir: str
    id: str = "folder"
    ran: list[str] = field(factory=list)

    async def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, user: str | None = None, workdir: str | None = None, stdin: bytes = b""
    ) -> Ended:
        self.ran.append(argv[0])
        done = await trio.run_process(
            list(argv), stdin=stdin, capture_stdout=True, capture_stderr=True, check=False, cwd=workdir or self.workdir,
            env={"PATH": os.environ["PATH"], **(env or {})},
        )  # fmt: skip
        return Ended(exit_code=done.returncode, stdout=bytes(done.stdout or b""), stderr=bytes(done.stderr or b""))

    async def put(self, files: Mapping[str, bytes], *, user: str | None = None, mode: int = 0o644) -> None:
        raise NotImplementedError

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes | None:
        raise NotImplementedError

    async def end_processes(self) -> None:
        raise NotImplementedError


def folders(tmp_path: Path) -> tuple[Folder, Folder]:
    for name in ("source", "target"):
        (tmp_path / name).mkdir()
    return Folder(str(tmp_path / "source")), Folder(str(tmp_path / "target"))


def write(folder: str, name: bytes, content: bytes) -> None:
    Path(os.fsdecode(os.path.join(os.fsencode(folder), name))).write_bytes(content)


def listed(folder: str) -> dict[bytes, tuple[int, bytes]]:
    """Every path below a folder, in bytes, with its mode and its content (of a link: where it leads)."""
    found = {}
    for path, names, files in os.walk(os.fsencode(folder)):
        for name in [*names, *files]:
            full = os.path.join(path, name)
            mode = os.lstat(full).st_mode
            content = os.readlink(full) if os.path.islink(full) else b"" if os.path.isdir(full) else Path(os.fsdecode(full)).read_bytes()
            found[os.path.relpath(full, os.fsencode(folder))] = (mode, content)
    return found


def left_in_tmp() -> set[str]:
    return {name for name in os.listdir("/tmp") if name.startswith("workspace.")}


# ── a copy for a fresh judge ──────────────────────────────────────────────────


async def test_a_workspace_arrives_as_it_was_left(tmp_path: Path) -> None:
    source, target = folders(tmp_path)
    work, before = Path(source.workdir), left_in_tmp()
    for name in (b"plain", b"-rf", b" two  words ", b"new\nline", b"*", b"quo'te\"", b".hidden", "é✓".encode(), b"\xff\xfe"):
        write(source.workdir, name, b"content of " + name)
    (work / "deep" / "er").mkdir(parents=True)
    (work / "deep" / "empty").mkdir(mode=0o700)
    (work / "run.sh").write_text("#!/bin/sh\n")
    (work / "run.sh").chmod(0o755)
    (work / "secret").write_text("x")
    (work / "secret").chmod(0o600)
    (work / "link").symlink_to("plain")
    (work / "dangling").symlink_to("/nowhere/at all")
    (work / "deep" / "up").symlink_to("..")
    os.link(work / "plain", work / "second name")
    await workspace.copy(source, target)
    assert listed(target.workdir) == listed(source.workdir)
    assert left_in_tmp() == before


async def test_what_the_harness_removed_is_gone(tmp_path: Path) -> None:
    source, target = folders(tmp_path)
    for name in ("test_that_failed.py", ".git", "-x"):
        (Path(target.workdir) / name).write_text("from the image")
    (Path(target.workdir) / "folder" / "below").mkdir(parents=True)
    (Path(source.workdir) / "kept").write_text("x")
    await workspace.copy(source, target)
    assert set(listed(target.workdir)) == {b"kept"}


@pytest.mark.parametrize("piece", [10240, 4096, 7000, 1 << 20])
async def test_a_workspace_of_any_size_goes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """10240 is tar's own record: then the last piece is an empty one."""
    monkeypatch.setattr(workspace, "PIECE_BYTES", piece)
    source, target = folders(tmp_path)
    (Path(source.workdir) / "large").write_bytes(os.urandom(95_000))
    await workspace.copy(source, target)
    assert listed(target.workdir) == listed(source.workdir)
    assert source.ran.count("dd") == 102_400 // piece + 1


async def test_an_empty_workspace_is_one_too(tmp_path: Path) -> None:
    source, target = folders(tmp_path)
    await workspace.copy(source, target)
    assert listed(target.workdir) == {}


async def test_a_workspace_without_end_is_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(workspace, "COPY_LIMIT", 8 << 10)
    source, target = folders(tmp_path)
    (Path(source.workdir) / "large").write_bytes(bytes(20 << 10))
    before = left_in_tmp()
    with pytest.raises(EvaluatorError, match="evaluate it where it is, without fresh_runtime"):
        await workspace.copy(source, target)
    for name in left_in_tmp() - before:
        os.unlink(f"/tmp/{name}")


async def test_what_can_not_be_packed_or_unpacked_says_why(tmp_path: Path) -> None:
    source, target = folders(tmp_path)
    before = left_in_tmp()
    with pytest.raises(EvaluatorError, match=r"could not be packed for a fresh runtime: .*No such file"):
        await workspace.copy(Folder(f"{tmp_path}/none"), target)
    with pytest.raises(EvaluatorError, match="could not be unpacked"):
        await workspace.copy(source, Folder(f"{tmp_path}/none"))
    for name in left_in_tmp() - before:
        os.unlink(f"/tmp/{name}")


async def test_an_image_without_tar_is_said_to_be_one(autojump_clock: trio.abc.Clock) -> None:
    runtime = MemoryRuntime()
    with pytest.raises(EvaluatorError, match="could not be packed for a fresh runtime: sh: executable file not found"):
        await workspace.copy(runtime, runtime)
    await runtime.close()


@pytest.mark.podman
async def test_a_large_workspace_goes_from_container_to_container(runtimes: Runtimes) -> None:
    """More than a program's output may hold, written by the agent; a file of root's in the workdir stays where the agent could not remove it."""
    async with (
        runtimes.open(SMALL, session_id="source", lifetime_s=LIFETIME_S) as source,
        runtimes.open(SMALL, session_id="clean", lifetime_s=LIFETIME_S) as clean,
    ):
        script = "head -c 40000000 /dev/urandom > large; echo x > '-odd name'; mkdir -p a/b; ln -s /etc a/link; chmod 700 a; chmod 666 large; touch a/b/.hidden"
        assert (await source.run(["sh", "-c", script])).exit_code == 0
        await clean.put({"/work/stale/file": b"from the image", "/work/.stale": b""})
        await workspace.copy(source, clean)
        told = [(await runtime.run(["sh", "-c", "find . -printf '%p %m %l %U\\n' | sort; cat large | md5sum"])).stdout for runtime in (source, clean)]
        assert told[0] == told[1]
        assert b"./-odd name 644" in told[0]
        assert (await clean.run(["sh", "-c", "ls /tmp"])).stdout == b""


# ── files and steps ───────────────────────────────────────────────────────────


async def test_files_lie_where_they_are_named_with_their_modes() -> None:
    runtime = MemoryRuntime(workdir="/testbed/")
    files = (FileSpec(path="a/run.sh", text="é", mode=0o755), FileSpec(path="/opt/b", base64="AAEC"))
    await workspace.prepare(runtime, RuntimeSpec(files=files))
    assert runtime.files == {"/testbed/a/run.sh": "é".encode(), "/opt/b": b"\0\1\2"}
    assert runtime.modes == {"/testbed/a/run.sh": 0o755, "/opt/b": 0o644}
    await runtime.close()


async def test_steps_run_in_order_as_whom_they_name_with_the_tasks_environment() -> None:
    ran: list[tuple[str, str, str]] = []

    async def noting(call: object) -> int:
        await trio.lowlevel.checkpoint()
        ran.append((call.argv[1], call.user, call.env["A"]))  # type: ignore[attr-defined]
        return int(call.argv[1] == "fails")  # type: ignore[attr-defined]

    runtime = MemoryRuntime(programs={"step": noting})
    spec = RuntimeSpec(
        prepare=(PrepareStep(argv=("step", "one"), user="root"), PrepareStep(argv=("step", "two"))),
        eval_prepare=(PrepareStep(argv=("step", "fails")), PrepareStep(argv=("step", "never"))), env={"A": "1"},
    )  # fmt: skip
    await workspace.prepare(runtime, spec)
    assert ran == [("one", "root", "1"), ("two", "agent", "1")]
    with pytest.raises(EvaluatorError, match="'step fails' ended with exit code 1"):
        await workspace.prepare_evaluation(runtime, spec)
    assert ran[2:] == [("fails", "agent", "1")]
    await runtime.close()


async def test_a_step_that_fails_names_itself_and_shows_its_end() -> None:
    async def talks(call: object) -> int:
        await trio.lowlevel.checkpoint()
        call.stdout += b"x" * 10_000 + b"the reason\n"  # type: ignore[attr-defined]
        return 2

    runtime = MemoryRuntime(programs={"talks": talks})
    with pytest.raises(Refused) as caught:
        await workspace.prepare(runtime, RuntimeSpec(prepare=(PrepareStep(argv=("true",)), PrepareStep(argv=("talks",)))))
    assert caught.value.path == "$.runtime.prepare[1]"
    assert str(caught.value).endswith("the reason")
    assert len(str(caught.value)) < 700
    await runtime.close()


# ── verdicts ──────────────────────────────────────────────────────────────────


def test_a_session_as_its_evaluator_sees_it() -> None:
    spec = TaskSpec(instruction="i", harness=HarnessSpec(), evaluator=EvaluatorSpec(config={"c": 1}), metadata={"m": 2})
    seen = workspace.finished(Folder("/w"), Outcome(status="failed"), (), spec)
    assert (seen.instruction, seen.config, seen.metadata, seen.outcome.status, seen.runtime.workdir) == ("i", {"c": 1}, {"m": 2}, "failed", "/w")


@pytest.mark.parametrize("reward", [0, 1.5, -3, 2**70, 1e308])
def test_a_finite_reward_is_kept_as_a_float(reward: float) -> None:
    kept = workspace.checked(Verdict(reward=reward, metrics={"a": [1, {"b": None}]}))
    assert (kept.reward, type(kept.reward), kept.metrics) == (float(reward), float, {"a": [1, {"b": None}]})


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf"), 10**400, True, None, "1", [1]])
def test_what_is_no_finite_number_is_no_reward(reward: object) -> None:
    with pytest.raises(EvaluatorError, match="return a finite number"):
        workspace.checked(Verdict(reward=reward))  # type: ignore[arg-type]


@pytest.mark.parametrize("metrics", [{"a": object()}, {"a": 2**70}, 7, [1]])
def test_metrics_that_are_no_json_are_no_metrics(metrics: object) -> None:
    with pytest.raises(EvaluatorError, match="the evaluator's metrics are not JSON"):
        workspace.checked(Verdict(reward=1.0, metrics=metrics))  # type: ignore[arg-type]
