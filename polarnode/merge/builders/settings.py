"""A builder's `config`: what is trained and how long a row may be, read once and refused with the field's path.

The rule for whoever edits it: a default keeps every sampled token trainable unless training it would be a mistake (a side call, an answer that
nobody used, an engine's failure), and every setting says in its refusal what it is for.
"""

from collections.abc import Iterator, Mapping
from typing import Final, get_args

from attrs import fields, frozen

from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.records import TurnRole

ROLES: Final[tuple[TurnRole, ...]] = get_args(TurnRole)
# What an agent does for its task; titles, routing and summaries are the harness's own business, under prompts that no evaluator judges.
TRAINED_ROLES: Final[frozenset[TurnRole]] = frozenset(("main", "subagent"))
SHORTEST_ROW: Final = 2  # a token to be conditioned on, and a sampled one


@frozen(kw_only=True)
class Settings:
    """Which turns carry loss, and how many tokens a row may have (None: as many as it has).

    `train_superseded`: cut answers that the client asked for again. `train_failed`: what was sampled before the engine failed. `train_cut`:
    answers that ended at their token limit. `train_partial`: answers that ended because the client left or someone aborted them.
    """

    train_roles: frozenset[TurnRole] = TRAINED_ROLES
    train_superseded: bool = False
    train_failed: bool = False
    train_cut: bool = True
    train_partial: bool = True
    max_row_tokens: int | None = None


_SWITCHES: Final[Mapping[str, str]] = {
    "train_superseded": "whether answers are trained that were cut and asked for again",
    "train_failed": "whether what was sampled before the engine failed is trained",
    "train_cut": "whether answers are trained that ended at their token limit",
    "train_partial": "whether answers are trained that ended because the client left or an abort came",
}
_OLDER_WORD: Final = "train_auxiliary"
NAMES: Final = (*(field.name for field in fields(Settings)), _OLDER_WORD)


def read_settings(config: Mapping[str, Json]) -> Settings:
    """The settings that a config says. Refused, with the field's path, for an unknown name or a value that can not be."""
    unknown = [name for name in config if name not in NAMES]
    if unknown:
        raise Refused(f"builders know no setting {unknown[0]!r}: theirs are {', '.join(NAMES)}", path=_path(unknown[0]))
    switches = {name: _switch(config, name, what, getattr(Settings(), name)) for name, what in _SWITCHES.items()}
    return Settings(train_roles=_train_roles(config), max_row_tokens=_limit(config), **switches)


def _switch(config: Mapping[str, Json], name: str, what: str, default: bool) -> bool:
    said = config.get(name, default)
    if not isinstance(said, bool):
        raise Refused(f"{name} says {what}: make it true or false", path=_path(name))
    return said


def _limit(config: Mapping[str, Json]) -> int | None:
    said = config.get("max_row_tokens")
    if said is not None and (not isinstance(said, int) or isinstance(said, bool) or said < SHORTEST_ROW):
        raise Refused(f"max_row_tokens says how many tokens a row may have: make it a whole number from {SHORTEST_ROW}", path=_path("max_row_tokens"))
    return said


def _train_roles(config: Mapping[str, Json]) -> frozenset[TurnRole]:
    """The roles whose turns carry loss. `train_auxiliary` is the older word for all of them."""
    everything = _switch(config, _OLDER_WORD, "whether side calls are trained", default=False)
    if "train_roles" not in config:
        return frozenset(ROLES) if everything else TRAINED_ROLES
    if everything:
        raise Refused("train_auxiliary and train_roles say the same: keep train_roles", path=_path(_OLDER_WORD))
    return frozenset(_roles(config["train_roles"]))


def _roles(said: Json) -> Iterator[TurnRole]:
    words = ", ".join(ROLES)
    if not isinstance(said, list):
        raise Refused(f"train_roles lists the roles whose turns are trained: make it a list of {words}", path=_path("train_roles"))
    for place, word in enumerate(said):
        found = [role for role in ROLES if role == word]
        if not found:
            raise Refused(f"there is no role {word!r}: name some of {words}", path=f"{_path('train_roles')}[{place}]")
        yield from found


def _path(name: str) -> str:
    return f"$.builder.config.{name}"
