"""The requirements that this machine must meet before any part of a node starts. `polarnode doctor` shows
them, and every start checks them first.

Each check gives findings. All checks take about a second; no engine and no container is started, and no model
is loaded. Invariant: a finding is not ok only if a node would not start with these settings.
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

from polarnode.containers.probe import MachineFinding, probe
from polarnode.containers.recipes import ImageRecipes, default_runtimes_dir, read_recipes
from polarnode.core.codec.limits import address
from polarnode.core.errors import ConfigError, EngineError
from polarnode.engine.checkpoints import CONFIG, TENSORS
from polarnode.engine.settings import RESERVED, check
from polarnode.http.server import Certificate
from polarnode.node.config import TINY_MODEL, NodeConfig, TeacherConfig
from polarnode.node.node import captures_certificate, captures_listener, control_certificate
from polarnode.node.settings import engine_settings, store_dir

HANDSHAKE_STEPS = 3  # steps of each side: hello, keys, finished
RENEWAL_DAYS = 14  # a certificate should have more days left: those of 90 days are renewed with 30 left
NVIDIA_SMI_S = 10.0  # seconds; nvidia-smi answers in one, and hangs with a broken driver
DEVICES = Path("/dev")
ARGUMENTS_TIMEOUT_S = 120.0  # seconds; SGLang's import takes 5 on an idle machine
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # a model's id on a hub, as Qwen/Qwen3-8B

# ── together ──────────────────────────────────────────────────────────────────


def refuse_unfit(config: NodeConfig, *, tasks: bool = False) -> None:
    """Raise ConfigError with a sentence for each reason why a node cannot start here with these settings.
    With `tasks` it must also be able to run tasks.
    """
    if tasks and not config.containers:
        raise ConfigError("--no-containers takes captures alone: leave it out to run tasks")
    faults = [finding for finding in requirements(config) if not finding.ok]
    if faults:
        raise ConfigError("\n".join(f"{each.name}: {each.what}\n  → {each.remedy}" for each in faults))
    captures_listener(config).close()


def requirements(config: NodeConfig) -> Iterator[MachineFinding]:
    """The findings of all checks, quick ones first. A model without a fault has no finding here."""
    if config.runs_tasks:
        yield from trio.run(probe, store_dir(config), config.limits).findings
        yield check_recipes(config)
    elif config.engine == "none":
        yield MachineFinding(name="engine", ok=True, what="none: other nodes of the log run the sessions")
    else:
        yield MachineFinding(name="containers", ok=True, what="none: captures alone are taken")
    if has_own_engine(config):
        yield check_sglang(config)
        yield check_gpus(config, os.environ)
        if config.engine_args and not RESERVED.keys() & config.engine_args.keys():
            yield check_engine_arguments(config, os.environ)
    yield from check_checkpoint(config)
    yield from check_adapters(config)
    yield from check_recorded_requests(config)
    yield from check_control_plane(config)
    yield from check_captures(config)


def has_own_engine(config: NodeConfig) -> bool:
    """Whether the node runs an SGLang of its own, for the policy or for a teacher."""
    return "sglang" in (config.engine, *(each.engine for each in config.teachers.values()))


# ── engine ────────────────────────────────────────────────────────────────────


def check_sglang(config: NodeConfig) -> MachineFinding:
    """Check the engine's package. It is looked up and not imported, because the node's process does not
    either.
    """
    if importlib.util.find_spec("sglang") is None:
        return MachineFinding(
            name="sglang",
            ok=False,
            what="not installed",
            remedy="pip install 'polarnode[gpu]' on a GPU host. Without a GPU: `make setup` in a checkout, or"
            " pip install 'polarnode[cpu]' and then pip install --no-deps sglang==0.5.23",
        )
    version = importlib.metadata.version("sglang")
    if importlib.util.find_spec("sgl_kernel") is not None:
        return MachineFinding(name="sglang", ok=True, what=f"{version}, full: serves on GPUs")
    wanted = bool(wanted_gpus(config))
    remedy = "pip install 'polarnode[gpu]' (about 4 GB), or use --cpu" if wanted else ""
    return MachineFinding(
        name="sglang", ok=not wanted, what=f"{version}, slim: serves with --cpu only", remedy=remedy
    )


def wanted_gpus(config: NodeConfig) -> tuple[int, ...]:
    """The GPUs on which the node's own engines run, in order."""
    owners: list[NodeConfig | TeacherConfig] = [config, *config.teachers.values()]
    return tuple(sorted({gpu for each in owners if each.engine == "sglang" for gpu in each.gpus}))


