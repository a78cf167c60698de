"""A node without engines: it runs nothing, and serves what the other nodes of its log run."""

import socket
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve
from fleet_kit import hollow_task
from hollow_node import open_hollow
from postgres_kit import running_cluster

from polarnode.client.asynchronous import AsyncPolarnodeClient
from polarnode.core.errors import ConfigError
from polarnode.node import opening
from polarnode.node.config import NodeConfig
from polarnode.node.config_sources import read_config
from polarnode.node.joining import control_plane_url, log_servers, shared_config
from polarnode.node.opening import open_node
from polarnode.node.serving import serve_control_plane
from polarnode.rollouts.scheduler import Scheduler


def config(folder: Path, name: str, **more: Any) -> NodeConfig:
    return NodeConfig(
        port=0,
        node_id=name,
        state_dir=str(folder / name),
        podman_dir=str(folder / "podman"),
        import_paths=("session_kit",),
        memory_reserve_mb=1,
        disk_reserve_mb=1,
        **more,
    )


async def test_tasks_pass_through_engineless_node(tmp_path: Path) -> None:
    with running_cluster() as cluster, trio.fail_after(120):
        dsn = cluster.database()
        address = config(tmp_path, "address", engine="none", log=dsn)
        runner = config(tmp_path, "runner", engine="simulated", log=dsn)
        async with (
            open_node(address, report=lambda text: None, url="http://127.0.0.1:1") as node,
            serve_control_plane(node) as here,
            AsyncPolarnodeClient(f"http://{here.host}:{here.port}", ack_every_s=0.0) as client,
        ):
            assert node.unready() is None
            assert node.engines.statistics().kind == "none"
            assert (await client.status())["engine"]["kind"] == "none"
            submitted = await client.submit(hollow_task(samples=2, seconds=0.0))
            await trio.sleep(0.5)
            assert not list(node.sessions()), "it claims nothing"
            async with open_hollow(runner):
                async for event in client.groups(task_id=submitted.task_id):
                    outcomes = [each.outcome.status for each in event.trajectories]
                    assert outcomes == ["completed"] * 2
                    assert {each.node for each in event.trajectories} == {"runner"}
                    break


async def test_node_starts_with_generation_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it settles what its last run left: sessions that go on would be sampled."""
    held: list[str | None] = []

    async def recover(journal: Any, scheduler: Scheduler, *more: Any) -> None:
        held.append(scheduler.services.places.statistics().paused)  # type: ignore[attr-defined]
        await real(journal, scheduler, *more)

    real = opening.recover
    monkeypatch.setattr(opening, "recover", recover)
    with running_cluster() as cluster, trio.fail_after(120):
        dsn = cluster.database()
        first, second = (config(tmp_path, name, engine="none", log=dsn) for name in ("one", "two"))
        async with open_node(first, report=lambda text: None) as node:
            await node.log.hold_generation("retract")
            async with open_node(second, report=lambda text: None):
                assert held == [None, "retract"]


def test_incomplete_settings_are_refused() -> None:
    for environment, words in (
        ({"POLARNODE_ENGINE": "none"}, "give POLARNODE_LOG"),
        ({"POLARNODE_ENGINE": "none", "POLARNODE_LOG": "x", "POLARNODE_CPU": "true"}, "takes no"),
        ({"POLARNODE_LOG": ""}, "is empty"),
        ({"POLARNODE_LOG": "host=h", "POLARNODE_NODE_URL": "h:1"}, "must be an http or https address"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_config(environment=environment)
    assert read_config(environment={"POLARNODE_URL": "http://trainers"}).node_url is None
    assert "secret" not in repr(read_config(environment={"POLARNODE_LOG": "password=secret"}))


def test_shared_nodes_are_named_and_reached(tmp_path: Path) -> None:
    far = "postgresql://me@10.9.9.9,10.9.9.8/d"
    plain = NodeConfig(state_dir=str(tmp_path), log=far)
    assert log_servers(far) == ["10.9.9.9", "10.9.9.8"]
    assert log_servers("host=/run/postgresql") == ["localhost"]
    with pytest.raises(ConfigError, match="is not reached by the other nodes"):
        shared_config(plain)
    with pytest.raises(ConfigError, match="must be a DSN"):
        shared_config(evolve(plain, log="no dsn"))
    for name in ("nœud", "a/b", "a\r\nX: y", ""):
        with pytest.raises(ConfigError, match=r"node_id .* must be letters"):
            shared_config(evolve(plain, node_url="http://n:1/", node_id=name))
    named = shared_config(evolve(plain, node_url="http://n:1/"))
    assert named.node_id == socket.gethostname()
    assert named.tls_cert is None
    public = shared_config(evolve(plain, host="0.0.0.0", token="t", node_id="mine"))
    assert (public.node_id, public.tls_cert) == ("mine", str(tmp_path / "tls.crt"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert control_plane_url(named, listener) == "http://n:1"
        assert control_plane_url(evolve(public, host="127.0.0.1"), listener) == f"https://127.0.0.1:{port}"
    with socket.create_server(("0.0.0.0", 0)) as listener:
        for here in ("postgresql://127.0.0.1/d", "host=/run/postgresql"):
            with pytest.raises(ConfigError, match=r"^--host 0\.0\.0\.0: .* give --node-url"):
                control_plane_url(evolve(public, log=here), listener)
        assert control_plane_url(evolve(public, log=here, node_url="http://n:1"), listener) == "http://n:1"
    alone = NodeConfig(state_dir=str(tmp_path))
    assert shared_config(alone) == alone
