"""The weights a node served, in order: one row a version, its body as JSON.

The rule for whoever edits it: as in `entries`, a row may be written twice and stands once; the first stands, for tokens bear its name.
"""

import sqlite3
from collections.abc import Mapping
from functools import partial

from attrs import frozen

from polarnode.conversation import Json
from polarnode.shell.journal.entries import ROW_BYTES, Entry
from polarnode.wire import dump_json, read_json

COLUMNS = "SELECT version, at, body FROM weights "


@frozen(kw_only=True)
class WeightsRow:
    """One version that was served since `at`."""

    version: str
    at: float
    body: Json


def weights_entry(version: str, body: Mapping[str, Json], *, now: float) -> Entry:
    row = (version, now, dump_json(dict(body)))
    return Entry(ROW_BYTES + len(row[2]), partial(_insert, row=row))


def _insert(db: sqlite3.Connection, *, row: tuple[str, float, bytes]) -> None:
    if db.execute("SELECT 1 FROM weights WHERE version = ?", row[:1]).fetchone() is None:
        db.execute("INSERT INTO weights (version, at, body) VALUES (?, ?, ?)", row)


def weights(db: sqlite3.Connection, limit: int) -> tuple[WeightsRow, ...]:
    """Newest first."""
    return tuple(_row(*row) for row in db.execute(COLUMNS + "ORDER BY number DESC LIMIT ?", (limit,)))


def weights_of(db: sqlite3.Connection, version: str) -> WeightsRow | None:
    row = db.execute(COLUMNS + "WHERE version = ?", (version,)).fetchone()
    return None if row is None else _row(*row)


def _row(version: str, at: float, body: bytes) -> WeightsRow:
    return WeightsRow(version=version, at=at, body=read_json(body))
