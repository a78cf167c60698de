"""Arguments for SGLang are compared with SGLang's own table of them before an engine is started, and reach it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve

from polarnode.cli.options import config_of
from polarnode.core.conversation import Json
from polarnode.core.errors import ConfigError
from polarnode.engine.embedded.arguments import fault_of
from polarnode.engine.settings import RESERVED, engine_arguments
from polarnode.node import checks
from polarnode.node.config import NodeConfig
from polarnode.node.config_sources import read_config
from polarnode.node.settings import engine_settings

CPU = NodeConfig(cpu=True)


def test_flags_override_file_and_environment(tmp_path: Path) -> None:
    """Flags, the file and the environment all give engine arguments."""
    flags = (
        "attention-backend=triton",
        "chunked_prefill_size=4096",
        "--enable-metrics=true",
        "x=a=b",
        'y="1"',
    )
    assert config_of({"cpu": True, "engine_args": flags}).engine_args == {
        "attention_backend": "triton",
        "chunked_prefill_size": 4096,
        "enable_metrics": True,
        "x": "a=b",
        "y": "1",
    }
    assert read_config(toml="[engine_args]\nstream_interval = 2\n").engine_args == {"stream_interval": 2}
    environment = {"POLARNODE_ENGINE_ARGS": '{log_level = "info"}'}
    config = read_config(environment=environment, flags={"cpu": True})
    found = engine_arguments(engine_settings(config, tmp_path, None), nccl_port=1)
    assert found["log_level"] == "info", "they win over what the node chooses"
    for wrong in ("name", "=value", "name="):
        with pytest.raises(ConfigError, match=f"--engine-arg {wrong}: write it as NAME=VALUE"):
            config_of({"cpu": True, "engine_args": (wrong,)})
    with pytest.raises(ConfigError, match="POLARNODE_ENGINE_ARGS are for the node's own SGLang"):
        read_config(environment={"POLARNODE_ENGINE": "simulated", **environment})


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_reserved_arguments_are_refused_with_reason(name: str) -> None:
    (fault,) = checks.check_checkpoint(evolve(CPU, engine_args={name: 1}))
    assert fault.what == f"--engine-arg {name} is the node's own: {RESERVED[name]}"
    assert "engine arguments" not in [
        each.name for each in checks.requirements(evolve(CPU, engine_args={name: 1}))
    ], "SGLang is not asked for them"


def test_value_has_type_of_field() -> None:
    pytest.importorskip("msgspec", reason="SGLang's package of its fields' types is not installed")
    cases: tuple[tuple[Json, object, str | None], ...] = (
        (1, int, None),
        (None, int | None, None),
        ("x", int | None, "must be of another type: expected `int | null`, got `str`"),
        (True, int, "must be of another type: expected `int`, got `bool`"),
        ("yes", bool, "must be of another type: expected `bool`, got `str`"),
    )
    for value, kind, fault in cases:
        assert fault_of(value, kind) == fault


@pytest.mark.engine
def test_sglang_checks_arguments_before_start() -> None:
    wrong = {
        "attention_backend": "torch_nativ",
        "chunked_prefill_size": "many",
        "tensor_parallel_size": 2,
        "max_prefil_tokens": 1,
        "xyzzy": 1,
        "max_running_requests": 8,
        "log_level": "info",
    }
    finding = checks.check_engine_arguments(evolve(CPU, engine_args=wrong), {"PATH": "/usr/bin:/bin"})
    first, second, third, fourth, fifth = finding.what.split("; ")
    assert (finding.ok, finding.name) == (False, "engine arguments")
    assert first.startswith(
        "--engine-arg attention_backend cannot be torch_nativ: did you mean torch_native?"
    )
    assert second.startswith(
        "--engine-arg chunked_prefill_size must be of another type: expected `int | null`"
    )
    assert third == "--engine-arg tensor_parallel_size is no argument of this SGLang: did you mean tp_size?"
    assert fourth.endswith("did you mean max_prefill_tokens?")
    assert fifth == "--engine-arg xyzzy is no argument of this SGLang"
    known = dict.fromkeys(RESERVED)
    program = [sys.executable, "-m", "polarnode.engine.embedded.arguments"]
    asked = subprocess.run(program, input=json.dumps(known), capture_output=True, text=True, check=True)
    assert "is no argument" not in asked.stdout, "each reserved name is one of SGLang's"
