"""What must hold before a node starts: each fault is one finding with its remedy, and starts ask for all of
them before an engine is begun.
"""

import importlib.util
import json
import socket
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from tls_kit import CertificateAuthority

from polarnode.cli import serve
from polarnode.containers.probe import MachineFinding
from polarnode.core.errors import ConfigError
from polarnode.node import checks
from polarnode.node.config import TINY_MODEL, NodeConfig, TeacherConfig

CPU = NodeConfig(cpu=True)


def test_recipes_are_named_with_harnesses(tmp_path: Path) -> None:
    finding = checks.check_recipes(CPU)
    assert finding.ok
    assert "pi (for pi)" in finding.what
    missing = checks.check_recipes(NodeConfig(runtimes_dir=str(tmp_path)))
    assert not missing.ok
    assert "no runtime.toml" in missing.what
    assert "POLARNODE_RUNTIMES_DIR" in missing.remedy


def test_missing_gpu_matters_if_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checks.check_gpus(CPU, {}) == MachineFinding(name="gpus", ok=True, what="none: use --cpu")
    assert not checks.check_gpus(NodeConfig(gpus=(0,)), {}).ok
    nvidia_smi(tmp_path, "for i in 0 1; do echo GPU $i: H200; done")
    assert checks.check_gpus(CPU, {}).what == "2: use --gpus 0-1"
    assert checks.check_gpus(NodeConfig(gpus=(0, 1)), {}).ok
    finding = checks.check_gpus(NodeConfig(gpus=(1, 2, 3)), {})
    assert (finding.ok, finding.what, finding.remedy) == (
        False,
        "2 found, but not GPU 2, 3",
        "use --gpus 0-1",
    )


def test_hanging_driver_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, "read -r never < /dev/zero")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(checks, "NVIDIA_SMI_S", 0.2)
    assert checks.check_gpus(CPU, {}).what == "nvidia-smi does not answer"


def nvidia_smi(folder: Path, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_missing_or_incomplete_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"sglang", "sgl_kernel"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in there else None)
    monkeypatch.setattr(checks.importlib.metadata, "version", lambda name: "0.5.23")
    assert checks.check_sglang(NodeConfig(gpus=(0,))) == MachineFinding(
        name="sglang", ok=True, what="0.5.23, full: serves on GPUs"
    )
    there.discard("sgl_kernel")
    assert checks.check_sglang(CPU).ok
    slim = checks.check_sglang(NodeConfig(gpus=(0,)))
    assert not slim.ok
    assert "polarnode[gpu]" in slim.remedy
    there.clear()
    missing = checks.check_sglang(CPU).remedy
    assert "make setup" in missing
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (pinned,) = (line for line in project["optional-dependencies"]["gpu"] if line.startswith("sglang=="))
    assert f"pip install --no-deps {pinned}" in missing, "the slim engine has the version of the extra `gpu`"


def test_capture_address_checked_like_agents(tmp_path: Path) -> None:
    """The address and the certificate of captures are checked as agents would."""
    authority = CertificateAuthority(tmp_path)

    def looked(*names: str, days: float, **settings: Any) -> list[tuple[bool, str, str]]:
        chain, key = authority.issue(*names, days=days)
        config = NodeConfig(capture_tls_cert=chain, capture_tls_key=key, **settings)
        return [(each.ok, each.what, each.remedy) for each in checks.check_captures(config)]

    url: Any = {"capture_url": "https://node.example:8443", "capture_port": 8443}
    (ok, what, remedy), (_, where, _) = looked("node.example", days=40.5, **url)
    assert ok
    assert what.endswith("for node.example, 40 days left")
    assert remedy == ""
    assert where == "127.0.0.1 port 8443; agents are given https://node.example:8443"
    assert "renew it" in looked("node.example", days=3, **url)[0][2]
    assert "expired" in looked("node.example", days=-1, **url)[0][1]
    other = looked("10.0.0.7", days=40, **url)[0]
    assert (other[0], "not valid for 'node.example'" in other[1]) == (True, True)
    assert "issued for node.example" in other[2]
    # an address of documentation, which no machine has
    ((ok, what, _),) = looked("x", days=3, capture_listen="192.0.2.1")
    assert (ok, "capture_listen 192.0.2.1" in what) == (False, True)
    assert list(checks.check_captures(NodeConfig())) == []


def test_control_plane_certificate_is_checked(tmp_path: Path) -> None:
    assert list(checks.check_control_plane(NodeConfig())) == []
    chain, key = CertificateAuthority(tmp_path).issue("10.0.0.2", days=40.5)
    config = NodeConfig(host="10.0.0.2", tls_cert=chain, tls_key=key)
    (found,) = checks.check_control_plane(config)
    assert (found.ok, found.remedy) == (True, "")
    assert found.what.endswith("for 10.0.0.2, 40 days left")
    (found,) = checks.check_control_plane(evolve(config, host="0.0.0.0"))
    assert "clients that do not pin it refuse it" in found.remedy
    (found,) = checks.check_control_plane(evolve(config, tls_key=chain))
    assert (found.ok, "tls_key" in found.what, "capture" in found.what) == (False, True, False)


