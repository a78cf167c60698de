"""The node's settings, as a frozen value, and the rules that they must follow.

This module is pure. A setting that breaks a rule raises a `ConfigError` that names the setting and its
remedy. `config_sources.py` reads settings from a TOML file, the environment and flags. Each default has its
reason beside it.
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping
from math import inf
from pathlib import Path
from typing import Literal

from attrs import field, frozen

from polarnode.containers.egress.rules import CALLBACK_NETWORKS, read_network
from polarnode.containers.user_namespace import Limits
from polarnode.core.codec.limits import address, is_loopback, label_faults, url_fault
from polarnode.core.codec.tasks import HOST, IMAGE
from polarnode.core.conversation import Json
from polarnode.core.errors import ConfigError
from polarnode.core.plugins import EVERYTHING, is_module
from polarnode.engine.protocol import Simulation
from polarnode.engine.settings import LORA_MODULES
from polarnode.evaluators.judging import JudgeConfig

MAX_JUDGE_ATTEMPTS = 10  # attempts to ask a judge: with the pauses between them longer than any post budget
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # the name of a judge or a teacher
KV_SETTINGS = ("kv_tokens", "kv_request_s", "kv_context_s")  # settings of a simulated engine
MIN_KV_TOKENS = 1024  # fewest tokens of a simulated KV cache
OWN_ENGINES = ("sglang", "simulated", "none")
TINY_MODEL = Path(__file__).parents[1] / "models" / "tiny"


@frozen(kw_only=True)
class TeacherConfig:
    """A second model, with the policy's vocabulary, that scores rows and never samples. Its weights are those
    of its checkpoint, or those that its own servers serve.
    """

    model: str | None = None  # the folder of its checkpoint; None: the servers of `engine` have it
    cpu: bool = False
    gpus: tuple[int, ...] = ()
    engine: str = "sglang"  # this node's own, simulated, or the addresses of servers
    tp: int = 1
    context_length: int | None = None  # tokens; None: what the checkpoint says
    mem_fraction: float | None = None  # share of GPU memory; None: SGLang's choice
    key_env: str | None = None  # the environment variable that holds its servers' key

    @property
    def engine_urls(self) -> tuple[str, ...]:
        """The servers of an external engine; none for the node's own."""
        return engine_urls(self.engine)


def engine_urls(engine: str) -> tuple[str, ...]:
    """The addresses in a setting `engine`, without a slash at their end; none for an engine of the node's
    own.
    """
    if engine in OWN_ENGINES:
        return ()
    return tuple(url.strip().rstrip("/") for url in engine.split(","))


