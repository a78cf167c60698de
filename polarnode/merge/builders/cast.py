"""Which of a session's turns are trained, and why each other one is not.

The rule for whoever edits it: a turn has one reason, the first that holds, and only the turns themselves and the settings decide it: never
the order in which turns come, or a row.
"""

from collections.abc import Mapping, Sequence

from attrs import frozen

from polarnode.conversation import Json
from polarnode.merge.builders.settings import Settings, read_settings
from polarnode.merge.checks import is_whole
from polarnode.merge.plan import CHOICE
from polarnode.records import LeftOut, Turn


@frozen(kw_only=True)
class Cast:
    """The session's turns by index, those that are trained in index order, and the others with their reason."""

    by_index: Mapping[int, Turn]
    trained: tuple[Turn, ...]
    trained_indexes: frozenset[int]
    left_out: tuple[LeftOut, ...]
    settings: Settings

    @property
    def leaves(self) -> tuple[Turn, ...]:
        """The trained turns that no other trained turn extends: where rows end, in index order."""
        inner = self._extended()
        return tuple(turn for turn in self.trained if turn.index not in inner)

    def _extended(self) -> set[int]:
        """The turns that some trained turn extends. Each is visited once, so a thousand leaves on one trunk cost no more than one."""
        inner: set[int] = set()
        for turn in self.trained:
            step = turn.parent
            while step is not None and step not in inner:
                inner.add(step)
                step = self.by_index[step].parent
        return inner


def select(turns: Sequence[Turn], config: Mapping[str, Json]) -> Cast:
    """Who plays in a session, as a builder's config says. Refused for a config that is wrong."""
    settings = read_settings(config)
    by_index = {turn.index: turn for turn in turns}
    ordered = [by_index[index] for index in sorted(by_index)]
    retried, endings = _superseded(ordered), _endings(ordered)
    reasons = {turn.index: _why_not(turn, settings, ending=endings.get(turn.index, turn), retried=turn.index in retried) for turn in ordered}
    trained = tuple(turn for turn in ordered if reasons[turn.index] is None)
    left_out = tuple(LeftOut(turn=index, reason=reason) for index, reason in reasons.items() if reason is not None)
    return Cast(by_index=by_index, trained=trained, trained_indexes=frozenset(turn.index for turn in trained), left_out=left_out, settings=settings)


def _why_not(turn: Turn, settings: Settings, *, ending: Turn, retried: bool) -> str | None:
    """Why a turn carries no loss, or None. `ending` is the turn with which its answer ended."""
    if turn.state == "failed" and not (settings.train_failed and turn.sampled and is_whole(turn)):
        return "failed"
    if not turn.sampled:
        return "empty"
    if retried and not settings.train_superseded:
        return "superseded"
    if ending.state == "partial" and not settings.train_partial:
        return "partial"
    if ending.finish_reason == "length" and not settings.train_cut:
        return "length"
    return None if turn.role in settings.train_roles else turn.role


def _endings(ordered: Sequence[Turn]) -> dict[int, Turn]:
    """Of turns whose answer went on exactly where they were cut: the last turn of that answer."""
    found: dict[int, Turn] = {}
    for turn in reversed(ordered):
        if turn.kind == "continue" and turn.parent is not None and turn.state != "failed":
            found.setdefault(turn.parent, found.get(turn.index, turn))
    return found


def _superseded(ordered: Sequence[Turn]) -> set[int]:
    """Cut turns that nothing extends and that a later sibling asked again, not in vain: what the agent went on with is its answer.

    Another choice of the same call asked nothing again.
    """
    living = [turn for turn in ordered if turn.state != "failed"]
    last_asked = {asked: turn.index for turn in living if turn.reason != CHOICE for asked in _asked(turn)}
    extended = {turn.parent for turn in living}
    cut = [turn for turn in living if turn.state == "partial" and turn.index not in extended]
    return {turn.index for turn in cut if any(last_asked.get(asked, -1) > turn.index for asked in _asked(turn))}


def _asked(turn: Turn) -> list[tuple[int | None, str, str]]:
    """What was asked of which parent, in each of the ways in which two askings can be the same."""
    ways = (("path", turn.before_key), ("body", turn.request_key))
    return [(turn.parent, way, key) for way, key in ways if key]
