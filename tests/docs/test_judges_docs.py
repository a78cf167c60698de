"""The page of judges against the program: every field of every config with its default, every rule, every
number.
"""

from pathlib import Path
from typing import Any

import attrs
import pytest
from test_docs import named, rows, section, shown_default

from polarnode.evaluators import judging, turn_rewards
from polarnode.evaluators.judge_evidence import MOST_FILES, ShowConfig
from polarnode.evaluators.judging import MAX_CRITERIA, CriterionConfig, LlmJudgeConfig
from polarnode.evaluators.turn_rewards import (
    MAX_JUDGED_ITEMS,
    RULES,
    TurnJudgeConfig,
    TurnRewardsConfig,
    WeightsConfig,
)
from polarnode.rollouts.judges import ANSWER_BYTES, MAX_REQUESTED_PAUSE_S, PASSES, PAUSES

PAGE = (Path(__file__).parents[2] / "docs" / "judges.md").read_text()
SHAPES = (LlmJudgeConfig, CriterionConfig, ShowConfig, TurnRewardsConfig, WeightsConfig, TurnJudgeConfig)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_every_field_is_documented(shape: Any) -> None:
    """Every field is documented with its default."""
    documented = {named(cells[0])[0]: cells[1] for cells in rows(section(shape.__name__, PAGE))}
    assert documented == {field.alias: shown_default(field) for field in attrs.fields(shape)}


def test_every_rule_is_documented() -> None:
    assert [named(cells[0])[0] for cells in rows(section("Rules", PAGE))] == list(RULES)


def test_numbers_match_the_program() -> None:
    text = section("A node's judges", PAGE)
    assert all(str(status) in text for status in PASSES)
    assert f"4 … {PAUSES.longest_s:.0f} s" in text
    assert f"above {MAX_REQUESTED_PAUSE_S:.0f} s" in text
    assert f"more than {ANSWER_BYTES >> 20} MiB" in text
    assert f"up to {MAX_CRITERIA}" in section("LlmJudgeConfig", PAGE)
    assert f"up to {MOST_FILES}" in section("ShowConfig", PAGE)
    assert f"{judging.REASON:,} characters" in section("llm_judge", PAGE)
    judge = section("TurnJudgeConfig", PAGE)
    assert (f"up to {MAX_JUDGED_ITEMS};" in judge, f"{turn_rewards.REASON} characters" in judge) == (
        True,
        True,
    )
