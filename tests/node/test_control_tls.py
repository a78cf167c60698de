"""A node's control plane over TLS: a client that pins its certificate is served, and nobody in plain text."""

from pathlib import Path

import pytest
import trio
from hollow_node import open_hollow
from tls_kit import Authority

from polarnode.client import AsyncPolarnodeClient
from polarnode.client.values import ClientError
from polarnode.core.errors import ConfigError
from polarnode.node.config import NodeConfig
from polarnode.node.config_sources import read_config
from polarnode.node.node import control_certificate


def test_the_settings_belong_together_and_come_from_everywhere() -> None:
    with pytest.raises(ConfigError, match="--tls-cert and --tls-key belong together: give both, or neither"):
        read_config(flags={"tls_cert": "a.crt"})
    found = read_config(toml='tls_cert = "a.crt"', environment={"POLARNODE_TLS_KEY": "a.key"})
    assert (found.tls_cert, found.tls_key) == ("a.crt", "a.key")
    with pytest.raises(ConfigError, match=r"^tls_cert a\.crt cannot be read"):
        control_certificate(found)
    assert control_certificate(NodeConfig()) is None


async def test_a_node_with_a_certificate_serves_over_tls_alone(tmp_path: Path) -> None:
    chain, key = Authority(tmp_path).issue("elsewhere.invalid")
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
