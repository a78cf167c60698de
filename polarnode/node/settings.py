"""The settings of a node's parts, made from those of the node: engines, teachers, journal, containers.

These functions read the checkpoint's folder and nothing else of the machine.
"""

from pathlib import Path

from attrs import evolve

from polarnode.containers.probe import default_state_dir
from polarnode.containers.recipes import RuntimesSettings
from polarnode.core.errors import ConfigError, ModelError
from polarnode.engine.protocol import FamilyMarks, Simulation
from polarnode.engine.settings import (
    EngineSettings,
    ExternalEngine,
    SimulatedEngine,
    checkpoint_context,
    experts_of,
    unrouted,
)
from polarnode.journal.values import RetentionLimits
from polarnode.node.config import NodeConfig, TeacherConfig
from polarnode.tokens.families import Family
from polarnode.tokens.template import LoadedModel, load_model
from polarnode.tokens.tokenizer import vocabulary_difference, vocabulary_sample


def engine_settings(config: NodeConfig, state: Path, model: LoadedModel | None) -> EngineSettings:
    """The settings of the policy's engine. A simulated and an external engine need `model`. For the node's
    own engine they are complete without it, because loading the model takes seconds.
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
        return evolve(settings, simulated=_simulated_settings(config, model))
    return evolve(settings, external=_external_settings(config, settings, model))


ASSUMED_CONTEXT = 32_768  # tokens of context, where no setting, checkpoint or server says how many


def _external_settings(config: NodeConfig, settings: EngineSettings, model: LoadedModel) -> ExternalEngine:
    """The settings of an external engine, with which its servers must agree. A node without engines has no
    servers.
    """
    if config.routed_experts and (reason := unrouted(settings)):
        raise ConfigError(f"--routed-experts: {reason}")
    return ExternalEngine(
        urls=config.engine_urls,
        vocab_size=model.tokenizer.vocab_size,
        context_length=config.context_length or checkpoint_context(settings.model_path) or ASSUMED_CONTEXT,
        words=vocabulary_sample(model.tokenizer),
        experts=experts_of(settings) if config.routed_experts else None,
    )


def retention_settings(config: NodeConfig) -> RetentionLimits:
    """The limits of what the journal keeps."""
    return RetentionLimits(
        acknowledged=config.keep_acknowledged_mb << 20,
        everything=config.keep_mb << 20,
        acknowledged_s=config.keep_acknowledged_hours * 3600,
        silence_s=config.consumer_hours * 3600,
    )


def no_experts_reason(config: NodeConfig, model: LoadedModel) -> str:
    """Why the engine of this node reports no routed experts, and what to do about it."""
    settings = engine_settings(config, Path(config.state_dir), model)
    return unrouted(settings) or "the engine was started without them; start the node with --routed-experts"


def _simulated_settings(config: NodeConfig, model: LoadedModel) -> SimulatedEngine:
    return SimulatedEngine(
        simulation=config.simulated,
        vocab_size=model.tokenizer.vocab_size,
        marks=simulated_marks(model.family),
    )


def simulated_marks(family: Family) -> FamilyMarks:
    """The marks that random answers are written with. Raises ModelError for a family that does not write
    calls as JSON between marks.
    """
    if family.call_syntax not in ("json", "none"):
        how = (
            f"the simulated engine writes calls as JSON between marks, the family {family.name} writes them"
            f" otherwise ({family.call_syntax})"
        )
        raise ModelError(f"{how}: leave --model out, or name a Qwen3; a node's load hardly depends on it")
    return FamilyMarks(
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
    """The settings of a teacher's engine. Raises ConfigError where its vocabulary differs from the
    policy's.
    """
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
        simulated = SimulatedEngine(
            simulation=Simulation(),
            vocab_size=model.tokenizer.vocab_size,
            marks=simulated_marks(model.family),
        )
    if teacher.engine_urls:
        external = ExternalEngine(
            urls=teacher.engine_urls,
            vocab_size=model.tokenizer.vocab_size,
            context_length=teacher.context_length or checkpoint_context(folder) or ASSUMED_CONTEXT,
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
