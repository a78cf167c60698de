"""doctor: what is there, what is not, what to do. The real machine's findings, and machines that lack one
thing.
"""

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokens_kit as kit
import trio
from attrs import evolve
from click.testing import CliRunner
from family_fixtures import family_folder
from judge_kit import Endpoint, error, says, serving

from polarnode.cli import doctor
from polarnode.cli.doctor_cache import cache
from polarnode.cli.main import main as command
from polarnode.containers.probe import MachineFinding
from polarnode.containers.probe import probe as probe_machine
from polarnode.containers.recipes import RuntimesSettings
from polarnode.evaluators.judging import JudgeConfig
from polarnode.node.config import TINY_MODEL, NodeConfig
from polarnode.tokens import template

CPU = NodeConfig(cpu=True)
TWO_GPUS = NodeConfig(gpus=(0, 1), host_cache_gb=20)
probing: Any = importlib.import_module("polarnode.containers.probe")


def examined(config: NodeConfig, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    code = doctor.run_doctor(config)
    return code, capsys.readouterr().out.splitlines()


def test_every_fault_has_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    """Every finding is a line, and every fault has its remedy."""
    code, lines = examined(CPU, capsys)
    found = [line for line in lines if line[:2] in ("✓ ", "✗ ")]
    names = [line[2:].partition(":")[0] for line in found]
    for name in (
        "podman",
        "container runtime",
        "storage",
        "disk",
        "state disk",
        "runtimes",
        "sglang",
        "gpus",
        "model",
    ):
        assert name in names
    assert code == int(any(line.startswith("✗") for line in found))
    for line, after in pairwise(lines):
        assert not line.startswith("✗") or after.startswith("  → ")


@pytest.mark.parametrize(
    ("config", "memory_gb", "ok", "expected"),
    [
        (CPU, 0, (True,), "131,072 tokens; sessions begin while it holds what they become"),
        (evolve(CPU, session_cache=True), 0, (True,), "sessions that still call are evicted last"),
        (evolve(CPU, residency=False), 0, (True,), "as many sessions run as run_limit"),
        (NodeConfig(engine="simulated"), 0, (True,), "without bounds"),
        (TWO_GPUS, 64, (True, True), "takes 40 GB of main memory, of 55 GB that can be had"),
        (TWO_GPUS, 32, (True, False), "set host_cache_gb to 11 or less"),
        (TWO_GPUS, 8, (True, False), "leave host_cache_gb out"),
    ],
)
def test_cache_size_is_known_before_start(
    config: NodeConfig, memory_gb: int, ok: tuple[bool, ...], expected: str, tmp_path: Path
) -> None:
    memory = tmp_path / "meminfo"
    memory.write_text(f"MemTotal:       {memory_gb * 10**6} kB\nMemFree: 1 kB\n")
    found = list(cache(config, memory))
    assert tuple(each.ok for each in found) == ok
    assert expected in " ".join(f"{each.what} {each.remedy}" for each in found)


def test_missing_podman_lists_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(probing, "SERVICE_PATH", str(tmp_path))
    monkeypatch.setattr(probing, "INIT_PLACES", ())
    code, lines = examined(CPU, capsys)
    assert code == 1
    for package in ("podman", "runc", "catatonit", "mmdebstrap"):
        assert any(line.startswith("  → apt-get install") and package in line for line in lines), package
    assert "checks failed" in lines[-1]


def test_verb_returns_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*oks: bool) -> Callable[[NodeConfig], Any]:
        return lambda config: iter(
            MachineFinding(name=f"f{number}", ok=ok, what="x [/y]", remedy="do it")
            for number, ok in enumerate(oks)
        )

    monkeypatch.setattr(doctor, "findings", found(True, True))
    fine = CliRunner().invoke(command, ["doctor", "--cpu"])
    assert fine.exit_code == 0
    assert fine.output.startswith("✓ f0: x [/y]\n  → do it\n✓ f1")
    assert "a node can start here; try: polarnode run --cpu" in fine.output
    monkeypatch.setattr(doctor, "findings", found(True, False, False))
    poor = CliRunner().invoke(command, ["doctor"])
    assert poor.exit_code == 1
    assert "✗ f1: x [/y]\n  → do it" in poor.output
    assert "2 checks failed" in poor.output


# ── one thing at a time ───────────────────────────────────────────────────────


