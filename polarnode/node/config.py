"""The node's settings: from a TOML file, the environment and flags; the later of them wins.

Pure: texts and mappings in, a frozen value out, or a `ConfigError` that names the setting and its remedy.
Keep the reason of each default beside it.
"""

import ipaddress
import re
import tomllib
from collections.abc import Iterable, Mapping
from math import inf
from pathlib import Path
from typing import Literal, get_origin

from attrs import field, fields, frozen

from polarnode.containers.egress.rules import CALLBACK_NETWORKS
from polarnode.core import codec
from polarnode.core.codec.limits import address, is_loopback, url_fault
from polarnode.core.codec.tasks import HOST
from polarnode.core.conversation import Json
from polarnode.core.errors import ConfigError, Refused
from polarnode.engine.protocol import Simulation
from polarnode.evaluators.judging import JudgeConfig

ENVIRONMENT_PREFIX = "POLARNODE_"
MAX_ATTEMPTS = 10  # of a question to a judge: with the pauses between them more than any post budget has
OWN_ENGINES = ("sglang", "simulated")
TINY_MODEL = Path(__file__).parents[1] / "models" / "tiny"


@frozen(kw_only=True)
class NodeConfig:
    """All settings of a node. Paths are absolute or relative to the working folder; counts are of sessions
    unless a comment names another unit.
    """

    model: str = str(TINY_MODEL)
    cpu: bool = False
    gpus: tuple[int, ...] = ()
    # sglang: this node's own; simulated: random answers at the speed of GPUs that need not be there, to size
    # a node; else the addresses of servers that somebody else runs, with commas between them
    engine: str = "sglang"
    tp: int = 1
    simulated: Simulation = field(factory=Simulation)  # how fast a simulated engine is
    context_length: int | None = None  # tokens; None: what the checkpoint says
    mem_fraction: float | None = None  # share of GPU memory for weights and KV cache; None: SGLang's choice
    # the engine remembers which experts of a mixture read each token: 4 bytes each for every token of its KV
    # cache
    routed_experts: bool = False
    # whether GPU memory is lent to a trainer, and what becomes of the weights in it
    memory_saver: Literal["off", "discard", "backup"] = "off"
    # begin with the weights that were served last, where a disk still has them; false: with those of the
    # model
    resume_weights: bool = True
    # MiB a session may carry beside ids and logprobs: 5 times the experts of 128k tokens on 48 layers of 8
    carried_mb: int = 256
    host: str = "127.0.0.1"
    port: int = 8080
    # captures open at once: each a harness somewhere on this machine, about 3 connections of the 256 their
    # socket takes
    capture_limit: int = 64
    capture_port: int = 0  # on 127.0.0.1, where their harnesses find the model; 0: any that is free
    # names in `Host` that are served besides loopback's and `host`; with a token every name is
    allowed_hosts: tuple[str, ...] = ()
    token: str | None = field(default=None, repr=False)
    state_dir: str = ".polarnode"  # journal, logs, engine scratch: one node's own
    # images and containers; None: one per user, shared by nodes so that images are built once
    podman_dir: str | None = None
    # folder where every request of a harness is written as it came, for `polarnode replay`
    record_requests: str | None = None
    runtimes_dir: str | None = None  # image recipes; None: the checkout's own `runtimes/`
    node_id: str = "node-0"
    # sessions that are not over, those that wait too: 11 kB each, and a trainer gains nothing by a longer
    # queue
    pending_limit: int = 20_000
    # containers prepared at once: Podman serves 4-8 calls on two cores before they only queue
    init_limit: int = 4
    # harnesses at once: one GPU serves about as many agents before each waits on the others
    run_limit: int = 64
    # prepared and waiting for a run slot: hides INIT behind RUN, each costs a container (about 1 MB idle)
    ready_limit: int = 4
    post_limit: int = 8  # evaluations at once: they are CPU work beside the harnesses
    # started containers kept of a shape at most, fewer where few are taken: as many as INIT and READY hold;
    # about 1 MB each
    warm: int = 8
    # folders of this machine below which tasks may mount; none unless the operator sets them
    volumes: tuple[str, ...] = ()
    # names tasks may ask to reach, `*.example.org` for all below one, `*` for any; none unless set
    egress: tuple[str, ...] = ()
    # networks such as 10.1.0.0/16 those names may lead to; public addresses alone unless set
    egress_networks: tuple[str, ...] = ()
    # networks that callbacks may go to; link-local, metadata and the node's own addresses never
    callback_networks: tuple[str, ...] = CALLBACK_NETWORKS
    # models that judge, by the name evaluators call them
    judges: Mapping[str, JudgeConfig] = field(factory=dict)
    # MiB of the machine's memory left free: less, and no session is begun until there is more
    memory_reserve_mb: int = 1024
    # MiB of the journal: above, the oldest events that all consumers acknowledged go; a day of a busy node
    keep_acknowledged_mb: int = 8192
    # and what they all had acknowledged so long ago: a mistake seen on Monday is read again from Friday
    keep_acknowledged_hours: float = 72.0
    # MiB of the journal: above, the oldest events go whoever still wants them; a trainer that is away for a
    # weekend
    keep_mb: int = 65536
    # without a word from a consumer, and nothing is kept for it any more: a week is longer than any pause
    consumer_hours: float = 168.0
    # MiB of the containers' disk left free: less, and no session is begun; half of it left, and the largest
    # is ended
    disk_reserve_mb: int = 4096
    # prepared workspaces kept as images, the least lately used go first: tasks of a batch are prepared once
    # each
    prepared: int = 32
    # module prefixes tasks may name code from; none unless the operator sets them
    import_paths: tuple[str, ...] = ()
    # a public Debian image to build on; None: look for one, else build it from the Debian archive
    base_image: str | None = None

    @property
    def engine_urls(self) -> tuple[str, ...]:
        """The servers of an external engine, without a slash at their end; none for the node's own."""
        if self.engine in OWN_ENGINES:
            return ()
        return tuple(url.strip().rstrip("/") for url in self.engine.split(","))


