"""What an acceptance expression may speak of: the columns of a trajectory, by name.

The rule for whoever edits it: a column that is added gets a line in COLUMNS and one in docs/offline-data.md; what a trajectory does not have is
None, never a made-up 0.
"""

from collections.abc import Mapping
from typing import Final

from polarnode.conversation import Json
from polarnode.records import Trajectory

COLUMNS: Final[Mapping[str, str]] = {
    "reward": "the evaluator's, or None",
    "outcome": "completed, timeout, failed, error, cancelled or interrupted",
    "status": "another word for outcome",
    "clock": "which budget fired, or None",
    "boundary": "whose fault an error was, or None",
    "exit_code": "the harness's, or None",
    "turns": "model calls that ended",
    "traces": "training sequences",
    "lineages": "different lines of conversation",
    "sampled_tokens": "tokens the model sampled",
    "trainable_tokens": "tokens that carry loss, over all traces",
    "longest": "tokens of the longest training sequence",
    "run_s": "seconds the harness ran",
    "harness": "its name",
    "model": "its name",
    "task_id": "the task's name in its source",
    "group_id": "the group's",
    "sample": "which of the task's samples, from 0",
    "metadata": "the task's own, as metadata['repo']",
    "metrics": "the session's, as metrics['refusals']; what the evaluator said is in metrics['evaluation']",
}


def facts_of(trajectory: Trajectory) -> dict[str, Json]:
    """The columns of one trajectory."""
    outcome = trajectory.outcome
    return {
        "reward": trajectory.reward,
        "outcome": outcome.status,
        "status": outcome.status,
        "clock": outcome.clock,
        "boundary": outcome.boundary,
        "exit_code": outcome.exit_code,
        "turns": len(trajectory.turns),
        "traces": len(trajectory.traces),
        "lineages": len({turn.lineage for turn in trajectory.turns}),
        "sampled_tokens": trajectory.sampled_tokens,
        "trainable_tokens": trajectory.trainable_tokens,
        "longest": max((len(trace.token_ids) for trace in trajectory.traces), default=0),
        "run_s": trajectory.timing.run_s,
        "harness": trajectory.harness,
        "model": trajectory.model,
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "sample": trajectory.sample_index,
        "metadata": dict(trajectory.metadata),
        "metrics": dict(trajectory.metrics),
    }
