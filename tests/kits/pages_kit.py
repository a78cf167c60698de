"""The commands of the pages: every fenced block of a shell, what is said about it, and how it is run.

A comment on the line before a fence says how a block is tested where it cannot be run as it stands:
`<!-- needs a GPU -->`, `<!-- tested by tests/benchmarks -->`. Every other block of `RUN` is run as it stands by
tests/live/test_pages.py, and every command of another page is in `TESTED` or `NEEDS` of tests/docs/test_page_commands.py.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
SHELLS = ("sh", "bash")
# pages whose blocks are run, in this order, on one node
RUN = ("docs/tutorial.md", "docs/troubleshooting.md", "docs/deployment.md", "docs/sizing.md")


@frozen(kw_only=True)
class Block:
    """A fenced block. `note` is the comment before it, empty without one."""

    page: str
    line: int
    language: str
    note: str
    text: str

    @property
    def commands(self) -> list[str]:
        """One a line, without comments; a line that ends with a backslash goes on."""
        joined = self.text.replace("\\\n", " ")
        lines = (re.sub(r"(^|\s+)# .*$", "", line).strip() for line in joined.splitlines())
        return [re.sub(r"\s+", " ", line) for line in lines if line and not line.startswith("#")]


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page of the repository."""
    text = (ROOT / page).read_text()
    for found in BLOCK.finditer(text):
        yield Block(
            page=page,
            line=text.count("\n", 0, found.start("text")) + 1,
            language=found["language"],
            note=found["note"] or "",
            text=found["text"],
        )


def shell_blocks(page: str) -> Iterator[Block]:
    return (block for block in blocks(page) if block.language in SHELLS)
