"""docs/troubleshooting.md quotes what the program says: each sentence of its first columns is in the code."""

import ast
import re
from functools import cache

from pages_kit import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()


@cache
def spoken() -> str:
    """Every text of the package, one a line; where an f-string puts a value, `…` stands."""
    found = []
    for path in (ROOT / "polarnode").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (each.value if isinstance(each, ast.Constant) else "…" for each in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def quoted() -> list[str]:
    """What the first cell of a row quotes, if it is a sentence and no name."""
    cells = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| ")]
    return [
        text for cell in cells for text in re.findall(r"`([^`]+)`", cell) if " " in text and ">" not in text
    ]


def test_quoted_sentences_are_in_code() -> None:
    assert len(quoted()) >= 10
    assert [text for text in quoted() if text not in spoken()] == []