def test_full_disk_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: SimpleNamespace(free=3 << 30))
    finding = doctor.disk(tmp_path / "not" / "there" / "yet")
    assert not finding.ok
    assert finding.what == f"3 GiB free for images and containers at {tmp_path}"
    assert "POLARNODE_PODMAN_DIR" in finding.remedy
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: SimpleNamespace(free=30 << 30))
    assert doctor.disk(tmp_path).ok


def test_journal_disk_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "not" / "there" / "yet"
    assert doctor.state_disk_finding(state).ok
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: SimpleNamespace(free=3 << 20))
    full = doctor.state_disk_finding(state)
    assert (full.ok, full.what) == (False, f"0.0 GiB free for the journal and the logs at {tmp_path}")
    assert "--state-dir" in full.remedy
    monkeypatch.undo()
    read_only = SimpleNamespace(f_flag=doctor.os.ST_RDONLY, f_frsize=1, f_blocks=1, f_bfree=1, f_bavail=1)
    monkeypatch.setattr(doctor.os, "statvfs", lambda place: read_only)
    assert not doctor.state_disk_finding(state).ok
    assert doctor.state_disk_finding(state).what.startswith("read-only")


async def test_judge_gets_one_word_question() -> None:
    async with serving(
        Endpoint([says('{"ready": true}'), says("Yes, I am."), error(401, "wrong key")])
    ) as url:
        told = JudgeConfig(base_url=url, model="strict", key_env="JUDGE_KEY")
        found = [await doctor.judge("j", told, {"JUDGE_KEY": "sk-123"}) for _ in range(3)]
    assert found[0] == MachineFinding(name="judge j", ok=True, what=f"strict at {url} answers")
    assert found[1].what.startswith("gives no answer in the requested form: the body is not JSON")
    assert found[2].what.endswith("judge j refused the question: HTTP 401: wrong key")
    assert [each.ok for each in found] == [True] * 3, "a node starts without an answer of its judges"
    assert "`structured`" in found[1].remedy


def test_missing_judge_key_prevents_start() -> None:
    config = NodeConfig(
        cpu=True, judges={"j": JudgeConfig(base_url="http://127.0.0.1:9/v1", model="m", key_env="JUDGE_KEY")}
    )
    (found,) = doctor.judges(config, {})
    assert not found.ok
    assert "JUDGE_KEY, which is not in the node's environment" in found.what
    assert list(doctor.judges(CPU, {})) == []


def test_model_is_loaded_and_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding, found = doctor.model(TINY_MODEL)
    assert isinstance(finding, MachineFinding)
    assert finding.ok
    assert finding.what.startswith("polarnode-tiny, embedded: family qwen3, ")
    assert isinstance(found, template.LoadedModel)
    loaded = template.load_model(TINY_MODEL)
    monkeypatch.setattr(
        doctor, "load_model", lambda path: evolve(loaded, notes=("it drops thinking from earlier turns",))
    )
    told = [each.what for each in doctor.model(tmp_path) if isinstance(each, MachineFinding)]
    assert told[1:] == ["it drops thinking from earlier turns"]


def test_json_has_the_same_findings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, lines = examined(CPU, capsys)
    result = CliRunner().invoke(command, ["doctor", "--cpu", "--json"])
    told = json.loads(result.stdout)
    assert (result.exit_code, told["ready"]) == (code, code == 0)
    shown = [line[2:] for line in lines if line[:2] in ("✓ ", "✗ ")]
    # free space and the like may differ by a digit
    assert [each["name"] for each in told["findings"]] == [line.partition(":")[0] for line in shown]
    assert told["model"]["family"] == "qwen3"
    monkeypatch.setattr(
        doctor, "requirements", lambda config: iter((MachineFinding(name="x", ok=False, what="y"),))
    )
    result = CliRunner().invoke(command, ["doctor", "--cpu", "--json", "--model", "/nowhere"])
    told = json.loads(result.stdout)
    assert (result.exit_code, told["ready"], told["model"]) == (1, False, {})
    assert told["findings"][0] == {"name": "x", "ok": False, "what": "y", "remedy": ""}


def test_folder_without_checkpoint_is_fault(tmp_path: Path) -> None:
    (finding,) = doctor.model(tmp_path)
    assert isinstance(finding, MachineFinding)
    assert not finding.ok
    assert "config.json cannot be read" in finding.what
    assert "--model" in finding.remedy


