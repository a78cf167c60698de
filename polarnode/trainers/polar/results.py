"""A trajectory as Polar's SessionResult, field by field.

The rule for whoever edits it: Polar's own classes read this, and `timing` forbids what it does not know, so that there are its four numbers
and no more. A session that ran out of time has its rows and its reward here like any other; Polar's own would have none.
"""

from collections.abc import Mapping

from polarnode.conversation import Json
from polarnode.records import Outcome, Timing, Trajectory
from polarnode.tasks import TaskSpec
from polarnode.trainers.polar.origin import Origin, origin_of, told
from polarnode.trainers.polar.traces import trace_json
from polarnode.trainers.polar.words import STATUSES, SessionWord, error_text
from polarnode.wire import plain

SCHEDULING = ("group_id", "policy_version", "rollout_step")  # what bridges stamp on a task and look for in its results
MAX_STEPS = "max_steps"  # how forks of Polar say that it was the budget of calls that ended a session: bridges train such a one


def session_result(trajectory: Trajectory, spec: TaskSpec | None) -> dict[str, Json]:
    """A session that is over. `spec` is its task's; None where it has none."""
    outcome, origin, metadata = trajectory.outcome, origin_of(trajectory.metadata), told(trajectory.metadata)
    whose: dict[str, Json] = {
        "session_id": origin.session_id or trajectory.session_id,
        "task_id": origin.task_id or trajectory.task_id,
    }
    return {
        **whose,
        "status": STATUSES[outcome.status],
        "trajectory": _trajectory_json(trajectory, spec, whose, metadata),
        "timing": _timing_json(trajectory.timing),
        "node_id": trajectory.node,
        "error": error_text(outcome),
        "metadata": {**metadata, **_reason(outcome), "polarnode": _ours(trajectory, origin)},
    }


def missing_result(session_id: str, task_id: str, outcome: Outcome, metadata: Mapping[str, Json], node: str) -> dict[str, Json]:
    """A session whose trajectory is not kept any more: how it ended, and no rows."""
    status: SessionWord = STATUSES[outcome.status]
    origin, error = origin_of(metadata), "its trajectory went when the node's journal was over its retention"
    return {
        "session_id": origin.session_id or session_id,
        "task_id": origin.task_id or task_id,
        "status": status,
        "trajectory": {"status": status, "metadata": {}, "traces": [], "error": error},
        "timing": _timing_json(Timing()),
        "node_id": node,
        "error": error,
        "metadata": {**told(metadata), "polarnode": {"session_id": session_id, "task_id": task_id, "outcome": plain(outcome)}},
    }


def _trajectory_json(trajectory: Trajectory, spec: TaskSpec | None, whose: dict[str, Json], metadata: dict[str, Json]) -> dict[str, Json]:
    turns = {turn.index: turn for turn in trajectory.turns}
    traces: list[Json] = [trace_json(trace, turns) for trace in trajectory.traces]
    return {
        "status": STATUSES[trajectory.outcome.status],
        "metadata": {
            "builder": None if spec is None else spec.builder.import_path or spec.builder.name,
            **whose,
            "api_type": trajectory.turns[0].provider if trajectory.turns else None,
            "model_requested": None if spec is None else spec.harness.model_name,
            "model_used": trajectory.model,
            "record_count": len(trajectory.turns),
            "task_metadata": metadata,
            "trace_count": len(traces),
            "reconstruction_stats": _stats(trajectory),
            **{name: metadata[name] for name in SCHEDULING if name in metadata},
            "evaluation": _evaluation(trajectory, spec),
        },
        "traces": traces,
        "error": error_text(trajectory.outcome),
    }


def _stats(trajectory: Trajectory) -> dict[str, Json]:
    """Every chain is whole: a row that can not go on is followed by another, and nothing of it is dropped."""
    chains = sum(trace.part == 0 for trace in trajectory.traces)
    return {
        "chains_total": chains,
        "chains_reconstructed_full": chains,
        "chains_reconstructed_truncated": 0,
        "completions_total": len(trajectory.turns),
        "completions_merged": len(trajectory.turns) - len(trajectory.left_out),
    }


def _evaluation(trajectory: Trajectory, spec: TaskSpec | None) -> Json:
    if trajectory.reward is None:
        return None
    strategy = None if spec is None else spec.evaluator.import_path or spec.evaluator.name
    return {"strategy": strategy, "outcome_reward": trajectory.reward, "metadata": plain(trajectory.metrics.get("evaluation", {}))}


def _timing_json(timing: Timing) -> dict[str, Json]:
    return {
        "register_to_init_queue_ms": 0.0,  # waiting for a place is nobody's time here
        "init_ms": 1000.0 * timing.init_s,
        "run_ms": 1000.0 * timing.run_s,
        "postrun_ms": 1000.0 * timing.post_s,
    }


def _reason(outcome: Outcome) -> dict[str, Json]:
    return {"termination_reason": MAX_STEPS} if outcome.clock == "turns" else {}


def _ours(trajectory: Trajectory, origin: Origin) -> dict[str, Json]:
    return {
        "session_id": trajectory.session_id,
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "sample_index": trajectory.sample_index,
        "attempt": trajectory.attempt,
        "outcome": plain(trajectory.outcome),
        "reward": trajectory.reward,
        "ready_s": trajectory.timing.ready_s,
        "left_out": plain(trajectory.left_out),
        "run": origin.run,
        "notes": list(origin.notes),
    }
