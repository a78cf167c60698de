"""Labels: what every node has of itself, and what a task requires that a node lacks."""

import pytest

from polarnode.core.errors import Refused
from polarnode.core.labels import every_label, label_texts, one_model, unmet


def test_own_labels_win_over_settings() -> None:
    found = every_label({"gpu": "h100", "node": "other"}, node="n0", model="tiny")
    assert found == {"gpu": "h100", "model": "tiny", "node": "n0"}


def test_unmet_names_the_label() -> None:
    labels = {"gpu": "h100", "model": "tiny"}
    assert unmet({"gpu": "h100"}, labels) is None
    assert unmet({"model": "tiny", "gpu": "b200"}, labels) == "gpu"
    assert unmet({"zone": "a"}, labels) == "zone"


def test_label_texts_have_one_order() -> None:
    assert label_texts({"b": "2", "a": "1"}) == label_texts({"a": "1", "b": "2"}) == "a=1, b=2"


def test_one_of_several_models_is_named() -> None:
    policy, judge = {"model": "policy", "gpu": "x"}, {"model": "judge"}
    assert one_model({}, [policy, policy]) == "policy"
    assert one_model({"model": "judge"}, [judge]) == one_model({"model": "judge"}, []) == "judge"
    assert one_model({}, []) == ""
    with pytest.raises(Refused, match=r"serve judge, policy: .* as requires\.model = judge") as refused:
        one_model({}, [policy, judge])
    assert refused.value.path == "$.requires.model"
