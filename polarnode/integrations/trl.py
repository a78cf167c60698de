"""A stock TRL trainer (1.16) on a node: completions, rewards and weights.

    from polarnode.integrations.trl import PolarnodeRollout, node_reward

    GRPOTrainer(model, rollout_func=PolarnodeRollout(task="task.toml"), reward_funcs=node_reward, …)

For `AsyncGRPOTrainer` of trl.experimental there are `NodeWorker` and `NodeWeights`. Nothing here imports TRL,
transformers or torch before it is used.
"""

import json
import logging
import queue
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import anyio
import anyio.from_thread
from attrs import define, evolve, field

from polarnode.client import PolarnodeClient
from polarnode.client.tensors import Transport, WeightsGroup, pairs, push_adapter, push_tensors
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.core.task import TaskSpec
from polarnode.core.weights import UpdateMode
from polarnode.groups import Estimator, Group
from polarnode.groups import rows_of as training_rows
from polarnode.integrations.rollout_tasks import (
    EXTRA_COLUMNS,
    TASK_KEY,
    WHOLE_GROUP_FIELDS,
    NodeRollouts,
    PluginSettings,
    own_task,
    plugin_settings,
    rollout_groups,
    task_of,
)
from polarnode.trainers.rows import Absent
from polarnode.trainers.trl import SeveralRows, rollout_members, rollout_samples

if TYPE_CHECKING:
    from concurrent.futures import Future

logger = logging.getLogger(__name__)

INSTRUCTION: Final = "instruction"  # the column that comes before a row's prompt
# The columns of a row that is more than a prompt.
TASK_COLUMNS: Final = {TASK_KEY, INSTRUCTION, *EXTRA_COLUMNS}
FOLDER: Final = "polarnode-weights"  # a folder below the trainer's output_dir
MAX_PROMPT_CHARS: Final = 200  # bytes of a prompt in an error message
# The methods that cast a tensor, by the name of the type. torch itself is the trainer's, and is not imported
# here.
CAST_METHODS: Final = {"bfloat16": "bfloat16", "float16": "half", "float32": "float"}
# What to use in place of a task's settings of whole groups if the samples of a prompt are spread over
# processes.
SPLIT: Final = dict.fromkeys(
    WHOLE_GROUP_FIELDS,
    "set per_device_train_batch_size to a multiple of num_generations, so that none is split",
)
BEAT_INTERVAL_S: Final = (
    1.0  # seconds after which a worker shows that its loop runs, and looks whether the trainer took rows
)


# ── weights ───────────────────────────────────────────────────────────────────


