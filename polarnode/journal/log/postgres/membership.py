"""Nodes: one row for each start of a process, and its signs of life.

The server's clock judges nobody: a node is declared lost by who watched the same sign for longer than the
lease on its own monotonic clock (`watching.py`), and only if the sign is still the same then.
"""

from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen
from psycopg.types.json import Jsonb

from polarnode.core.conversation import Json
from polarnode.journal.log.port import Joined, NodeFacts, NodeRow
from polarnode.journal.log.postgres.connection import Database
from polarnode.journal.log.postgres.places import claims, put_back_lost

# An incarnation and what earlier ones of its name held change hands in one statement: from then on the
# fence of `finish_place` refuses an older process of this name that still runs.
JOIN: Final = """
WITH began AS (
    INSERT INTO nodes (name, url, certificate, version, labels)
    VALUES (%(name)s, %(url)s, %(certificate)s, %(version)s, %(labels)s) RETURNING incarnation, name
), replaced AS (
    UPDATE nodes SET state = 'replaced' FROM began
    WHERE nodes.name = began.name AND nodes.incarnation < began.incarnation
        AND nodes.state IN ('alive', 'lost')
), taken AS (
    UPDATE places SET incarnation = began.incarnation FROM began, nodes old
    WHERE places.state = 'running' AND places.incarnation = old.incarnation AND old.name = began.name
        AND old.incarnation < began.incarnation
    RETURNING places.session_id
), moved AS (
    UPDATE sessions SET incarnation = began.incarnation FROM began
    WHERE sessions.session_id IN (SELECT session_id FROM taken)
)
SELECT incarnation FROM began"""


def join(db: Database, facts: NodeFacts) -> Joined:
    values = {
        "name": facts.name,
        "url": facts.url,
        "certificate": facts.certificate,
        "version": facts.version,
        "labels": Jsonb(dict(facts.labels)),
    }
    db.execute("SELECT settle_identity()")  # after a failover, numbers go on where no living node has one
    row = db.execute(JOIN, values).fetchone()
    assert row is not None
    return Joined(incarnation=row["incarnation"], inherited=claims(db, row["incarnation"]))


def renew_certificate(db: Database, incarnation: int, certificate: str) -> None:
    db.execute("UPDATE nodes SET certificate = %s WHERE incarnation = %s", (certificate, incarnation))


# One statement a second and node: 64 nodes on one server are 64 of them, and each more is 64 more.
BEAT: Final = """
WITH signed AS (
    UPDATE nodes SET sign = sign + 1, signed = clock_timestamp(), report = coalesce(%(report)s, report),
        reading = coalesce(%(reading)s, reading), load = %(load)s
    WHERE incarnation = %(incarnation)s AND state = 'alive' RETURNING incarnation, labels
)
SELECT incarnation, sign, EXISTS (SELECT 1 FROM signed) AS signed,
    CASE WHEN labels -> 'model' = (SELECT labels -> 'model' FROM signed) THEN load END AS load,
    EXISTS (SELECT 1 FROM callbacks) AS callbacks_pending
FROM nodes WHERE state = 'alive'"""


@frozen(kw_only=True)
class Beat:
    """What a node is told when it gives its sign: whether it was taken, the signs of all, and the loads of
    those of its model that begin sessions, its own as it was before.
    """

    signed: bool
    signs: Mapping[int, int]
    loads: Mapping[int, float]
    callbacks_pending: bool


def beat(
    db: Database,
    incarnation: int | None,
    report: Mapping[str, Json] | None = None,
    reading: Mapping[str, int] | None = None,
    load: float | None = None,
) -> Beat:
    """Give a sign, if there is an incarnation, and read those of all."""
    values = {
        "incarnation": incarnation,
        "report": None if report is None else Jsonb(dict(report)),
        "reading": None if reading is None else Jsonb(dict(reading)),
        "load": load,
    }
    rows = db.execute(BEAT, values).fetchall()
    return Beat(
        signed=bool(rows) and rows[0]["signed"],
        signs={row["incarnation"]: row["sign"] for row in rows},
        loads={row["incarnation"]: row["load"] for row in rows if row["load"] is not None},
        callbacks_pending=bool(rows) and rows[0]["callbacks_pending"],
    )


def signs(db: Database) -> dict[int, int]:
    rows = db.execute("SELECT incarnation, sign FROM nodes WHERE state = 'alive'")
    return {row["incarnation"]: row["sign"] for row in rows}


EXPIRE: Final = "UPDATE nodes SET state = 'lost' WHERE incarnation = %s AND state = 'alive' AND sign = %s"


def expire(db: Database, incarnation: int, last: int) -> bool:
    return db.execute(EXPIRE, (incarnation, last)).rowcount > 0


def leave(db: Database, incarnation: int) -> None:
    db.execute("UPDATE nodes SET state = 'left' WHERE incarnation = %s AND state = 'alive'", (incarnation,))
    put_back_lost(db)


NODES: Final = """
SELECT nodes.*, (SELECT count(*) FROM places
    WHERE places.incarnation = nodes.incarnation AND places.state = 'running')
    AS running FROM nodes """


def nodes(db: Database, *, every: bool) -> tuple[NodeRow, ...]:
    where = "" if every else "WHERE state = 'alive' "
    return tuple(map(read_node, db.execute((NODES + where + "ORDER BY name, incarnation").encode())))


def node_of(db: Database, session_id: str) -> NodeRow | None:
    row = db.execute(
        (NODES + "WHERE incarnation = (SELECT incarnation FROM sessions WHERE session_id = %s)").encode(),
        (session_id,),
    ).fetchone()
    return None if row is None else read_node(row)


def read_node(row: Mapping[str, Any]) -> NodeRow:
    return NodeRow(
        incarnation=row["incarnation"],
        facts=NodeFacts(
            name=row["name"],
            url=row["url"],
            certificate=row["certificate"],
            version=row["version"],
            labels=row["labels"],
        ),
        state=row["state"],
        sign=row["sign"],
        running=row["running"],
        serving=row["serving"],
        report=row["report"],
    )
