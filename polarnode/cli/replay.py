"""`polarnode replay`: recorded requests of a harness, planned as a live session would be; a line for each, and what they add up to.

A folder with recorded requests is a session, wherever it lies under the one that was named. The rule for whoever edits it: with `--json`
nothing but one object a request goes to stdout, and a session is printed when it is done, so that thousands need no more memory than one.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from os import walk
from pathlib import Path
from typing import Final

from attrs import asdict
from rich.console import Console
from rich.table import Table

from polarnode.cli.printing import fitted, harmless, open_console
from polarnode.config import TINY_MODEL
from polarnode.errors import Refused
from polarnode.providers.dialect import NoMemory
from polarnode.replay.recording import Recorded, read_recorded
from polarnode.replay.session import Line, Totals, added, replay_session, total
from polarnode.tokens.families import family_of
from polarnode.tokens.template import Template
from polarnode.tokens.tokenizer import load_tokenizer
from polarnode.wire import dump_json

_REQUEST: Final = re.compile(r"(?P<name>.*)request\.json", re.IGNORECASE)
_NUMBER: Final = re.compile(r"(\d+)")
FIGURES: Final = ("lineage", "prompt", "new")
COLUMNS: Final = ("file", "provider", "kind", "parent", "lineage", "reason", "role", "prompt", "new", "error")


def replay(folder: Path, tokenizer: Path | None, *, as_json: bool) -> int:
    """Print what became of every recorded request under a folder. 1 when one of them was refused, else 0."""
    sessions = _sessions(folder)
    if not sessions:
        raise Refused(f"there are no recorded requests in {folder}: name a folder with NN-request.json files in it, or in its sub-folders")
    template = _template(tokenizer or TINY_MODEL)
    console = open_console(stderr=as_json)
    totals = []
    for session, files in sessions:
        lines = replay_session(_read(folder, files), template)
        totals.append(total(lines))
        _print_json(lines) if as_json else _print_table(session, lines, console)
        console.print(_summary(session, totals[-1]))
    console.print(_summary("all", added(totals)), style="bold")
    return 1 if any(each.errors for each in totals) else 0


def _template(path: Path) -> Template:
    tokenizer = load_tokenizer(path)
    return Template(tokenizer, family_of(tokenizer))


# ── files ─────────────────────────────────────────────────────────────────────


def _sessions(folder: Path) -> list[tuple[str, list[Path]]]:
    """The folders with requests in them, and those requests, both in the order a person counts in."""
    found = []
    for place, _, names in walk(folder, followlinks=False):
        files = sorted((Path(place) / name for name in names if _REQUEST.fullmatch(name)), key=_natural)
        if files:
            found.append((folder.resolve().name if Path(place) == folder else Path(place).relative_to(folder).as_posix(), files))
    return sorted(found, key=lambda session: _natural(Path(session[0])))


def _natural(path: Path) -> list[tuple[bool, int, str]]:
    """`9-request.json` comes before `10-request.json`."""
    parts = _NUMBER.split(path.as_posix())
    return [(bool(place % 2), int(part) if place % 2 else 0, part) for place, part in enumerate(parts)]


def _read(folder: Path, files: Sequence[Path]) -> list[Recorded]:
    return [read_recorded(file.relative_to(folder).as_posix(), _content(file), NoMemory(), response=_response(file)) for file in files]


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise Refused(f"{file} can not be read: {error.strerror}") from error


def _response(file: Path) -> bytes | None:
    found = _REQUEST.fullmatch(file.name)
    beside = file.with_name(f"{found['name']}response.txt") if found else file
    return _content(beside) if beside != file and beside.is_file() else None


# ── what is printed ───────────────────────────────────────────────────────────


def _print_json(lines: Sequence[Line]) -> None:
    for line in lines:
        sys.stdout.write(dump_json(asdict(line)).decode() + "\n")
    sys.stdout.flush()


def _print_table(session: str, lines: Sequence[Line], console: Console) -> None:
    console.print(f"\nsession {harmless(session)}", style="bold")
    console.print(fitted(console, lambda narrow: _table(lines, narrow=narrow)))


def _table(lines: Sequence[Line], *, narrow: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=narrow, padding=(0, 1))
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in FIGURES else "left", no_wrap=name in FIGURES or not narrow, overflow="fold")
    for line in lines:
        table.add_row(*map(harmless, _cells(line)), style="red" if line.error else "")
    return table


def _cells(line: Line) -> Iterator[str]:
    parent = None if line.parent is None else _short(line.parent)
    yield _short(line.file)
    for value in (line.provider, line.kind, parent, line.lineage, line.reason, line.role, line.prompt_tokens, line.new_tokens):
        yield "–" if value is None else str(value)
    yield line.error or ""


def _short(file: str) -> str:
    """What tells a session's files apart."""
    found = _REQUEST.fullmatch(Path(file).name)
    return (found["name"] if found else "").rstrip("-_.") or Path(file).name


def _summary(session: str, totals: Totals) -> str:
    return (
        f"{harmless(session)}: {totals.requests} requests, {totals.turns} turns in {totals.lineages} lineages ({totals.main_lineages} main); "
        f"{totals.prompt_tokens} prompt tokens, {totals.new_tokens} of them new; {totals.errors} errors"
    )
