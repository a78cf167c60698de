"""docs/evaluators.md against the program: every field with its default, every evaluator, every number."""

from pathlib import Path
from typing import Any

import attrs
import pytest
from test_docs import named, rows, section, shown_default

from polarnode.core.task import Budgets
from polarnode.evaluators import contract, patches, swebench
from polarnode.evaluators.harbor import HarborConfig
from polarnode.evaluators.registry import ALIKE
from polarnode.evaluators.swebench import SwebenchConfig
from polarnode.evaluators.test_on_output import TestOnOutputConfig

PAGE = (Path(__file__).parents[2] / "docs" / "evaluators.md").read_text()


@pytest.mark.parametrize(
    ("title", "cls"),
    [("test_on_output", TestOnOutputConfig), ("harbor", HarborConfig), ("swebench", SwebenchConfig)],
)
def test_every_field_is_documented_with_its_default(title: str, cls: Any) -> None:
    documented = {named(cells[0])[0]: cells[1] for cells in rows(section(title, PAGE))}
    assert documented == {field.alias: shown_default(field) for field in attrs.fields(cls)}


def test_every_evaluator_from_files_is_documented() -> None:
    assert {each.name for each in ALIKE} == {
        named(cells[0])[0] for cells in rows(section("Evaluators", PAGE))
    }


def test_the_numbers_are_the_programs() -> None:
    assert swebench.INSTALL in PAGE
    assert f"last {contract.TAIL:,} characters" in " ".join(PAGE.split())
    assert f"in the last {contract.LOG_BYTES >> 20} MiB of an output" in PAGE
    assert f"{contract.NAMES} names of tests" in PAGE
    assert f"{patches.PATCH_SHOWN:,} characters of a patch" in PAGE
    assert f"larger than {patches.FILE_BYTES >> 20} MiB" in PAGE
    assert f"larger than {patches.PATCH_BYTES >> 20} MiB is worth 0" in PAGE
    assert f"is {Budgets().post_s:g} unless the task says more" in PAGE.replace("\n  ", " ")
    assert all(pattern.strip("*/") in PAGE for pattern in patches.LEFTOVERS)