@frozen(kw_only=True)
class NodeConfig:
    """All settings of a node. Paths are absolute or relative to the working folder; counts are of sessions
    unless a comment names another unit.
    """

    model: str = str(TINY_MODEL)
    cpu: bool = False
    gpus: tuple[int, ...] = ()
    # sglang: this node's own engine; simulated: random answers at the speed of GPUs that need not be there,
    # to size a node; none: the node runs no session and serves results of the other nodes of its log;
    # otherwise the addresses of servers that somebody else runs, with commas between them
    engine: str = "sglang"
    tp: int = 1
    simulated: Simulation = field(factory=Simulation)  # how fast a simulated engine is
    context_length: int | None = None  # tokens; None: what the checkpoint says
    mem_fraction: float | None = None  # share of GPU memory for weights and KV cache; None: SGLang's choice
    # Whether the engine remembers which experts of a mixture read each token. It takes 4 bytes for each
    # expert and each token of the KV cache.
    routed_experts: bool = False
    # whether GPU memory is lent to a trainer, and what becomes of the weights in it
    memory_saver: Literal["off", "discard", "backup"] = "off"
    # The largest rank of an adapter that is accepted; 0: no adapters. Each slot has GPU memory for it from
    # the start.
    lora_rank: int = 0
    # Sessions begin only while the engine's cache has room for the length they will reach; false: as many
    # begin as run_limit allows.
    residency: bool = True
    host_cache_gb: int = 0  # GB of main memory for each GPU, for what its KV cache evicts
    session_cache: bool = False  # whether SGLang evicts prefixes of sessions that still call last
    lora_modules: tuple[str, ...] = LORA_MODULES  # what adapters may change; fewer modules take less memory
    # Adapters that are sampled at once; calls of further ones wait. The default is enough for the current
    # version and the one before of each run that shares an engine.
    lora_slots: int = 8
    # Adapters that are served from the start: by name, a folder in PEFT's format. Later ones of trainers
    # replace them.
    adapters: Mapping[str, str] = field(factory=dict)
    # Begin with the weights that were served last, where a disk still has them; false: with those of `model`.
    resume_weights: bool = True
    # MiB that a session may carry besides ids and logprobs: 5 times the experts of 128k tokens on 48 layers
    # of 8.
    carried_mb: int = 256
    engine_args: Mapping[str, Json] = field(factory=dict)  # further arguments of SGLang, by their names there
    host: str = "127.0.0.1"
    port: int = 8080
    # PEM files of the control plane's certificate with its chain, and of the key. They are read again when
    # they change. None: plain HTTP, for loopback and private networks.
    tls_cert: str | None = None
    tls_key: str | None = None
    # Captures that are open at once. Each is a harness somewhere, with about 3 of the 512 connections that
    # their socket takes.
    capture_limit: int = 64
    capture_listen: str = "127.0.0.1"  # the address where their harnesses find the model; any other needs TLS
    capture_port: int = 0  # the port at that address; 0: any that is free
    # PEM files of its certificate with the chain, and of the key. They are read again when they change.
    capture_tls_cert: str | None = None
    capture_tls_key: str | None = None
    # The address that harnesses are given, where it is another one, as for a name, an ingress or a translated
    # port.
    capture_url: str | None = None
    # Names in `Host` that are served besides those of loopback and `host`; with a token every name is served.
    allowed_hosts: tuple[str, ...] = ()
    token: str | None = field(default=None, repr=False)
    # The DSN of the PostgreSQL that nodes share as their log: tasks, events, consumers and weights. None: the
    # log of a node alone, in its own journal. It is not shown, because it may hold a password.
    log: str | None = field(default=None, repr=False)
    # The address at which the other nodes of that log reach this one; None: its host and port.
    node_url: str | None = None
    # A folder that every node of the log mounts, or a URL of fsspec such as s3://bucket/path. Snapshots of
    # sessions are copied there, so that sessions go on elsewhere when their node is lost. None: snapshots
    # stay in each node's own folder.
    snapshots: str | None = None
    state_dir: str = ".polarnode"  # journal, logs and engine scratch; each node has its own
    # A file on which the program that started the node holds a lock; None: the node lives until it is
    # stopped.
    lifeline: str | None = None
    # The node ends by itself after so many seconds without that lock, and without work in its log. A machine
    # with Ray's head is back in less, and its GPUs are idle for no longer.
    orphan_s: float = 300.0
    # The folder of images and containers; None: one for each user, shared by nodes so that images are built
    # once.
    podman_dir: str | None = None
    # A folder where every request of a harness is written as it came, with its response, for `polarnode
    # replay`.
    record_requests: str | None = None
    runtimes_dir: str | None = None  # image recipes; None: polarnode's own `runtimes/`
    node_id: str = "node-0"
    # What tasks may require of a node, such as gpu = "h100". Every node has the labels `model` and `node`.
    labels: Mapping[str, str] = field(factory=dict)
    # Most sessions that are not over, with those that wait: 11 kB each, and a trainer gains nothing by a
    # longer queue.
    pending_limit: int = 20_000
    # Containers that are prepared at once: Podman serves 4-8 calls on two cores before they only queue.
    init_limit: int = 4
    # Harnesses that run at once: one GPU serves about as many agents before each waits for the others.
    run_limit: int = 64
    # Sessions that are prepared and wait for a run slot. They hide INIT behind RUN, and each costs a
    # container (about 1 MB idle).
    ready_limit: int = 4
    post_limit: int = 8  # evaluations at once: they are CPU work beside the harnesses
    # Most started containers that are kept of a shape, and fewer where few are taken: as many as INIT and
    # READY hold, about 1 MB each.
    warm: int = 8
    # Folders of this machine below which tasks may mount; none unless the operator sets them.
    volumes: tuple[str, ...] = ()
    # Names that tasks may ask to reach, `*.example.org` for all below one, `*` for any; none unless set.
    egress: tuple[str, ...] = ()
    # Networks such as 10.1.0.0/16 to which those names may lead; only public addresses unless set.
    egress_networks: tuple[str, ...] = ()
    # Networks to which callbacks may go; never link-local, metadata and the node's own addresses.
    callback_networks: tuple[str, ...] = CALLBACK_NETWORKS
    # Models that judge, by the name that evaluators use.
    judges: Mapping[str, JudgeConfig] = field(factory=dict)
    # Models that score what the policy sampled, by the name that tasks and POST /v1/score use.
    teachers: Mapping[str, TeacherConfig] = field(factory=dict)
    # MiB of the machine's memory that stay free: with less, no session begins until there is more.
    memory_reserve_mb: int = 1024
    # MiB of the journal above which the oldest events go that all consumers acknowledged: a day of a busy
    # node.
    keep_acknowledged_mb: int = 8192
    # Events that all consumers had acknowledged so long ago go too: a mistake that is seen on Monday is read
    # again from Friday.
    keep_acknowledged_hours: float = 72.0
    # MiB of the journal above which the oldest events go even if somebody still wants them: a trainer may be
    # away for a weekend.
    keep_mb: int = 65536
    # After so long without a sign of a consumer nothing is kept for it any more: a week is longer than any
    # pause.
    consumer_hours: float = 168.0
    # MiB of the containers' disk that stay free: with less, no session begins; with half of it, the largest
    # session is ended.
    disk_reserve_mb: int = 4096
    # Whether the page at /ui/ offers to cancel tasks, and to pause and resume.
    ui_actions: bool = False
    # false: the node takes captures alone, for machines where no container can run.
    containers: bool = True
    # Whether a node starts where this machine does not enforce some limit of a session, as without root.
    limits: Limits = "enforced"
    # Prepared workspaces that are kept as images; the least recently used go first. Each task of a batch is
    # prepared once.
    prepared: int = 32
    # Prefixes of modules from which tasks may name code; none unless the operator sets them.
    import_paths: tuple[str, ...] = ()
    # A public Debian image to build on; None: look for one, else build it from the Debian archive.
    base_image: str | None = None

    @property
    def captures_public(self) -> bool:
        """Whether programs of other machines reach the captures' endpoint."""
        url = address(self.capture_url or "")
        return not (is_loopback(self.capture_listen) and is_loopback(url.hostname or "localhost"))

    @property
    def engine_urls(self) -> tuple[str, ...]:
        """The servers of an external engine, without a slash at their end; none for the node's own."""
        return engine_urls(self.engine)

    @property
    def runs_tasks(self) -> bool:
        """Whether this node runs sessions in containers. Without engines other nodes of its log run them."""
        return self.containers and self.engine != "none"