def test_model_language_is_a_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What a model speaks stands in a table behind the machine's findings."""
    _, lines = examined(evolve(CPU, model=str(family_folder("glm4"))), capsys)
    told = dict(
        re.split(r"  +", line.strip(), maxsplit=1)
        for line in lines
        if line.startswith("  ") and "→" not in line and "  " in line.strip()
    )
    assert told["family"] == "glm4"
    assert told["ends a turn"].startswith("<|user|> (")
    assert told["calls"].startswith("name<arg_key>")
    assert next(place for place, line in enumerate(lines) if "family glm4" in line) < next(
        place for place, line in enumerate(lines) if "<arg_key>" in line
    )


def test_refused_model_is_fault_with_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = kit.variant(
        tmp_path, template=lambda text: text.replace("'\\n<tool_response>\\n' +", "loop.index ~")
    )
    shutil.copy(kit.TINY / "config.json", folder)
    code, lines = examined(evolve(CPU, model=str(folder)), capsys)
    assert code == 1
    place = next(place for place, line in enumerate(lines) if line.startswith("✗ model: "))
    assert "depending on what came before" in lines[place]
    assert lines[place + 1].startswith("  → give --model another folder")


def test_simulated_engine_lacks_some_families() -> None:
    (finding,) = doctor.model(family_folder("gptoss"), simulated=True)
    assert isinstance(finding, MachineFinding)
    assert not finding.ok
    assert "writes them otherwise (harmony)" in finding.what


def test_doctor_checks_node_folder(tmp_path: Path) -> None:
    settings = RuntimesSettings(state_dir=tmp_path, node_id="n", warm=0)
    assert trio.run(probe_machine, settings.state_dir).findings
    found = doctor.findings(NodeConfig(cpu=True, podman_dir=str(tmp_path / "podman")))
    names = [each.name for each in found if isinstance(each, MachineFinding)]
    assert names.index("disk") < names.index("model")
    assert os.listdir(tmp_path) == []


def machine(root: Path, **values: int) -> Path:
    """A /proc/sys with these numbers, by the last part of their names; the others are plenty."""
    for name in [each.sysctl for each in doctor.SHARED_RESOURCES] + ["vm.nr_hugepages"]:
        last = name.rpartition(".")[2].replace("-", "_")
        path = root / name.replace(".", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{values.get(last, 0 if last == 'nr_hugepages' else 2**62)}\n")
    (root / "kernel" / "core_pattern").write_text("core\n")
    (root / "kernel" / "core_pipe_limit").write_text("0\n")
    return root


def test_container_totals_fit_kernel_limits(tmp_path: Path) -> None:
    config = NodeConfig(run_limit=64, warm=8)
    (fine,) = doctor.kernel_findings(config, machine(tmp_path))
    assert fine.what == "enough for 136 containers at once (2 × run_limit + warm)"
    short = doctor.kernel_findings(config, machine(tmp_path, max_user_instances=128, pid_max=32768))
    inotify, pids = short
    assert inotify.what == "128 for the machine; 136 containers at once may take 16 each"
    assert inotify.remedy == ("sysctl -w fs.inotify.max_user_instances=4096, and in /etc/sysctl.d for good")
    assert "kernel.pid_max=131072" in pids.remedy
    assert all(each.ok for each in (inotify, pids)), "a node starts with them"
    huge, _ = doctor.kernel_findings(config, machine(tmp_path, nr_hugepages=16))
    assert "one session can take them all" in huge.what


def test_core_dump_program_is_named(tmp_path: Path) -> None:
    sysctls = machine(tmp_path)
    (sysctls / "kernel/core_pattern").write_text("|/usr/share/apport/apport -p%p %s\n")
    dumps, _ = doctor.kernel_findings(NodeConfig(), sysctls)
    assert "may start /usr/share/apport/apport as root" in dumps.what
    assert "kernel.core_pipe_limit=16" in dumps.remedy
    (sysctls / "kernel/core_pipe_limit").write_text("16\n")
    assert len(list(doctor.kernel_findings(NodeConfig(), sysctls))) == 1


def test_kernel_limits_are_read() -> None:
    assert list(doctor.kernel_findings(NodeConfig()))
