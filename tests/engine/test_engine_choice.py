"""`--engine simulated`: chosen on purpose only, sized by its settings, and named in everything that comes of
it.
"""

import gc
from pathlib import Path

import pytest
from click.testing import CliRunner

from polarnode.cli.doctor import findings, run_doctor
from polarnode.cli.main import main
from polarnode.cli.options import serving_config
from polarnode.containers.probe import MachineFinding
from polarnode.core.errors import ConfigError
from polarnode.engine.protocol import Simulation
from polarnode.node.config import TINY_MODEL, NodeConfig
from polarnode.node.config_sources import read_config
from polarnode.node.opening import load_node_model, rare_collections
from polarnode.node.settings import engine_settings

ON = NodeConfig(
    engine="simulated", simulated=Simulation(tokens_per_s=40), gpus=(0, 1, 2, 3), tp=2, context_length=9000
)


def test_simulated_engine_is_no_default() -> None:
    assert read_config().engine == "sglang"
    assert read_config(environment={"POLARNODE_ENGINE": "simulated"}).engine == "simulated"


def test_simulation_settings_from_table_or_environment() -> None:
    file = 'engine = "simulated"\n[simulated]\ntokens_per_s = 120\nmax_running = 64\n'
    assert read_config(toml=file).simulated == Simulation(tokens_per_s=120, max_running=64)
    assert read_config(environment={"POLARNODE_SIMULATED": "{first_token_s = 0.5}"}).simulated == Simulation(
        first_token_s=0.5
    )


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ('engine = "vllm"', "sglang"),
        ("[simulated]\nmax_running = 0", "simulated.max_running must be at least 1"),
        ("[simulated]\ntokens_per_s = -1", "simulated.tokens_per_s must be 0 or more"),
        ("[simulated]\ntokens = 1", "tokens"),
        (
            "[simulated]\nkv_tokens = 1000",
            "kv_tokens 1000 holds no harness's prompt: give at least 1024, or 0",
        ),
        ("[simulated]\nkv_tokens = -1", "simulated.kv_tokens must be 0 or more"),
        ("[simulated]\nkv_page = 0", "simulated.kv_page must be at least 1"),
        ("[simulated]\nkv_context_s = -1", "simulated.kv_context_s must be 0 or more"),
        ("[simulated]\nspeed = 0", "simulated.speed must be more than 0"),
        ("[simulated]\nkv_past_tokens = nan", "simulated.kv_past_tokens must be more than 0"),
    ],
)
def test_impossible_settings_are_named(toml: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_config(toml=toml)


def test_simulated_engine_needs_no_device() -> None:
    assert serving_config({"engine": "simulated"}, hint="").engine == "simulated"
    assert "RANDOM" in CliRunner().invoke(main, ["--help"]).output


def test_simulated_hosts_know_model_language(tmp_path: Path) -> None:
    model = load_node_model(ON)
    assert model.name == "simulated:tiny"
    assert model.path == TINY_MODEL
    settings = engine_settings(ON, tmp_path, model)
    assert settings.simulated is not None
    assert settings.simulated.simulation.tokens_per_s == 40
    assert settings.simulated.vocab_size == model.tokenizer.vocab_size
    assert settings.simulated.marks.turn_end == model.family.turn_end
    assert (settings.gpus, settings.tp, settings.context_length) == ((0, 1, 2, 3), 2, 9000)
    assert load_node_model(NodeConfig(cpu=True)).name == "tiny"
    assert engine_settings(NodeConfig(cpu=True), tmp_path, model).simulated is None


def test_doctor_describes_simulated_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = NodeConfig(engine="simulated", gpus=(0, 1, 2, 3), tp=2, podman_dir=str(tmp_path))
    found = {finding.name: finding for finding in findings(config) if isinstance(finding, MachineFinding)}
    assert found["engine"].ok
    assert (
        found["engine"].what
        == "simulated: EVERY ANSWER IS RANDOM, no model is loaded; 2 × 256 requests at 80 tokens/s"
    )
    assert not {"sglang", "gpus"} & found.keys()
    run_doctor(config)
    assert "EVERY ANSWER IS RANDOM" in capsys.readouterr().out


def test_garbage_collector_is_restored() -> None:
    before = gc.get_threshold()
    with rare_collections():
        assert gc.get_threshold() > before
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
