"""Which weights a name means, and what of a session is sent to be scored."""

from typing import Any

import pytest
from trainers_kit import make_turn

from polarnode.client import session_scores
from polarnode.client.session_scores import ChosenWeights, HeldWeights
from polarnode.core.errors import Refused
from polarnode.core.weights import AdaptersState, AdapterState
from polarnode.groups.policy_difference import rows_to_score

ADAPTERS = AdaptersState(
    adapters=(AdapterState(name="run-a", version="a-8"), AdapterState(name="lost", version=""))
)


def held(**more: Any) -> HeldWeights:
    return HeldWeights(**({"version": "7", "adapters": ADAPTERS, "teachers": ("large",)} | more))


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("policy", ChosenWeights(engine="policy")),
        ("7", ChosenWeights(engine="policy", version="7")),
        ("run-a", ChosenWeights(engine="policy", adapter="run-a")),
        ("a-8", ChosenWeights(engine="policy", adapter="run-a", version="a-8")),
        ("large", ChosenWeights(engine="large")),
    ],
)
def test_model_name_selects_weights(name: str, chosen: ChosenWeights) -> None:
    assert held().choose(name) == chosen


@pytest.mark.parametrize("name", ["6", "lost", ""])
def test_unheld_weights_are_refused(name: str) -> None:
    with pytest.raises(Refused) as refused:
        held().choose(name)
    assert str(refused.value) == (
        f"the node does not hold the weights {name!r}, and scores by 7 (policy), a-8 (adapter run-a), the"
        " teacher large: name one of these"
    )


def test_node_without_weights_uses_servers() -> None:
    bare = held(version="", adapters=AdaptersState())
    assert bare.choose("policy") == ChosenWeights(engine="policy")
    with pytest.raises(Refused, match=r"scores by weights without a name \(policy\), the teacher large"):
        bare.choose("")


def test_long_session_needs_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_to_score([make_turn(index, None, [1] * 8, [2, 3]) for index in range(5)])
    assert [len(part) for part in session_scores._requests(rows)] == [5]
    monkeypatch.setattr(session_scores, "MAX_ROWS", 2)
    assert [len(part) for part in session_scores._requests(rows)] == [2, 2, 1]
    monkeypatch.setattr(session_scores, "MOST_TOKENS", 15)
    assert [len(part) for part in session_scores._requests(rows)] == [1] * 5
    assert list(session_scores._requests(())) == []
