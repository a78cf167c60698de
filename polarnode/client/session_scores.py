"""`score_session`: which weights of a node a name means, and a finished session's tokens under them.

A composition of the routes that there are: the session's turns, the node's weights, adapters and teachers,
and POST /v1/score. Nothing is sampled, and nothing of it is kept.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from attrs import frozen

from polarnode.client import requests
from polarnode.client.requests import ClientRequest, Script, T, ask
from polarnode.client.values import ClientError
from polarnode.core.errors import Refused
from polarnode.core.status import ScoredRow
from polarnode.core.weights import AdaptersState
from polarnode.groups.policy_difference import RowToScore, SessionDifference, compared, rows_to_score

POLICY: Final = "policy"
# of one request: the node takes 1,024 rows and 4,194,304 tokens (docs/teachers.md); longer sessions are sent
# in several
MAX_ROWS, MOST_TOKENS = 1024, 1 << 22


@frozen(kw_only=True)
class HeldWeights:
    """The weights that a node can score by. `version` and `adapters` are those of the policy."""

    version: str
    adapters: AdaptersState
    teachers: tuple[str, ...]

    def choose(self, name: str) -> "ChosenWeights":
        """The weights that a name means. Raises Refused, naming those that are held, for any other."""
        if name == POLICY or (name == self.version and name):
            return ChosenWeights(engine=POLICY, version=None if name == POLICY else name)
        for each in self.adapters.adapters:
            if each.version and name in (each.name, each.version):
                version = each.version if name == each.version != each.name else None
                return ChosenWeights(engine=POLICY, adapter=each.name, version=version)
        if name in self.teachers:
            return ChosenWeights(engine=name)
        held = [f"{self.version or 'weights without a name'} (policy)"]
        held += [f"{each.version} (adapter {each.name})" for each in self.adapters.adapters if each.version]
        held += [f"the teacher {each}" for each in self.teachers]
        raise Refused(
            f"the node does not hold the weights {name!r}, and scores by {', '.join(held)}: name one of"
            " these",
            path="$.weights",
        )


@frozen(kw_only=True)
class ChosenWeights:
    """Weights as POST /v1/score names them. `version`: the one that must score, where it was named."""

    engine: str
    adapter: str = ""
    version: str | None = None


def score_session(session_id: str, weights: str) -> Script[SessionDifference]:
    """The session's sampled tokens under `weights`. Raises Refused for weights that the node does not hold,
    or no longer, and ClientError 404 until the session has finished.
    """
    trajectory = yield from ask(requests.trajectory(session_id, turns="full", arrays="base64"))
    held = yield from _held()
    chosen = held.choose(weights)
    rows = rows_to_score(trajectory.turns, inherited=trajectory.inherited)
    scored: list[ScoredRow] = []
    for part in _requests(rows):
        answer = yield from ask(requests.score([each.row for each in part], chosen.engine, chosen.adapter))
        scored += answer
    others = {each.version for each in scored} - {chosen.version}
    if chosen.version is not None and others:
        raise Refused(
            f"the node served {' and '.join(map(str, others))} before {chosen.version} had scored all: give"
            " the version that it serves now, or the name policy or an adapter's for whatever is served",
            path="$.weights",
        )
    return compared(trajectory, rows, scored, engine=chosen.engine, adapter=chosen.adapter)


def _held() -> Script[HeldWeights]:
    status = yield from ask(requests.status())
    weights = yield from _none_if_absent(requests.weights_status())
    adapters = yield from _none_if_absent(requests.adapters())
    return HeldWeights(
        version="" if weights is None else weights.version,
        adapters=adapters or AdaptersState(),
        teachers=tuple(status.get("teachers") or ()),
    )


def _none_if_absent(request: ClientRequest[T]) -> Script[T | None]:
    """None of a node that samples from servers of somebody else: it has neither weights nor adapters."""
    try:
        return (yield from ask(request))
    except ClientError as error:
        if error.status != 409:
            raise
        return None


def _requests(rows: Sequence[RowToScore]) -> Iterator[list[RowToScore]]:
    """The rows in as many requests as a node needs."""
    part: list[RowToScore] = []
    tokens = 0
    for each in rows:
        length = len(each.row.token_ids)
        if part and (len(part) == MAX_ROWS or tokens + length > MOST_TOKENS):
            yield part
            part, tokens = [], 0
        part.append(each)
        tokens += length
    if part:
        yield part
