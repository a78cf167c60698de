"""verl (0.9.1, V1 trainers): an agent loop whose samples are sessions of a node, and a rollout backend that
gives the node the policy's weights.

`actor_rollout_ref.model.external_lib=polarnode.integrations.verl` imports this module in each of verl's
processes, where it registers both under the name `polarnode`. Settings of the two are those of
`rollout_tasks` under `actor_rollout_ref.rollout.engine_kwargs.polarnode`. docs/trainers/verl.md has the whole
configuration.

verl counts rollouts of a prompt by itself, so a sample is a task of one session with the prompt's uid as its
group. A session that is not usable raises: that is verl's `failure` of a prompt, which never gets a reward.
"""

from collections.abc import Iterable, Mapping
from secrets import token_hex
from typing import Any, Final

from attrs import evolve
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.workers.rollout import base as rollouts
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry

from polarnode.client import PolarnodeClient
from polarnode.client.tensors import WeightsGroup, push_adapter, push_tensors
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.core.trajectory import Trajectory
from polarnode.integrations.rollout_tasks import (
    ENVIRONMENT,
    PluginSettings,
    SessionLost,
    only,
    plugin_settings,
    shared_rollouts,
    task_of,
)
from polarnode.trainers.rows import version_number
from polarnode.trainers.verl import agent_loop_outputs

NAME: Final = "polarnode"
# The settings of the weights, beside those of the tasks (ENVIRONMENT): arguments of `push_tensors`, and the
# `address` and `port` of a WeightsGroup.
WEIGHTS: Final = ("folder", "transport", "mode", "address", "port")
# A name of this process's launch: a version names one set of weights for ever, and a run that is started
# again makes other weights of the same step.
LAUNCH: Final = token_hex(3)


# ── settings ──────────────────────────────────────────────────────────────────


def settings_of(
    rollout: Any, given: Mapping[str, Any] | None = None
) -> tuple[PluginSettings, dict[str, Any]]:
    """The settings of the tasks and of the weights, from `rollout.engine_kwargs.polarnode`, over which
    `given` (an entry of agent_loop_config_path) goes.
    """
    kwargs = rollout.get("engine_kwargs") if hasattr(rollout, "get") else rollout.engine_kwargs
    found = {**_plain((kwargs or {}).get(NAME) or {}), **_plain(given or {})}
    unknown = sorted(set(found) - set(ENVIRONMENT) - set(WEIGHTS))
    if unknown:
        raise Refused(
            f"engine_kwargs.polarnode has no setting {unknown[0]!r}: it takes"
            f" {', '.join((*ENVIRONMENT, *WEIGHTS))}",
            path=f"$.{unknown[0]}",
        )
    weights = {name: found.pop(name) for name in WEIGHTS if name in found}
    return plugin_settings(found), weights


