"""A node's control plane over TLS: a client that pins its certificate is served, and nobody in plain text."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
from hollow_node import open_hollow
from postgres_kit import running_cluster
from tls_kit import CertificateAuthority
from weights_kit import free_port

from polarnode.api.proxy import NODES_INTERVAL_S
from polarnode.client import AsyncPolarnodeClient
from polarnode.client.values import ClientError
from polarnode.core.errors import ConfigError
from polarnode.http import server
from polarnode.node.config import NodeConfig
from polarnode.node.config_sources import read_config
from polarnode.node.node import control_certificate


def test_tls_settings_belong_together() -> None:
    with pytest.raises(ConfigError, match="--tls-cert and --tls-key belong together: give both, or neither"):
        read_config(flags={"tls_cert": "a.crt"})
    found = read_config(toml='tls_cert = "a.crt"', environment={"POLARNODE_TLS_KEY": "a.key"})
    assert (found.tls_cert, found.tls_key) == ("a.crt", "a.key")
    with pytest.raises(ConfigError, match=r"^tls_cert a\.crt cannot be read"):
        control_certificate(found)
    assert control_certificate(NodeConfig()) is None


async def test_nodes_follow_renewed_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CERTIFICATE_CHECK_S", 0.05)
    with running_cluster() as cluster, trio.fail_after(60):
        dsn, authority, stack = cluster.database(), CertificateAuthority(tmp_path), AsyncExitStack()
        async with stack:
            nodes = []
            for name in ("a", "b"):
                chain, key = authority.issue("elsewhere.invalid", label=name)
                config = NodeConfig(
                    engine="simulated",
                    port=free_port(),
                    node_id=name,
                    log=dsn,
                    token="t",
                    tls_cert=chain,
                    tls_key=key,
                    state_dir=str(tmp_path / name),
                    podman_dir=str(tmp_path / "podman"),
                    memory_reserve_mb=1,
                    disk_reserve_mb=1,
                )
                nodes.append(await stack.enter_async_context(open_hollow(config)))
            (node, at), (renewed, _) = nodes
            certificate = control_certificate(node.config)
            assert certificate is not None
            url = f"https://{at.host}:{at.port}#{certificate.digest}"
            client = await stack.enter_async_context(AsyncPolarnodeClient(url, token="t"))
            authority.issue("elsewhere.invalid", label="b")
            shown = control_certificate(renewed.config)
            assert shown is not None
            while {each.facts.certificate for each in await node.log.nodes()} != {  # noqa: ASYNC110
                certificate.digest,
                shown.digest,
            }:
                await trio.sleep(0.05)
            assert renewed.membership.facts.certificate == shown.digest, "if it joins again"
            (tmp_path / "b" / "engine-0.log").write_text("words")
            await trio.sleep(NODES_INTERVAL_S)
            assert "b/engine-0" in [each.name for each in await client.node_logs()]


async def test_node_with_certificate_serves_only_tls(tmp_path: Path) -> None:
    chain, key = CertificateAuthority(tmp_path).issue("elsewhere.invalid")
    config = NodeConfig(
        engine="simulated",
        port=0,
        token="t",
        tls_cert=chain,
        tls_key=key,
        state_dir=str(tmp_path / "state"),
        podman_dir=str(tmp_path / "podman"),
        memory_reserve_mb=1,
        disk_reserve_mb=1,
    )
    certificate = control_certificate(config)
    assert certificate is not None
    async with open_hollow(config) as (_, address):
        where = f"{address.host}:{address.port}"
        async with AsyncPolarnodeClient(f"https://{where}#{certificate.digest}", token="t") as client:
            with trio.fail_after(30):
                assert (await client.status())["node"] == "node-0"
        async with AsyncPolarnodeClient(f"http://{where}", token="t", patience_s=0) as client:
            with trio.fail_after(30), pytest.raises(ClientError) as refused:
                await client.status()
        assert (refused.value.status, refused.value.type) == (400, "tls_required")
