"""The node's own settings: from a TOML file, the environment and flags, in that order of growing weight.

Pure: texts and mappings in, a frozen value out, or a sentence naming the setting and its remedy. Every default has its reason beside it.
"""

import ipaddress
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_origin

from attrs import field, fields, frozen

from polarnode import wire
from polarnode.conversation import Json
from polarnode.engine_host.protocol import Simulation
from polarnode.errors import ConfigError, Refused

ENVIRONMENT_PREFIX = "POLARNODE_"
TINY_MODEL = Path(__file__).parent / "models" / "tiny"


@frozen(kw_only=True)
class NodeConfig:
    """Everything a node is told. Paths are absolute or relative to the working folder; counts are of sessions unless said otherwise."""

    model: str = str(TINY_MODEL)
    cpu: bool = False
    gpus: tuple[int, ...] = ()
    engine: Literal["sglang", "simulated"] = "sglang"  # simulated: random answers at the speed of GPUs that need not be there, to size a node
    tp: int = 1
    simulated: Simulation = field(factory=Simulation)  # how fast a simulated engine is
    context_length: int | None = None  # tokens; None: what the checkpoint says
    mem_fraction: float | None = None  # share of GPU memory for weights and KV cache; None: SGLang's choice
    routed_experts: bool = False  # the engine remembers which experts of a mixture read each token: 4 bytes each for every token of its KV cache
    carried_mb: int = 256  # MiB a session may carry beside ids and logprobs: 5 times the experts of 128k tokens on 48 layers of 8
    host: str = "127.0.0.1"
    port: int = 8080
    token: str | None = None
    state_dir: str = ".polarnode"  # journal, logs, engine scratch: one node's own
    podman_dir: str | None = None  # images and containers; None: one per user, shared by nodes so that images are built once
    record_requests: str | None = None  # folder where every request of a harness is written as it came, for `polarnode replay`
    runtimes_dir: str | None = None  # image recipes; None: the checkout's own `runtimes/`
    node_id: str = "node-0"
    init_limit: int = 4  # containers prepared at once: Podman serves 4-8 calls on two cores before they only queue
    run_limit: int = 64  # harnesses at once: one GPU serves about as many agents before each waits on the others
    ready_limit: int = 4  # prepared and waiting for a run slot: hides INIT behind RUN, each costs a container (about 1 MB idle)
    post_limit: int = 8  # evaluations at once: they are CPU work beside the harnesses
    warm: int = 2  # started containers kept for each shape of runtime in demand
    import_paths: tuple[str, ...] = ()  # module prefixes tasks may name code from; none unless the person who runs the node says so
    base_image: str | None = None  # a public Debian image to build on; None: look for one, else build it from the Debian archive


def read_config(*, toml: str | None = None, environment: Mapping[str, str] | None = None, flags: Mapping[str, Json] | None = None) -> NodeConfig:
    """One config from its three sources; `flags` that are None were not given."""
    said: dict[str, Json] = {**_from_toml(toml), **_from_environment(environment or {})}
    said.update({name: value for name, value in (flags or {}).items() if value is not None})
    try:
        config = wire.structure(said, NodeConfig, forbid_extra=True)
    except Refused as refused:
        raise ConfigError(f"setting {(refused.path or '$').removeprefix('$.')}: {refused}") from refused
    _check(config)
    return config


def parse_gpus(text: str) -> list[Json]:
    """`0-7`, `0`, `0,2,4-5` as a list of GPU numbers."""
    found: list[Json] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ConfigError(f"--gpus {text}: give numbers and ranges, such as 0-7 or 0,2")
        found.extend(range(int(first), int(last or first) + 1))
    if not found or len(set(map(str, found))) != len(found):
        raise ConfigError(f"--gpus {text}: name each GPU once")
    return found


def _from_toml(toml: str | None) -> dict[str, Json]:
    if toml is None:
        return {}
    try:
        return tomllib.loads(toml)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the config file is not TOML: {error}") from error


def _from_environment(environment: Mapping[str, str]) -> dict[str, Json]:
    """POLARNODE_PORT=9000 and the like; values that are not text in the config are read as TOML values."""
    known = {f"{ENVIRONMENT_PREFIX}{each.name.upper()}": each for each in fields(NodeConfig)}
    said: dict[str, Json] = {}
    for variable, text in environment.items():
        if variable in known:
            each = known[variable]
            said[each.name] = text if each.type in (str, str | None) or get_origin(each.type) is Literal else _toml_value(variable, text)
    return said


def _toml_value(variable: str, text: str) -> Json:
    try:
        value: Json = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{variable}={text}: write it as in TOML, such as 8, true or [0, 1]") from error
    return value


def _check(config: NodeConfig) -> None:
    if config.cpu and config.gpus:
        raise ConfigError("choose --cpu or --gpus, not both")
    if config.tp < 1 or (config.gpus and len(config.gpus) % config.tp):
        raise ConfigError(f"--tp {config.tp} must divide the {len(config.gpus)} GPUs given: one engine takes --tp of them")
    _check_simulated(config.simulated)
    for name in ("init_limit", "run_limit", "post_limit", "carried_mb"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} must be at least 1")
    if config.token is None and not _is_loopback(config.host):
        raise ConfigError(f"--host {config.host} can be reached from outside: set a bearer token with POLARNODE_TOKEN, or serve on 127.0.0.1")


def _check_simulated(told: Simulation) -> None:
    for name in ("max_running", "answer_tokens", "chunk_tokens"):
        if getattr(told, name) < 1:
            raise ConfigError(f"simulated.{name} must be at least 1")
    for name in ("tokens_per_s", "first_token_s", "prefill_tokens_per_s", "calling_turns"):
        if getattr(told, name) < 0:
            raise ConfigError(f"simulated.{name} must be 0 or more")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
