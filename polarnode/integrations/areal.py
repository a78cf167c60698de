"""AReaL: a rollout workflow that runs a dataset's rows as tasks on a polarnode.

    trainer.train(
        workflow="polarnode.integrations.areal.PolarnodeWorkflow",
        workflow_kwargs={"task": "task.toml", "samples": 8},
    )

Contract: areal 1.0.4 and areal-project/AReaL cbff54d64 (areal/api/workflow_api.py,
areal/infra/workflow_executor.py, areal/infra/remote_inf_engine.py). One episode is one task of `samples`
sessions, so AReaL's own groups stay at one (`gconfig.n_samples: 1`): the node knows the group, and rewards
are compared by session, not by row (`reward_norm: null`).

AReaL counts its weights in numbers and names none in its updates; the node has names of its own. At the
beginning and the end of each episode the workflow reads both, and so learns which name is which number.
"""

import logging
from collections.abc import Mapping
from typing import Any, Final, Literal

from areal.api import RolloutWorkflow
from areal.infra import workflow_context
from areal.utils import stats_tracker
from attrs import define, field

from polarnode.client import Unreachable
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.groups import Estimator, Group
from polarnode.integrations.rollout_tasks import (
    NodeRollouts,
    SessionLost,
    plugin_settings,
    shared_rollouts,
    task_of,
)
from polarnode.trainers import areal

log = logging.getLogger(__name__)

EstimatorName = Estimator | Literal["none"]
ESTIMATORS: Final[tuple[EstimatorName, ...]] = ("grpo", "grpo_without_std", "leave_one_out", "none")


@define(eq=False)
class LearnedVersions:
    """AReaL's number of each of the node's weight versions, as far as the two were seen together."""

    numbers: dict[str, int] = field(factory=dict)

    def record_version(self, version: str, number: int) -> None:
        """Note that the node served `version` while AReaL was at `number`. AReaL counts on after the node
        serves the new weights, so the larger number is right.
        """
        self.numbers[version] = max(number, self.numbers.get(version, 0))

    async def look(self, engine: Any, rollouts: NodeRollouts) -> int:
        """Read which version the node serves, note it, and return AReaL's number of the weights."""
        number = int(engine.get_version())
        self.record_version((await rollouts.client.weights()).version, number)
        return number

    def number(self, version: str, earliest: int) -> int:
        """The number of a version. For a version that nobody named or saw it is `earliest`, AReaL's number
        when the episode began.
        """
        return self.numbers.get(version, earliest) if version else earliest


# What was learned of each node is kept here, because AReaL makes a new workflow for each training step.
_LEARNED_VERSIONS: Final[dict[str, LearnedVersions]] = {}


class PolarnodeWorkflow(RolloutWorkflow):  # type: ignore[misc]
    """Runs each row of AReaL's dataset as one task of `samples` sessions.

    * `url`, `token`, `task`, `run`, `patience_s`: see `plugin_settings`; POLARNODE_URL and so on instead.
    * `samples`: sessions of one row. `estimator`: how their rewards become advantages (docs/groups.md), or
      "none", which gives AReaL rewards, for its own normalisation over rows.
    * `rl_loss_weight`, `distill_loss_weight`: AReaL's, of rewards and of the teacher that the task's
      `carry.teacher` requests.
    * `temperature`, `top_p`, `max_tokens`: sampling of every turn. AReaL's actor divides logits by its own
      `temperature`, which must be the same.
    """

    def __init__(
        self,
        *,
        samples: int = 1,
        estimator: EstimatorName = "grpo",
        rl_loss_weight: float = 1.0,
        distill_loss_weight: float = 0.005,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_tokens: int | None = None,
        **node: Any,
    ) -> None:
        if estimator not in ESTIMATORS:
            raise Refused(
                f"estimator must be one of {', '.join(ESTIMATORS)}, not {estimator!r}", path="$.estimator"
            )
        if samples < 2 and estimator != "none":
            raise Refused(
                f"{samples} session has nothing to be compared with: set samples in workflow_kwargs and"
                ' n_samples: 1 in gconfig, or estimator "none" for rewards as they are',
                path="$.samples",
            )
        self.settings = plugin_settings(node)
        self.samples = samples
        self.weights = {"rl_loss_weight": rl_loss_weight, "distill_loss_weight": distill_loss_weight}
        self.estimator: Estimator | None = None if estimator == "none" else estimator
        self.sampling: Mapping[str, Json] = {
            "temperature": temperature,
            "top_p": top_p,
            "max_tokens": max_tokens,
        }

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        """Run the task of a row, and return the rows of its usable sessions as tensors. It returns None,
        which AReaL replaces, if no session is usable, the group is dropped, or the machine lost it. A reward
        of 0 is never made up.
        """
        spec = task_of(
            self.settings,
            data,
            samples=self.samples,
            sampling=self.sampling,
            evaluation=workflow_context.get().is_eval,
        )
        versions = _LEARNED_VERSIONS.setdefault(self.settings.url, LearnedVersions())
        rollouts = shared_rollouts(self.settings)
        try:
            earliest = await versions.look(engine, rollouts)
            group = await rollouts.group(spec)
            await versions.look(engine, rollouts)
        except (SessionLost, Unreachable) as error:
            log.warning("task %s is left out: %s", spec.task_id, error)
            return None
        for member in group.members:
            if member.reward is not None:
                stats_tracker.get(workflow_context.stat_scope()).scalar(reward=member.reward)
        return self._rows(group, versions, earliest)

    def _rows(self, group: Group, versions: LearnedVersions, earliest: int) -> dict[str, Any] | None:
        if not group.usable:
            log.warning("task %s gives nothing to train: %s", group.task_id, group.reason or _why(group))
            return None
        return areal.rollout(
            group,
            number=lambda version: versions.number(version, earliest),
            estimator=None if workflow_context.get().is_eval else self.estimator,
            arrays="native",
            **self.weights,
        )


def _why(group: Group) -> str:
    return "; ".join(f"{member.session_id}: {member.why}" for member in group.members if member.why)
