"""verl (0.9.1, V1 trainers): an agent loop whose samples are sessions of a node, and a rollout backend that
gives the node the policy's weights.

`actor_rollout_ref.model.external_lib=polarnode.integrations.verl` imports this module in each of verl's
processes, where it registers both under the name `polarnode`. Settings of the two are those of
`rollout_tasks` under `actor_rollout_ref.rollout.engine_kwargs.polarnode`. docs/trainers/verl.md has the whole
configuration.

verl counts rollouts of a prompt by itself, so a sample is a task of one session with the prompt's uid as its
group. A session that is not usable raises, which verl counts as a `failure` of the prompt, so that it never
gets a reward. verl starts the sessions of a prompt in one event loop and trains on none before the last has
ended (`_run_prompt` of verl/trainer/ppo/v1/agent_loop_tq.py), so each can wait here for the others. If only
one session is left, it is masked, because verl would take its reward for its advantage.
"""

import logging
from collections.abc import Iterable, Mapping
from secrets import token_hex
from typing import Any, Final

import anyio
from anyio.lowlevel import checkpoint
from attrs import define, evolve, field
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
    check_whole_groups,
    only,
    plugin_settings,
    shared_rollouts,
    task_of,
)
from polarnode.integrations.verl_algorithms import (
    NAME,
    OWN_GROUPS,
    check_algorithm,
    compares_samples,
    rows_per_prompt,
)
from polarnode.trainers.rows import version_number
from polarnode.trainers.verl import agent_loop_outputs, untrained

log = logging.getLogger(__name__)

# The settings of the weights, beside those of the tasks (ENVIRONMENT): arguments of `push_tensors`, and the
# `address` and `port` of a WeightsGroup.
WEIGHT_SETTINGS: Final = ("folder", "transport", "mode", "address", "port")
# A name of this process's launch: a version names one set of weights for ever, and a run that is started
# again makes other weights of the same step.
LAUNCH_ID: Final = token_hex(3)


# ── settings ──────────────────────────────────────────────────────────────────


def settings_of(
    rollout: Any, given: Mapping[str, Any] | None = None
) -> tuple[PluginSettings, dict[str, Any]]:
    """The settings of the tasks and of the weights, from `rollout.engine_kwargs.polarnode`. `given`, an entry
    of agent_loop_config_path, overrides them.
    """
    kwargs = rollout.get("engine_kwargs") if hasattr(rollout, "get") else rollout.engine_kwargs
    found = {**_plain((kwargs or {}).get(NAME) or {}), **_plain(given or {})}
    unknown = sorted(set(found) - set(ENVIRONMENT) - set(WEIGHT_SETTINGS))
    if unknown:
        raise Refused(
            f"engine_kwargs.polarnode has no setting {unknown[0]!r}: it takes"
            f" {', '.join((*ENVIRONMENT, *WEIGHT_SETTINGS))}",
            path=f"$.{unknown[0]}",
        )
    weights = {name: found.pop(name) for name in WEIGHT_SETTINGS if name in found}
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


def version_step(version: str) -> int:
    """The step of a weight version `RUN-LAUNCH-STEP`, or of one that is a number. Raises Refused for
    others.
    """
    return version_number(version.rpartition("-")[2])


# ── the agent loop ────────────────────────────────────────────────────────────


@define(eq=False)
class _PromptSessions:
    """The sessions of a prompt in this process: how many began, ended, and were usable."""

    begun: int = 0
    ended: int = 0
    usable: int = 0
    over: anyio.Event = field(factory=anyio.Event)

    def end(self, *, usable: bool) -> None:
        self.ended += 1
        self.usable += usable
        if self.ended == self.begun:
            self.over.set()


@define(eq=False)
class _StepRows:
    """The numbers of rows of a step's prompts, as far as they were seen in this process."""

    step: int = -1
    prompts: set[str] = field(factory=set)
    rows: int = 0
    told: bool = False

    def begin(self, step: int, uid: str) -> None:
        if step > self.step:
            self.step, self.prompts, self.rows, self.told = step, set(), 0, False
        self.prompts.add(uid)

    def count(self, step: int, rows: int, room: float) -> None:
        """Warn once a step when its prompts have more rows than fit into its mini-batches."""
        if step != self.step:
            return
        self.rows += rows
        if self.rows > room * len(self.prompts) and not self.told:
            self.told = True
            log.warning(
                "step %d: %d prompts of this process have %d rows so far, and actor.ppo_mini_batch_size x"
                " rollout.n has room for %d of them: verl takes one more optimizer step on the rows that are"
                " left over, however few. Raise actor.ppo_mini_batch_size to data.train_batch_size times the"
                " most rows that a session has on average (docs/trainers/verl.md)",
                step,
                len(self.prompts),
                self.rows,
                int(room * len(self.prompts)),
            )


_SESSIONS_BY_PROMPT: Final[dict[str, _PromptSessions]] = {}
_STEP_ROWS: Final = _StepRows()