@define(kw_only=True)
class WeightPusher:
    """Serves a trainer's weights on a node, each under a new version, as `push_tensors` does.

    * `transport`: "disk" writes checkpoints below `folder`, which the node must see under the same absolute
      path; "tensor" sends handles, for a node on this process's own GPU or on this machine's CPU;
      "distributed" broadcasts from `address`, this machine's as the node reaches it.
    * `model`: the checkpoint that training began with: a folder, or a name in the local cache of the hub.
    * `dtype` ("bfloat16" …): what floating-point tensors are cast to. The node takes only the types of
      its own checkpoint; "disk" casts to them by itself.
    """

    settings: PluginSettings
    transport: Transport = "disk"
    folder: Path | None = None
    model: str | None = None
    address: str | None = None
    dtype: str | None = None
    mode: UpdateMode = "in_place"
    # A version names one set of weights forever, so a run that is repeated needs names of its own.
    mark: str = field(factory=lambda: token_hex(4), init=False)
    _group: WeightsGroup | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        if self.transport not in get_args(Transport):
            raise Refused(f"weights={self.transport!r}: use disk, tensor or distributed", path="$.weights")
        if self.dtype is not None and self.dtype not in CAST_METHODS:
            raise Refused(f"dtype={self.dtype!r}: use one of {', '.join(CAST_METHODS)}", path="$.dtype")
        if self.transport == "distributed":
            if self.address is None:
                raise Refused(
                    "weights='distributed' broadcasts from this machine: give its address", path="$.address"
                )
            self._group = WeightsGroup(self.address)

    def version(self, number: int) -> str:
        return f"{self.settings.run}-{self.mark}-{number}"

    def number(self, version: str) -> int:
        """The number of a version of this run; 0 for weights that were served before it."""
        begin, _, number = version.rpartition("-")
        return int(number) if begin == f"{self.settings.run}-{self.mark}" else 0

    def push(self, number: int, named: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Serve these tensors under this number; pairs may be made while they are sent. Returns when they
        are served.
        """
        cast = ((name, self._cast_tensor(tensor)) for name, tensor in pairs(named))
        push_tensors(
            self._client(),
            self.version(number),
            dict(cast) if isinstance(named, Mapping) else cast,
            transport=self.transport,
            folder=self.folder,
            model=_checkpoint_folder(self.model) if self.transport == "disk" else None,
            group=self._group,
            mode=self.mode,
        )

    def push_adapter(self, number: int, model: Any, state: Mapping[str, Any]) -> None:
        """Serve the active adapter of a PEFT model as a version of the adapter `run`, whatever `transport`
        is: it goes over HTTP. `state` has the model's tensors, whole. The node refuses PEFT's features beyond
        LoRA (DoRA, `modules_to_save` …) with a reason.
        """
        from peft import get_peft_model_state_dict

        name = model.active_adapter
        tensors = get_peft_model_state_dict(model, state_dict=state, adapter_name=name)
        push_adapter(
            self._client(),
            self.settings.run,
            self.version(number),
            tensors,
            config=model.peft_config[name],
        )

    def _client(self) -> PolarnodeClient:
        given = self.settings
        return PolarnodeClient(given.url, token=given.token, patience_s=given.patience_s)

    def _cast_tensor(self, tensor: Any) -> Any:
        same = self.dtype is None or not tensor.is_floating_point()
        return tensor if same else getattr(tensor, CAST_METHODS[self.dtype or ""])()


def _checkpoint_folder(model: str | None) -> str:
    """The folder of a model whose name is one that transformers accepts."""
    if model is None:
        raise Refused(
            "weights='disk' needs the checkpoint that training began with: give model=", path="$.model"
        )
    if Path(model).is_dir():
        return model
    from huggingface_hub import snapshot_download

    found: str = snapshot_download(model, local_files_only=True)
    return found


# ── GRPOTrainer ───────────────────────────────────────────────────────────────


class PolarnodeRollout:
    """The `rollout_func` of a GRPOTrainer: each prompt is a task on a node, and each step's weights are
    served before they are sampled from.

    * `url`, `token`, `task` (a task file, or a mapping), `run`: the node and what all tasks have in common;
      POLARNODE_URL, POLARNODE_TOKEN, POLARNODE_TASK and POLARNODE_RUN if not given. A row of the dataset may
      add to its task in a column `polarnode`; its prompt is the instruction.
    * `weights`, `folder` (below the trainer's output_dir if not given), `model` (the trainer's), `address`,
      `dtype`: how weights get to the node, see `WeightPusher`; "none" pushes nothing. With a `peft_config`
      the adapter alone is served, under the name of the run, and tasks name it.
    * `several`: of a session with several rows train the "last" of the main agent, or "refuse" it.
    * `importance_sampling`: let TRL weigh tokens by its own probability over the recorded one, with its
      `vllm_importance_sampling_*` settings. It reads them for its own vLLM only, so this sets the attributes
      that `use_vllm` would set.
    """

    def __init__(
        self,
        *,
        url: str | None = None,
        token: str | None = None,
        task: str | Path | Mapping[str, Any] | None = None,
        run: str | None = None,
        weights: Transport | Literal["none"] = "disk",
        folder: str | Path | None = None,
        model: str | None = None,
        address: str | None = None,
        dtype: str | None = None,
        several: SeveralRows = "last",
        importance_sampling: bool = False,
    ) -> None:
        self.settings = plugin_settings({"url": url, "token": token, "task": task, "run": run})
        self.several = several
        self.weights = None
        if weights != "none":
            where = None if folder is None else Path(folder)
            self.weights = WeightPusher(
                settings=self.settings,
                transport=weights,
                folder=where,
                model=model,
                address=address,
                dtype=dtype,
            )
        self._importance_sampling = importance_sampling
        self._pushed_step: int | None = None  # the step whose weights are served
        self._push_count = 0
        self._dataset_rows: _DatasetRows | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """TRL's call for completions. Every process of a trainer makes it at the same step, with its own
        prompts.
        """
        if self._dataset_rows is None:
            self._begin(trainer)
        self.push(trainer)
        groups = rollout_groups(self.settings, list(self._task_specs(prompts, trainer)))
        absent = Absent(token_id=_pad_token(trainer))
        ends = _ends(trainer)
        found = [rollout_members(group, absent=absent, several=self.several, ends=ends) for group in groups]
        return {name: [value for each in found for value in each[name]] for name in found[0]}

    def push(self, trainer: Any) -> None:
        """Serve the trainer's weights, unless they are served already. This is a collective operation: every
        process calls it.
        """
        step = trainer.state.global_step
        if self.weights is None or step == self._pushed_step:
            return
        # This gathers the shards of FSDP and of DeepSpeed's stage 3, and raises if they cannot be gathered.
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        model = trainer.accelerator.unwrap_model(trainer.model)
        # `_push_count` is a count of its own, because train() may be called again.
        if trainer.accelerator.is_main_process:
            if hasattr(model, "peft_config"):
                self.weights.push_adapter(self._push_count, model, state)
            else:
                self.weights.push(self._push_count, state)
        trainer.accelerator.wait_for_everyone()  # nobody samples before the weights are served
        self._pushed_step, self._push_count = step, self._push_count + 1

    def _begin(self, trainer: Any) -> None:
        """Refuse settings that cannot be right, before anything is sampled."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        if self.weights is not None and hasattr(model, "peft_config"):
            # The tasks are sampled by the adapter that `push_adapter` serves.
            template = {"adapter": self.settings.run, **self.settings.template}
            self.settings = evolve(self.settings, template=template)
        self._dataset_rows = _DatasetRows((trainer.train_dataset, trainer.eval_dataset))
        if self.weights is not None:
            self.weights.folder = self.weights.folder or Path(trainer.args.output_dir, FOLDER)
            self.weights.model = self.weights.model or model.config.name_or_path
            trainer.add_callback(_last_push(self, trainer))
        if self._importance_sampling:
            _read_recorded_logprobs(trainer)

    def _task_specs(self, prompts: Sequence[Any], trainer: Any) -> Iterator[TaskSpec]:
        """Equal prompts that stand together are the samples of one task, up to the size of a group."""
        assert self._dataset_rows is not None
        training = trainer.model.training
        size = trainer.num_generations if training else trainer.num_generations_eval
        for _, same in groupby(prompts, key=_key):
            alike = list(same)
            for start in range(0, len(alike), size):
                count = min(size, len(alike) - start)
                row = self._dataset_rows.row(alike[0])
                yield task_of(
                    self.settings,
                    row,
                    samples=count,
                    sampling=_sampling(trainer.args),
                    instead=SPLIT if training and count < size else None,
                    evaluation=not training,
                )


def node_reward(
    completions: Sequence[Any],
    *,
    reward: Sequence[float | None],
    unusable: Sequence[int],
    rows_left_out: Sequence[int],
    log_metric: Any = None,
    **_: Any,
) -> list[float | None]:
    """The reward function of a GRPOTrainer: the node's own reward of each completion. None for a session that
    is not usable, which TRL leaves out of its group and does not train.

    TRL's log gets the fraction of such sessions, and the number of rows per session that were left out.
    """
    if log_metric is not None:
        log_metric("node/unusable", sum(unusable) / len(unusable))
        log_metric("node/rows_left_out", sum(rows_left_out) / len(rows_left_out))
    return list(reward)


def _sampling(args: Any) -> dict[str, Json]:
    """The trainer's sampling, without anything that a harness requests, because TRL computes logprobs at its
    own temperature and before any cut.
    """
    return {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k or -1,  # in TRL 0 means all
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty,
    }


def _pad_token(trainer: Any) -> int:
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    return int(tokenizer.pad_token_id)


def _ends(trainer: Any) -> tuple[int, ...]:
    """The tokens that TRL takes for the end of a completion; a completion with another last token is
    truncated to TRL.
    """
    found = [*(getattr(trainer, "eos_token_ids", None) or ()), _pad_token(trainer)]
    return tuple(int(each) for each in found)


def _last_push(rollout: PolarnodeRollout, trainer: Any) -> Any:
    """Serves also the weights of the last step, after which there is no rollout."""
    from transformers import TrainerCallback

    class LastPush(TrainerCallback):  # type: ignore[misc]
        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            rollout.push(trainer)

    return LastPush()


class _NoEngine:
    """A stand-in for the vLLM that TRL 1.16 keeps."""

    def sync_weights(self) -> None:
        """Do nothing, because the rollout has pushed the weights."""


def _read_recorded_logprobs(trainer: Any) -> None:
    if trainer.use_vllm:
        raise Refused("importance_sampling=True is for a trainer without use_vllm: the node samples")
    trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, _NoEngine(), -1


# ── AsyncGRPOTrainer ──────────────────────────────────────────────────────────


class NodeWeights:
    """The `weight_transfer` of an AsyncGRPOTrainer: tensors go to the node as TRL gathers them. Versions are
    counted as TRL counts its `model_version`.
    """

    def __init__(self, weights: WeightPusher) -> None:
        self.weights = weights
        self.sent = 0

    def init_weight_transfer(self) -> None:
        """Do nothing, because there is nothing to set up."""

    def pause(self) -> None:
        """Do nothing, because the update holds generation itself for as long as it must."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        self.weights.push(self.sent + 1, iterator)
        self.sent += 1

    def resume(self) -> None:
        """Do nothing, because the update resumes generation itself."""

    def destroy(self) -> None:
        """Do nothing, because no resources are held."""


class NodeWorker:
    """The `rollout_worker` of an AsyncGRPOTrainer: groups of sessions on a node, as rows for its queue.

    Every row of a session is trained once, with the advantage of its session (or of its lineage, if that has
    a reward of its own). A session that is not usable gives none. `dataset`: rows as for PolarnodeRollout;
    they are repeated forever. `samples`: sessions of a group. `groups`: how many are in progress at once.
    `estimator`: "grpo" is TRL's. How weights get to the node: see `WeightPusher`; pass `weight_transfer` to
    the trainer too.
    """

    def __init__(
        self,
        dataset: Sequence[Mapping[str, Any]],
        *,
        samples: int = 8,
        groups: int = 16,
        url: str | None = None,
        token: str | None = None,
        task: str | Path | Mapping[str, Any] | None = None,
        run: str | None = None,
        temperature: float = 1.0,
        estimator: Estimator = "grpo",
        weights: Transport = "disk",
        folder: str | Path | None = None,
        model: str | None = None,
        address: str | None = None,
        dtype: str | None = None,
        mode: UpdateMode = "in_place",
    ) -> None:
        self.settings = plugin_settings({"url": url, "token": token, "task": task, "run": run})
        self.weights = WeightPusher(
            settings=self.settings,
            transport=weights,
            folder=None if folder is None else Path(folder),
            model=model,
            address=address,
            dtype=dtype,
            mode=mode,
        )
        self.weight_transfer = NodeWeights(self.weights)
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._dataset, self._samples, self._groups = dataset, samples, groups
        self._sampling: dict[str, Json] = {"temperature": temperature}
        self._estimator: Estimator = estimator
        self._portal: AbstractContextManager[anyio.from_thread.BlockingPortal] | None = None
        self._work: Future[None] | None = None
        self._last_beat = time.monotonic()

    def start(self) -> None:
        """Begin the work. TRL calls this after the first weights are served."""
        self._portal = anyio.from_thread.start_blocking_portal()
        self._last_beat = time.monotonic()
        self._work = self._portal.__enter__().start_task_soon(self._run)

    def stop(self) -> None:
        """End the work, and cancel the tasks in progress on the node."""
        if self._portal is None or self._work is None:
            return
        self._work.cancel()
        portal, self._portal = self._portal, None
        portal.__exit__(None, None, None)

    def update_model_version(self, model_version: int) -> None:
        """Do nothing, because each token records the weights that sampled it."""

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error that ended the worker, or RuntimeError if its loop stands still."""
        if self._work is not None and self._work.done() and not self._work.cancelled():
            error = self._work.exception()
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise RuntimeError(f"rollouts on the node ended: {error}") from error
        if time.monotonic() - self._last_beat > stale_after_s:
            raise RuntimeError(f"rollouts on the node have stood still for {stale_after_s:.0f} s")

    async def _run(self) -> None:
        places = anyio.Semaphore(self._groups)
        async with NodeRollouts(self.settings) as rollouts, anyio.create_task_group() as tasks:
            tasks.start_soon(self._show_life)
            number = 0
            while True:
                for index in range(len(self._dataset)):
                    await places.acquire()
                    tasks.start_soon(self._one, rollouts, self._dataset[index], number, places)
                    number += 1

    async def _one(
        self, rollouts: NodeRollouts, row: Mapping[str, Any], number: int, places: anyio.Semaphore
    ) -> None:
        spec = task_of(self.settings, row, samples=self._samples, sampling=self._sampling)
        group = await rollouts.group(spec)
        unusable = sum(not member.usable for member in group.members) / max(len(group.members), 1)
        self.metrics_queue.put_nowait({"node/unusable": unusable})
        prompt = row.get("prompt", "")  # only for TRL's log
        for sample in samples_of(group, number, self.weights, self._estimator, prompt=prompt):
            self.rollout_buffer.put_nowait(sample)
        # TRL takes rows in another thread and signals nothing; what waits for it grows stale
        while self.rollout_buffer.qsize() > self._groups * self._samples:  # noqa: ASYNC110
            await anyio.sleep(BEAT_INTERVAL_S)
        places.release()

    async def _show_life(self) -> None:
        while True:
            self._last_beat = time.monotonic()
            await anyio.sleep(BEAT_INTERVAL_S)


def samples_of(
    group: Group, number: int, weights: WeightPusher, estimator: Estimator = "grpo", *, prompt: Any = ()
) -> list[Any]:
    """TRL's RolloutSamples of a group: each row of each usable session."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    advantages: dict[str, list[float]] = {}
    for row in training_rows([group], estimator=estimator):
        advantages.setdefault(row.session_id, []).append(row.advantage)
    fields = [
        each
        for trajectory in group.usable
        for each in rollout_samples(
            trajectory,
            advantage=advantages.get(trajectory.session_id, []),
            group_id=number,
            prompt=chat,
            number=weights.number,
            arrays="native",
        )
    ]
    return [RolloutSample(**each | {"enqueued_at": time.time()}) for each in fields]


# ── rows of a dataset ─────────────────────────────────────────────────────────


class _DatasetRows:
    """Finds the row of a prompt, because TRL passes only the prompt to a `rollout_func`."""

    def __init__(self, datasets: Iterable[Any]) -> None:
        self._rows: dict[str, tuple[Any, int]] = {}
        for dataset in datasets:
            for each in dataset.values() if isinstance(dataset, dict) else [dataset]:
                self._add(each)

    def row(self, prompt: Any) -> Mapping[str, Any]:
        place = self._rows.get(_key(prompt))
        found: Mapping[str, Any] = {"prompt": prompt} if place is None else place[0][place[1]]
        return found

    def _add(self, dataset: Any) -> None:
        names = set(getattr(dataset, "column_names", None) or ())
        if not names & TASK_COLUMNS:
            return
        if not hasattr(dataset, "__getitem__"):
            wanted = ", ".join(sorted(names & TASK_COLUMNS))
            raise Refused(
                f"a streaming dataset cannot have the columns {wanted}: TRL passes prompts alone,"
                " and their rows are found by prompt. Load the dataset whole, or leave the columns out",
                path="$.prompt",
            )
        for index, prompt in enumerate(dataset["prompt"]):
            known = self._rows.setdefault(_key(prompt), (dataset, index))
            if known != (dataset, index) and not _same_task(known[0][known[1]], dataset[index]):
                raise Refused(
                    f"two rows have the prompt {_key(prompt)[:MAX_PROMPT_CHARS]} and different tasks: TRL"
                    " passes"
                    " a rollout_func prompts alone, so make each prompt its task's own",
                    path="$.prompt",
                )


def _same_task(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return own_task(one) == own_task(other) and one.get(INSTRUCTION) == other.get(INSTRUCTION)


def _key(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=repr)
