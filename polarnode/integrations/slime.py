"""slime and miles: the functions that their arguments name.

    --rollout-function-path polarnode.integrations.slime.generate_rollout
    --custom-reward-post-process-path polarnode.integrations.slime.reward_post_process

Sources: THUDM/slime 624b824 and its fork radixark/miles 31f1ca9, which call these functions alike; the
classes are those of the trainer whose process this is. Settings are the variables of
`rollout_tasks.ENVIRONMENT`, which Ray passes to slime's processes (`--runtime-env-json`).

`--over-sampling-batch-size` above `--rollout-batch-size` keeps the surplus groups in progress from one call
to the next, so that a step does not wait for its slowest group. Nothing is aborted between calls; the task's
`group.max_staleness` says how stale a session may be.
"""

import atexit
import logging
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from statistics import fmean, stdev
from typing import Any, Final

import anyio.from_thread
from attrs import define, evolve, field, frozen

from polarnode.core.errors import PolarnodeError, Refused
from polarnode.core.task import TaskSpec
from polarnode.groups import Group
from polarnode.integrations.rollout_tasks import (
    NodeRollouts,
    PluginSettings,
    SessionLost,
    plugin_settings,
    rollout_groups,
    task_of,
)
from polarnode.trainers import miles, slime

logger = logging.getLogger(__name__)

# Estimators whose rewards slime centres in their group, and those whose rewards it also divides by their
# spread.
CENTRED_ESTIMATORS: Final = frozenset({"grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"})
SCALED_ESTIMATORS: Final = CENTRED_ESTIMATORS - {"reinforce_plus_plus_baseline"}
SPREAD_EPSILON: Final = 1e-6  # added to the spread, as slime does
# Arguments of slime's own rollout that a node replaces. They are refused, because ignoring one silently would
# train on something else.
REPLACED_ARGUMENTS: Final = (
    "custom_generate_function_path",
    "custom_rm_path",
    "rm_type",
    "group_rm",
    "partial_rollout",
)
# Groups given up in one call, for each group of the batch. A filter that drops nine of ten still ends.
MAX_GIVEN_UP_PER_GROUP: Final = 16
# How often a prompt of an evaluation is run again if the machine lost a session of it, after the node's own
# retries.
MAX_EVALUATION_RETRIES: Final = 2
METRIC_PREFIX: Final = "rollout/polarnode"


# ── rollouts ──────────────────────────────────────────────────────────────────


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """slime's rollout function: `RolloutFnTrainOutput` with `rollout_batch_size` groups, each a list of
    sessions, each a list of Samples that share a `rollout_id`; `RolloutFnEvalOutput` for an evaluation.

    Each prompt is one task of `n_samples_per_prompt` sessions. Sessions that are not usable are stand-ins
    (`trainers.slime`); a group without a usable one is replaced. Raises Refused for an argument that it
    cannot honour, and what `NodeRollouts.group` raises.
    """
    _check(args)
    if evaluation:
        return _evaluate(args, plugin_settings())
    return _in_progress().collect(args, data_source)


def _check(args: Any) -> None:
    for name in REPLACED_ARGUMENTS:
        if getattr(args, name, None):
            flag = name.replace("_", "-")
            raise Refused(f"leave --{flag} out: a node runs and scores the sessions", path=f"--{flag}")
    if getattr(args, "reward_key", None):
        raise Refused("leave --reward-key out: a session's reward is a number", path="--reward-key")
    if getattr(args, "apply_chat_template", False):
        raise Refused(
            "leave --apply-chat-template out: a prompt is the instruction of a harness, not a model's input",
            path="--apply-chat-template",
        )
    fields = _trainer_class("utils.types", "Sample").__dataclass_fields__
    if getattr(args, "rollout_top_p", 1.0) != 1.0 and "rollout_top_p_token_ids" in fields:
        raise Refused(
            "--rollout-top-p must be 1: slime replays what top-p kept, which a node does not record",
            path="--rollout-top-p",
        )
    if _centres_rewards(args) and not getattr(args, "custom_reward_post_process_path", None):
        raise Refused(
            "add --custom-reward-post-process-path polarnode.integrations.slime.reward_post_process: without"
            " it a session of several rows counts once for each of them",
            path="--custom-reward-post-process-path",
        )