@register(NAME)
class PolarnodeAgentLoop(AgentLoopBase):  # type: ignore[misc]  # verl is not installed beside the checks
    """One rollout of a prompt: a session of a harness on the node, as an AgentLoopOutput for each row."""

    def __init__(self, *args: Any, name: str = NAME, tools: Any = None, **kwargs: Any) -> None:
        """`kwargs` has verl's own arguments and the keys of the entry of agent_loop_config_path."""
        own = {key: kwargs.pop(key) for key in (*ENVIRONMENT, *WEIGHT_SETTINGS) if key in kwargs}
        super().__init__(*args, **kwargs)
        check_algorithm(self.config)
        self.compares, self.room = compares_samples(self.config), rows_per_prompt(self.config)
        self.settings, _ = settings_of(self.rollout_config, own)
        if _trains_adapter(self.config.actor_rollout_ref.get("model") or {}):
            template = {**self.settings.template, "adapter": self.settings.run}
            self.settings = evolve(self.settings, template=template)
        actor = self.config.actor_rollout_ref.actor
        # The longest row that verl's dynamic batches take. For a longer one verl's assertion would end the
        # run.
        self.longest: int | None = None
        if actor.get("use_dynamic_bsz", False):
            self.longest = actor.ppo_max_token_len_per_gpu * actor.get("ulysses_sequence_parallel_size", 1)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """`kwargs`: the fields of the dataset's row and `uid`, `session_id`, `global_steps`. Raises
        SessionLost for a session that is not usable (docs/groups.md).
        """
        # A sample without a uid is a prompt of its own.
        uid, step = str(kwargs.get("uid") or token_hex(8)), int(kwargs.get("global_steps", 0))
        siblings = _SESSIONS_BY_PROMPT.setdefault(uid, _PromptSessions())
        siblings.begun += 1
        _STEP_ROWS.begin(step, uid)
        rows: list[dict[str, Any]] = []
        try:
            await checkpoint()  # verl has made the tasks of all siblings, and this lets each of them begin
            rows = await self._session(sampling_params, kwargs)
        finally:
            siblings.end(usable=bool(rows))
            if siblings.over.is_set():
                _SESSIONS_BY_PROMPT.pop(uid, None)
        if self.room is not None:
            _STEP_ROWS.count(step, len(rows), self.room)
        if self.compares:
            await siblings.over.wait()
            if siblings.begun > 1 and siblings.usable == 1:
                log.warning("prompt %s: one session of %d is left, which is not trained", uid, siblings.begun)
                rows = [fields | untrained(fields) for fields in rows]
        return [AgentLoopOutput(**fields) for fields in rows]

    async def _session(self, sampling_params: dict[str, Any], row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The rows of one session."""
        spec = task_of(
            self.settings,
            row,
            group_id=None if row.get("uid") is None else str(row["uid"]),
            sampling=_sampling(sampling_params),
            instead=OWN_GROUPS,
        )
        group = await shared_rollouts(self.settings).group(spec)
        trajectory, [member] = only(group), group.members
        if not member.usable:
            raise SessionLost(f"session {trajectory.session_id} is not usable: {member.why}")
        return self._rows(trajectory, row)

    def _rows(self, trajectory: Trajectory, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        # A session of verl's sync trainer begins and ends under the weights of the previous step.
        before = max(0, int(row.get("global_steps", 0)) - 1)
        rows = agent_loop_outputs(
            trajectory, number=version_step if _counted(trajectory) else None, arrays="native"
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
    if found.get("top_k") == 0:  # in verl 0 also means all
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
                version = f"{self.settings.run}-{LAUNCH_ID}-{global_steps or 0}"
                # This does not run in another thread, because gathering a tensor needs the CUDA device of
                # this one.
                if peft_config is None:
                    push_tensors(self.client, version, named, **self.weights)
                elif base_sync_done:
                    push_adapter(self.client, self.settings.run, version, dict(named), config=peft_config)
        finally:
            for _ in named:
                pass


class NodeReplica(RolloutReplica):  # type: ignore[misc]
    """The driver's side of the rollout backend: verl starts no servers of its own, so there are none to put
    to sleep.

    Settings that the agent loop refuses for the whole run are refused here first, which ends the run. Later,
    verl would take a refused sample for a failure, which its samplers replace without end
    (`sync_refill_failed_groups`, the async trainers).
    """

    def __init__(self, replica_rank: int, config: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(replica_rank, config, model_config, *args, **kwargs)
        # verl passes only a part of its configuration, but omegaconf knows the whole.
        if hasattr(type(config), "_get_root"):
            check_algorithm(config._get_root())
        group = settings_of(self.config)[0].template.get("group")
        if isinstance(group, dict):
            check_whole_groups(group, OWN_GROUPS)

    async def launch_servers(self) -> None:
        settings, _ = settings_of(self.config)
        self._server_address = settings.url
        self._server_handle = None

    async def init_standalone(self) -> None:
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()


rollouts._ROLLOUT_REGISTRY[NAME, "async"] = f"{NodeWeights.__module__}.{NodeWeights.__qualname__}"
RolloutReplicaRegistry.register(NAME, lambda: NodeReplica)
