"""Turns into training sequences: which turns are trained, and the rows in which their tokens lie.

Whoever adds a builder keeps two rules: a row is token for token what the engine was conditioned on (it is copied from the turns, nothing is
rendered here), and a sampled token is trainable in one row only. `checks.check` holds both on every result. All of it is linear in the
output: chains are walked, ids are copied as memory, nothing is recursive.

A builder of one's own makes its rows of `select` (which turns are trained, by the same settings), `line_to` and `row` or `rows`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from polarnode import plugins
from polarnode.conversation import Json
from polarnode.errors import Refused, boundary
from polarnode.merge.builders.cast import Cast, select
from polarnode.merge.builders.rows import line_to, prompt_ids, row, rows
from polarnode.merge.builders.settings import Settings, read_settings
from polarnode.merge.checks import check_turns
from polarnode.records import Built, Trace, Turn
from polarnode.tasks import BuilderSpec

__all__ = ["Builder", "Cast", "Settings", "build", "line_to", "per_request", "prefix_merging", "prompt_ids", "read_settings", "row", "rows", "select"]

Builder = Callable[[Sequence[Turn], Mapping[str, Json]], Built]


def build(spec: BuilderSpec, turns: Sequence[Turn], *, allowed_imports: tuple[str, ...] = ()) -> Built:
    """The rows of a session as the named builder makes them. Refused for an unknown name, a wrong config or an import that fails.

    LawBroken when the turns themselves are not whole, before anything is made of them.
    """
    check_turns(turns)
    if spec.import_path is not None:
        return _foreign(spec.import_path, turns, spec.config, allowed_imports)
    builder = _BUILDERS.get(spec.name)
    if builder is None:
        raise Refused(f"there is no builder {spec.name!r}: name one of {', '.join(_BUILDERS)}, or give import_path", path="$.builder.name")
    return builder(turns, spec.config)


def prefix_merging(turns: Sequence[Turn], config: Mapping[str, Json]) -> Built:
    """One row a leaf of the tree of turns. A turn in several rows is trained in the first of them and context in the others.

    The first, and not the longest: rows and their tokens are as many either way, and so a row does not change with what comes after it.
    """
    cast = select(turns, config)
    taken: set[int] = set()
    traces: list[Trace] = []
    for leaf in cast.leaves:
        line = line_to(cast.by_index, leaf.index)
        lost = {turn.index for turn in line if turn.index in cast.trained_indexes and turn.index not in taken}
        taken |= lost
        traces += rows(line, lost, limit=cast.settings.max_row_tokens)
    return Built(traces=tuple(traces), left_out=cast.left_out)


def per_request(turns: Sequence[Turn], config: Mapping[str, Json]) -> Built:
    """One row a trained turn: its whole prompt as context, its sample with loss. Of a prompt that is too long the end is kept."""
    cast = select(turns, config)
    limit = cast.settings.max_row_tokens
    traces: list[Trace] = []
    for turn in cast.trained:
        needed = None if limit is None else max(limit, len(turn.sampled)) + 1
        line = line_to(cast.by_index, turn.index, tokens=needed)
        traces += rows(line, {turn.index}, limit=limit, prompt_length=turn.prompt_length)
    return Built(traces=tuple(traces), left_out=cast.left_out)


_BUILDERS: Final[Mapping[str, Builder]] = {"prefix_merging": prefix_merging, "per_request": per_request}


def _foreign(import_path: str, turns: Sequence[Turn], config: Mapping[str, Json], allowed: tuple[str, ...]) -> Built:
    builder = plugins.load(import_path, allowed=allowed)
    if not callable(builder):
        raise Refused(f"the builder {import_path!r} is not callable: name a function of (turns, config)", path="$.builder.import_path")
    with boundary(Refused, f"the builder {import_path!r} failed"):
        built = builder(turns, config)
    if not isinstance(built, Built):
        raise Refused(f"the builder {import_path!r} returned {type(built).__name__}: return a Built", path="$.builder.import_path")
    return built
