"""The settings of builders, and which turns of a session they train.

`read_settings` reads a builder's `config`. `select` gives each turn that is left out the first reason that
holds. By default every sampled token is trained unless that would be a mistake (a side call, an unused
answer, an engine failure). Invariant: only the turns and the settings decide, never the order of the turns or
a row.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, get_args

from attrs import fields, frozen

from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.core.trajectory import LeftOut, Turn, TurnRole
from polarnode.merge.attach import EXTRA_CHOICE
from polarnode.merge.invariants import is_whole

# ── settings ──────────────────────────────────────────────────────────────────────────────────────

ROLES: Final[tuple[TurnRole, ...]] = get_args(TurnRole)
# These roles work on the task. Titles, routing and summaries are the harness's own, under prompts that no
# evaluator judges.
TRAINED_ROLES: Final[frozenset[TurnRole]] = frozenset(("main", "subagent"))
MIN_ROW_TOKENS: Final = 2  # one token of context and one sampled token


@frozen(kw_only=True)
class Settings:
    """Which turns carry loss, and how many tokens a row may have (None: no limit).

    `train_superseded`: cut answers that the client requested again. `train_failed`: what was sampled before
    the engine failed. `train_cut`: answers that ended at their token limit. `train_partial`: answers that
    ended because the client left or aborted them. `inherited_turns`: turns with a lower index are a fork's
    context. The node sets it, never a task.
    """

    train_roles: frozenset[TurnRole] = TRAINED_ROLES
    train_superseded: bool = False
    train_failed: bool = False
    train_cut: bool = True
    train_partial: bool = True
    max_row_tokens: int | None = None
    inherited_turns: int = 0


# The reason of a turn that is left out because a fork has it from its parent, where it is trained.
INHERITED_REASON: Final = "inherited"
# the name of the setting in the config that a builder gets for a fork
INHERITED_TURNS_SETTING: Final = "inherited_turns"
_SWITCH_MEANINGS: Final[Mapping[str, str]] = {
    "train_superseded": "whether cut answers that the client requested again are trained",
    "train_failed": "whether what was sampled before the engine failed is trained",
    "train_cut": "whether answers that ended at their token limit are trained",
    "train_partial": "whether answers that ended because the client left or by an abort are trained",
}
_OLD_ROLES_SETTING: Final = "train_auxiliary"
NAMES: Final = (
    *(each.name for each in fields(Settings) if each.name != INHERITED_TURNS_SETTING),
    _OLD_ROLES_SETTING,
)


def read_settings(config: Mapping[str, Json]) -> Settings:
    """The settings in a config. Raises Refused, with the path of the field, for an unknown name or an invalid
    value.
    """
    unknown = [name for name in config if name not in (*NAMES, INHERITED_TURNS_SETTING)]
    if unknown:
        raise Refused(
            f"builders have no setting {unknown[0]!r}: use one of {', '.join(NAMES)}", path=_path(unknown[0])
        )
    switches = {
        name: _read_switch(config, name, what, getattr(Settings(), name))
        for name, what in _SWITCH_MEANINGS.items()
    }
    inherited = config.get(INHERITED_TURNS_SETTING, 0)
    return Settings(
        train_roles=_read_train_roles(config),
        max_row_tokens=_limit(config),
        inherited_turns=inherited if isinstance(inherited, int) else 0,
        **switches,
    )


def _read_switch(config: Mapping[str, Json], name: str, what: str, default: bool) -> bool:
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise Refused(f"{name} says {what}: make it true or false", path=_path(name))
    return value


def _limit(config: Mapping[str, Json]) -> int | None:
    value = config.get("max_row_tokens")
    if value is not None and (
        not isinstance(value, int) or isinstance(value, bool) or value < MIN_ROW_TOKENS
    ):
        raise Refused(
            f"max_row_tokens says how many tokens a row may have: make it a whole number from"
            f" {MIN_ROW_TOKENS}",
            path=_path("max_row_tokens"),
        )
    return value


def _read_train_roles(config: Mapping[str, Json]) -> frozenset[TurnRole]:
    """The roles whose turns carry loss. `train_auxiliary` is an older setting that means all roles."""
    everything = _read_switch(config, _OLD_ROLES_SETTING, "whether side calls are trained", default=False)
    if "train_roles" not in config:
        return frozenset(ROLES) if everything else TRAINED_ROLES
    if everything:
        raise Refused(
            "train_auxiliary and train_roles say the same: keep train_roles", path=_path(_OLD_ROLES_SETTING)
        )
    return frozenset(_read_roles(config["train_roles"]))


def _read_roles(value: Json) -> Iterator[TurnRole]:
    words = ", ".join(ROLES)
    if not isinstance(value, list):
        raise Refused(
            f"train_roles lists the roles whose turns are trained: make it a list of {words}",
            path=_path("train_roles"),
        )
    for place, word in enumerate(value):
        found = [role for role in ROLES if role == word]
        if not found:
            raise Refused(
                f"there is no role {word!r}: name some of {words}", path=f"{_path('train_roles')}[{place}]"
            )
        yield from found


def _path(name: str) -> str:
    return f"$.builder.config.{name}"


# ── selection ─────────────────────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class TrainableSelection:
    """The session's turns by index, the trained turns in index order, and the turns left out with their
    reasons.
    """

    by_index: Mapping[int, Turn]
    trained: tuple[Turn, ...]
    trained_indexes: frozenset[int]
    left_out: tuple[LeftOut, ...]
    settings: Settings

    @property
    def leaves(self) -> tuple[Turn, ...]:
        """The trained turns that no other trained turn extends, in index order. Rows end with them."""
        inner = self._extended()
        return tuple(turn for turn in self.trained if turn.index not in inner)

    def _extended(self) -> set[int]:
        """The turns that some trained turn extends. Each is visited once, so the cost does not grow with the
        number of leaves on a trunk.
        """
        inner: set[int] = set()
        for turn in self.trained:
            step = turn.parent
            while step is not None and step not in inner:
                inner.add(step)
                step = self.by_index[step].parent
        return inner


def select(turns: Sequence[Turn], config: Mapping[str, Json]) -> TrainableSelection:
    """The turns of a session that a builder's config trains. Raises Refused for a wrong config."""
    settings = read_settings(config)
    by_index = {turn.index: turn for turn in turns}
    ordered = [by_index[index] for index in sorted(by_index)]
    retried, endings = _superseded_turns(ordered), _answer_endings(ordered)
    reasons = {
        turn.index: _why_not(
            turn, settings, ending=endings.get(turn.index, turn), retried=turn.index in retried
        )
        for turn in ordered
    }
    trained = tuple(turn for turn in ordered if reasons[turn.index] is None)
    left_out = tuple(
        LeftOut(turn=index, reason=reason) for index, reason in reasons.items() if reason is not None
    )
    return TrainableSelection(
        by_index=by_index,
        trained=trained,
        trained_indexes=frozenset(turn.index for turn in trained),
        left_out=left_out,
        settings=settings,
    )