def check_gpus(config: NodeConfig, environment: Mapping[str, str]) -> MachineFinding:
    """Check that this process may use the GPUs that the config names. No GPU is ok if none is named."""
    try:
        count = _count_gpus()
    except subprocess.TimeoutExpired:
        return MachineFinding(
            name="gpus",
            ok=False,
            what="nvidia-smi does not answer",
            remedy="check the driver: dmesg | grep -i nvrm",
        )
    visible = [each for each in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    if visible and count:
        count = len(visible)  # --gpus numbers only these, as CUDA does
    found = f"{count} found" + (f" (CUDA_VISIBLE_DEVICES={','.join(visible)})" if visible else "")
    missing = [number for number in wanted_gpus(config) if number >= count]
    if missing:
        named = ", ".join(map(str, missing))
        remedy = (
            f"use --gpus 0-{count - 1}"
            if count
            else "use --cpu, or install the driver: nvidia-smi -L must list the GPUs"
        )
        return MachineFinding(name="gpus", ok=False, what=f"{found}, but not GPU {named}", remedy=remedy)
    return MachineFinding(
        name="gpus", ok=True, what=f"{count}: use --gpus 0-{count - 1}" if count else "none: use --cpu"
    )


def _count_gpus() -> int:
    """Count the GPUs that nvidia-smi lists. A container may lack that program; its devices are counted
    then.
    """
    if shutil.which("nvidia-smi") is None:
        return sum(re.fullmatch(r"nvidia\d+", name) is not None for name in os.listdir(DEVICES))
    asked = subprocess.run(
        ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=False
    )
    return sum(line.startswith("GPU ") for line in asked.stdout.splitlines())


def check_engine_arguments(config: NodeConfig, environment: Mapping[str, str]) -> MachineFinding:
    """Check in another process that this SGLang takes the arguments of `engine_args` with these values."""
    names, remedy = ", ".join(config.engine_args), "see docs/engines.md#arguments-of-sglang"
    platform = "polarnode_cpu" if config.cpu else ""
    try:
        asked = subprocess.run(
            [sys.executable, "-m", "polarnode.engine.embedded.arguments"],
            input=json.dumps(dict(config.engine_args)),
            env={**environment, "SGLANG_PLATFORM": platform},
            capture_output=True,
            text=True,
            timeout=ARGUMENTS_TIMEOUT_S,
            check=True,
        )
        faults = json.loads(asked.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        last = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1]
        what = f"SGLang cannot be asked for its arguments: {last}"
        return MachineFinding(name="engine arguments", ok=False, what=what, remedy="see the finding sglang")
    if faults:
        return MachineFinding(name="engine arguments", ok=False, what="; ".join(faults), remedy=remedy)
    return MachineFinding(name="engine arguments", ok=True, what=f"{names}: as SGLang has them")


def check_checkpoint(config: NodeConfig) -> Iterator[MachineFinding]:
    """Findings for faults of the model's folder, and of the engine's settings for this model. Its tokenizer
    and template are checked when it is loaded.
    """
    folder, name = Path(config.model), config.model
    if config.engine_urls and name == str(TINY_MODEL):
        return  # the node asks the servers for their model
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
        yield MachineFinding(name="model", ok=False, what=what, remedy=remedy)
    elif config.engine == "sglang" and (config.cpu or config.gpus):
        try:
            check(engine_settings(config, Path(config.state_dir), None))
        except (ConfigError, EngineError) as error:
            yield MachineFinding(name="engine", ok=False, what=str(error), remedy="see docs/engines.md")


def check_adapters(config: NodeConfig) -> Iterator[MachineFinding]:
    """Findings for missing files of adapters that are served from the start. Whether their content fits is
    seen when an engine loads them.
    """
    for name, folder in config.adapters.items():
        paths = (Path(folder) / file for file in (CONFIG, TENSORS))
        missing = next((path for path in paths if not path.is_file()), None)
        if missing is not None:
            what = f"adapters.{name}: there is no {missing}"
            remedy = "name a folder that PEFT's save_pretrained wrote, with safetensors"
            yield MachineFinding(name="adapters", ok=False, what=what, remedy=remedy)


# ── containers ────────────────────────────────────────────────────────────────


def check_recipes(config: NodeConfig) -> MachineFinding:
    """Check the recipes of the runtimes that harnesses run in."""
    try:
        folder = Path(config.runtimes_dir) if config.runtimes_dir else default_runtimes_dir()
        return MachineFinding(
            name="runtimes",
            ok=True,
            what=f"{_describe_recipes(read_recipes(folder, base=config.base_image))} in {folder}",
        )
    except ConfigError as error:
        return MachineFinding(
            name="runtimes",
            ok=False,
            what=str(error),
            remedy="unset POLARNODE_RUNTIMES_DIR, or set it to a folder of image recipes",
        )


def _describe_recipes(found: ImageRecipes) -> str:
    """Name each recipe and its harnesses, as in `base, pi (for pi)`."""
    return ", ".join(
        recipe.name + (f" (for {', '.join(recipe.config.harnesses)})" if recipe.config.harnesses else "")
        for recipe in found.by_name.values()
    )


# ── recordings ────────────────────────────────────────────────────────────────


def check_recorded_requests(config: NodeConfig) -> Iterator[MachineFinding]:
    """A finding if the folder of recorded requests cannot be made or written to."""
    if config.record_requests is None:
        return
    folder = Path(config.record_requests).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        remedy = "set --record-requests to a folder, which is made if it is missing"
        yield MachineFinding(name="record_requests", ok=False, what=f"{there} is not a folder", remedy=remedy)
    elif not os.access(there, os.W_OK | os.X_OK):
        remedy = "set --record-requests to a folder that this user can write to"
        yield MachineFinding(
            name="record_requests", ok=False, what=f"{there} cannot be written to", remedy=remedy
        )


# ── addresses and certificates ────────────────────────────────────────────────


def check_control_plane(config: NodeConfig) -> Iterator[MachineFinding]:
    """A finding for the certificate of the node's control plane; none where it speaks plain HTTP."""
    try:
        certificate = control_certificate(config)
    except ConfigError as error:
        yield MachineFinding(name="control plane", ok=False, what=str(error), remedy="see docs/fleet.md")
        return
    if certificate is not None:
        every = config.host in ("0.0.0.0", "::")
        host = socket.gethostname() if every else config.host
        yield check_certificate(certificate, host, time.time(), "clients that do not pin it refuse it")


def check_captures(config: NodeConfig) -> Iterator[MachineFinding]:
    """Findings for the captures' endpoint: its certificate, and the address that agents of other machines
    use.
    """
    try:
        captures_listener(evolve(config, capture_port=0)).close()
        certificate = captures_certificate(config)
    except ConfigError as error:
        yield MachineFinding(name="captures", ok=False, what=str(error), remedy="see docs/remote.md")
        return
    if certificate is not None:
        host = address(config.capture_url or "").hostname or config.capture_listen
        yield check_certificate(certificate, host, time.time())
    if config.captures_public:
        given = config.capture_url or "the address it listens on"
        yield MachineFinding(
            name="captures",
            ok=True,
            what=f"{config.capture_listen} port {config.capture_port or 'any'}; agents are given {given}",
            remedy=""
            if config.capture_port
            else "set capture_port: a firewall or an ingress needs a fixed one",
        )


def check_certificate(
    certificate: Certificate, host: str, now: float, otherwise: str = "no agent connects"
) -> MachineFinding:
    """Check whether clients that trust this certificate's authority accept it for `host`, and for how long. A
    handshake in memory verifies it as they do. `otherwise` says what happens to them if they do not accept
    it.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(certificate.chain)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself may serve as the authority
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
        return MachineFinding(
            name="certificate", ok=True, what=f"{certificate.chain}: {fault}", remedy=remedy
        )
    ends = ssl.cert_time_to_seconds(str((calling.getpeercert() or {})["notAfter"]))
    days = (ends - now) / 86400
    return MachineFinding(
        name="certificate",
        ok=True,
        what=f"{certificate.chain}: for {host}, {days:.0f} days left",
        remedy="" if days > RENEWAL_DAYS else "renew it: a node that runs reads it again by itself",
    )
