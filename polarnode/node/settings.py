"""A node's config as its parts are told it."""

from pathlib import Path

from attrs import evolve

from polarnode.config import NodeConfig
from polarnode.engine_host.protocol import Marks
from polarnode.errors import ConfigError, ModelError
from polarnode.shell.engine import EngineSettings, Simulated, unrouted
from polarnode.shell.journal import Retention
from polarnode.shell.podman import RuntimesSettings, default_state_dir
from polarnode.tokens.family import Family
from polarnode.tokens.model import LoadedModel, load_model


def load_node_model(config: NodeConfig) -> LoadedModel:
    """The model, by a name that says in every trajectory when its answers are random."""
    model = load_model(Path(config.model))
    return evolve(model, name=f"simulated:{model.name}") if config.engine == "simulated" else model


def engine_settings(config: NodeConfig, state: Path, model: LoadedModel) -> EngineSettings:
    if not config.cpu and not config.gpus and config.engine != "simulated":
        raise ConfigError("say where the model runs: --gpus 0-7, --gpus 0, or --cpu")
    return EngineSettings(
        model_path=Path(config.model),
        device="cpu" if config.cpu else "cuda",
        gpus=config.gpus,
        tp=config.tp,
        context_length=config.context_length,
        mem_fraction=config.mem_fraction,
        state_dir=state,
        routed_experts=config.routed_experts,
        memory_saver=config.memory_saver,
        simulated=_simulated(config, model) if config.engine == "simulated" else None,
    )


def retention_of(config: NodeConfig) -> Retention:
    """How much the journal keeps."""
    return Retention(
        acknowledged=config.keep_acknowledged_mb << 20,
        everything=config.keep_mb << 20,
        acknowledged_s=config.keep_acknowledged_hours * 3600,
        silence_s=config.consumer_hours * 3600,
    )


def why_unrouted(config: NodeConfig, model: LoadedModel) -> str:
    """Why the engine of this node tells no routed experts, and what to do about it."""
    settings = engine_settings(config, Path(config.state_dir), model)
    return unrouted(settings) or "the engine was started without them; start the node with --routed-experts"


def _simulated(config: NodeConfig, model: LoadedModel) -> Simulated:
    return Simulated(simulation=config.simulated, vocab_size=model.tokenizer.vocab_size, marks=simulated_marks(model.family))


def simulated_marks(family: Family) -> Marks:
    """What random answers are written with. ModelError for a family that writes calls otherwise than as JSON between marks."""
    if family.call_syntax not in ("json", "none"):
        how = f"the simulated engine writes calls as JSON between marks, the family {family.name} writes them otherwise ({family.call_syntax})"
        raise ModelError(f"{how}: leave --model out, or name a Qwen3; a node's load hardly depends on it")
    return Marks(
        turn_end=family.stop_ids[0],
        think_open=family.think_open,
        think_close=family.think_close,
        call_open=family.call_open,
        call_close=family.call_close,
    )


def runtimes_settings(config: NodeConfig) -> RuntimesSettings:
    state_dir = Path(config.podman_dir) if config.podman_dir else default_state_dir()
    return RuntimesSettings(
        state_dir=state_dir,
        node_id=config.node_id,
        runtimes_dir=Path(config.runtimes_dir) if config.runtimes_dir else None,
        base_image=config.base_image,
        warm=config.warm,
        prepared=config.prepared,
        volumes=config.volumes,
        disk_reserve_mb=config.disk_reserve_mb,
    )
