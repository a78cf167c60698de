"""What must hold on this machine before any part of a node starts: `polarnode doctor` shows it, and every
start asks for it first.

Each check is a finding. All take about a second; no engine and no container is started, no model is loaded.
Invariant: a finding is not ok only if a node would not start with these settings.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import trio
from attrs import evolve

from polarnode.containers.probe import Finding, probe
from polarnode.containers.recipes import Recipes, default_runtimes_dir, read_recipes
from polarnode.core.codec.limits import address
from polarnode.core.errors import ConfigError, EngineError
from polarnode.engine.checkpoints import CONFIG, TENSORS
from polarnode.engine.settings import RESERVED, check
from polarnode.http.server import Certificate
from polarnode.node.config import TINY_MODEL, NodeConfig, TeacherConfig
from polarnode.node.node import captures_certificate, captures_listener, control_certificate
from polarnode.node.settings import engine_settings, store_dir

HANDSHAKE_STEPS = 3  # of each side: hello, keys, finished
RENEWAL_DAYS = 14  # left of a certificate: those of 90 days are renewed when 30 are
NVIDIA_SMI_S = 10.0  # seconds; it answers in one, and hangs with a broken driver
DEVICES = Path("/dev")
ARGUMENTS_S = 120.0  # seconds; SGLang's import takes 5 on an idle machine
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # of a model: Qwen/Qwen3-8B

# ── together ──────────────────────────────────────────────────────────────────


def refuse_unfit(config: NodeConfig, *, tasks: bool = False) -> None:
    """Raise ConfigError with a sentence for each reason why a node cannot start here with these settings, or
    cannot run the `tasks` of this command.
    """
    if tasks and not config.containers:
        raise ConfigError("--no-containers takes captures alone: leave it out to run tasks")
    faults = [finding for finding in requirements(config) if not finding.ok]
    if faults:
        raise ConfigError("\n".join(f"{each.name}: {each.what}\n  → {each.remedy}" for each in faults))
    captures_listener(config).close()


def requirements(config: NodeConfig) -> Iterator[Finding]:
    """All of them, quick ones first. A model that can be looked at has no finding of its own here."""
    if config.runs_tasks:
        yield from trio.run(probe, store_dir(config), config.limits).findings
        yield recipes(config)
    elif config.engine == "none":
        yield Finding(name="engine", ok=True, what="none: other nodes of the log run the sessions")
    else:
        yield Finding(name="containers", ok=True, what="none: captures alone are taken")
    if has_own_engine(config):
        yield sglang(config)
        yield gpus(config, os.environ)
        if config.engine_args and not RESERVED.keys() & config.engine_args.keys():
            yield engine_arguments(config, os.environ)
    yield from checkpoint(config)
    yield from adapters(config)
    yield from recorded_requests(config)
    yield from control_plane(config)
    yield from captures(config)


def has_own_engine(config: NodeConfig) -> bool:
    """Whether an SGLang of the node's own runs, for the policy or for a teacher."""
    return "sglang" in (config.engine, *(each.engine for each in config.teachers.values()))


# ── engine ────────────────────────────────────────────────────────────────────


def sglang(config: NodeConfig) -> Finding:
    """The engine's package. It is looked up but not imported, as in the node's process."""
    if importlib.util.find_spec("sglang") is None:
        return Finding(
            name="sglang",
            ok=False,
            what="not installed",
            remedy="pip install 'polarnode[gpu]' on a GPU host. Without a GPU: `make setup` in a checkout, or"
            " pip install 'polarnode[cpu]' and then pip install --no-deps sglang==0.5.23",
        )
    version = importlib.metadata.version("sglang")
    if importlib.util.find_spec("sgl_kernel") is not None:
        return Finding(name="sglang", ok=True, what=f"{version}, full: serves on GPUs")
    wanted = bool(wanted_gpus(config))
    remedy = "pip install 'polarnode[gpu]' (about 4 GB), or use --cpu" if wanted else ""
    return Finding(
        name="sglang", ok=not wanted, what=f"{version}, slim: serves with --cpu only", remedy=remedy
    )


def wanted_gpus(config: NodeConfig) -> tuple[int, ...]:
    """The GPUs that engines of the node's own run on, in order."""
    owners: list[NodeConfig | TeacherConfig] = [config, *config.teachers.values()]
    return tuple(sorted({gpu for each in owners if each.engine == "sglang" for gpu in each.gpus}))


