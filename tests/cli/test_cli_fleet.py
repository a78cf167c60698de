"""`polarnode fleet`: its refusals, its table, and draining, against a front that runs."""

import io
import socket
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner
from fleet_kit import hollow_nodes
from polarnode.fleet.config import FleetConfig
from polarnode.fleet.front import Front, open_front
from polarnode.fleet.routes import FrontRoutes, exposition, fleet_status
from polarnode.fleet.serving import ask_again, listed
from polarnode.fleet.streams import StreamRoutes
from quart_trio import QuartTrio
from rich.console import Console

from polarnode.api.app import Extension, control_plane
from polarnode.cli import fleet, fleet_run, main
from polarnode.cli.progress import Steps
from polarnode.core.errors import ConfigError
from polarnode.fleet import serving
from polarnode.http.server import Address, open_server

PIN = "ab12" * 16


def test_what_cannot_work_is_one_sentence() -> None:
    for arguments, words in (
        ([], "name the nodes"),
        (["--nodes", "10.0.0.5"], "give addresses such as"),
        (["--nodes", "https://10.0.0.5#ab12"], "64 hexadecimal digits, not 4 characters"),
        (["--nodes", f"http://10.0.0.5#{PIN}"], "only an https address shows a certificate"),
        (["--nodes", "http://a:1", "--host", "0.0.0.0"], "set POLARNODE_TOKEN"),
        (["--nodes", "http://a:1", "--token", ""], "token must be printable ASCII, not empty"),
        (["--nodes", "http://a:1", "--node-token", " x"], "--node-token must be printable ASCII"),
    ):
        found = CliRunner().invoke(main, ["fleet", *arguments], env={"POLARNODE_TOKEN": ""})
        assert found.exit_code == 1, found.output
        assert words in found.output
    assert "polarnode fleet drain" in CliRunner().invoke(main, ["fleet", "--help"]).output
    assert set(fleet.fleet.commands) == {"status", "drain"}


async def test_the_list_of_nodes_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "nodes"
    file.write_text(f"# ours\nhttp://10.0.0.1:8080/\nhttps://10.0.0.2:8443#{PIN}\n\n")
    config = FleetConfig(nodes=(f"@{file}", "http://10.0.0.3:1", "dns:localhost:9"))

    async def resolved(name: str, port: int, **_: object) -> list[object]:
        await trio.lowlevel.checkpoint()
        assert (name, port) == ("localhost", 9)
        return [(0, 0, 0, "", ("::1", 9, 0, 0)), (0, 0, 0, "", ("127.0.0.1", 9))]

    monkeypatch.setattr(trio.socket, "getaddrinfo", resolved)
    assert await listed(config) == {
        "http://10.0.0.1:8080": "",
        "https://10.0.0.2:8443": PIN,
        "http://10.0.0.3:1": "",
        "http://127.0.0.1:9": "",
        "http://[::1]:9": "",
    }


def app_of(front: Front) -> QuartTrio:
    rows = (
        *FrontRoutes(front=front).rows(),
        *StreamRoutes(roster=front.roster, nursery=front.nursery).rows(),
    )
    return control_plane((), token=None, extensions=(Extension(rows=rows),))


async def test_a_fleet_is_shown_and_a_node_drained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with hollow_nodes(tmp_path, 2) as nodes:
        config = FleetConfig(nodes=tuple(node.url for node in nodes), state_dir=str(tmp_path / "front"))
        async with (
            open_front(config, ask_again) as front,
            open_server(app_of(front), Address(host="127.0.0.1", port=0)) as address,
        ):
            url = f"http://127.0.0.1:{address.port}"
            with trio.fail_after(30):
                while len(front.roster.in_state("up")) < 2:  # noqa: ASYNC110
                    await trio.sleep(0.05)
            front.lost["node-1"] = 1234
            await trio.to_thread.run_sync(lambda: fleet_run.status(url, None, as_json=False))
            shown = capsys.readouterr().out
            assert "in office" in shown
            assert shown.count(" up ") == 2
            assert "lost, re-run" in shown
            assert [line.split()[-1] for line in shown.splitlines() if " up " in line] == ["0", "1234"]
            assert " model " not in shown, "there is one"
            await trio.to_thread.run_sync(lambda: fleet_run.drain("node-1", url, None, back=False))
            with trio.fail_after(10):
                while not front.roster.in_state("draining", "left"):  # noqa: ASYNC110
                    await trio.sleep(0.05)
            await trio.to_thread.run_sync(lambda: fleet_run.drain("node-1", url, None, back=True))
            assert "takes tasks again" in capsys.readouterr().out
            # a node has the route too, for its front: it would drain itself, whatever name is given
            with pytest.raises(ConfigError, match="is a node, not a fleet"):
                await trio.to_thread.run_sync(
                    lambda: fleet_run.drain("node-1", nodes[0].url, None, back=False)
                )
            assert b"polarnode_fleet_slots" in exposition(front)
            assert fleet_status(front)["node"] == "fleet"


def test_a_taken_port_is_said_before_nodes_are_asked(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = ["--nodes", "http://127.0.0.1:1", "--port", str(taken.getsockname()[1])]
        arguments += ["--state-dir", str(tmp_path / "state")]
        found = CliRunner().invoke(main, ["fleet", *arguments])
    assert "choose another with --port" in found.output


async def test_how_many_nodes_are_up_is_shown_until_all_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_run, "SHOWN_S", 3.0)
    monkeypatch.setattr(serving, "ASKED_S", 0.2)
    lines, console = list[str](), Console(file=io.StringIO(), width=200)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        async with hollow_nodes(tmp_path, 1) as nodes:
            file = tmp_path / "nodes"
            file.write_text(f"{nodes[0].url}\n")
            config = FleetConfig(nodes=(f"@{file}",), state_dir=str(tmp_path / "front"))
            async with open_front(config, ask_again) as front:
                with trio.fail_after(30):
                    await fleet_run.show_up(front, Steps(lines.append), console)
                    assert lines[-1] == "1 of 1 nodes are up"
                    file.write_text(f"{nodes[0].url}\n{away}\n")
                    while len(front.roster.members) < 2:  # noqa: ASYNC110
                        await trio.sleep(0.05)
                await fleet_run.show_up(front, Steps(lines.append), console)
    assert lines[-1] == "1 of 2 nodes are up"
    assert isinstance(console.file, io.StringIO)
    [told] = console.file.getvalue().splitlines()
    assert told.startswith(f"· {away} is ")
    assert "does not answer" in told