def _why_not(turn: Turn, settings: Settings, *, ending: Turn, retried: bool) -> str | None:
    """Why a turn carries no loss, or None. `ending` is the turn with which its answer ended."""
    if turn.index < settings.inherited_turns:
        return INHERITED_REASON
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


def _answer_endings(ordered: Sequence[Turn]) -> dict[int, Turn]:
    """Maps each cut turn whose answer was continued exactly at the cut to the last turn of that answer."""
    found: dict[int, Turn] = {}
    for turn in reversed(ordered):
        if turn.kind == "continue" and turn.parent is not None and turn.state != "failed":
            found.setdefault(turn.parent, found.get(turn.index, turn))
    return found


def _superseded_turns(ordered: Sequence[Turn]) -> set[int]:
    """The cut turns that nothing extends and whose request a later sibling repeated with success. The agent
    continued with the sibling's answer.

    Another choice of the same call is not a repeated request.
    """
    living = [turn for turn in ordered if turn.state != "failed"]
    latest = {
        request: turn.index for turn in living if turn.reason != EXTRA_CHOICE for request in _requests(turn)
    }
    extended = {turn.parent for turn in living}
    cut = [turn for turn in living if turn.state == "partial" and turn.index not in extended]
    return {
        turn.index for turn in cut if any(latest.get(request, -1) > turn.index for request in _requests(turn))
    }


def _requests(turn: Turn) -> list[tuple[int | None, str, str]]:
    """The keys of a turn's request under its parent, one for each way in which two requests can be equal."""
    ways = (("path", turn.before_key), ("body", turn.request_key))
    return [(turn.parent, way, key) for way, key in ways if key]
