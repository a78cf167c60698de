"""The settings of a node's parts, made from those of the node: engines, teachers, journal, containers.

They read the checkpoint's folder and nothing else of the machine.
"""

from pathlib import Path

from attrs import evolve

from polarnode.containers.probe import default_state_dir
from polarnode.containers.recipes import RuntimesSettings
from polarnode.core.errors import ConfigError, ModelError
from polarnode.engine.protocol import Marks, Simulation
from polarnode.engine.settings import (
    EngineSettings,
    External,
    Simulated,
    context_of,
    experts_of,
    unrouted,
)
from polarnode.journal.values import Retention
from polarnode.node.config import NodeConfig, TeacherConfig
from polarnode.tokens.families import Family
from polarnode.tokens.template import LoadedModel, load_model
from polarnode.tokens.tokenizer import vocabulary_difference, vocabulary_sample


def engine_settings(config: NodeConfig, state: Path, model: LoadedModel | None) -> EngineSettings:
    """The policy's engine. Without the model, which takes seconds to load, it is complete for the node's own
    engine; a simulated and an external one need it.
    """
    if not config.cpu and not config.gpus and config.engine == "sglang":
        raise ConfigError("say where the model runs: --gpus 0-7, --gpus 0, --cpu, or --engine URL")
    if config.session_cache and not config.residency:
        raise ConfigError(
            "session_cache needs residency, which tells the engine whose prefixes may go first: leave out"
            " residency = false, or session_cache"
        )
    settings = EngineSettings(
        model_path=Path(config.model),
        device="cpu" if config.cpu else "cuda",
        gpus=config.gpus,
        tp=config.tp,
        context_length=config.context_length,
        mem_fraction=config.mem_fraction,
        state_dir=state,
        routed_experts=config.routed_experts,
        memory_saver=config.memory_saver,
        lora_rank=config.lora_rank,
        residency=config.residency,
        session_cache=config.session_cache,
        host_cache_gb=config.host_cache_gb,
        lora_modules=config.lora_modules,
        lora_slots=config.lora_slots,
        extra=config.engine_args,
    )
    if model is None or config.engine == "sglang":
        return settings
    if config.engine == "simulated":
        return evolve(settings, simulated=_simulated(config, model))
    return evolve(settings, external=_external(config, settings, model))


ASSUMED_CONTEXT = 32_768  # tokens, where neither a setting, the checkpoint nor a server says how many


def _external(config: NodeConfig, settings: EngineSettings, model: LoadedModel) -> External:
    """What the servers must agree with; none at all for a node without engines."""
    if config.routed_experts and (reason := unrouted(settings)):
        raise ConfigError(f"--routed-experts: {reason}")
    return External(
        urls=config.engine_urls,
        vocab_size=model.tokenizer.vocab_size,
        context_length=config.context_length or context_of(settings.model_path) or ASSUMED_CONTEXT,
        words=vocabulary_sample(model.tokenizer),
        experts=experts_of(settings) if config.routed_experts else None,
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
    """Why the engine of this node reports no routed experts, and what to do about it."""
    settings = engine_settings(config, Path(config.state_dir), model)
    return unrouted(settings) or "the engine was started without them; start the node with --routed-experts"


def _simulated(config: NodeConfig, model: LoadedModel) -> Simulated:
    return Simulated(
        simulation=config.simulated,
        vocab_size=model.tokenizer.vocab_size,
        marks=simulated_marks(model.family),
    )


def simulated_marks(family: Family) -> Marks:
    """What random answers are written with. ModelError for a family that writes calls otherwise than as JSON
    between marks.
    """
    if family.call_syntax not in ("json", "none"):
        how = (
            f"the simulated engine writes calls as JSON between marks, the family {family.name} writes them"
            f" otherwise ({family.call_syntax})"
        )
        raise ModelError(f"{how}: leave --model out, or name a Qwen3; a node's load hardly depends on it")
    return Marks(
        turn_end=family.stop_ids[0],
        think_open=family.think_open,
        think_close=family.think_close,
        call_open=family.call_open,
        call_close=family.call_close,
    )


def store_dir(config: NodeConfig) -> Path:
    """The folder of the images and containers."""
    return Path(config.podman_dir) if config.podman_dir else default_state_dir()


def runtimes_settings(config: NodeConfig) -> RuntimesSettings:
    return RuntimesSettings(
        state_dir=store_dir(config),
        node_id=config.node_id,
        runtimes_dir=Path(config.runtimes_dir) if config.runtimes_dir else None,
        base_image=config.base_image,
        warm=config.warm,
        prepared=config.prepared,
        volumes=config.volumes,
        disk_reserve_mb=config.disk_reserve_mb,
        limits=config.limits,
    )


def teacher_settings(
    name: str, teacher: TeacherConfig, state: Path, model: LoadedModel, policy: Path
) -> EngineSettings:
    """The engine of a teacher. ConfigError where its checkpoint has another vocabulary than the policy's."""
    if teacher.model is not None:
        theirs = load_model(Path(teacher.model)).tokenizer
        if difference := vocabulary_difference(theirs, model.tokenizer):
            raise ConfigError(
                f"teachers.{name}.model has another vocabulary than --model: {difference}; a teacher reads"
                " the policy's ids, so name a model of its family"
            )
    folder = Path(teacher.model or policy)
    simulated = external = None
    if teacher.engine == "simulated":
        simulated = Simulated(
            simulation=Simulation(),
            vocab_size=model.tokenizer.vocab_size,
            marks=simulated_marks(model.family),
        )
    if teacher.engine_urls:
        external = External(
            urls=teacher.engine_urls,
            vocab_size=model.tokenizer.vocab_size,
            context_length=teacher.context_length or context_of(folder) or ASSUMED_CONTEXT,
            words=vocabulary_sample(model.tokenizer),
        )
    return EngineSettings(
        model_path=folder,
        device="cpu" if teacher.cpu else "cuda",
        gpus=teacher.gpus,
        tp=teacher.tp,
        context_length=teacher.context_length,
        mem_fraction=teacher.mem_fraction,
        state_dir=state / f"teacher-{name}",
        weight_version=name,
        simulated=simulated,
        external=external,
        key_env=teacher.key_env,
    )