# ── a start asks them all ─────────────────────────────────────────────────────


def faulty(config: NodeConfig) -> list[str]:
    """The names and texts of what keeps a node with these settings from starting here."""
    return [f"{each.name}: {each.what}: {each.remedy}" for each in checks.requirements(config) if not each.ok]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "Mine-8B"
    folder.mkdir()
    sizes = {"max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 4}
    (folder / "config.json").write_text(json.dumps(sizes))
    return folder


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"context_length": 4097},
            "--context-length 4097: the model Mine-8B was made for 4096; leave it out",
        ),
        ({"context_length": 4096}, None),
        (
            {"cpu": False, "gpus": (0, 1, 2), "tp": 3},
            "--tp 3 does not divide the 32 attention heads of the model Mine-8B",
        ),
        ({"tp": 2}, "--cpu takes neither --gpus nor --tp"),
        ({"memory_saver": "backup"}, "memory_saver lends the memory of GPUs"),
        ({"routed_experts": True}, "--routed-experts: the model Mine-8B is dense"),
        ({"session_cache": True, "residency": False}, "session_cache needs residency"),
        ({"session_cache": True, "engine_args": {"enable_flexkv": True}}, "session_cache does not go with"),
        ({"host_cache_gb": 4}, "host_cache_gb takes what the KV cache of a GPU evicts"),
    ],
)
def test_settings_beyond_model_are_fault(
    changes: dict[str, Any], expected: str | None, checkpoint: Path
) -> None:
    found = list(checks.check_checkpoint(evolve(CPU, model=str(checkpoint), **changes)))
    if expected is None:
        assert found == []
        return
    (fault,) = found
    assert not fault.ok
    assert fault.what.startswith(expected)


def test_longer_context_needs_sglang_switch(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A context longer than the checkpoint's is SGLang's own switch."""
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    assert list(checks.check_checkpoint(evolve(CPU, model=str(checkpoint), context_length=9000))) == []


def test_hub_model_name_suggests_download(tmp_path: Path) -> None:
    (hub,) = checks.check_checkpoint(evolve(CPU, model="Qwen/Qwen3-8B"))
    assert hub.what == "--model Qwen/Qwen3-8B: a folder is needed, for models are not fetched from a hub"
    assert hub.remedy == (
        "hf download Qwen/Qwen3-8B --local-dir /models/Qwen3-8B, then --model /models/Qwen3-8B"
    )
    (away,) = checks.check_checkpoint(evolve(CPU, model=str(tmp_path / "no")))
    assert away.what.endswith("/no: no such folder")
    (other,) = checks.check_checkpoint(evolve(CPU, model=str(tmp_path)))
    assert other.what.endswith("there is no config.json")


def test_visible_gpus_counted_like_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(checks, "DEVICES", tmp_path)
    assert checks.check_gpus(CPU, {}).what == "3: use --gpus 0-2", "a container without nvidia-smi"
    shown = checks.check_gpus(NodeConfig(gpus=(0, 2)), {"CUDA_VISIBLE_DEVICES": "4,5"})
    assert (shown.ok, shown.what) == (False, "2 found (CUDA_VISIBLE_DEVICES=4,5), but not GPU 2")
    teacher = NodeConfig(engine="simulated", gpus=(7,), teachers={"big": TeacherConfig(gpus=(1, 3))})
    assert checks.check_gpus(teacher, {}).what == "3 found, but not GPU 3", (
        "those of a simulated engine are not there"
    )


def test_start_without_gpus_lists_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DEVICES", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    state, begun = tmp_path / "state", time.monotonic()
    with pytest.raises(ConfigError) as refused:
        serve.serve(NodeConfig(gpus=(0,), port=0, state_dir=str(state), model="Qwen/Qwen3-8B"))
    assert time.monotonic() - begun < 10, "nothing was loaded or started"
    text = str(refused.value)
    assert (
        "gpus: 0 found, but not GPU 0\n  → use --cpu, or install the driver: nvidia-smi -L must list" in text
    )
    assert "model: --model Qwen/Qwen3-8B: a folder is needed" in text
    assert not (state / "journal.sqlite").exists()


def test_unprivileged_user_is_told_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert any(
        line.startswith("rights: not root, and without a user namespace to be root of: an administrator")
        for line in faulty(CPU)
    )
    with pytest.raises(ConfigError, match="rights: not root"):
        checks.refuse_unfit(CPU)


@pytest.mark.podman
def test_taken_capture_port_is_told_early() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"capture_port {port} is not available"):
            checks.refuse_unfit(NodeConfig(engine="simulated", capture_port=port))
    checks.refuse_unfit(NodeConfig(engine="simulated", capture_port=port))


def test_embedded_model_has_no_fault() -> None:
    assert list(checks.check_checkpoint(CPU)) == []
    assert list(checks.check_checkpoint(evolve(CPU, context_length=65536))) == []
    assert list(checks.check_checkpoint(NodeConfig(engine="http://127.0.0.1:1", model=str(TINY_MODEL)))) == []
