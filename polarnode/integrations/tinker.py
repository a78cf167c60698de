"""A policy-gradient loop for Tinker (0.38, tinker-cookbook 0.6.1): it turns sessions of a node into optimizer
steps in Tinker's cloud.

    from polarnode.integrations.tinker import adapter_weights, train

    weights = adapter_weights(settings, "Qwen/Qwen3-8B")  # settings whose task names an adapter
    train(training_client, rows, weights=weights, steps=50, settings=settings)

Tinker trains adapters in its own cloud. The caller gives `weights`, which brings each step's adapter to the
node: `adapter_weights` makes one. Nothing here imports tinker or its cookbook before it is used.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any, Final, Protocol

from attrs import field, frozen

from polarnode.client import PolarnodeClient
from polarnode.client.tensors import push_adapter
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.groups import Estimator, Group
from polarnode.groups import rows_of as training_rows
from polarnode.integrations.rollout_tasks import (
    PluginSettings,
    plugin_settings,
    rollout_groups,
    task_of,
)
from polarnode.trainers.tinker import datums

logger = logging.getLogger(__name__)

# Brings the weights after so many steps from Tinker to the node, and returns when the node serves them.
ServeWeights = Callable[[Any, int], object]
# The cookbook's rate for adapters is of this size; the other numbers of Adam are the cookbook's.
LEARNING_RATE: Final = 4e-5
# Tinker's losses that are products with an advantage. Without an advantage their gradient is 0.
POLICY_LOSSES: Final = frozenset({"importance_sampling", "ppo", "cispo", "dro"})
# Seconds that Tinker keeps an export. Nobody needs it once it is on the node, and a download takes minutes.
EXPORT_TTL_S: Final = 3600
ADAM_PARAMETERS: Final = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


class Future(Protocol):
    """Tinker's APIFuture."""

    def result(self) -> Any: ...