def check_hosts(names: Iterable[str]) -> None:
    """Raise ConfigError for a name in `allowed_hosts` that no browser sends."""
    for name in names:
        if not HOST.fullmatch(name) or name != name.lower():
            raise ConfigError(
                f"allowed_hosts: {name!r} is no host's name: write it in lower case as node.example or"
                " *.node.example, without scheme, port and path"
            )


def _check_access(config: NodeConfig) -> None:
    check_hosts(config.allowed_hosts)
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigError("tls_cert and tls_key belong together: give both, or neither")
    # A header carries no other characters. An empty token would equal that of a client that has none.
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


def check_config(config: NodeConfig) -> None:
    """Raise ConfigError for settings that are invalid, or that contradict each other."""
    if config.cpu and config.gpus:
        raise ConfigError("--cpu and --gpus exclude each other: give one of them")
    if config.tp < 1 or (config.gpus and len(config.gpus) % config.tp):
        raise ConfigError(
            f"--tp {config.tp} must divide the {len(config.gpus)} GPUs given: one engine takes --tp of them"
        )
    if config.context_length is not None and config.context_length < 1:
        raise ConfigError("context_length must be at least 1 token; leave it out for the checkpoint's")
    if config.mem_fraction is not None and not 0 < config.mem_fraction < 1:
        raise ConfigError("mem_fraction must be between 0 and 1: it is the share of a GPU's memory")
    _check_simulated(config.simulated)
    _check_external(config)
    _check_egress(config)
    for name, judge in config.judges.items():
        _check_judge(name, judge)
    for name, teacher in config.teachers.items():
        _check_teacher(name, teacher, config)
    if config.lora_rank < 0:
        raise ConfigError("lora_rank must be 0 or more: 0 takes no adapters")
    if config.engine_args and config.engine != "sglang":
        raise ConfigError("engine_args are for the node's own SGLang: leave them out with another --engine")
    if config.host_cache_gb < 0:
        raise ConfigError("host_cache_gb must be 0 or more: 0 keeps nothing of the KV cache in main memory")
    if config.adapters and not config.lora_rank:
        raise ConfigError(
            f"adapters: {', '.join(config.adapters)} cannot be served with lora_rank 0: set it to their"
            " largest rank, such as lora_rank = 32"
        )
    for name in ("pending_limit", "init_limit", "run_limit", "post_limit", "carried_mb", "lora_slots"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} must be at least 1")
    if not 0 < config.orphan_s < inf:
        raise ConfigError("orphan_s must be more than 0 seconds")
    if config.capture_limit < 0:
        raise ConfigError("capture_limit must be 0 or more: 0 takes no captures")
    for prefix in config.import_paths:
        if prefix != EVERYTHING and not is_module(prefix):
            raise ConfigError(
                f"import_paths {prefix!r} is no module: write it as package or package.module, or * for all"
            )
    if config.base_image is not None and not IMAGE.fullmatch(config.base_image):
        raise ConfigError(
            f"base_image {config.base_image!r} is no image's name: write it as debian:bookworm-slim"
        )
    _check_labels(config.labels)
    _check_log(config)
    _check_captures(config)
    _check_retention(config)
    _check_access(config)


