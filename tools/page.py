"""Replace the part of a page between two marker comments, and leave the rest unchanged."""

from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def marks(name: str) -> tuple[str, str]:
    """What the part begins and ends with."""
    return f"<!-- {name} -->", f"<!-- /{name} -->"


def part(page: Path, name: str) -> str:
    """What stands between the marks."""
    begin, end = marks(name)
    return page.read_text().partition(begin)[2].partition(end)[0]


def write_part(page: Path, name: str, text: str) -> None:
    """Put `text` between the marks in the place of what is there. SystemExit for a page that has none."""
    begin, end = marks(name)
    before, found, rest = page.read_text().partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise SystemExit(f"{page.relative_to(ROOT)} has no {begin} and {end} to write between")
    page.write_text(f"{before}{begin}\n{text}{end}{after}")


def write_table(page: Path, name: str, head: str, lines: Mapping[str, str]) -> None:
    """Put a table between the marks: `head`, and its lines by their first cell, in order. Lines that are there
    already and not given anew stay.
    """
    there = part(page, name).splitlines(keepends=True)
    kept = {each.split("|")[1].strip(): each for each in there if each.startswith("| ") and each not in head}
    whole = kept | dict(lines)
    write_part(page, name, head + "".join(whole[case] for case in sorted(whole)))
