"""`polarnode doctor`: what this machine has for a node, what it lacks, and what to do. Starts no engine and no container."""

import importlib.metadata
import importlib.util
import shutil
import subprocess
from pathlib import Path

import trio
from rich.console import Console
from rich.text import Text

from polarnode.config import NodeConfig
from polarnode.errors import ModelError
from polarnode.shell.podman import Finding, default_state_dir, probe
from polarnode.tokens.model import load_model

NVIDIA_SMI_S = 10.0  # seconds; it answers in one, and hangs where a driver is broken
ENOUGH_DISK = 10 << 30  # bytes: four runtime images and their base are about 4 GB

console = Console(highlight=False)


def examine(config: NodeConfig) -> int:
    """Print every finding; returns 0 when a node would start here."""
    state_dir = Path(config.podman_dir) if config.podman_dir else default_state_dir()
    podman = trio.run(probe, state_dir)
    findings = [*podman.findings, sglang(), gpus(), disk(state_dir), model(Path(config.model))]
    for finding in findings:
        console.print(Text("✓ " if finding.ok else "✗ ", style="green" if finding.ok else "red") + Text(f"{finding.name}: {finding.what}"))
        if finding.remedy:
            console.print(Text(f"  → {finding.remedy}", style="yellow"))
    return int(not all(finding.ok for finding in findings))


def sglang() -> Finding:
    """The engine's package, looked up without importing it: the node's process never does."""
    if importlib.util.find_spec("sglang") is None:
        return Finding(name="sglang", ok=False, what="not installed", remedy="run `make setup`, or pip install 'polarnode[gpu]' on a GPU host")
    full = importlib.util.find_spec("sgl_kernel") is not None
    return Finding(name="sglang", ok=True, what=f"{importlib.metadata.version('sglang')}, {'full' if full else 'slim: serves with --cpu only'}")


def gpus() -> Finding:
    """The GPUs nvidia-smi lists. None is no fault: a node runs with --cpu."""
    if shutil.which("nvidia-smi") is None:
        return Finding(name="gpus", ok=True, what="none: use --cpu")
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=False).stdout
    except subprocess.TimeoutExpired:
        return Finding(name="gpus", ok=False, what="nvidia-smi does not answer", remedy="look at the driver: dmesg | grep -i nvrm")
    lines = [line for line in listed.splitlines() if line.startswith("GPU ")]
    return Finding(name="gpus", ok=True, what=f"{len(lines)}: use --gpus 0-{len(lines) - 1}" if lines else "none: use --cpu")


def disk(state_dir: Path) -> Finding:
    """Room for images where Podman keeps them."""
    place = next(folder for folder in (state_dir, *state_dir.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    remedy = "" if free >= ENOUGH_DISK else "free some, or set POLARNODE_PODMAN_DIR to a folder on a larger disk"
    return Finding(name="disk", ok=free >= ENOUGH_DISK, what=f"{free / (1 << 30):.0f} GiB free at {place}", remedy=remedy)


def model(path: Path) -> Finding:
    """Whether the checkpoint's tokenizer and template can be served token-faithfully: loads them and runs the audit."""
    try:
        loaded = load_model(path)
    except ModelError as error:
        return Finding(name="model", ok=False, what=str(error), remedy="name another checkpoint folder with --model")
    return Finding(
        name="model", ok=True, what=f"{path.name}: family {loaded.family.name}, {loaded.tokenizer.vocab_size} ids; the template audit passes"
    )