@frozen
class _Prompt:
    """A group's samples as the data source gave them, and its task."""

    samples: Sequence[Any]
    spec: TaskSpec


@define
class _GroupsInProgress:
    """The groups in progress on the node. They outlive a call."""

    settings: PluginSettings
    portal: Any  # anyio's portal to an event loop in a thread of its own
    rollouts: NodeRollouts
    running: dict["Future[Group]", _Prompt] = field(factory=dict)

    def collect(self, args: Any, data_source: Any) -> Any:
        """Wait for `rollout_batch_size` groups and return them; of those that have ended, the oldest come
        first.
        """
        batch = args.rollout_batch_size
        ahead = args.over_sampling_batch_size - batch
        made: list[list[list[Any]]] = []
        counts = _CallCounts()
        while len(made) < batch:
            missing = batch - len(made) + ahead - len(self.running)
            for samples in data_source.get_samples(missing) if missing > 0 else ():
                self._begin(_Prompt(samples, _task(self.settings, args, samples[0], len(samples))))
            if not self.running:
                raise PolarnodeError("the data source has no more samples")
            wait(self.running, return_when=FIRST_COMPLETED)
            ended = [future for future in self.running if future.done()]
            for future in ended[: batch - len(made)]:
                prompt = self.running.pop(future)
                kept = self._ended(args, future, prompt, counts)
                if kept is not None:
                    made.append(kept)
            if counts.given_up > MAX_GIVEN_UP_PER_GROUP * batch:
                raise PolarnodeError(
                    f"gave {counts.given_up} groups up for a batch of {batch}; the last: {counts.reason}"
                )
        made.sort(key=lambda group: group[0][0].index)
        return _trainer_class("rollout.base_types", "RolloutFnTrainOutput")(
            samples=made,
            metrics=counts.metrics(sample for group in made for each in group for sample in each),
        )

    def _begin(self, prompt: _Prompt) -> None:
        self.running[self.portal.start_task_soon(self.rollouts.group, prompt.spec)] = prompt

    def _ended(
        self, args: Any, future: "Future[Group]", prompt: _Prompt, counts: "_CallCounts"
    ) -> list[list[Any]] | None:
        """The samples of a group, or None if it is not trained on. A group that the machine lost is begun
        again.
        """
        try:
            # The group may have ended in an earlier call, before the last update of the weights.
            group = self.portal.call(self.rollouts.delivered, future.result())
        except SessionLost as lost:
            counts.again += 1
            counts.give_up(str(lost))
            self._begin(_with_new_task(prompt))
            return None
        counts.count(group)
        if not group.usable:
            counts.give_up(group.reason or "without a usable session")
            if all((member.why or "").startswith("lost") for member in group.members):
                counts.again += 1
                self._begin(_with_new_task(prompt))
            return None
        made = _samples(args, group, prompt.samples)
        if _kept(args, made):
            return made
        counts.give_up("dropped by --dynamic-sampling-filter-path")
        return None

    def close(self) -> None:
        """End the tasks in progress on the node."""
        for future in self.running:
            future.cancel()  # the portal waits for the tasks when it is closed


@define
class _CallCounts:
    """The counts of one call, as slime's metrics."""

    again: int = 0
    given_up: int = 0
    reason: str = ""
    sessions: int = 0
    usable: int = 0
    unusable: dict[str, int] = field(factory=dict)

    def count(self, group: Group) -> None:
        self.sessions += len(group.members)
        self.usable += len(group.usable)
        for member in group.members:
            if member.why is not None:
                why = member.why.partition(":")[0].replace(" ", "_")
                self.unusable[why] = self.unusable.get(why, 0) + 1

    def give_up(self, reason: str) -> None:
        self.given_up += 1
        self.reason = reason

    def metrics(self, samples: Iterable[Any]) -> dict[str, float]:
        rows = [each for each in samples if not each.remove_sample]
        stale = [each.metadata["polarnode"]["staleness"] for each in rows]
        known = [each for each in stale if each is not None]
        found: dict[str, float] = {
            "sessions": self.sessions,
            "usable": self.usable,
            "rows": len(rows),
            "groups_given_up": self.given_up,
            "groups_run_again": self.again,
        }
        if known:
            found |= {"staleness_mean": fmean(known), "staleness_max": max(known)}
        found |= {f"unusable/{why}": count for why, count in self.unusable.items()}
        return {f"{METRIC_PREFIX}/{name}": value for name, value in found.items()}


