"""What happened: turns, traces, trajectories, outcomes. Frozen values; token ids are `array('i')`, logprobs `array('f')`, never lists of ints."""

from polarnode.records.arrays import ExpertType, RoutedExperts, TopLogprobs, floats, ids
from polarnode.records.results import Built, Clock, LeftOut, Outcome, Status, Timing, Trace, Trajectory, TurnSpan, Verdict
from polarnode.records.turns import Heard, Turn, TurnKind, TurnRole, TurnState, VersionSpan

__all__ = [
    "Built",
    "Clock",
    "ExpertType",
    "Heard",
    "LeftOut",
    "Outcome",
    "RoutedExperts",
    "Status",
    "Timing",
    "TopLogprobs",
    "Trace",
    "Trajectory",
    "Turn",
    "TurnKind",
    "TurnRole",
    "TurnSpan",
    "TurnState",
    "Verdict",
    "VersionSpan",
    "floats",
    "ids",
]
