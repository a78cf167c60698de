"""Write the log of a step: a line of log.jsonl, and a line for the terminal."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polarnode.groups import Group


def log(file: Path, kind: str, line: Mapping[str, Any]) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps({"kind": kind, **line}) + "\n")
    print(kind, *(f"{name} {formatted(value)}" for name, value in line.items()), flush=True)


def formatted(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def summary(groups: Sequence[Group]) -> dict[str, Any]:
    """Counts of the sessions' results. A missing reward, because the machine lost the session, is not a
    failure of the policy.
    """
    rewards = [member.reward for group in groups for member in group.members if member.reward is not None]
    sessions = [each for group in groups for each in group.trajectories]
    traces = [trace for each in sessions for trace in each.traces]
    return {
        "reward": sum(rewards) / max(1, len(rewards)),
        "sessions": sum(len(group.members) for group in groups),
        "unusable": sum(not member.usable for group in groups for member in group.members),
        "uniform": sum(len({member.reward for member in group.members}) == 1 for group in groups),
        "turns": len(
            {
                (each.session_id, span.turn)
                for each in sessions
                for trace in each.traces
                for span in trace.turn_spans
            }
        ),
        "traces": len(traces),
        "versions": sorted({span.version for trace in traces for span in trace.version_spans}),
    }
