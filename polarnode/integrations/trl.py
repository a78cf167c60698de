"""A stock TRL trainer (1.16) on a node: completions, rewards and weights.

    from polarnode.integrations.trl import PolarnodeRollout, node_reward

    GRPOTrainer(model, rollout_func=PolarnodeRollout(task="task.toml"), reward_funcs=node_reward, …)

For `AsyncGRPOTrainer` of trl.experimental there are `NodeWorker` and `NodeWeights`. Nothing here imports TRL,
transformers or torch before it is used.
"""

import json
import logging
import queue
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.from_thread
from attrs import define, field

from polarnode.client import PolarnodeClient
from polarnode.client.tensors import buckets
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.core.task import TaskSpec
from polarnode.core.weights import UpdateMode
from polarnode.groups import Estimator, Group
from polarnode.groups import rows_of as training_rows
from polarnode.integrations.rollout_tasks import (
    EXTRA_COLUMNS,
    TASK_KEY,
    NodeRollouts,
    PluginSettings,
    plugin_settings,
    rollout_groups,
    task_of,
)
from polarnode.trainers.rows import Absent
from polarnode.trainers.trl import Several, rollout_members, rollout_samples

if TYPE_CHECKING:
    from concurrent.futures import Future

logger = logging.getLogger(__name__)

FOLDER: Final = "polarnode-weights"  # below the trainer's output_dir
PROMPT_BYTES: Final = 200  # of a prompt in an error message
BEAT_S: Final = (
    1.0  # how often a worker shows that its loop runs, and looks whether the trainer has taken rows
)


# ── weights ───────────────────────────────────────────────────────────────────


@define(kw_only=True)
class Weights:
    """Serves a trainer's weights on a node, each under a new version.

    `folder`: checkpoints are written below it and read by the node, which must see it under the same absolute
    path; the last one is kept, because a node that restarts reads it again. None sends handles of the tensors
    instead, for a trainer on the node's machine: no disk, but a node that restarts waits for the next push.
    `dtype` ("bfloat16" …) is what tensors are cast to: the node takes those of its own checkpoint only.
    """

    settings: PluginSettings
    folder: Path | None
    dtype: str | None = None
    mode: UpdateMode = "in_place"
    # versions name one set of weights for ever: a run that is repeated needs names of its own
    mark: str = field(factory=lambda: token_hex(4), init=False)
    _last: Path | None = field(default=None, init=False)

    def version(self, number: int) -> str:
        return f"{self.settings.run}-{self.mark}-{number}"

    def number(self, version: str) -> int:
        """The number of a version of this run; 0 for what was served before it."""
        begin, _, number = version.rpartition("-")
        return int(number) if begin == f"{self.settings.run}-{self.mark}" else 0

    def push(self, number: int, model: Any, state: Mapping[str, Any] | None = None) -> None:
        """Serve a model under this number; `state` are its whole tensors by name, its own if None. Returns
        when they are served.
        """
        whole = model.state_dict() if state is None else state
        cast = {name: self._cast(tensor) for name, tensor in whole.items()}
        if self.folder is None:
            self.send(number, _untied(model, cast))
            return
        folder = (self.folder / self.version(number)).absolute()
        model.save_pretrained(folder, state_dict=cast)
        self._client().update_weights(self.version(number), path=folder, mode=self.mode)
        if self._last is not None:
            shutil.rmtree(self._last, ignore_errors=True)
        self._last = folder

    def send(self, number: int, named: Iterable[tuple[str, Any]]) -> None:
        """Serve tensors by handle, made while they are sent. The trainer must be on the node's machine."""
        pairs = ((name, self._cast(tensor)) for name, tensor in named)
        self._client().push_weights(self.version(number), buckets(pairs), mode=self.mode)

    def _cast(self, tensor: Any) -> Any:
        import torch

        same = self.dtype is None or not tensor.is_floating_point()
        return tensor if same else tensor.to(getattr(torch, self.dtype or ""))

    def _client(self) -> PolarnodeClient:
        given = self.settings
        return PolarnodeClient(given.url, token=given.token, patience_s=given.patience_s)