def _plain(value: Any) -> Any:
    """omegaconf's objects as dicts and lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in value}
    return (
        value
        if isinstance(value, str) or not hasattr(value, "__iter__")
        else [_plain(each) for each in value]
    )


def step_of(version: str) -> int:
    """The step of a weight version `RUN-LAUNCH-STEP`, or of one that is a number. Refused for others."""
    return version_number(version.rpartition("-")[2])


# ── the agent loop ────────────────────────────────────────────────────────────


@register(NAME)
class PolarnodeAgentLoop(AgentLoopBase):  # type: ignore[misc]  # verl is not installed beside the checks
    """One rollout of a prompt: a session of a harness on the node, as an AgentLoopOutput for each row."""

    def __init__(self, *args: Any, name: str = NAME, tools: Any = None, **kwargs: Any) -> None:
        """`kwargs` has verl's own arguments and the keys of the entry of agent_loop_config_path."""
        own = {key: kwargs.pop(key) for key in (*ENVIRONMENT, *WEIGHTS) if key in kwargs}
        super().__init__(*args, **kwargs)
        self.settings, _ = settings_of(self.rollout_config, own)
        if _trains_adapter(self.config.actor_rollout_ref.get("model") or {}):
            template = {**self.settings.template, "adapter": self.settings.run}
            self.settings = evolve(self.settings, template=template)
        actor = self.config.actor_rollout_ref.actor
        # the longest row that verl's dynamic batches take; it asserts there, and the run would end
        self.longest: int | None = None
        if actor.get("use_dynamic_bsz", False):
            self.longest = actor.ppo_max_token_len_per_gpu * actor.get("ulysses_sequence_parallel_size", 1)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """`kwargs`: the fields of the dataset's row and `uid`, `session_id`, `global_steps`. Raises
        SessionLost for a session that is not usable (docs/groups.md).
        """
        spec = task_of(
            self.settings,
            kwargs,
            group_id=None if kwargs.get("uid") is None else str(kwargs["uid"]),
            sampling=_sampling(sampling_params),
        )
        group = await shared_rollouts(self.settings).group(spec)
        trajectory, [member] = only(group), group.members
        if not member.usable:
            raise SessionLost(f"session {trajectory.session_id} is not usable: {member.why}")
        return [AgentLoopOutput(**fields) for fields in self._rows(trajectory, kwargs)]

    def _rows(self, trajectory: Trajectory, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        # a session of verl's sync trainer begins and ends under the weights of the step before
        before = max(0, int(row.get("global_steps", 0)) - 1)
        rows = agent_loop_outputs(
            trajectory, number=step_of if _counted(trajectory) else None, arrays="native"
        )
        for fields in rows:
            tokens = len(fields["prompt_ids"]) + len(fields["response_ids"])
            if self.longest is not None and tokens > self.longest:
                raise Refused(
                    f"a row of session {trajectory.session_id} has {tokens} tokens, and a GPU of this run"
                    f" takes {self.longest}: set builder.config.max_row_tokens of the task, or raise"
                    " actor.ppo_max_token_len_per_gpu"
                )
            if "min_global_steps" not in fields["extra_fields"]:
                self._count_by_step(fields["extra_fields"], trajectory, before)
        return rows

    def _count_by_step(self, extra: dict[str, Any], trajectory: Trajectory, before: int) -> None:
        mode = self.config.trainer.get("v1", {}).get("trainer_mode", "sync")
        if mode != "sync":
            raise Refused(
                f"session {trajectory.session_id} has weight versions that are no steps"
                f" ({extra['polarnode'].get('weight_versions')}), and trainer_mode={mode} counts in them:"
                " use rollout.name=polarnode, or trainer_mode=sync"
            )
        extra["min_global_steps"] = extra["max_global_steps"] = before


def _trains_adapter(model: Mapping[str, Any]) -> bool:
    """Whether verl sends an adapter instead of merged weights: FSDP has its rank in one place, Megatron in
    another.
    """
    lora = model.get("lora") or {}
    return bool((model.get("lora_rank") or lora.get("rank")) and not lora.get("merge"))


def _sampling(params: Mapping[str, Any]) -> dict[str, Json]:
    """verl's sampling parameters that a node has; `logprobs` are always recorded."""
    names = ("temperature", "top_p", "top_k", "repetition_penalty")
    found = {name: params[name] for name in names if params.get(name) is not None}
    if found.get("top_k") == 0:  # verl's other word for all
        found["top_k"] = -1
    return found


def _counted(trajectory: Trajectory) -> bool:
    versions = {span.version for trace in trajectory.traces for span in trace.version_spans}
    return all(version.rpartition("-")[2].isdecimal() for version in versions)


# ── weights ───────────────────────────────────────────────────────────────────


class NodeWeights(BaseRollout):  # type: ignore[misc]
    """`rollout.name=polarnode`: the actor's side of a rollout backend. An update of weights goes to the node;
    the memory of the trainer's GPUs is never lent, so there is nothing to release.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, model_config, device_mesh, *args, **kwargs)
        self.settings, self.weights = settings_of(self.config)
        self.client = PolarnodeClient(
            self.settings.url, token=self.settings.token, patience_s=self.settings.patience_s
        )
        self.weights.setdefault("model", self.model_config.local_path)
        address, port = self.weights.pop("address", None), self.weights.pop("port", 0)
        if self.weights.get("transport") == "distributed":
            if address is None:
                raise Refused("transport=distributed needs address, this machine's as the node reaches it")
            self.weights["group"] = WeightsGroup(address=address, port=int(port))

    async def resume(self, tags: list[str]) -> None:
        return

    async def release(self) -> None:
        return

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Any]],
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        peft_config: Mapping[str, Any] | None = None,
        base_sync_done: bool = True,
        **kwargs: Any,
    ) -> None:
        """Every rank calls it, because each tensor is gathered from all; rank 0 sends them. Raises what
        `push_tensors` or `push_adapter` raises, after the last tensor, so that no rank waits for another.

        With a `peft_config` they are an adapter's, named after the run; verl sends the frozen base before its
        first one, which is what the node serves already.
        """
        if wire_format != "named_tensors":
            raise Refused(f"a node takes whole tensors, not {wire_format}: choose another checkpoint engine")
        named = iter(weights)
        try:
            if self.device_mesh is None or self.device_mesh.get_rank() == 0:
                version = f"{self.settings.run}-{LAUNCH}-{global_steps or 0}"
                # not in a thread: gathering a tensor needs the CUDA device of this one
                if peft_config is None:
                    push_tensors(self.client, version, named, **self.weights)
                elif base_sync_done:
                    push_adapter(self.client, self.settings.run, version, dict(named), config=peft_config)
        finally:
            for _ in named:
                pass


class NodeReplica(RolloutReplica):  # type: ignore[misc]
    """The driver's side: verl starts no servers of its own, and there are none to put to sleep."""

    async def launch_servers(self) -> None:
        settings, _ = settings_of(self.config)
        self._server_address = settings.url
        self._server_handle = None

    async def init_standalone(self) -> None:
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()


rollouts._ROLLOUT_REGISTRY[NAME, "async"] = f"{NodeWeights.__module__}.{NodeWeights.__qualname__}"
RolloutReplicaRegistry.register(NAME, lambda: NodeReplica)
