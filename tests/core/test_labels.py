"""Labels: what every node has of itself, and what a task requires that a node lacks."""

import pytest

from polarnode.core.errors import Refused
from polarnode.core.labels import all_labels, choose_model, first_unmet_label, format_labels


def test_own_labels_win_over_settings() -> None:
    found = all_labels({"gpu": "h100", "node": "other"}, node="n0", model="tiny")
    assert found == {"gpu": "h100", "model": "tiny", "node": "n0"}


def test_unmet_label_is_named() -> None:
    labels = {"gpu": "h100", "model": "tiny"}
    assert first_unmet_label({"gpu": "h100"}, labels) is None
    assert first_unmet_label({"model": "tiny", "gpu": "b200"}, labels) == "gpu"
    assert first_unmet_label({"zone": "a"}, labels) == "zone"


def test_label_text_has_fixed_order() -> None:
    assert format_labels({"b": "2", "a": "1"}) == format_labels({"a": "1", "b": "2"}) == "a=1, b=2"


def test_requires_names_one_of_models() -> None:
    policy, judge = {"model": "policy", "gpu": "x"}, {"model": "judge"}
    assert choose_model({}, [policy, policy]) == "policy"
    assert choose_model({"model": "judge"}, [judge]) == choose_model({"model": "judge"}, []) == "judge"
    assert choose_model({}, []) == ""
    with pytest.raises(Refused, match=r"serve judge, policy: .* as requires\.model = judge") as refused:
        choose_model({}, [policy, judge])
    assert refused.value.path == "$.requires.model"
