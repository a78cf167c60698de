"""`polarnode fleet`: its refusals, its table, draining, and two nodes of this machine on a PostgreSQL."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from postgres_kit import running_cluster
from rich.console import Console

from polarnode.cli import fleet, fleet_run, main
from polarnode.cli.fleet_run import local_prefix
from polarnode.core.errors import ConfigError

DSN = "postgresql://me@10.0.0.1/polarnode"
KITS = Path(__file__).parents[1] / "kits"


def test_impossible_options_are_refused(tmp_path: Path) -> None:
    secret = tmp_path / "dsn"
    for arguments, words in (
        ([], "say where the nodes run"),
        (["--local", "2", "--ray", "auto", "--log", DSN], "one of them"),
        (["--local", "2"], "name the PostgreSQL that the nodes share"),
        (["--local", "2", "--log", "postgresql://me:pw@h/d"], "--log must not hold a password"),
        (["--local", "2", "--log", f"@{secret}"], "cannot be read"),
        (["--local", "2", "--log", "no dsn"], "log must be a DSN of libpq"),
        (["--stop"], "give its address with --ray"),
    ):
        found = CliRunner().invoke(main, ["fleet", *arguments], env={"POLARNODE_LOG": ""})
        assert found.exit_code in (1, 2), found.output
        assert words in " ".join(found.output.split()), found.output
        assert "pw" not in found.output
    assert set(fleet.fleet.commands) == {"status", "drain"}


def test_table_shows_each_node() -> None:
    nodes = [
        {"name": "a", "url": "http://a:1", "state": "alive", "running": 3, "serving": {"": "v7"}}
        | {"labels": {"gpu": "h100", "node": "a"}},
        {"name": "b", "url": "http://b:1", "state": "lost", "running": 0, "serving": {}, "labels": {}},
        {"name": "c", "url": "http://c:1", "state": "alive", "running": 1, "draining": True},
    ]
    console = Console(file=io.StringIO(), width=200)
    console.print(fleet_run.nodes_table(nodes))
    assert isinstance(console.file, io.StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert lines[1] == ["a", "http://a:1", "alive", "3", "v7", "gpu=h100"]
    assert lines[2] == ["b", "http://b:1", "lost", "0", "–"]
    assert lines[3][2] == "draining"
    assert lines[4] == ["3", "nodes"]


def test_status_of_single_node_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def asked(*_: object) -> dict[str, Any]:
        return {"node": "n"}

    monkeypatch.setattr(fleet_run, "_asked", asked)
    with pytest.raises(ConfigError, match="is a node alone"):
        fleet_run.status("http://h:1", None, as_json=False)

    async def away(*_: object) -> dict[str, Any]:
        return {"node": "n", "nodes": None}

    monkeypatch.setattr(fleet_run, "_asked", away)
    with pytest.raises(ConfigError, match="cannot reach its log now"):
        fleet_run.status("http://h:1", None, as_json=False)


def _fleet(*arguments: str) -> str:
    found = CliRunner().invoke(main, ["fleet", *arguments])
    assert found.exit_code == 0, found.output
    return found.output


def _ask(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)
    except OSError:
        return None


def _until(holds: Callable[[], Any], told: Callable[[], str]) -> Any:
    end = time.monotonic() + 120
    while not (found := holds()):
        assert time.monotonic() < end, told()
        time.sleep(0.2)
    return found


def test_local_nodes_share_a_log(tmp_path: Path) -> None:
    """The log is away when they start: they wait, say so, and none of it is on a command line."""
    with running_cluster() as cluster:
        dsn = f"{cluster.database(())} password=very-secret"
        cluster.stop()
        program = KITS / "hollow_cli.py"
        out = tmp_path / "out"
        env = {
            **os.environ,
            "POLARNODE_LOG": dsn,
            "PYTHONPATH": f"{KITS.parents[1]}:{KITS}",
            "POLARNODE_MEMORY_RESERVE_MB": "1",
            "POLARNODE_DISK_RESERVE_MB": "1",
        }
        arguments = ["fleet", "--local", "2", "--cpu", "--state-dir", str(tmp_path / "state")]
        with out.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, str(program), *arguments], env=env, stdout=file, stderr=file, cwd=tmp_path
            )

        def told() -> str:
            logs = [each.read_text() for each in (tmp_path / "state/nodes").glob("*.log")]
            return "\n".join([out.read_text(), *logs])

        assert local_prefix(tmp_path / "state") != local_prefix(tmp_path / "other"), (
            "they would replace each other"
        )
        try:
            urls = _until(lambda: re.findall(r"starts at (http\S+)", out.read_text()), told)
            assert len(urls) == 2
            waiting = _until(lambda: "waiting for the log" in told().partition("starts at")[2], told)
            assert waiting
            cluster.start()
            rows = _until(lambda: "2 of 2 nodes take sessions" in out.read_text(), told)
            assert rows
            for url in urls:
                _until(lambda url=url: (_ask(f"{url}/readyz") or {}).get("ready"), told)
            name = f"{local_prefix(tmp_path / 'state')}-1"
            shown = _fleet("status", "--url", urls[0])
            assert shown.count(" alive ") == 2, shown
            assert "takes no new sessions" in _fleet("drain", name, "--url", urls[0])  # by way of the other
            _until(lambda: " draining " in _fleet("status", "--url", urls[1]), told)
            assert "takes sessions again" in _fleet("drain", name, "--back", "--url", urls[1])
            _until(lambda: _fleet("status", "--url", urls[1]).count(" alive ") == 2, told)
            lines = [
                (path / "cmdline").read_bytes()
                for path in Path("/proc").iterdir()
                if path.name.isdigit() and (path / "cmdline").exists()
            ]
            assert any(str(tmp_path).encode() in line for line in lines)
            assert not any(b"very-secret" in line for line in lines)
            assert "very-secret" not in told()
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 0, told()
