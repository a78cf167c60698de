"""Turns into training sequences: which turns are trained, and the rows in which their tokens lie.

Whoever adds a builder keeps two rules: a row is token for token what the engine was conditioned on (it is copied from the turns, nothing is
rendered here), and a sampled token is trainable in one row only. `checks.check` holds both on every result. All of it is linear in the
output: chains are walked, ids are copied as memory, nothing is recursive.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, get_args

from attrs import frozen

from polarnode import plugins
from polarnode.conversation import Json
from polarnode.errors import Refused, boundary
from polarnode.merge import ledger
from polarnode.merge.checks import check_turns
from polarnode.merge.ledger import chain
from polarnode.merge.lineage import CHOICE
from polarnode.records import Built, LeftOut, Trace, Turn, TurnRole, TurnSpan, VersionSpan
from polarnode.tasks import BuilderSpec

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


def prompt_ids(turns: Sequence[Turn], index: int) -> "array[int]":
    """The ids turn `index` was conditioned on, exactly, int32[prompt_length]. A fresh array."""
    return ledger.prompt_ids(_by_index(turns), index)


def prefix_merging(turns: Sequence[Turn], config: Mapping[str, Json]) -> Built:
    """One row a leaf of the tree of turns. A turn in several rows is trained in the first of them and context in the others."""
    cast = _select(turns, config)
    inner = _extended(cast)
    taken: set[int] = set()
    traces: list[Trace] = []
    for turn in cast.trained:
        if turn.index in inner:
            continue
        line = chain(cast.by_index, turn.index)
        lost = {step.index for step in line if step.index in cast.trained_indexes and step.index not in taken}
        taken |= lost
        traces.append(_row(line, lost, prompt_length=len(line[0].prompt_delta)))
    return Built(traces=tuple(traces), left_out=cast.left_out)


def per_request(turns: Sequence[Turn], config: Mapping[str, Json]) -> Built:
    """One row a trained turn: its whole prompt as context, its sample with loss."""
    cast = _select(turns, config)
    lines = ((turn, chain(cast.by_index, turn.index)) for turn in cast.trained)
    return Built(traces=tuple(_row(line, {turn.index}, prompt_length=turn.prompt_length) for turn, line in lines), left_out=cast.left_out)


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


# ── which turns are trained ───────────────────────────────────────────────────

_SETTINGS: Final = ("train_roles", "train_auxiliary")
_ROLES: Final[tuple[TurnRole, ...]] = get_args(TurnRole)
# What an agent does for its task; titles, routing and summaries are the harness's own business, under prompts that no evaluator judges.
_TRAINED_ROLES: Final[frozenset[TurnRole]] = frozenset(("main", "subagent"))


@frozen(kw_only=True)
class _Cast:
    """The session's turns by index, those that are trained in index order, and the others with their reason."""

    by_index: Mapping[int, Turn]
    trained: tuple[Turn, ...]
    trained_indexes: frozenset[int]
    left_out: tuple[LeftOut, ...]


def _select(turns: Sequence[Turn], config: Mapping[str, Json]) -> _Cast:
    roles = _train_roles(config)
    by_index = _by_index(turns)
    ordered = [by_index[index] for index in sorted(by_index)]
    retried = _superseded(ordered)
    reasons = {turn.index: _why_not(turn, roles=roles, retried=retried) for turn in ordered}
    trained = tuple(turn for turn in ordered if reasons[turn.index] is None)
    left_out = tuple(LeftOut(turn=index, reason=reason) for index, reason in reasons.items() if reason is not None)
    return _Cast(by_index=by_index, trained=trained, trained_indexes=frozenset(turn.index for turn in trained), left_out=left_out)


def _why_not(turn: Turn, *, roles: frozenset[TurnRole], retried: set[int]) -> str | None:
    if turn.state == "failed":
        return "failed"
    if not turn.sampled:
        return "empty"
    if turn.index in retried:
        return "superseded"
    return None if turn.role in roles else turn.role


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


def _train_roles(config: Mapping[str, Json]) -> frozenset[TurnRole]:
    """The roles whose turns carry loss. `train_auxiliary` is the older word for all of them."""
    unknown = [name for name in config if name not in _SETTINGS]
    if unknown:
        raise Refused(f"builders know no setting {unknown[0]!r}: theirs are {' and '.join(_SETTINGS)}", path=f"$.builder.config.{unknown[0]}")
    everything = config.get("train_auxiliary", False)
    if not isinstance(everything, bool):
        raise Refused("train_auxiliary says whether side calls are trained: make it true or false", path="$.builder.config.train_auxiliary")
    if "train_roles" not in config:
        return frozenset(_ROLES) if everything else _TRAINED_ROLES
    if everything:
        raise Refused("train_auxiliary and train_roles say the same: keep train_roles", path="$.builder.config.train_auxiliary")
    return frozenset(_roles(config["train_roles"]))


def _roles(said: Json) -> Iterator[TurnRole]:
    words = ", ".join(_ROLES)
    if not isinstance(said, list):
        raise Refused(f"train_roles lists the roles whose turns are trained: make it a list of {words}", path="$.builder.config.train_roles")
    for place, word in enumerate(said):
        found = [role for role in _ROLES if role == word]
        if not found:
            raise Refused(f"there is no role {word!r}: name some of {words}", path=f"$.builder.config.train_roles[{place}]")
        yield from found


def _extended(cast: _Cast) -> set[int]:
    """The turns that some trained turn extends. Each is visited once, so a thousand leaves on one trunk cost no more than one."""
    inner: set[int] = set()
    for turn in cast.trained:
        step = turn.parent
        while step is not None and step not in inner:
            inner.add(step)
            step = cast.by_index[step].parent
    return inner


def _by_index(turns: Sequence[Turn]) -> dict[int, Turn]:
    return {turn.index: turn for turn in turns}


# ── one row ───────────────────────────────────────────────────────────────────


def _row(line: Sequence[Turn], trained: set[int], *, prompt_length: int) -> Trace:
    """The turns of a line, copied one behind the other; loss on the samples of `trained`."""
    leaf = line[-1]
    length = leaf.prompt_length + len(leaf.sampled)
    token_ids, logprobs, mask = array("i", [0]) * length, array("f", [0.0]) * length, bytearray(length)
    spans = _spans(line)
    with memoryview(token_ids) as tokens, memoryview(logprobs) as chances:
        for turn in line:
            start = turn.prompt_length
            end = start + len(turn.sampled)
            tokens[start - len(turn.prompt_delta) : start] = memoryview(turn.prompt_delta)
            tokens[start:end] = memoryview(turn.sampled)
            if turn.index in trained:
                chances[start:end] = memoryview(turn.logprobs)
                mask[start:end] = b"\x01" * len(turn.sampled)
    return Trace(
        lineage=leaf.lineage,
        token_ids=token_ids,
        loss_mask=bytes(mask),
        logprobs=logprobs,
        prompt_length=prompt_length,
        turn_spans=spans,
        version_spans=tuple(_shifted(line)),
        role=leaf.role,
        finish_reason=leaf.finish_reason,
    )


def _spans(line: Sequence[Turn]) -> tuple[TurnSpan, ...]:
    sampled = (turn for turn in line if turn.sampled)
    return tuple(TurnSpan(turn=turn.index, start=turn.prompt_length, end=turn.prompt_length + len(turn.sampled)) for turn in sampled)


def _shifted(line: Sequence[Turn]) -> list[VersionSpan]:
    return [
        VersionSpan(version=span.version, start=turn.prompt_length + span.start, end=turn.prompt_length + span.end)
        for turn in line
        for span in turn.version_spans
    ]