_OPEN_LOCK = threading.Lock()  # miles evaluates in a thread of its own


def _in_progress() -> _GroupsInProgress:
    with _OPEN_LOCK:
        return _opened()


@cache
def _opened() -> _GroupsInProgress:
    settings = plugin_settings()
    stack = ExitStack()
    portal = stack.enter_context(anyio.from_thread.start_blocking_portal())
    opened = _GroupsInProgress(settings, portal, portal.call(NodeRollouts, settings))
    stack.callback(opened.close)
    atexit.register(stack.close)
    return opened


def _with_new_task(prompt: _Prompt) -> _Prompt:
    """The same prompt as a new task, because a task's id names its result forever."""
    return _Prompt(prompt.samples, evolve(prompt.spec, task_id=None))


def _task(
    settings: PluginSettings, args: Any, sample: Any, count: int, *, evaluation: bool = False, **sampling: Any
) -> TaskSpec:
    """The task of a prompt, sampled exactly as slime's arguments say. `metadata` of the dataset's row may
    hold a task under `polarnode`.
    """
    names = {"temperature": "rollout_temperature", "top_p": "rollout_top_p", "top_k": "rollout_top_k"}
    given = {name: getattr(args, argument, None) for name, argument in names.items()} | sampling
    return task_of(
        settings,
        {"prompt": sample.prompt, "metadata": sample.metadata or {}},
        samples=count,
        sampling=given,
        evaluation=evaluation,
    )


# ── samples ───────────────────────────────────────────────────────────────────


def _samples(args: Any, group: Group, given: Sequence[Any]) -> list[list[Any]]:
    """slime's or miles' Samples of a group, made from those that the data source gave."""
    if any(each.index is None or each.group_index is None for each in given):
        raise Refused(
            "the data source gives samples without index or group_index, by which a session is counted once",
            path="--data-source-path",
        )
    projection = miles if _package() == "miles" else slime
    packed = projection.group_samples(
        group,
        group_index=given[0].group_index,
        index=given[0].index,
        size=len(given),
        decode=_tokenizer(args.hf_checkpoint).decode,
        arrays="native",
    )
    return [
        [_sample(base, fields) for fields in session] for base, session in zip(given, packed, strict=True)
    ]


def _sample(base: Any, fields: Mapping[str, Any]) -> Any:
    """A Sample with the fields of a row; fields that the row lacks are those of the data source's sample."""
    found = {name: value for name, value in fields.items() if value is not None}
    found |= {"index": base.index, "rollout_id": base.index}
    found["metadata"] = {**(base.metadata or {}), **fields["metadata"]}
    return type(base).from_dict(base.to_dict() | found)


def _kept(args: Any, made: list[list[Any]]) -> bool:
    """The verdict of `--dynamic-sampling-filter-path` on a group. The filter sees one Sample for each usable
    session.
    """
    path = getattr(args, "dynamic_sampling_filter_path", None)
    if path is None:
        return True
    module, _, name = path.rpartition(".")
    first = [session[0] for session in made if not session[0].remove_sample]
    answer = getattr(import_module(module), name)(args, first)
    return bool(getattr(answer, "keep", answer))


def _package() -> str:
    """`slime` or `miles`: the trainer whose process this is."""
    for name in ("miles", "slime"):
        if f"{name}.utils.types" in sys.modules:
            return name
    raise Refused("neither slime nor miles is loaded: name this function in their arguments")


def _trainer_class(module: str, name: str) -> Any:
    return getattr(import_module(f"{_package()}.{module}"), name)


@cache
def _tokenizer(checkpoint: str) -> Any:
    return _trainer_class("utils.processing_utils", "load_tokenizer")(checkpoint, trust_remote_code=True)


# ── evaluation ────────────────────────────────────────────────────────────────


