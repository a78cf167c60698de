"""Versions of the weights and of adapters.

A version becomes the current one only when its files would outlive the node that brought them: enough nodes
that are alive have them, or a shared storage has them. Otherwise a node that dies after an upload would leave
a version that nobody can load.
"""

from collections.abc import Mapping
from typing import Any, Final

from psycopg.types.json import Jsonb

from polarnode.core.codec.json import dump_json, read_json
from polarnode.core.conversation import Json
from polarnode.core.weights import PauseMode
from polarnode.journal.entries import adapter_of, is_deleted
from polarnode.journal.log.port import LogWeights, NodeRow, TransferKind
from polarnode.journal.log.postgres.connection import Database
from polarnode.journal.log.postgres.membership import SELECT_NODES, read_node

NOTIFY_WEIGHTS: Final = "SELECT pg_notify('polarnode', 'weights')"


def add_weights(db: Database, version: str, body: Json, *, model: str, shared: bool, at: float) -> None:
    db.execute(
        "INSERT INTO weights (model, version, adapter, at, body, shared) VALUES (%s, %s, %s, %s, %s, %s)"
        " ON CONFLICT (model, version) DO NOTHING",
        (model, version, adapter_of(body), at, dump_json(body), shared),
    )
    db.execute(NOTIFY_WEIGHTS)


def add_weight_holder(db: Database, version: str, incarnation: int, *, model: str) -> None:
    held = db.execute(
        "INSERT INTO weight_holders SELECT number, %s FROM weights WHERE model = %s AND version = %s"
        " ON CONFLICT DO NOTHING",
        (incarnation, model, version),
    )
    if held.rowcount:  # saying it again is no news, or the nodes would wake each other for ever
        db.execute(NOTIFY_WEIGHTS)


def make_current(db: Database, version: str, *, model: str, holders: int) -> bool:
    row = db.execute("SELECT serve_version(%s, %s, %s) AS served", (model, version, holders)).fetchone()
    return row is not None and bool(row["served"])


def change_weights(db: Database, version: str, body: Json, *, model: str) -> None:
    db.execute(
        "UPDATE weights SET body = %s, current = current AND NOT %s WHERE model = %s AND version = %s",
        (dump_json(body), is_deleted(body), model, version),
    )
    db.execute(NOTIFY_WEIGHTS)


def report_serving(db: Database, incarnation: int, versions: Mapping[str, str]) -> None:
    told = db.execute(
        "UPDATE nodes SET serving = %(serving)s WHERE incarnation = %(incarnation)s"
        " AND serving IS DISTINCT FROM %(serving)s",
        {"serving": Jsonb(dict(versions)), "incarnation": incarnation},
    )
    if told.rowcount:
        db.execute(NOTIFY_WEIGHTS)


# So many transfers of each kind are remembered for a model. One is under way; the others were left
# unfinished, or are asked for again.
MAX_TRANSFERS: Final = 64
INSERT_TRANSFER: Final = """
INSERT INTO transfers (model, kind, name, body) VALUES (%s, %s, %s, %s)
ON CONFLICT (model, kind, name) DO UPDATE SET body = excluded.body"""
DELETE_OLD_TRANSFERS: Final = """
DELETE FROM transfers WHERE number IN (SELECT number FROM transfers
    WHERE model = %s AND kind = %s ORDER BY number DESC OFFSET %s)"""


def add_transfer(db: Database, kind: TransferKind, name: str, body: Json, *, model: str) -> None:
    db.execute(INSERT_TRANSFER, (model, kind, name, Jsonb(body)))
    db.execute(DELETE_OLD_TRANSFERS, (model, kind, MAX_TRANSFERS))


def read_transfer(db: Database, kind: TransferKind, name: str, *, model: str) -> Json:
    row = db.execute(
        "SELECT body FROM transfers WHERE model = %s AND kind = %s AND name = %s", (model, kind, name)
    ).fetchone()
    body: Json = None if row is None else row["body"]
    return body


def end_transfer(db: Database, kind: TransferKind, name: str, *, model: str) -> None:
    db.execute("DELETE FROM transfers WHERE model = %s AND kind = %s AND name = %s", (model, kind, name))


INSERT_HOLD: Final = """
INSERT INTO holds SELECT %(model)s, %(mode)s, coalesce(max(incarnation), 0) FROM nodes
ON CONFLICT (model) DO UPDATE SET mode = excluded.mode, among = excluded.among"""


def hold_generation(db: Database, mode: PauseMode | None, *, model: str) -> None:
    if not model:
        db.execute("DELETE FROM holds")
    if model or mode is not None:
        db.execute(INSERT_HOLD, {"model": model, "mode": mode})
    db.execute(NOTIFY_WEIGHTS)


SELECT_HOLD: Final = """
SELECT mode,
    %(follows)s OR EXISTS (SELECT 1 FROM nodes WHERE state = 'alive' AND incarnation <= among) AS counts
FROM holds WHERE model IN ('', %(model)s) ORDER BY model = '' LIMIT 1"""


def generation_hold(db: Database, *, model: str, follows: bool) -> PauseMode | None:
    row = db.execute(SELECT_HOLD, {"model": model, "follows": follows}).fetchone()
    mode: PauseMode | None = row["mode"] if row is not None and row["counts"] else None
    return mode


SELECT_STALE_NODES: Final = (
    SELECT_NODES
    + """WHERE state = 'alive' AND serving <> '{}' AND EXISTS (SELECT 1 FROM weights
    WHERE current AND adapter = '' AND model = coalesce(nodes.labels ->> 'model', '')
    AND version IS DISTINCT FROM nodes.serving ->> '') ORDER BY name, incarnation"""
)


def stale_nodes(db: Database) -> tuple[NodeRow, ...]:
    return tuple(map(read_node, db.execute(SELECT_STALE_NODES.encode())))


SELECT_WEIGHTS: Final = """
SELECT weights.*, ARRAY(SELECT incarnation FROM weight_holders JOIN nodes USING (incarnation)
    WHERE weight_holders.number = weights.number AND nodes.state = 'alive' ORDER BY incarnation) AS holders
FROM weights WHERE model = %(model)s """


def weights_of(db: Database, version: str, *, model: str) -> LogWeights | None:
    values = {"model": model, "version": version}
    row = db.execute((SELECT_WEIGHTS + "AND version = %(version)s").encode(), values).fetchone()
    return None if row is None else _read_weights(row)


# The inner query uses no column of the outer one, so that it runs once and not once for each version that
# ever was.
ONLY_LATEST: Final = """AND (current OR number IN
    (SELECT max(number) FROM weights newest WHERE newest.model = %(model)s GROUP BY newest.adapter)) """


LIST_CLAUSE: Final = "AND (adapter <> '') = %(adapters)s ORDER BY number DESC LIMIT %(limit)s"


def weights(
    db: Database, *, model: str, adapters: bool, latest: bool, limit: int | None
) -> tuple[LogWeights, ...]:
    query = f"{SELECT_WEIGHTS}{ONLY_LATEST if latest else ''}{LIST_CLAUSE}"
    values = {"model": model, "adapters": adapters, "limit": limit}
    return tuple(map(_read_weights, db.execute(query.encode(), values)))


def _read_weights(row: Mapping[str, Any]) -> LogWeights:
    return LogWeights(
        version=row["version"],
        adapter=row["adapter"],
        at=row["at"],
        body=read_json(bytes(row["body"])),
        shared=row["shared"],
        current=row["current"],
        counted=row["counted"],
        holders=tuple(row["holders"]),
    )