def _untied(model: Any, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The tensors that a checkpoint has: of tied ones the first alone."""
    named = model.named_parameters
    again = {name for name, _ in named(remove_duplicate=False)} - {name for name, _ in named()}
    return ((name, tensor) for name, tensor in state.items() if name not in again)


# ── GRPOTrainer ───────────────────────────────────────────────────────────────


class PolarnodeRollout:
    """The `rollout_func` of a GRPOTrainer: each prompt is a task on a node, and each step's weights are
    served before they are sampled from.

    * `url`, `token`, `task` (a task file, or a mapping), `run`: the node and what all tasks have in common;
      POLARNODE_URL, POLARNODE_TOKEN, POLARNODE_TASK and POLARNODE_RUN if not given. A row of the dataset may
      add to its task in a column `polarnode`; its prompt is the instruction.
    * `weights`: "disk" writes a checkpoint below `folder` (the trainer's output_dir if not given) for each
      rollout; "tensor" sends handles, for a node on this machine; "none" pushes nothing.
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
        weights: str = "disk",
        folder: str | Path | None = None,
        dtype: str | None = None,
        several: Several = "last",
        importance_sampling: bool = False,
    ) -> None:
        if weights not in ("disk", "tensor", "none"):
            raise Refused(f"weights={weights!r}: use disk, tensor or none", path="$.weights")
        given = {"url": url, "token": token, "task": task, "run": run}
        self.settings = plugin_settings(given)
        self.several = several
        self._importance_sampling = importance_sampling
        self._how, self._folder, self._dtype = weights, folder, dtype
        self._weights: Weights | None = None
        self._pushed: int | None = None
        self._columns: _Columns | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """What TRL calls. Every process of a trainer calls it, at the same step, with its own prompts."""
        if self._columns is None:
            self._begin(trainer)
        self.push(trainer)
        groups = rollout_groups(self.settings, list(self._specs(prompts, trainer)))
        absent = Absent(token_id=_pad_token(trainer))
        found = [rollout_members(group, absent=absent, several=self.several) for group in groups]
        return {name: [value for each in found for value in each[name]] for name in found[0]}

    def push(self, trainer: Any) -> None:
        """Serve the trainer's weights, unless they are served already. A collective: every process calls
        it.
        """
        step = trainer.state.global_step
        if self._how == "none" or step == self._pushed:
            return
        # gathers shards of FSDP and of DeepSpeed's stage 3, and raises if they cannot be gathered
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        if trainer.accelerator.is_main_process:
            if self._weights is None:
                folder = Path(self._folder or Path(trainer.args.output_dir) / FOLDER)
                self._weights = Weights(
                    settings=self.settings, folder=folder if self._how == "disk" else None, dtype=self._dtype
                )
            self._weights.push(step, trainer.accelerator.unwrap_model(trainer.model_wrapped), state)
        trainer.accelerator.wait_for_everyone()  # nobody samples before the weights are served
        self._pushed = step

    def _begin(self, trainer: Any) -> None:
        """Refuse what cannot be right, before anything is sampled."""
        if self._how != "none" and hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config"):
            raise Refused(
                "this trainer trains an adapter, and a node takes whole weights: leave peft_config out, or"
                " merge and push them yourself and pass weights='none'",
                path="$.weights",
            )
        self._columns = _Columns((trainer.train_dataset, trainer.eval_dataset))
        if self._how != "none":
            trainer.add_callback(_last_push(self, trainer))
        if self._importance_sampling:
            _read_recorded_logprobs(trainer)

    def _specs(self, prompts: Sequence[Any], trainer: Any) -> Iterator[TaskSpec]:
        """Equal prompts that stand together are the samples of one task, up to the size of a group."""
        assert self._columns is not None
        training = trainer.model.training
        size = trainer.num_generations if training else trainer.num_generations_eval
        for _, same in groupby(prompts, key=_key):
            alike = list(same)
            for start in range(0, len(alike), size):
                count = min(size, len(alike) - start)
                row = self._columns.row(alike[0])
                yield task_of(self.settings, row, samples=count, sampling=_sampling(trainer.args))


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

    TRL's log gets the fraction of such sessions, and the rows per session for which it has no room.
    """
    if log_metric is not None:
        log_metric("polarnode/unusable", sum(unusable) / len(unusable))
        log_metric("polarnode/rows_left_out", sum(rows_left_out) / len(rows_left_out))
    return list(reward)


def _sampling(args: Any) -> dict[str, Json]:
    """The trainer's sampling. Its logprobs are at its temperature, so the node must sample at that one."""
    found: dict[str, Json] = {"temperature": args.temperature}
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    return found | {
        name: getattr(args, name) for name, value in neutral.items() if getattr(args, name) != value
    }


def _pad_token(trainer: Any) -> int:
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    return int(tokenizer.pad_token_id)


def _last_push(rollout: PolarnodeRollout, trainer: Any) -> Any:
    """Serves the last step's weights too, which no rollout follows."""
    from transformers import TrainerCallback

    class LastPush(TrainerCallback):  # type: ignore[misc]
        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            rollout.push(trainer)

    return LastPush()


class _NoEngine:
    """Stands where TRL 1.16 keeps its vLLM."""

    def sync_weights(self) -> None:
        """The rollout has pushed them."""


def _read_recorded_logprobs(trainer: Any) -> None:
    if trainer.use_vllm:
        raise Refused("importance_sampling=True is for a trainer without use_vllm: the node samples")
    trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, _NoEngine(), -1


# ── AsyncGRPOTrainer ──────────────────────────────────────────────────────────


class NodeWeights:
    """The `weight_transfer` of an AsyncGRPOTrainer: tensors go to the node as TRL streams them.

    By handle, so the trainer's main process must be on the node's machine. `mode`: what happens to turns in
    progress. Versions are counted as TRL counts its `model_version`.
    """

    def __init__(
        self,
        *,
        url: str | None = None,
        token: str | None = None,
        run: str | None = None,
        dtype: str | None = None,
        mode: UpdateMode = "in_place",
    ) -> None:
        settings = plugin_settings({"url": url, "token": token, "run": run})
        self.weights = Weights(settings=settings, folder=None, dtype=dtype, mode=mode)
        self.sent = 0

    def init_weight_transfer(self) -> None:
        """Nothing to set up."""

    def pause(self) -> None:
        """The update holds generation itself, for as long as it must."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        self.weights.send(self.sent + 1, iterator)
        self.sent += 1

    def resume(self) -> None:
        """Done by the update."""

    def destroy(self) -> None:
        """Nothing is held."""


class NodeWorker:
    """The `rollout_worker` of an AsyncGRPOTrainer: groups of sessions on a node, as rows for its queue.

    Every row of a session is trained once, with the advantage of its session (or of its lineage, if that has
    a reward of its own). A session that is not usable gives none. `dataset`: rows as for PolarnodeRollout;
    they are repeated for ever. `samples`: sessions of a group. `groups`: how many are in progress at once.
    `estimator`: "grpo" is TRL's. Pass its `weights` as the trainer's `weight_transfer`.
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
        dtype: str | None = None,
        estimator: Estimator = "grpo",
    ) -> None:
        self.settings = plugin_settings({"url": url, "token": token, "task": task, "run": run})
        self.weights = NodeWeights(url=url, token=token, run=run, dtype=dtype)
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._dataset, self._samples, self._groups = dataset, samples, groups
        self._sampling: dict[str, Json] = {"temperature": temperature}
        self._estimator: Estimator = estimator
        self._portal: AbstractContextManager[anyio.from_thread.BlockingPortal] | None = None
        self._work: Future[None] | None = None
        self._beat = time.monotonic()

    def start(self) -> None:
        """Begin. TRL calls it after the first weights are served."""
        self._portal = anyio.from_thread.start_blocking_portal()
        self._beat = time.monotonic()
        self._work = self._portal.__enter__().start_task_soon(self._run)

    def stop(self) -> None:
        """End, and cancel the tasks in progress on the node."""
        if self._portal is None or self._work is None:
            return
        self._work.cancel()
        portal, self._portal = self._portal, None
        portal.__exit__(None, None, None)

    def update_model_version(self, model_version: int) -> None:
        """Nothing to do: each token records the weights that sampled it."""

    def check_health(self, stale_after_s: float) -> None:
        """Raise what ended the work, or RuntimeError if its loop stands still."""
        if self._work is not None and self._work.done() and not self._work.cancelled():
            error = self._work.exception()
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise RuntimeError(f"rollouts on the node ended: {error}") from error
        if time.monotonic() - self._beat > stale_after_s:
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
        for sample in samples_of(group, number, self.weights.weights, self._estimator, prompt=row["prompt"]):
            self.rollout_buffer.put_nowait(sample)
        unusable = sum(not member.usable for member in group.members) / max(len(group.members), 1)
        self.metrics_queue.put_nowait({"polarnode/unusable": unusable})
        # TRL takes rows in another thread and signals nothing; what waits for it grows stale
        while self.rollout_buffer.qsize() > self._groups * self._samples:  # noqa: ASYNC110
            await anyio.sleep(BEAT_S)
        places.release()

    async def _show_life(self) -> None:
        while True:
            self._beat = time.monotonic()
            await anyio.sleep(BEAT_S)


def samples_of(
    group: Group, number: int, weights: Weights, estimator: Estimator = "grpo", *, prompt: Any = ()
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


class _Columns:
    """Finds the row of a prompt: TRL passes a `rollout_func` nothing else of it."""

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
        if not names & {TASK_KEY, *EXTRA_COLUMNS}:
            return
        if not hasattr(dataset, "__getitem__"):
            raise Refused(
                f"a streaming dataset cannot have the column {TASK_KEY}: TRL passes a rollout_func prompts"
                " alone, and their rows are found by prompt. Load the dataset whole",
                path=f"$.{TASK_KEY}",
            )
        for index, prompt in enumerate(dataset["prompt"]):
            known = self._rows.setdefault(_key(prompt), (dataset, index))
            if known != (dataset, index) and not _same_task(known[0][known[1]], dataset[index]):
                raise Refused(
                    f"two rows have the prompt {_key(prompt)[:PROMPT_BYTES]} and different tasks: TRL passes"
                    " a rollout_func prompts alone, so make each prompt its task's own",
                    path="$.prompt",
                )


def _same_task(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(name) == other.get(name) for name in (TASK_KEY, *EXTRA_COLUMNS))


def _key(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=repr)