def _evaluate(args: Any, settings: PluginSettings) -> Any:
    """The rewards of each data set, one for each session. A prompt is left out if a session of it has no
    reward.
    """
    found = {}
    for data in getattr(args, "eval_datasets", None) or ():
        result = _evaluate_dataset(args, settings, data)
        if result["samples"]:
            found[data.name] = result
        else:
            logger.error("evaluation %s has no result: no session of it was scored", data.name)
    return _trainer_class("rollout.base_types", "RolloutFnEvalOutput")(data=found)


def _evaluate_dataset(args: Any, settings: PluginSettings, data: Any) -> dict[str, list[Any]]:
    rows = _trainer_class("utils.data", "Dataset")(
        data.path,
        tokenizer=None,
        processor=None,
        max_length=None,
        prompt_key=data.input_key,
        label_key=data.label_key,
        tool_key=data.tool_key,
        metadata_key=data.metadata_key,
    ).samples
    count = data.n_samples_per_eval_prompt
    asked = {"temperature": data.temperature, "top_p": data.top_p, "top_k": data.top_k}
    waiting = dict(enumerate(rows))
    scored: dict[int, list[Any]] = {}
    for _ in range(1 + MAX_EVALUATION_RETRIES):
        specs = [_task(settings, args, row, count, evaluation=True, **asked) for row in waiting.values()]
        for number, group in zip(list(waiting), rollout_groups(settings, specs), strict=True):
            if len(group.trajectories) == count and all(e.reward is not None for e in group.trajectories):
                scored[number] = _eval_samples(args, group, waiting.pop(number), number * count)
        if not waiting:
            break
    if waiting:
        logger.warning("%s: %d of %d prompts are left out", data.name, len(waiting), len(rows))
    samples = [sample for number in sorted(scored) for sample in scored[number]]
    return {
        "rewards": [sample.reward for sample in samples],
        "truncated": [sample.status.value == "truncated" for sample in samples],
        "samples": samples,
    }


def _eval_samples(args: Any, group: Group, row: Any, index: int) -> list[Any]:
    """One Sample for each session, of its first row, with the session's reward."""
    found = []
    for place, session in enumerate(group.trajectories):
        fields = slime.samples(session, decode=_tokenizer(args.hf_checkpoint).decode)[0]
        sample = _sample(row, fields | {"reward": session.reward})
        sample.index = sample.rollout_id = index + place
        found.append(sample)
    return found


# ── rewards ───────────────────────────────────────────────────────────────────


def reward_post_process(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """The raw and the normalised reward of each Sample, for slime's `_post_process_rewards`.

    A session counts once in its group, whatever its rows; a stand-in counts as nothing and has 0. A row with
    a reward of its own (its lineage's) is compared with the sessions' mean, in units of their spread.
    """
    raw = [_reward(sample) for sample in samples]
    if not _centres_rewards(args):
        return raw, raw
    scale = args.advantage_estimator in SCALED_ESTIMATORS and args.grpo_std_normalization
    groups: dict[Any, dict[Any, float]] = {}
    for sample, reward in zip(samples, raw, strict=True):
        if not sample.remove_sample:
            own = (sample.metadata or {}).get("polarnode", {}).get("session_reward")
            groups.setdefault(sample.group_index, {})[sample.rollout_id] = reward if own is None else own
    levels = {name: _mean_and_spread(list(rewards.values()), scale) for name, rewards in groups.items()}
    normalised = []
    for sample, reward in zip(samples, raw, strict=True):
        mean, spread = levels.get(sample.group_index, (reward, 1.0))
        normalised.append(0.0 if sample.remove_sample else (reward - mean) / spread)
    return raw, normalised


def _centres_rewards(args: Any) -> bool:
    return args.advantage_estimator in CENTRED_ESTIMATORS and bool(args.rewards_normalization)


def _reward(sample: Any) -> float:
    own = None if sample.remove_sample else (sample.metadata or {}).get("polarnode", {}).get("row_reward")
    return float(sample.reward if own is None else own)


def _mean_and_spread(rewards: Sequence[float], scale: bool) -> tuple[float, float]:
    """The mean and the divisor of a group: its sample deviation, as slime computes it; 1 if there is none."""
    spread = stdev(rewards) if scale and len(rewards) > 1 else 0.0
    return fmean(rewards), spread + SPREAD_EPSILON if spread else 1.0
