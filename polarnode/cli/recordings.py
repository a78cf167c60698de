"""The work of the commands that read only files: `merge` makes training rows from recorded calls, `replay`
makes turns from recorded requests or compares two recordings, and `check` verifies a journal.

`merge` writes rows to a file or stdout, and each bad line to stderr where it is read. `replay` plans each
request as a live session would; every folder with requests is one session. Invariant: stdout carries nothing
but rows (`merge`) or JSON objects (`replay --json`). Sessions are printed one at a time to bound memory.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from os import walk
from pathlib import Path
from typing import BinaryIO, Final

import click
from attrs import asdict
from rich.console import Console
from rich.table import Table

from polarnode.cli.output import fit_table, harmless, open_console
from polarnode.cli.remote import trajectory_lines
from polarnode.cli.sources import written_whole
from polarnode.core.codec import read_trajectory
from polarnode.core.codec.json import dump_json, plain
from polarnode.core.errors import Refused
from polarnode.gateway.recorded_difference import (
    PromptComparison,
    TokenPrompt,
    compare_sessions,
    compare_tokens,
    token_prompts,
)
from polarnode.gateway.recorded_request import RecordedRequest, read_recorded
from polarnode.gateway.replay import Line, ReplayTotals, added, replay_session, total
from polarnode.journal.check import check_journal
from polarnode.merge.token_forest import Counts, Sessions
from polarnode.node.config import TINY_MODEL
from polarnode.providers.contract import NoMemory
from polarnode.tokens.families import family_of
from polarnode.tokens.pieces import text_of
from polarnode.tokens.template import Template
from polarnode.tokens.tokenizer import load_tokenizer

# ── check ─────────────────────────────────────────────────────────────────────


def check(state_dir: Path, *, as_json: bool) -> int:
    """Verify the journal of a state folder, or a journal file; returns the exit code, 1 with faults."""
    found = check_journal(state_dir / "journal.sqlite" if state_dir.is_dir() else state_dir)
    if as_json:
        click.echo(dump_json({**plain(found), "ok": found.ok}))
        return 0 if found.ok else 1
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("table", "rows", "without checksum", "faults"):
        table.add_column(name, justify="left" if name == "table" else "right")
    for name, each in found.tables.items():
        table.add_row(name, str(each.rows), str(each.unverified), str(each.faults))
    open_console().print(table)
    for fault in found.faults:
        click.echo(harmless(f"· {fault}"))
    verdict = "no faults" if found.ok else f"{len(found.faults)} faults"
    click.echo(f"{harmless(str(found.path))} (version {found.version}): {verdict}")
    return 0 if found.ok else 1


# ── merge ─────────────────────────────────────────────────────────────────────


def merge(file: Path, output: Path | None) -> int:
    """Merge a file of calls (`-`: stdin); returns the exit code, 1 when a line is bad."""
    sessions = Sessions()
    with _opened(file) as lines:
        for number, line in enumerate(lines, 1):
            wrong = sessions.take(line, number)
            if wrong is not None:
                click.echo(harmless(wrong), err=True)
    with written_whole(output) if output is not None else nullcontext[BinaryIO](sys.stdout.buffer) as out:
        out.writelines(sessions.rows())
        out.flush()
    click.echo(_merge_summary(sessions.counts), err=True)
    return 1 if sessions.counts.bad else 0


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    try:
        with nullcontext(sys.stdin.buffer) if str(file) == "-" else file.open("rb") as lines:
            yield lines
    except OSError as error:
        raise Refused(f"{file} cannot be read: {error.strerror}") from error


def _merge_summary(counts: Counts) -> str:
    return (
        f"{counts.records} records, {counts.sessions} sessions, {counts.rows} rows; {counts.sampled} sampled"
        f" tokens, {counts.trainable} trainable; {counts.broken} broken (a prompt without the reply before"
        f" it), {counts.retries} retries, {counts.empty} empty, {counts.bad} bad lines"
    )


# ── replay ────────────────────────────────────────────────────────────────────

_REQUEST_FILE: Final = re.compile(r"(?P<name>.*)request\.json", re.IGNORECASE)
_NUMBER_PATTERN: Final = re.compile(r"(\d+)")
FIGURES: Final = ("lineage", "prompt", "new")
NAME_A_FOLDER: Final = "name a folder with NN-request.json files, directly or in sub-folders"
NAMED: Final = 6  # the most sessions that a refusal names
COLUMNS: Final = ("file", "provider", "kind", "parent", "lineage", "reason", "role", "prompt", "new", "error")


def replay(folder: Path, tokenizer: Path | None, *, as_json: bool) -> int:
    """Print each recorded request under a folder; returns the exit code, 1 when one is refused."""
    sessions = _sessions(folder)
    if not sessions:
        raise Refused(f"{folder} has no recorded requests: {NAME_A_FOLDER}")
    template = _template(tokenizer or TINY_MODEL)
    console = open_console(stderr=as_json)
    totals = []
    for session, files in sessions:
        lines = replay_session(_read(folder, files), template)
        totals.append(total(lines))
        _print_json(lines) if as_json else _print_table(session, lines, console)
        console.print(_replay_summary(session, totals[-1]))
    console.print(_replay_summary("all", added(totals)), style="bold")
    return 1 if any(each.errors for each in totals) else 0


def compare_recordings(one: Path, other: Path, tokenizer: Path | None, *, as_json: bool) -> int:
    """Compare the sessions of two folders, or of two files of trajectories; returns the exit code, 1 when a
    prompt differs or a request is refused.
    """
    if one.is_dir() != other.is_dir():
        raise Refused(
            f"of {one} and {other} one is a folder: compare two folders of recordings, or two files"
        )
    compared = _compared_folders(one, other) if one.is_dir() else _compared_files(one, other, tokenizer)
    console = open_console(stderr=as_json)
    same = True
    for name, other_name, found in compared:
        same = same and found.same
        if as_json:
            click.echo(
                dump_json({"session": name, "against": other_name, "same": found.same, **plain(found)})
            )
        else:
            console.print(f"{harmless(name)} against {harmless(other_name)}", style="bold")
            for line in _shown(found):
                console.print(line, soft_wrap=True)
    return 0 if same else 1


def _compared_folders(one: Path, other: Path) -> Iterator[tuple[str, str, PromptComparison]]:
    left, right = dict(_sessions(one)), dict(_sessions(other))
    for place, sessions in ((one, left), (other, right)):
        if not sessions:
            raise Refused(f"{place} has no recorded requests: {NAME_A_FOLDER}")
    for name, other_name in _pair_sessions(one, other, list(left), list(right)):
        found = compare_sessions(_read(one, left[name]), _read(other, right[other_name]))
        yield name, other_name, found


def _compared_files(
    one: Path, other: Path, tokenizer: Path | None
) -> Iterator[tuple[str, str, PromptComparison]]:
    left, right = (_session_prompts(file) for file in (one, other))
    token_bytes = None if tokenizer is None else load_tokenizer(tokenizer).token_bytes

    def text(ids: Sequence[int]) -> str:
        return " ".join(map(str, ids)) if token_bytes is None else text_of(ids, token_bytes)

    for name, other_name in _pair_sessions(one, other, list(left), list(right)):
        yield name, other_name, compare_tokens(left[name], right[other_name], text)


def _session_prompts(file: Path) -> dict[str, list[TokenPrompt]]:
    """The prompts of each session of a file, as one row of ids for each of its traces."""
    trajectories = map(read_trajectory, trajectory_lines(file))
    found = {each.session_id: token_prompts(each) for each in trajectories}
    if not found:
        raise Refused(f"{file} has no trajectory: name a file that `polarnode run` or `export` wrote")
    return found


def _pair_sessions(
    one: Path, other: Path, left: Sequence[str], right: Sequence[str]
) -> list[tuple[str, str]]:
    """The pairs of sessions to compare: those of the same name, or the only one on each side."""
    if len(left) == len(right) == 1:
        return [(left[0], right[0])]
    alone = sorted({*left} ^ {*right})
    if alone:
        raise Refused(
            f"{', '.join(alone[:NAMED])}{' …' * (len(alone) > NAMED)}: only in one of {one} and {other};"
            " compare one session on each side, or sessions with the same names"
        )
    return [(name, name) for name in left]


def _shown(found: PromptComparison) -> Iterator[str]:
    """The lines to print for a person. Texts are JSON strings, so that blanks and line ends are visible."""
    there = (
        "" if found.requests == found.against_requests else f"; OTHER has {found.against_requests} requests"
    )
    yield f"{found.equal} of {found.requests} prompts equal{there}"
    first = found.first
    if first is not None and first.part is None:
        side, file = ("DIR", first.file) if first.file is not None else ("OTHER", first.against_file)
        yield f"{harmless(str(file))} of {side} has no counterpart: the other side has no more requests"
    elif first is not None:
        yield f"first difference: {harmless(f'{first.file} and {first.against_file}')}, in {first.part}"
        shown = (first.before, first.words, first.against_words, first.after)
        for label, text in zip(("before", "DIR", "OTHER", "after"), shown, strict=True):
            yield f"  {label:<6}  {harmless(dump_json(text).decode())}"
    for error in found.errors:
        yield f"not read: {harmless(error)}"


def _template(path: Path) -> Template:
    tokenizer = load_tokenizer(path)
    return Template(tokenizer, family_of(tokenizer))


def _sessions(folder: Path) -> list[tuple[str, list[Path]]]:
    """Each folder that holds requests, with those requests; both in natural order."""
    found = []
    for place, _, names in walk(folder, followlinks=False):
        files = sorted(
            (Path(place) / name for name in names if _REQUEST_FILE.fullmatch(name)), key=_natural_key
        )
        if files:
            at_top = Path(place) == folder
            name = folder.resolve().name if at_top else Path(place).relative_to(folder).as_posix()
            found.append((name, files))
    return sorted(found, key=lambda session: _natural_key(Path(session[0])))


def _natural_key(path: Path) -> list[tuple[bool, int, str]]:
    """A sort key by which `9-request.json` comes before `10-request.json`."""
    parts = _NUMBER_PATTERN.split(path.as_posix())
    return [(bool(place % 2), int(part) if place % 2 else 0, part) for place, part in enumerate(parts)]


def _read(folder: Path, files: Sequence[Path]) -> list[RecordedRequest]:
    return [
        read_recorded(
            file.relative_to(folder).as_posix(), _content(file), NoMemory(), response=_response(file)
        )
        for file in files
    ]


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise Refused(f"{file} cannot be read: {error.strerror}") from error


def _response(file: Path) -> bytes | None:
    found = _REQUEST_FILE.fullmatch(file.name)
    beside = file.with_name(f"{found['name']}response.txt") if found else file
    return _content(beside) if beside != file and beside.is_file() else None


def _print_json(lines: Sequence[Line]) -> None:
    for line in lines:
        sys.stdout.write(dump_json(asdict(line)).decode() + "\n")
    sys.stdout.flush()


def _print_table(session: str, lines: Sequence[Line], console: Console) -> None:
    console.print(f"\nsession {harmless(session)}", style="bold")
    console.print(fit_table(console, lambda narrow: _table(lines, narrow=narrow)))


def _table(lines: Sequence[Line], *, narrow: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=narrow, padding=(0, 1))
    for name in COLUMNS:
        table.add_column(
            name,
            justify="right" if name in FIGURES else "left",
            no_wrap=name in FIGURES or not narrow,
            overflow="fold",
        )
    for line in lines:
        table.add_row(*map(harmless, _cells(line)), style="red" if line.error else "")
    return table


def _cells(line: Line) -> Iterator[str]:
    parent = None if line.parent is None else _short(line.parent)
    yield _short(line.file)
    for value in (
        line.provider,
        line.kind,
        parent,
        line.lineage,
        line.reason,
        line.role,
        line.prompt_tokens,
        line.new_tokens,
    ):
        yield "–" if value is None else str(value)
    yield line.error or ""


def _short(file: str) -> str:
    """The part of a file's name that differs within a session."""
    found = _REQUEST_FILE.fullmatch(Path(file).name)
    return (found["name"] if found else "").rstrip("-_.") or Path(file).name


def _replay_summary(session: str, totals: ReplayTotals) -> str:
    return (
        f"{harmless(session)}: {totals.requests} requests, {totals.turns} turns in {totals.lineages} lineages"
        f" ({totals.main_lineages} main); {totals.prompt_tokens} prompt tokens, {totals.new_tokens} of them"
        f" new; {totals.errors} errors"
    )
