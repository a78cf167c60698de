"""Every command of the pages is run by a test, or says what it needs.

A block of a shell is one of three: a page of `RUN` (tests/kits/pages_kit.py), whose blocks are run as they stand; a
comment before it, `<!-- needs … -->` or `<!-- tested by … -->`; or each of its commands is in a table below.
"""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from pages_kit import ROOT, RUN, Block, blocks, shell_blocks

from polarnode.core import codec
from polarnode.node.config import NodeConfig

PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
]
NOTE = re.compile(r"needs (a|an|the) [^,.]+|needs systemd|tested by (?P<tests>\S+)(, .*)?")
# what this machine and CI lack; a command that names it says so by itself
NEEDS = {
    "a GPU": r"--gpus\b|--tp\b|CUDA_VISIBLE_DEVICES|make gpu|vllm serve|sglang\.launch_server",
    "a checkpoint": r"/models/|--model MODEL",
    "other hosts": r"https?://10\.0\.0\.|--host 10\.0\.0\.",
    "a Ray cluster": r"\bray job|--ray auto|polarnode\[ray\]",
    "a trainer's installation": r"atroposlib|\brun-api\b|uv run|torchrun|examples/trainers/|python (train|environment)\.py",
    "tables or datasets of the reader's": r"terminal-bench-2/|SWE-bench_Verified|tasks\.jsonl|held-out\.jsonl|hello/$|mended\.toml",
    "hours": r"make (learn|distill|chaos|fuzz)",
    "a package index": r"^pip install|^apt-get install|-m venv",
}
# a command, and the test or program that runs it
TESTED = {
    r"make (demo|test|setup)": ".ci/run",
    r"\S*python -m pytest .*": ".ci/run",
    r"\S*ruff format \..*": "tools/check.sh",
    r"\S*polarnode run --cpu hello\.toml": "tools/wheel_check.sh",
    r"\S*polarnode inspect --from \S+": "tests/cli/test_cli_inspection.py",
    r"polarnode watch --task \S+": "tests/cli/test_cli_verbs.py",
    r"polarnode inspect [0-9a-f]{16}": "tests/cli/test_cli_inspection.py",
    r"polarnode (status|logs (-f )?\S+|cancel \S+)": "tests/cli/test_cli_verbs.py",
    r"polarnode fork \S+ --turn .*": "tests/cli/test_cli_verbs.py",
    r"\S*polarnode doctor": "tests/cli/test_cli_doctor.py",
    r"\S*polarnode check \S+": "tests/journal/test_journal_check.py",
    r"polarnode convert (--harness pi )?\S+": "tests/cli/test_cli_convert.py",
    r"polarnode generate --cpu .*": "tests/cli/test_cli_generate.py",
    r"polarnode evaluate --task .*": "tests/recovery",
    r"polarnode gym-agent .*": "tests/integrations/test_nemo_gym.py",
    r"polarnode fleet --local .*": "tests/cli/test_cli_fleet.py",
    r"polarnode fleet status": "tests/cli/test_cli_fleet.py",
    r"python -m examples\.grpo .*": "tests/live/test_grpo_live.py",
    r"\S*python examples/verify\.py .*": "tests/examples",
    r"curl .*/v1/capture.*": "tests/rollouts/test_captures.py",
    r"curl .*/v1/trajectories/stream.*": "tests/api",
    r"curl .*/v1/(export|trajectories/).*": "tests/api",
    r"curl .*/v1/tasks --json .*": "tests/api",
    r"curl .*/update_weights_from_disk .*": "tests/engine/test_engine_cache_real.py",
    r"cp -a \S+ \S+": "tests/journal/test_journal_versions.py",
    r"export [A-Z_]+=\S.*": ".ci/run",
    r'python -c "from polarnode\.client .*"': "tests/client",
}


@pytest.mark.parametrize("page", PAGES)
def test_shell_block_is_run_or_noted(page: str) -> None:
    """Every block of a shell is run by a test, or names its needs."""
    for block in shell_blocks(page):
        where = f"{page}:{block.line}"
        if block.note:
            found = NOTE.fullmatch(block.note)
            assert found, f"{where}: write `needs …` or `tested by …`, not {block.note}"
            assert not found["tests"] or (ROOT / found["tests"]).exists(), f"{where}: no {found['tests']}"
        elif page not in RUN:
            untested = [line for line in block.commands if not known(line)]
            assert untested == [], f"{where}: say before the block what it needs, or add a row to TESTED"


def known(line: str) -> bool:
    return any(re.search(pattern, line) for pattern in NEEDS.values()) or any(
        re.fullmatch(pattern, line) for pattern in TESTED
    )


def test_tested_commands_are_on_pages() -> None:
    """Each row of the table is used, and its test is there."""
    lines = [
        line
        for page in PAGES
        if page not in RUN
        for block in shell_blocks(page)
        if not block.note
        for line in block.commands
    ]
    for pattern, where in TESTED.items():
        assert any(re.fullmatch(pattern, line) for line in lines), f"no page has {pattern}"
        assert (ROOT / where).exists(), where
    assert not known("polarnode nosuch")


# ── files that pages give ─────────────────────────────────────────────────────


def noted(page: str, note: str) -> Block:
    (found,) = (block for block in blocks(page) if block.note == note)
    return found


def test_deployment_settings_are_a_nodes() -> None:
    (block,) = (
        each for each in blocks("docs/deployment.md") if each.text.startswith("# /etc/polarnode.toml")
    )
    config = codec.structure(tomllib.loads(block.text), NodeConfig, forbid_extra=True)
    assert (len(config.gpus), config.run_limit) == (8, 128)


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "polarnode.service"
    program = shutil.which("true") or "/bin/true"
    text = noted("docs/deployment.md", "unit: polarnode.service").text
    assert "ExecStart=/opt/polarnode/bin/polarnode --config /etc/polarnode.toml\n" in text
    unit.write_text(text.replace("/opt/polarnode/bin/polarnode", program))
    systemd = shutil.which("systemd-analyze")
    if systemd is None:
        pytest.skip("no systemd-analyze on this machine")
    done = subprocess.run(
        [systemd, "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("page", PAGES)
def test_scripts_and_manifests_are_valid(page: str) -> None:
    """Scripts are bash's, and manifests are YAML."""
    for block in blocks(page):
        if block.language in ("sh", "bash"):
            done = subprocess.run(
                ["bash", "-n"], input=block.text, capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, f"{page}:{block.line}: {done.stderr}"
        if block.language == "yaml":
            assert all(isinstance(each, dict) for each in yaml.safe_load_all(block.text)), (
                f"{page}:{block.line}"
            )
        if block.language == "json":
            json.loads(block.text)
