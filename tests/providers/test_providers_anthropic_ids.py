"""Anthropic Messages: references go out as `toolu_…` and come back as they were minted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarnode.providers.anthropic.write import to_api_id, to_node_id


@given(st.text("0123456789abcdefXYZ_", max_size=34))
def test_id_survives_round_trip(rest: str) -> None:
    """An id survives the way out and back."""
    minted = "call_" + rest
    assert to_api_id(minted) == "toolu_" + rest
    assert to_node_id(to_api_id(minted)) == minted


@pytest.mark.parametrize("foreign", ["", "fc_12", "abc", "Toolu_1"])
def test_foreign_id_passes_unchanged(foreign: str) -> None:
    assert to_node_id(foreign) == to_api_id(foreign) == foreign