def read_config(
    *,
    toml: str | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Json] | None = None,
) -> NodeConfig:
    """One config from its three sources; `flags` that are None were not given."""
    settings: dict[str, Json] = {**_from_toml(toml), **_from_environment(environment or {})}
    settings.update({name: value for name, value in (flags or {}).items() if value is not None})
    try:
        config = codec.structure(settings, NodeConfig, forbid_extra=True)
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
    by_variable = {f"{ENVIRONMENT_PREFIX}{each.name.upper()}": each for each in fields(NodeConfig)}
    settings: dict[str, Json] = {}
    for variable, text in environment.items():
        if variable in by_variable:
            each = by_variable[variable]
            settings[each.name] = (
                text
                if each.type in (str, str | None) or get_origin(each.type) is Literal
                else _toml_value(variable, text)
            )
    return settings


def _toml_value(variable: str, text: str) -> Json:
    try:
        value: Json = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{variable}={text}: write it as in TOML, such as 8, true or [0, 1]") from error
    return value


def check_hosts(names: Iterable[str]) -> None:
    """Raise ConfigError for an `allowed_hosts` that no browser sends."""
    for name in names:
        if not HOST.fullmatch(name) or name != name.lower():
            raise ConfigError(
                f"allowed_hosts: {name!r} is no host's name: write it in lower case as node.example or"
                " *.node.example, without scheme, port and path"
            )


def _check_access(config: NodeConfig) -> None:
    check_hosts(config.allowed_hosts)
    # a header carries no more than this; an empty token would be what a client sends that has none
    if config.token is not None and not re.fullmatch(r"[!-~]([ -~]*[!-~])?", config.token):
        raise ConfigError(
            "token must be printable ASCII, not empty, without spaces at its ends: set POLARNODE_TOKEN to a"
            " random one, or unset it"
        )
    if config.token is None and not is_loopback(config.host):
        raise ConfigError(
            f"--host {config.host} can be reached from outside: set a bearer token with POLARNODE_TOKEN, or"
            " serve on 127.0.0.1"
        )


