"""`polarnode merge`: model calls recorded elsewhere, merged into rows by tokens alone; rows to a file or stdout, the rest to stderr.

The rule for whoever edits it: stdout carries rows and nothing else, and every bad line is told where it is met, so that a long run says
early what is wrong.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO

import click

from polarnode.cli.files import written_whole
from polarnode.cli.printing import harmless
from polarnode.errors import Refused
from polarnode.merge.by_tokens.sessions import Counts, Sessions


def merge(file: Path, output: Path | None) -> int:
    """Merge a file of calls (`-`: stdin). 1 when a line was bad, else 0."""
    sessions = Sessions()
    with _opened(file) as lines:
        for number, line in enumerate(lines, 1):
            wrong = sessions.take(line, number)
            if wrong is not None:
                click.echo(harmless(wrong), err=True)
    with written_whole(output) if output is not None else nullcontext[BinaryIO](sys.stdout.buffer) as out:
        out.writelines(sessions.rows())
        out.flush()
    click.echo(_summary(sessions.counts), err=True)
    return 1 if sessions.counts.bad else 0


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    try:
        with nullcontext(sys.stdin.buffer) if str(file) == "-" else file.open("rb") as lines:
            yield lines
    except OSError as error:
        raise Refused(f"{file} can not be read: {error.strerror}") from error


def _summary(counts: Counts) -> str:
    return (
        f"{counts.records} records, {counts.sessions} sessions, {counts.rows} rows; "
        f"{counts.sampled} sampled tokens, {counts.trainable} trainable; "
        f"{counts.broken} broken (a prompt without the reply before it), {counts.retries} retries, {counts.empty} empty, {counts.bad} bad lines"
    )