def _check_log(config: NodeConfig) -> None:
    if config.log == "":
        raise ConfigError("log is empty: give the DSN of a PostgreSQL, or leave it out")
    if config.snapshots is not None and (config.log is None or not config.snapshots):
        raise ConfigError(
            "snapshots is for nodes that share a log, a folder or a URL such as s3://bucket/path: give log"
            " too, or leave it out"
        )
    if config.node_url is not None and (fault := url_fault(config.node_url)):
        raise ConfigError(f"node_url: {config.node_url!r} {fault}")
    if config.engine == "none":
        if config.log is None:
            raise ConfigError(
                "--engine none runs no session: give --log, the PostgreSQL whose other nodes do"
            )
        if config.cpu or config.gpus or config.teachers:
            raise ConfigError("--engine none takes no --cpu, --gpus or teachers: leave them out")


def _check_labels(labels: Mapping[str, str]) -> None:
    for path, sentence in label_faults(labels, "labels"):
        raise ConfigError(f"{path} {sentence}")
    for name in ("model", "node"):
        if name in labels:
            raise ConfigError(f"labels.{name} cannot be set: it is the {name}'s own name on every node")


def _check_captures(config: NodeConfig) -> None:
    listen, public, secure = config.capture_listen, config.capture_url, config.capture_tls_cert is not None
    try:
        every = not is_loopback(listen) and ipaddress.ip_address(listen).is_unspecified
    except ValueError as error:
        raise ConfigError(
            f"capture_listen: {listen!r} is no address: write one such as 10.0.0.7 or 0.0.0.0, and"
            " its name in capture_url"
        ) from error
    if secure != (config.capture_tls_key is not None):
        raise ConfigError("capture_tls_cert and capture_tls_key belong together: give both, or neither")
    if not is_loopback(listen) and not secure:
        raise ConfigError(
            f"capture_listen {listen} can be reached from outside, where keys would be read on their way: set"
            " capture_tls_cert and capture_tls_key, or listen on 127.0.0.1 behind a proxy that ends TLS"
        )
    if every and public is None:
        raise ConfigError(
            f"capture_listen {listen} is no address that a harness can call: set capture_url, such as"
            " https://node.example:8443"
        )
    if public is None:
        return
    url = address(public)
    if fault := url_fault(public):
        raise ConfigError(f"capture_url: {public!r} {fault}")
    if url.query or url.fragment:
        raise ConfigError(f"capture_url: {public!r} must end with its path: keys are added by the node")
    if url.scheme != "https" and (secure or not is_loopback(url.hostname or "")):
        raise ConfigError(f"capture_url: {public!r} must begin with https://, for keys are sent there")


