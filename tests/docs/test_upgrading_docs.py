"""docs/upgrading.md and SECURITY.md say what the program does: versions of journals, names that were given up, links."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from polarnode.cli.main import main as command
from polarnode.journal.schema import MIGRATIONS, SCHEMA_VERSION

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "upgrading.md").read_text()


def table(title: str) -> list[list[str]]:
    """The cells of the table below a heading, without its head."""
    found = re.search(rf"^## {title}$\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    lines = [line for line in found[1].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_every_journal_version_is_listed() -> None:
    assert f"The journal has version {SCHEMA_VERSION}." in PAGE
    assert f"every version from {min(MIGRATIONS)} to {SCHEMA_VERSION};" in PAGE
    assert [int(row[0]) for row in table("Journals")] == list(range(2, SCHEMA_VERSION + 1))


def renamed_flags() -> list[tuple[str, str, str]]:
    """Verb, old flag and new flag of each renamed one, from the program itself."""
    return [
        (verb, param.opts[0], str(getattr(param, "help", "")).split()[-1].rstrip("."))
        for verb, each in command.commands.items()
        for param in each.params
        if param.name is not None and param.name.startswith("renamed_")
    ]


@pytest.mark.parametrize(("verb", "old", "new"), renamed_flags())
def test_renamed_flag_is_tabled_and_refused(verb: str, old: str, new: str, tmp_path: Path) -> None:
    (row,) = (row for row in table("Other names") if row[0].startswith(f"`{old}` of "))
    assert verb in row[0]
    assert row[1] == f"`{new}`"
    value = () if old == "--skip" else ("x",)
    refused = CliRunner().invoke(command, [verb, old, *value, str(tmp_path)])
    assert refused.exit_code == 2
    assert f"{old} is called {new} now" in refused.output


def test_table_names_no_valid_flag() -> None:
    documented = {row[0].split("`")[1] for row in table("Other names") if row[0].startswith("`--")}
    assert documented == {old for _, old, _ in renamed_flags()}


def test_security_policy_links_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    assert "private vulnerability reporting" in text
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert {"docs/security.md", "docs/upgrading.md"} <= set(targets)
    assert [target for target in targets if not (ROOT / target).is_file()] == []
