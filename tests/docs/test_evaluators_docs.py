"""docs/evaluators.md against the program: every field with its default, every evaluator, every number."""

from pathlib import Path
from typing import Any

import attrs
import pytest
from test_docs import named, rows, section, shown_default

from polarnode.core.codec import read_task, read_toml_value
from polarnode.core.task import Budgets
from polarnode.evaluators import agent_programs, contract, patches, program_cases, swebench
from polarnode.evaluators.harbor import HarborConfig
from polarnode.evaluators.registry import EVALUATORS, FIXED_EVALUATORS, find
from polarnode.evaluators.swebench import SwebenchConfig
from polarnode.evaluators.test_on_output import TestOnOutputConfig

EXAMPLES = Path(__file__).parents[2] / "examples" / "unforgeable"
PAGE = (Path(__file__).parents[2] / "docs" / "evaluators.md").read_text()


@pytest.mark.parametrize(
    ("title", "cls"),
    [
        ("test_on_output", TestOnOutputConfig),
        ("harbor", HarborConfig),
        ("swebench", SwebenchConfig),
        ("Apart from the agent", agent_programs.SeparateConfig),
        ("program_cases", program_cases.ProgramCasesConfig),
    ],
)
def test_every_field_is_documented(title: str, cls: Any) -> None:
    """Every field is documented with its default."""
    documented = {named(cells[0])[0]: cells[1] for cells in rows(section(title, PAGE))}
    assert documented == {field.alias: shown_default(field) for field in attrs.fields(cls)}


def test_every_case_field_is_documented() -> None:
    """Every field of a case is documented with its default."""
    documented = {named(cells[0])[0]: cells[1] for cells in rows(section("A case", PAGE))}
    both = (program_cases.Case, program_cases.ExpectedOutput)
    assert documented == {field.alias: shown_default(field) for cls in both for field in attrs.fields(cls)}


def test_evaluators_in_forgery_table() -> None:
    """Every evaluator has a row on what can be forged."""
    cells = [cells[0] for cells in rows(section("What an agent can forge", PAGE))]
    assert set(EVALUATORS) == {name for cell in cells for name in named(cell)} - {"separate", "fresh_runtime"}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_examples_are_valid_tasks(path: Path) -> None:
    task = read_task(read_toml_value(path.read_text()))
    found = find(task.evaluator)
    assert (found.name, found.fresh) == (task.evaluator.name, task.evaluator.name == "command")


def test_file_evaluators_are_documented() -> None:
    assert {each.name for each in FIXED_EVALUATORS} == {
        named(cells[0])[0] for cells in rows(section("Evaluators", PAGE))
    }


def test_numbers_match_the_program() -> None:
    assert swebench.INSTALL in PAGE
    assert f"longer than {agent_programs.MAX_DATA_BYTES >> 20} MiB" in PAGE
    assert f"At most {agent_programs.MOST_REQUESTS:,} programs a test" in PAGE
    assert f"1 to {program_cases.MAX_CASES}" in PAGE
    assert f"at most {program_cases.OUTPUT_BYTES >> 20} MiB of each" in PAGE
    assert (
        f"at most {program_cases.MAX_PATTERN_BYTES >> 10} KiB, within {program_cases.MAX_PATTERN_S:g} s"
        in PAGE
    )
    assert f"last {contract.TAIL:,} characters" in " ".join(PAGE.split())
    assert f"in the last {contract.LOG_BYTES >> 20} MiB of an output" in PAGE
    assert f"{contract.NAMES} names of tests" in PAGE
    assert f"{patches.PATCH_SHOWN:,} characters of a patch" in PAGE
    assert f"larger than {patches.FILE_BYTES >> 20} MiB" in PAGE
    assert f"larger than {patches.MAX_PATCH_BYTES >> 20} MiB is worth 0" in PAGE
    assert f"is {Budgets().post_s:g} unless the task says more" in PAGE.replace("\n  ", " ")
    assert all(pattern.strip("*/") in PAGE for pattern in patches.LEFTOVER_PATTERNS)