def _check_retention(config: NodeConfig) -> None:
    if config.keep_mb < 1:
        raise ConfigError("keep_mb must be at least 1 MiB")
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
    for name in ("tokens_per_s", "first_token_s", "prefill_tokens_per_s", "calling_turns", *KV_SETTINGS):
        if not getattr(simulation, name) >= 0:
            raise ConfigError(f"simulated.{name} must be 0 or more")
    for name in ("kv_page", "kv_chunk"):
        if getattr(simulation, name) < 1:
            raise ConfigError(f"simulated.{name} must be at least 1")
    for name in ("kv_past_tokens", "speed"):
        if not getattr(simulation, name) > 0:
            raise ConfigError(f"simulated.{name} must be more than 0")
    if simulation.kv_tokens and simulation.kv_tokens < MIN_KV_TOKENS:
        raise ConfigError(
            f"simulated.kv_tokens {simulation.kv_tokens} holds no harness's prompt: give at least"
            f" {MIN_KV_TOKENS},"
            " or 0 for as many as are wanted"
        )


def _check_external(config: NodeConfig) -> None:
    urls = config.engine_urls
    _check_urls("engine", urls, "POLARNODE_ENGINE_KEY")
    if urls and (config.cpu or config.gpus or config.tp != 1):
        raise ConfigError("--engine URL takes no --cpu, --gpus or --tp: its servers have the model")
    if urls and config.memory_saver != "off":
        raise ConfigError(
            "memory_saver lends the memory of the node's own engine: leave it out with --engine URL"
        )


def _check_urls(where: str, urls: tuple[str, ...], key: str) -> None:
    for url in urls:
        if fault := url_fault(url):
            raise ConfigError(
                f"{where}: {url!r} {fault}; give sglang, simulated, or the addresses of SGLang servers such"
                " as http://10.0.0.5:30000, with commas between them"
            )
        if address(url).query:
            raise ConfigError(f"{where}: {url!r} must hold no key: set {key}")
    if len(set(urls)) != len(urls):
        raise ConfigError(f"{where}: {','.join(urls)} names a server twice")


def _check_teacher(name: str, teacher: TeacherConfig, config: NodeConfig) -> None:
    where, urls, own = f"teachers.{name}", teacher.engine_urls, teacher.engine == "sglang"
    _check_urls(f"{where}.engine", urls, f"{where}.key_env")
    others: list[NodeConfig | TeacherConfig] = [config, *config.teachers.values()]
    sharing = [each for each in others if set(each.gpus) & set(teacher.gpus)]
    rules = (
        (
            NAME_PATTERN.fullmatch(name),
            where,
            "needs a name of letters, digits, '.', '_' or '-': tasks write it",
        ),
        (name != "policy", where, "needs another name: policy is the engine that samples"),
        (teacher.model or urls, f"{where}.model", "is missing: name the folder of its checkpoint"),
        (not own or teacher.cpu != bool(teacher.gpus), where, "needs cpu = true or gpus, one of them"),
        (own or not (teacher.cpu or teacher.gpus), where, "takes no cpu and gpus: leave them out"),
        (
            teacher.tp >= 1 and len(teacher.gpus) % teacher.tp == 0,
            f"{where}.tp",
            f"must divide the {len(teacher.gpus)} GPUs given",
        ),
        (
            len(sharing) < 2 or all(each.mem_fraction is not None for each in sharing),
            f"{where}.gpus",
            "names a GPU that has another model: give both a mem_fraction, or this one another GPU",
        ),
        (
            teacher.key_env is None or re.fullmatch(r"[A-Za-z_]\w*", teacher.key_env),
            f"{where}.key_env",
            "must be a variable's name, never a key itself",
        ),
    )
    for holds, setting, sentence in rules:
        if not holds:
            raise ConfigError(f"{setting} {sentence}")


def _check_judge(name: str, judge: JudgeConfig) -> None:
    where, url = f"judges.{name}", address(judge.base_url)
    rules = (
        (
            NAME_PATTERN.fullmatch(name),
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
        (
            1 <= judge.attempts <= MAX_JUDGE_ATTEMPTS,
            f"{where}.attempts",
            f"must be 1 to {MAX_JUDGE_ATTEMPTS}",
        ),
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
            read_network(network, name)
