"""SGLang's weight updates with a way back, in each of its scheduler processes.

SGLang's own updates leave a model half-changed when a load fails, and an error in one ends the scheduler.
Here everything is checked before a tensor is touched, the old weights are kept until the commit, and nothing
is raised. Every step is ordered by `control.py` through SGLang's check_weights (its one control call with
free text) and answers for all ranks. The module is imported in scheduler processes only, because torch and
sglang are imported at the top.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]
import torch
from sglang.srt.managers.io_struct import (
    CheckWeightsReqInput,
    CheckWeightsReqOutput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightFromDiskReqOutput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromDistributedReqOutput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightsFromTensorReqOutput,
)
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.model_executor.model_runner_components.weight_updater import LocalSerializedTensor
from sglang.srt.runtime_context import get_model, get_parallel, get_spec
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

from polarnode.engine.checkpoints import (
    BadCheckpoint,
    Kind,
    Manifest,
    check_folder,
    check_tensors,
    check_whole,
    draft_tensors,
    manifest,
)
from polarnode.engine.embedded.control import OURS

Named = Sequence[tuple[str, torch.Tensor]]
Outcome = tuple[bool, str]
# The main memory that must be free, as a multiple of the copy's bytes: otherwise the kernel may kill the
# engine for lack of memory.
SPARE = 1.1
TYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
}


class KeptTensor(NamedTuple):
    """A tensor of the model and a copy of its old value."""

    place: torch.Tensor
    copy: torch.Tensor


class Keeper(SchedulerWeightUpdaterManager):  # type: ignore[misc]  # sglang is not typed
    """Replaces SGLang's weight updater in a scheduler. Everything runs in the scheduler's own thread, between
    two batches.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kept: list[KeptTensor] = []
        self.loaded: set[str] = set()
        self.opened = False  # whether the runners expect tensors
        # A draft model with a checkpoint of its own is another model, and is never given the target's
        # tensors.
        self.follows = get_spec().speculative_draft_model_path in (None, get_model().model_path)
        self.path = self._all_updaters()[0].model_config.model_path
        self.model: Manifest = manifest(Path(self.path))
        self.drafts = draft_tensors(self.model)

    # ── orders of the host ────────────────────────────────────────────────────

    def check_weights(self, recv_req: CheckWeightsReqInput) -> CheckWeightsReqOutput:
        if not recv_req.action.startswith(OURS):
            return super().check_weights(recv_req)
        action, _, ranks = recv_req.action.removeprefix(OURS).partition(" ")
        steps = {
            "keep": lambda: self._keep(int(ranks)),
            "check": self._check,
            "restore": self._restore,
            "drop": self._drop,
        }
        ok, text = self._run_on_ranks(steps[action])
        return CheckWeightsReqOutput(success=ok, message=text)

    def update_weights_from_disk(
        self, recv_req: UpdateWeightFromDiskReqInput
    ) -> UpdateWeightFromDiskReqOutput:
        def load() -> None:
            path = Path(recv_req.model_path)
            check_folder(path, self.model)
            followers = self._draft_updaters() if self.drafts & manifest(path).keys() else []
            for updater in (*self._target_updaters(), *followers):
                _require(updater.update_weights_from_disk(recv_req.model_path, recv_req.load_format))
            self.loaded |= self.model.keys()

        ok, text = self._run_on_ranks(load)
        return UpdateWeightFromDiskReqOutput(success=ok, message=text)

    def update_weights_from_tensor(
        self, recv_req: UpdateWeightsFromTensorReqInput
    ) -> UpdateWeightsFromTensorReqOutput:
        def load() -> None:
            self._load(
                self._tensors(
                    self.tp_worker.deserialize_own_rank(recv_req.serialized_named_tensors),
                    recv_req.load_format,
                )
            )

        ok, text = self._run_on_ranks(load)
        return UpdateWeightsFromTensorReqOutput(success=ok, message=text)

    def update_weights_from_distributed(
        self, recv_req: UpdateWeightsFromDistributedReqInput
    ) -> UpdateWeightsFromDistributedReqOutput:
        """Receive before checking, because the sender would hang in a broadcast without a receiver."""

        def load() -> None:
            received = self._all_updaters()[0].receive_weights_from_distributed(
                names=recv_req.names,
                dtypes=recv_req.dtypes,
                shapes=recv_req.shapes,
                group_name=recv_req.group_name,
                load_format=recv_req.load_format,
            )
            self._load(received)

        ok, text = self._run_on_ranks(load)
        return UpdateWeightsFromDistributedReqOutput(success=ok, message=text)

    # ── the steps ─────────────────────────────────────────────────────────────

    def _keep(self, ranks: int) -> None:
        self._drop()
        places = self._places()
        size = ranks * sum(place.nbytes for place in places)  # the other ranks look at the same memory now
        if (free := psutil.virtual_memory().available) < size * SPARE:
            raise BadCheckpoint(
                f"a way back takes {size / 1e9:.1f} GB of main memory and {free / 1e9:.1f} GB are free: free"
                " some"
            )
        self.kept = [KeptTensor(place, place.detach().to("cpu", copy=True)) for place in places]

    def _check(self) -> None:
        if self.model:
            check_whole(self.loaded | {"lm_head.weight"}, self.model)
        self._close()

    def _restore(self) -> None:
        """Restore the old weights in place, because captured CUDA graphs read these very addresses."""
        self._close()
        if not self.kept:
            raise BadCheckpoint("no old weights are kept to roll back to")
        current = {place.data_ptr() for place in self._places()}
        for place, copy in self.kept:
            if place.data_ptr() not in current:
                raise BadCheckpoint("a load replaced tensors of the model, which cannot be undone in place")
            with torch.no_grad():
                place.copy_(copy)
        for updater in self._all_updaters():
            updater.model_config.model_path = self.path
        self._drop()

    def _drop(self) -> None:
        self.kept, self.loaded = [], set()
        self.path = self._all_updaters()[0].model_config.model_path

    # ── inside ────────────────────────────────────────────────────────────────

    def _load(self, named: Named) -> None:
        found = {
            name: Kind(tuple(tensor.shape), TYPES.get(tensor.dtype, str(tensor.dtype)))
            for name, tensor in named
        }
        if self.model:
            check_tensors(found, self.model)
        if not self.opened:
            self.opened = True
            for updater in self._all_updaters():
                updater.begin_weight_update()
        known = [each for each in named if not self.model or each[0] in self.model]
        for updater in self._target_updaters():
            _require(updater.load_weights_from_distributed(known))
        # Without tensors of its own a draft keeps its old ones. It may guess worse, and nothing else changes.
        if drafted := [each for each in known if each[0] in self.drafts]:
            for updater in self._draft_updaters():
                _require(updater.load_weights_from_distributed(drafted))
        self.loaded |= found.keys()

    def _tensors(self, payload: Any, layout: str | None) -> Named:
        device = torch.device(self._all_updaters()[0].device)
        if layout == "flattened_bucket":
            bucket = FlattenedTensorBucket(
                flattened_tensor=payload["flattened_tensor"].to(device), metadata=payload["metadata"]
            )
            return list(bucket.reconstruct_tensors())
        rank = get_parallel().tp_rank
        return [
            (name, (each.get(rank) if isinstance(each, LocalSerializedTensor) else each).to(device))
            for name, each in payload
        ]

    def _close(self) -> None:
        if self.opened:
            self.opened = False
            for updater in self._all_updaters():
                updater.end_weight_update(run_post_load=False)

    def _all_updaters(self) -> list[Any]:
        """The updaters of every model that an update may change, the target's first."""
        return [*self._target_updaters(), *self._draft_updaters()]

    def _target_updaters(self) -> list[Any]:
        return [runner.weight_updater for role, runner in self._select_runners() if role == "target"]

    def _draft_updaters(self) -> list[Any]:
        """The updaters of the drafts that the target's own checkpoint holds."""
        drafts = [runner.weight_updater for role, runner in self._select_runners() if role != "target"]
        return drafts if self.follows else []

    def _places(self) -> list[torch.Tensor]:
        """Every tensor that a forward pass reads, each memory once, because tied weights are two names for
        one memory.
        """
        models = [updater.get_model() for updater in self._all_updaters()]
        found = [each.data for model in models for each in (*model.parameters(), *model.buffers())]
        return list(
            {(each.data_ptr(), each.shape, each.stride()): each for each in found if each.numel()}.values()
        )

    def _run_on_ranks(self, step: Callable[[], None]) -> Outcome:
        """Run a step, and return whether every rank succeeded, and the reason if one did not. Nothing is
        raised, because an error in a scheduler ends it.
        """
        try:
            step()
            outcome: Outcome = (True, "")
        except Exception as error:  # an isolation edge: a bad payload must not end an engine that serves
            outcome = (
                False,
                str(error) if isinstance(error, BadCheckpoint) else f"{type(error).__name__}: {error}",
            )
        ranks = torch.distributed.get_world_size(group=self.tp_cpu_group)
        if ranks == 1:
            return outcome
        outcomes: list[Any] = [None] * ranks
        torch.distributed.all_gather_object(outcomes, outcome, group=self.tp_cpu_group)
        return next((each for each in outcomes if not each[0]), outcome)


def _require(outcome: Outcome) -> None:
    if not outcome[0]:
        raise BadCheckpoint(outcome[1])
