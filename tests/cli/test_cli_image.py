"""`polarnode image build`, and the seconds that are shown while something is made."""

import io
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner
from rich.console import Console
from trio.testing import MockClock

from polarnode.cli import image
from polarnode.cli.main import main as command
from polarnode.cli.progress import Steps
from polarnode.containers.images import ensure_images
from polarnode.node.config import TINY_MODEL, NodeConfig
from polarnode.node.settings import runtimes_settings

# ── images ────────────────────────────────────────────────────────────────────


def test_folder_without_containerfile_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["image", "build", str(tmp_path), "--tag", "mine/x"])
    assert result.exit_code == 1
    assert (
        f"{tmp_path / image.FILES[0]} is not there: write it, or name the file with --file" in result.output
    )


@pytest.mark.podman
def test_own_image_is_built_in_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLARNODE_STATE_DIR", str(tmp_path / "state"))
    settings = runtimes_settings(NodeConfig(state_dir=str(tmp_path / "state")))
    log = tmp_path / "log"

    def ensure(name: str) -> None:
        async def run() -> None:
            await ensure_images(settings, [name], log=log, report=print)

        trio.run(run)

    ensure("base")
    folder = tmp_path / "agent"
    folder.mkdir()
    # the certificates of this machine are there in the second try alone
    content = "FROM localhost/polarnode/base\nUSER root\nRUN echo one > /mine\n"
    (folder / "Dockerfile").write_text(content)
    argv = ["image", "build", str(folder), "--tag", "localhost/polarnode-test/mine:1"]
    built = CliRunner().invoke(command, argv)
    assert built.exit_code == 0, built.output
    assert 'runtime = { image = "localhost/polarnode-test/mine:1" }' in built.output
    ensure("localhost/polarnode-test/mine:1")
    (folder / "Dockerfile").write_text(content + "RUN false\n")
    again = CliRunner().invoke(command, argv)
    assert again.exit_code == 1, "an image of that name exists, and is built again all the same"
    assert "failed with exit code" in again.output
    assert "images.log" in again.output
    taken = CliRunner().invoke(command, ["image", "build", str(folder), "--tag", "base"])
    assert "base is one of polarnode's own images: choose another name" in taken.output


@pytest.mark.podman
@pytest.mark.usefixtures("podman")
def test_missing_image_is_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("polarnode.cli.run.on_own_node")
    file = tmp_path / "task.toml"
    file.write_text('instruction = "x"\nharness = "pi"\nruntime = { image = "localhost/none/such" }\n')
    argv = ["run", "--engine", "simulated", "--gpus", "0", "--model", str(TINY_MODEL), str(file)]
    found = CliRunner().invoke(command, [*argv, "--out", str(tmp_path / "out")])
    assert found.exit_code == 1
    assert "runtime.image: no image is called localhost/none/such; there are recipes for" in found.output
    assert found.output.startswith(f"Error: {file}"), found.output


# ── seconds ───────────────────────────────────────────────────────────────────


async def test_long_step_is_reported_regularly(autojump_clock: MockClock) -> None:
    lines: list[str] = []
    steps = Steps(lines.append, hint="log: x")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(steps.show)
        steps.report("loading m")
        await trio.sleep(2)
        steps.report("starting the engine")
        await trio.sleep(32)
        steps.end()
        await trio.sleep(40)
        steps.report("building runtime pi")
        await trio.sleep(40)
    assert lines == [
        "loading m",
        "starting the engine",
        "starting the engine: 15 s so far (log: x)",
        "starting the engine: 30 s so far (log: x)",
        "building runtime pi",
    ]


async def test_terminal_shows_spinner_and_seconds(autojump_clock: MockClock) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    lines: list[str] = []
    steps = Steps(lines.append, console)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(steps.show)
        steps.report("starting the engine")
        await trio.sleep(3.5)
        steps.end()
    assert isinstance(console.file, io.StringIO)
    assert "starting the engine: 3 s so far" in console.file.getvalue()
    assert lines == ["starting the engine"]
