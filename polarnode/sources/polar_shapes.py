"""Polar's TaskRequest, as its own models write it: the classes it is read with. Unknown fields are refused there by nobody, so they are noted here."""

from collections.abc import Mapping
from typing import Literal

from attrs import field, frozen

from polarnode.conversation import Json


@frozen(kw_only=True)
class PolarAction:
    type: Literal["upload_file", "upload_dir", "exec"]
    source: str | None = None
    target: str | None = None
    command: str | None = None
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    max_attempts: int = 1
    retry_backoff_seconds: float = 0.0


@frozen(kw_only=True)
class PolarRuntime:
    image: str
    backend: Literal["docker", "apptainer"] = "docker"
    prepare: tuple[PolarAction, ...] = ()
    eval_prepare: tuple[PolarAction, ...] | None = None
    env: Mapping[str, str] = field(factory=dict)
    network: str | None = "host"
    workdir: str | None = None
    direct_exec_init_command: str | None = None
    cpus: int | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int = 0
    allow_internet: bool = True
    internet_volumes: tuple[str, ...] = ()
    import_path: str | None = None
    kwargs: Mapping[str, Json] = field(factory=dict)


@frozen(kw_only=True)
class PolarMcp:
    name: str
    transport: str = "stdio"
    command: str | None = None
    args: tuple[str, ...] = ()
    url: str | None = None


@frozen(kw_only=True)
class PolarShell:
    command: str
    cwd: str | None = None
    env: Mapping[str, str] | None = None


@frozen(kw_only=True)
class PolarAgent:
    harness: str | None = None
    import_path: str | None = None
    model_name: str | None = None
    settings: Mapping[str, Json] = field(factory=dict)
    env: Mapping[str, str] = field(factory=dict)
    mcp_servers: tuple[PolarMcp, ...] = ()
    skills_path: str | None = None
    custom_shell: PolarShell | None = None


@frozen(kw_only=True)
class PolarStrategy:
    strategy: str
    config: Mapping[str, Json] = field(factory=dict)


@frozen(kw_only=True)
class PolarEvaluator:
    strategy: str
    config: Mapping[str, Json] = field(factory=dict)
    env: Mapping[str, str] = field(factory=dict)
    refresh_runtime: bool = False


@frozen(kw_only=True)
class PolarTask:
    instruction: str
    agent: PolarAgent
    task_id: str | None = None
    num_samples: int = 1
    dispatch_priority: int | None = None
    early_stop_min_usable_sessions: int | None = None
    max_steps: int | None = None  # of forks: model calls a session may make
    timeout_seconds: float = 600.0
    runtime: PolarRuntime | None = None
    builder: PolarStrategy = PolarStrategy(strategy="per_request")
    evaluator: PolarEvaluator | None = None
    callback_url: str | None = None
    metadata: Mapping[str, Json] = field(factory=dict)