def _check(config: NodeConfig) -> None:
    if config.cpu and config.gpus:
        raise ConfigError("choose --cpu or --gpus, not both")
    if config.tp < 1 or (config.gpus and len(config.gpus) % config.tp):
        raise ConfigError(
            f"--tp {config.tp} must divide the {len(config.gpus)} GPUs given: one engine takes --tp of them"
        )
    _check_simulated(config.simulated)
    _check_external(config)
    _check_egress(config)
    for name, judge in config.judges.items():
        _check_judge(name, judge)
    for name in ("pending_limit", "init_limit", "run_limit", "post_limit", "carried_mb"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} must be at least 1")
    if config.capture_limit < 0:
        raise ConfigError("capture_limit must be 0 or more: 0 takes no captures")
    _check_retention(config)
    _check_access(config)


def _check_retention(config: NodeConfig) -> None:
    if not 1 <= config.keep_acknowledged_mb <= config.keep_mb:
        raise ConfigError(
            f"keep_acknowledged_mb must be 1 to keep_mb ({config.keep_mb}): what all have acknowledged goes"
            " first"
        )
    for name in ("keep_acknowledged_hours", "consumer_hours"):
        if not 0 < getattr(config, name) < inf:
            raise ConfigError(f"{name} must be more than 0 hours")


def _check_simulated(simulation: Simulation) -> None:
    for name in ("max_running", "answer_tokens", "chunk_tokens"):
        if getattr(simulation, name) < 1:
            raise ConfigError(f"simulated.{name} must be at least 1")
    for name in ("tokens_per_s", "first_token_s", "prefill_tokens_per_s", "calling_turns"):
        if getattr(simulation, name) < 0:
            raise ConfigError(f"simulated.{name} must be 0 or more")


def _check_external(config: NodeConfig) -> None:
    urls = config.engine_urls
    for url in urls:
        if fault := url_fault(url):
            raise ConfigError(
                f"engine: {url!r} {fault}; give sglang, simulated, or the addresses of SGLang servers such as"
                " http://10.0.0.5:30000, with commas between them"
            )
        if address(url).query:
            raise ConfigError(f"engine: {url!r} must hold no key: set POLARNODE_ENGINE_KEY")
    if len(set(urls)) != len(urls):
        raise ConfigError(f"engine: {config.engine} names a server twice")
    if urls and (config.cpu or config.gpus or config.tp != 1):
        raise ConfigError("--engine URL takes no --cpu, --gpus or --tp: its servers have the model")
    if urls and config.memory_saver != "off":
        raise ConfigError(
            "memory_saver lends the memory of the node's own engine: leave it out with --engine URL"
        )


def _check_judge(name: str, judge: JudgeConfig) -> None:
    where, url = f"judges.{name}", address(judge.base_url)
    rules = (
        (
            re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name),
            where,
            "needs a name of letters, digits, '.', '_' or '-': tasks write it",
        ),
        (
            not (url.username or url.password or url.query),
            f"{where}.base_url",
            "must hold no key: name its variable in key_env",
        ),
        (
            (fault := url_fault(judge.base_url)) is None,
            f"{where}.base_url",
            f"{fault}; it ends in its version path",
        ),
        (judge.model, f"{where}.model", "is empty"),
        (
            judge.key_env is None or re.fullmatch(r"[A-Za-z_]\w*", judge.key_env),
            f"{where}.key_env",
            "must be a variable's name, never a key itself",
        ),
        (judge.at_once >= 1, f"{where}.at_once", "must be at least 1"),
        (0 < judge.answer_s < float("inf"), f"{where}.answer_s", "must be more than 0 seconds"),
        (1 <= judge.attempts <= MAX_ATTEMPTS, f"{where}.attempts", f"must be 1 to {MAX_ATTEMPTS}"),
        (
            not set(judge.body) & {"messages", "stream", "n"},
            f"{where}.body",
            "must leave messages, stream and n alone",
        ),
    )
    for holds, setting, sentence in rules:
        if not holds:
            raise ConfigError(f"{setting} {sentence}")


def _check_egress(config: NodeConfig) -> None:
    for name in config.egress:
        if name != "*" and not HOST.fullmatch(name.removesuffix(".")):
            raise ConfigError(
                f"egress: {name!r} is no host's name: write it as pypi.example, *.pypi.example or *, without"
                " scheme, port and path"
            )
    for name in ("egress_networks", "callback_networks"):
        for network in getattr(config, name):
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise ConfigError(
                    f"{name}: {network!r} is no network ({error}): write it as 10.1.0.0/16 or fd00::/8"
                ) from error
