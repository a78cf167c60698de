"""A Harbor task.toml (schemas 1.0 to 1.4) as attrs classes: the fields we act on. Others are known by name in `harbor.py`, to be told of.

Harbor itself ignores fields it does not know, so that unknown ones are notes and never refusals.
"""

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen

from polarnode.conversation import Json


@frozen(kw_only=True)
class HarborMcp:
    name: str
    transport: Literal["stdio", "sse", "streamable-http", "http"] = "sse"
    url: str | None = None
    command: str | None = None
    args: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(factory=dict)


@frozen(kw_only=True)
class HarborEnvironment:
    docker_image: str | None = None
    build_timeout_sec: float = 600.0
    os: str = "linux"
    cpus: float | None = None
    memory_mb: int | None = None
    memory: str | None = None
    storage_mb: int | None = None
    storage: str | None = None
    gpus: int | None = None
    env: Mapping[str, str] = field(factory=dict)
    mcp_servers: tuple[HarborMcp, ...] = ()
    workdir: str | None = None
    network_mode: Literal["no-network", "public", "allowlist"] | None = None
    allowed_hosts: tuple[str, ...] = ()
    allow_internet: bool | None = None


@frozen(kw_only=True)
class HarborAgent:
    timeout_sec: float | None = None
    user: str | int | None = None


@frozen(kw_only=True)
class HarborVerifier:
    timeout_sec: float = 600.0
    env: Mapping[str, str] = field(factory=dict)
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Mapping[str, Json] | None = None
    collect: tuple[Mapping[str, Json], ...] = ()


@frozen(kw_only=True)
class HarborTask:
    """`steps` are for tasks of several instructions, which are refused."""

    task: Mapping[str, Json] = field(factory=dict)
    metadata: Mapping[str, Json] = field(factory=dict)
    environment: HarborEnvironment = field(factory=HarborEnvironment)
    agent: HarborAgent = field(factory=HarborAgent)
    verifier: HarborVerifier = field(factory=HarborVerifier)
    artifacts: tuple[str | Mapping[str, Any], ...] = ()
    steps: tuple[Mapping[str, Json], ...] = ()
