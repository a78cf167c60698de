"""How far behind the weights of a session are: the versions its tokens were sampled by, against the history of those that were served.

Pure. The rule for whoever edits it: a version is a name, and the same name is the same weights; what the history does not know is not guessed.
"""

from collections.abc import Sequence

from attrs import evolve

from polarnode.records import Trajectory


def stamped(trajectory: Trajectory, history: Sequence[str]) -> Trajectory:
    """The trajectory of a session that ends now. `history`: the versions that were served, oldest first, the last is served now."""
    return evolve(trajectory, staleness=updates_behind(trajectory, history))


def updates_behind(trajectory: Trajectory, history: Sequence[str]) -> int | None:
    """Weight updates between the session's oldest sampled token and the last of `history`; None when it has no token of a version in it.

    Of a version that was served more than once the last time counts: going back to it made its tokens fresh again.
    """
    behind = {version: len(history) - 1 - index for index, version in enumerate(history)}
    sampled = {span.version for turn in trajectory.turns for span in turn.version_spans if span.end > span.start}
    return max((behind[version] for version in sampled if version in behind), default=None)