class TrainingClient(Protocol):
    """The part of `tinker.TrainingClient` that is used here."""

    def forward_backward(
        self, data: list[Any], loss_fn: Any, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> Future: ...

    def optim_step(self, optim_params: Any) -> Future: ...

    def save_weights_external(self, name: str, ttl_seconds: int | None = None) -> Future: ...


@frozen(kw_only=True)
class Step:
    """The result of a step. `rows` and `tokens` were trained; `unusable` members of its groups were not.
    `reward` is the mean of usable sessions, None without one.

    `worst`: the largest difference of a recorded logprob from Tinker's own, in nats. On the weights that
    sampled it is as small as two engines' arithmetic differs; more means that the node does not serve what
    Tinker trains. `metrics` are Tinker's.
    """

    number: int
    reward: float | None
    sessions: int
    unusable: int
    rows: int
    tokens: int
    worst: float
    metrics: Mapping[str, float] = field(factory=dict)


def train(
    client: TrainingClient,
    dataset: Sequence[Mapping[str, Any]],
    *,
    weights: ServeWeights,
    steps: int,
    prompts: int = 8,
    samples: int = 8,
    loss_fn: str = "importance_sampling",
    loss_fn_config: Mapping[str, float | str] | None = None,
    estimator: Estimator = "grpo_without_std",
    kl_penalty_coef: float = 0.0,
    adam: Any = None,
    temperature: float = 1.0,
    settings: PluginSettings | None = None,
) -> Iterator[Step]:
    """Train, and yield after each step. A step takes the next `prompts` rows of the dataset, which is
    repeated forever, as tasks of `samples` sessions.

    * `weights(client, n)` serves the weights after `n` steps on the node; it is called with 0 first, so that
      the weights that sample are those that are trained, and after each step that changed them.
    * `estimator`: "grpo_without_std" is the cookbook's. `adam`: a `tinker.AdamParams`; the cookbook's numbers
      if None.
    * `kl_penalty_coef`: how much the reverse KL to the teacher of the tasks (`carry.teacher`) counts beside
      rewards; the cookbook's is 1.
    * `settings`: of `plugin_settings`; from POLARNODE_URL, POLARNODE_TOKEN, POLARNODE_TASK and POLARNODE_RUN
      if None.

    Sessions that are not usable are not trained, and do not count as a reward of 0. A step without an
    advantage, because it has no row or its groups are flat, takes no optimizer step: Adam would move the
    weights by its momentum.
    """
    if not dataset:
        raise Refused("the dataset has no row", path="$.dataset")
    # Tinker computes logprobs at temperature 1
    if temperature != 1.0 and loss_fn != "cross_entropy":
        logger.warning("Tinker's logprobs are at temperature 1, and sessions are sampled at %s", temperature)
    where = settings or plugin_settings()
    rows = (dataset[number % len(dataset)] for number in count())
    sampling: dict[str, Json] = {"temperature": temperature}
    weights(client, 0)
    for number in range(1, steps + 1):
        specs = [task_of(where, row, samples=samples, sampling=sampling) for row in islice(rows, prompts)]
        groups = rollout_groups(where, specs)
        data = data_of(groups, estimator=estimator, kl_penalty_coef=kl_penalty_coef)
        if not any(_can_teach(each, loss_fn) for each in data):
            logger.warning("step %d has nothing to train: weights stay as they are", number)
            yield _step(number, groups, data, None, {})
            continue
        # Both are requested before either is awaited, so that Tinker computes them in one of its cycles.
        forward = client.forward_backward(data, loss_fn, loss_fn_config)
        optimizer = client.optim_step(adam or _default_adam())
        output, stepped = forward.result(), optimizer.result()
        weights(client, number)
        yield _step(number, groups, data, output, {**output.metrics, **(stepped.metrics or {})})


def _can_teach(datum: Any, loss_fn: Any) -> bool:
    """Whether a Datum can move the weights. A user's own loss may not need an advantage."""
    if loss_fn not in POLICY_LOSSES:
        return True
    return bool((datum.loss_fn_inputs["advantages"].to_numpy() != 0).any())


def adapter_weights(settings: PluginSettings, base_model: str) -> ServeWeights:
    """The `weights` of `train` that serve Tinker's adapter itself: exported, downloaded and written as PEFT's
    by the cookbook, pushed over HTTP as a version of the adapter that the tasks of `settings` name.
    `base_model` is the name or folder of what the node serves.
    """
    name = settings.template.get("adapter")
    if not isinstance(name, str) or not name:
        raise Refused("the task names no adapter: give it one, such as its run's name", path="$.task.adapter")
    node = PolarnodeClient(settings.url, token=settings.token, patience_s=settings.patience_s)
    mark = token_hex(4)  # a version names one set of weights forever, also when a run begins again

    def serve(client: Any, step: int) -> None:
        from safetensors.torch import load_file
        from tinker_cookbook import weights  # type: ignore[import-not-found]

        version = f"{name}-{mark}-{step}"
        # The cookbook cannot download a sampler's checkpoint, but it can download an export.
        saved = client.save_weights_external(version, ttl_seconds=EXPORT_TTL_S).result()
        with TemporaryDirectory() as folder:
            found = weights.download(tinker_path=saved.path, output_dir=f"{folder}/tinker")
            peft = Path(folder, "peft")
            weights.build_lora_adapter(base_model=base_model, adapter_path=found, output_path=str(peft))
            config = json.loads((peft / "adapter_config.json").read_text())
            tensors = load_file(peft / "adapter_model.safetensors")
            push_adapter(node, name, version, tensors, config=config)

    return serve


def data_of(
    groups: Sequence[Group], *, estimator: Estimator = "grpo_without_std", kl_penalty_coef: float = 0.0
) -> list[Any]:
    """The `tinker.Datum`s of a batch: every row of every usable session once, with its advantage on sampled
    tokens and 0 elsewhere.

    Tinker sums the loss over all tokens of a batch, so that each counts alike.
    """
    from tinker.types import Datum, ModelInput, TensorData  # type: ignore[import-not-found]

    advantages: dict[str, list[float]] = {}
    for row in training_rows(groups, estimator=estimator):
        advantages.setdefault(row.session_id, []).append(row.advantage)
    fields = [
        each
        for group in groups
        for trajectory in group.usable
        for each in datums(
            trajectory,
            advantage=advantages.get(trajectory.session_id, []),
            kl_penalty_coef=kl_penalty_coef,
            mask=False,  # forward_backward refuses a mask
            arrays="native",
        )
    ]
    return [
        Datum(
            model_input=ModelInput.model_validate(each["model_input"]),
            loss_fn_inputs={name: TensorData(**tensor) for name, tensor in each["loss_fn_inputs"].items()},
        )
        for each in fields
    ]


def _step(
    number: int, groups: Sequence[Group], data: Sequence[Any], output: Any, metrics: Mapping[str, float]
) -> Step:
    members = [member for group in groups for member in group.members]
    rewards = [trajectory.reward for group in groups for trajectory in group.usable]
    found = [reward for reward in rewards if reward is not None]
    trained = [each.loss_fn_inputs["advantages"].to_numpy() != 0 for each in data]
    return Step(
        number=number,
        reward=sum(found) / len(found) if found else None,
        sessions=len(members),
        unusable=len(members) - len(rewards),
        rows=len(data),
        tokens=int(sum(each.sum() for each in trained)),
        worst=_worst(data, output) if output is not None else 0.0,
        metrics=metrics,
    )


def _worst(data: Sequence[Any], output: Any) -> float:
    """The largest difference over sampled tokens, because only they have a recorded logprob. A token that was
    certain has a logprob of 0 on both sides.
    """
    worst = 0.0
    for datum, computed in zip(data, output.loss_fn_outputs, strict=True):
        recorded = datum.loss_fn_inputs["logprobs"].to_numpy()
        away = abs(computed["logprobs"].to_numpy() - recorded)[recorded != 0]
        worst = max(worst, float(away.max(initial=0.0)))
    return worst


def _default_adam() -> Any:
    from tinker.types import AdamParams

    return AdamParams(learning_rate=LEARNING_RATE, **ADAM_PARAMETERS)
