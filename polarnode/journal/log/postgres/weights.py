"""Versions of the weights and of adapters.

A version becomes the current one only when its files would outlive the node that brought them: enough nodes
that are alive have them, or a shared storage has. Otherwise a dead uploader would leave a version that
nobody can load.
"""

from collections.abc import Mapping
from typing import Any, Final

from psycopg.types.json import Jsonb

from polarnode.core.codec.json import dump_json, read_json
from polarnode.core.conversation import Json
from polarnode.journal.entries import adapter_of
from polarnode.journal.log.port import LogWeights, NodeRow
from polarnode.journal.log.postgres.connection import Database
from polarnode.journal.log.postgres.membership import NODES, read_node


def add_weights(db: Database, version: str, body: Json, *, shared: bool, at: float) -> None:
    db.execute(
        "INSERT INTO weights (version, adapter, at, body, shared) VALUES (%s, %s, %s, %s, %s)"
        " ON CONFLICT (version) DO NOTHING",
        (version, adapter_of(body), at, dump_json(body), shared),
    )


def hold_weights(db: Database, version: str, incarnation: int) -> None:
    db.execute(
        "INSERT INTO weight_holders SELECT version, %s FROM weights WHERE version = %s"
        " ON CONFLICT DO NOTHING",
        (incarnation, version),
    )


def serve_weights(db: Database, version: str, *, holders: int) -> bool:
    row = db.execute("SELECT serve_version(%s, %s) AS served", (version, holders)).fetchone()
    return row is not None and bool(row["served"])


def change_weights(db: Database, version: str, body: Json) -> None:
    db.execute("UPDATE weights SET body = %s WHERE version = %s", (dump_json(body), version))


def serving(db: Database, incarnation: int, versions: Mapping[str, str]) -> None:
    db.execute("UPDATE nodes SET serving = %s WHERE incarnation = %s", (Jsonb(dict(versions)), incarnation))


STALE: Final = (
    NODES
    + """WHERE state = 'alive' AND EXISTS (SELECT 1 FROM weights WHERE current AND adapter = ''
    AND version IS DISTINCT FROM nodes.serving ->> '') ORDER BY name, incarnation"""
)


def stale_nodes(db: Database) -> tuple[NodeRow, ...]:
    return tuple(map(read_node, db.execute(STALE.encode())))


WEIGHTS: Final = """
SELECT weights.*, ARRAY(SELECT incarnation FROM weight_holders JOIN nodes USING (incarnation)
    WHERE weight_holders.version = weights.version AND nodes.state = 'alive' ORDER BY incarnation) AS holders
FROM weights WHERE (adapter <> '') = %s ORDER BY number DESC LIMIT %s"""


def weights(db: Database, *, adapters: bool, limit: int | None) -> tuple[LogWeights, ...]:
    return tuple(map(_weights, db.execute(WEIGHTS, (adapters, limit))))


def _weights(row: Mapping[str, Any]) -> LogWeights:
    return LogWeights(
        version=row["version"],
        adapter=row["adapter"],
        at=row["at"],
        body=read_json(bytes(row["body"])),
        shared=row["shared"],
        current=row["current"],
        holders=tuple(row["holders"]),
    )