def gpus(config: NodeConfig, environment: Mapping[str, str]) -> Finding:
    """The GPUs that this process may use and those the config names. Having none is ok if none are named."""
    try:
        count = _count_gpus()
    except subprocess.TimeoutExpired:
        return Finding(
            name="gpus",
            ok=False,
            what="nvidia-smi does not answer",
            remedy="check the driver: dmesg | grep -i nvrm",
        )
    visible = [each for each in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    if visible and count:
        count = len(visible)  # --gpus counts among them, as CUDA does
    found = f"{count} found" + (f" (CUDA_VISIBLE_DEVICES={','.join(visible)})" if visible else "")
    missing = [number for number in wanted_gpus(config) if number >= count]
    if missing:
        named = ", ".join(map(str, missing))
        remedy = (
            f"use --gpus 0-{count - 1}"
            if count
            else "use --cpu, or install the driver: nvidia-smi -L must list the GPUs"
        )
        return Finding(name="gpus", ok=False, what=f"{found}, but not GPU {named}", remedy=remedy)
    return Finding(
        name="gpus", ok=True, what=f"{count}: use --gpus 0-{count - 1}" if count else "none: use --cpu"
    )


def _count_gpus() -> int:
    """GPUs that nvidia-smi lists. A container may lack that program: then the devices in it are counted."""
    if shutil.which("nvidia-smi") is None:
        return sum(re.fullmatch(r"nvidia\d+", name) is not None for name in os.listdir(DEVICES))
    asked = subprocess.run(
        ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=False
    )
    return sum(line.startswith("GPU ") for line in asked.stdout.splitlines())


def engine_arguments(config: NodeConfig, environment: Mapping[str, str]) -> Finding:
    """Whether this SGLang has the arguments of `engine_args` with these values: another process asks it."""
    names, remedy = ", ".join(config.engine_args), "see docs/engines.md#arguments-of-sglang"
    platform = "polarnode_cpu" if config.cpu else ""
    try:
        asked = subprocess.run(
            [sys.executable, "-m", "polarnode.engine.embedded.arguments"],
            input=json.dumps(dict(config.engine_args)),
            env={**environment, "SGLANG_PLATFORM": platform},
            capture_output=True,
            text=True,
            timeout=ARGUMENTS_S,
            check=True,
        )
        faults = json.loads(asked.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        last = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1]
        what = f"SGLang cannot be asked for its arguments: {last}"
        return Finding(name="engine arguments", ok=False, what=what, remedy="see the finding sglang")
    if faults:
        return Finding(name="engine arguments", ok=False, what="; ".join(faults), remedy=remedy)
    return Finding(name="engine arguments", ok=True, what=f"{names}: as SGLang has them")


def checkpoint(config: NodeConfig) -> Iterator[Finding]:
    """What is wrong with the model's folder, or with settings of the engine for this model. Its tokenizer and
    template are looked at when it is loaded.
    """
    folder, name = Path(config.model), config.model
    if config.engine_urls and name == str(TINY_MODEL):
        return  # the servers are asked for theirs
    if not (folder / "config.json").is_file():
        remedy = "name a folder with a Hugging Face checkpoint, or leave --model out for the embedded model"
        what = (
            f"--model {name}: there is no config.json"
            if folder.is_dir()
            else f"--model {name}: no such folder"
        )
        if not folder.exists() and HUB_ID.fullmatch(name):
            there = f"/models/{folder.name}"
            what = f"--model {name}: a folder is needed, for models are not fetched from a hub"
            remedy = f"hf download {name} --local-dir {there}, then --model {there}"
        yield Finding(name="model", ok=False, what=what, remedy=remedy)
    elif config.engine == "sglang" and (config.cpu or config.gpus):
        try:
            check(engine_settings(config, Path(config.state_dir), None))
        except (ConfigError, EngineError) as error:
            yield Finding(name="engine", ok=False, what=str(error), remedy="see docs/engines.md")


def adapters(config: NodeConfig) -> Iterator[Finding]:
    """The folders of adapters that are served from the start. Whether their content fits is seen when an
    engine loads them.
    """
    for name, folder in config.adapters.items():
        paths = (Path(folder) / file for file in (CONFIG, TENSORS))
        missing = next((path for path in paths if not path.is_file()), None)
        if missing is not None:
            what = f"adapters.{name}: there is no {missing}"
            remedy = "name a folder that PEFT's save_pretrained wrote, with safetensors"
            yield Finding(name="adapters", ok=False, what=what, remedy=remedy)


# ── containers ────────────────────────────────────────────────────────────────


def recipes(config: NodeConfig) -> Finding:
    """The recipes of runtimes that harnesses run in."""
    try:
        folder = Path(config.runtimes_dir) if config.runtimes_dir else default_runtimes_dir()
        return Finding(
            name="runtimes",
            ok=True,
            what=f"{_carried(read_recipes(folder, base=config.base_image))} in {folder}",
        )
    except ConfigError as error:
        return Finding(
            name="runtimes",
            ok=False,
            what=str(error),
            remedy="unset POLARNODE_RUNTIMES_DIR, or set it to a folder of image recipes",
        )


def _carried(found: Recipes) -> str:
    """Each recipe and its harnesses: `base, pi (for pi)`."""
    return ", ".join(
        recipe.name + (f" (for {', '.join(recipe.config.harnesses)})" if recipe.config.harnesses else "")
        for recipe in found.by_name.values()
    )


# ── recordings ────────────────────────────────────────────────────────────────


def recorded_requests(config: NodeConfig) -> Iterator[Finding]:
    """The folder of recorded requests, where it cannot be one."""
    if config.record_requests is None:
        return
    folder = Path(config.record_requests).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        remedy = "set --record-requests to a folder, which is made if it is missing"
        yield Finding(name="record_requests", ok=False, what=f"{there} is not a folder", remedy=remedy)
    elif not os.access(there, os.W_OK | os.X_OK):
        remedy = "set --record-requests to a folder that this user can write to"
        yield Finding(name="record_requests", ok=False, what=f"{there} cannot be written to", remedy=remedy)


# ── addresses and certificates ────────────────────────────────────────────────


def control_plane(config: NodeConfig) -> Iterator[Finding]:
    """The certificate of the node's own control plane; nothing where it speaks plain HTTP."""
    try:
        certificate = control_certificate(config)
    except ConfigError as error:
        yield Finding(name="control plane", ok=False, what=str(error), remedy="see docs/fleet.md")
        return
    if certificate is not None:
        every = config.host in ("0.0.0.0", "::")
        host = socket.gethostname() if every else config.host
        yield certified(certificate, host, time.time(), "clients that do not pin it refuse it")


def captures(config: NodeConfig) -> Iterator[Finding]:
    """Where agents of other machines find the captures' endpoint; nothing where none does."""
    try:
        captures_listener(evolve(config, capture_port=0)).close()
        certificate = captures_certificate(config)
    except ConfigError as error:
        yield Finding(name="captures", ok=False, what=str(error), remedy="see docs/remote.md")
        return
    if certificate is not None:
        host = address(config.capture_url or "").hostname or config.capture_listen
        yield certified(certificate, host, time.time())
    if config.captures_public:
        given = config.capture_url or "the address it listens on"
        yield Finding(
            name="captures",
            ok=True,
            what=f"{config.capture_listen} port {config.capture_port or 'any'}; agents are given {given}",
            remedy=""
            if config.capture_port
            else "set capture_port: a firewall or an ingress needs a fixed one",
        )


def certified(
    certificate: Certificate, host: str, now: float, otherwise: str = "no agent connects"
) -> Finding:
    """Whether clients that trust this certificate's authority take it for `host`, and for how long. They are
    asked in memory: a handshake verifies as they do. `otherwise` is what becomes of them if not.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(certificate.chain)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # its own certificate is enough of an authority
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    calling = client.wrap_bio(back, there, server_hostname=host)
    called = certificate.context.wrap_bio(there, back, server_side=True)
    try:
        for side in (calling, called) * HANDSHAKE_STEPS:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        fault = error.verify_message
        remedy = f"{otherwise}: have one issued for {host}; a node that runs reads it again by itself"
        return Finding(name="certificate", ok=True, what=f"{certificate.chain}: {fault}", remedy=remedy)
    ends = ssl.cert_time_to_seconds(str((calling.getpeercert() or {})["notAfter"]))
    days = (ends - now) / 86400
    return Finding(
        name="certificate",
        ok=True,
        what=f"{certificate.chain}: for {host}, {days:.0f} days left",
        remedy="" if days > RENEWAL_DAYS else "renew it: a node that runs reads it again by itself",
    )
