"""Nodes: one row for each start of a process, and its signs of life.

The server's clock is not used. A node is declared lost by another node that saw the same sign for longer than
the lease, on its own monotonic clock (`watching.py`), and only if the sign is still the same then.
"""

from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen
from psycopg.types.json import Jsonb

from polarnode.core.conversation import Json
from polarnode.journal.log.port import JoinedNode, NodeFacts, NodeRow
from polarnode.journal.log.postgres.connection import Database
from polarnode.journal.log.postgres.places import claims, put_back_lost

# One statement begins an incarnation and gives it the places of earlier ones of its name. From then on
# `finish_place` refuses an older process of this name that still runs.
JOIN_NODE: Final = """
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


def join(db: Database, facts: NodeFacts) -> JoinedNode:
    values = {
        "name": facts.name,
        "url": facts.url,
        "certificate": facts.certificate,
        "version": facts.version,
        "labels": Jsonb(dict(facts.labels)),
    }
    db.execute("SELECT settle_identity()")  # after a failover it skips numbers that living nodes may have
    row = db.execute(JOIN_NODE, values).fetchone()
    assert row is not None
    return JoinedNode(incarnation=row["incarnation"], inherited=claims(db, row["incarnation"]))


def renew_certificate(db: Database, incarnation: int, certificate: str) -> None:
    db.execute("UPDATE nodes SET certificate = %s WHERE incarnation = %s", (certificate, incarnation))


# Each node runs this statement once a second. With 64 nodes, a further statement here would be 64 more a
# second.
GIVE_SIGN: Final = """
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
class SignAnswer:
    """The answer to a sign of life: whether it was accepted, the signs of all nodes that are alive, and the
    loads of those with the same model that begin sessions. The node's own load in it is the previous one.
    """

    signed: bool
    signs: Mapping[int, int]
    loads: Mapping[int, float]
    callbacks_pending: bool


def give_sign(
    db: Database,
    incarnation: int | None,
    report: Mapping[str, Json] | None = None,
    reading: Mapping[str, int] | None = None,
    load: float | None = None,
) -> SignAnswer:
    """Give a sign, if there is an incarnation, and read the signs of all nodes."""
    values = {
        "incarnation": incarnation,
        "report": None if report is None else Jsonb(dict(report)),
        "reading": None if reading is None else Jsonb(dict(reading)),
        "load": load,
    }
    rows = db.execute(GIVE_SIGN, values).fetchall()
    return SignAnswer(
        signed=bool(rows) and rows[0]["signed"],
        signs={row["incarnation"]: row["sign"] for row in rows},
        loads={row["incarnation"]: row["load"] for row in rows if row["load"] is not None},
        callbacks_pending=bool(rows) and rows[0]["callbacks_pending"],
    )


def read_signs(db: Database) -> dict[int, int]:
    rows = db.execute("SELECT incarnation, sign FROM nodes WHERE state = 'alive'")
    return {row["incarnation"]: row["sign"] for row in rows}


DECLARE_LOST: Final = (
    "UPDATE nodes SET state = 'lost' WHERE incarnation = %s AND state = 'alive' AND sign = %s"
)


def declare_lost(db: Database, incarnation: int, last: int) -> bool:
    return db.execute(DECLARE_LOST, (incarnation, last)).rowcount > 0


def leave(db: Database, incarnation: int) -> None:
    db.execute("UPDATE nodes SET state = 'left' WHERE incarnation = %s AND state = 'alive'", (incarnation,))
    put_back_lost(db)


SELECT_NODES: Final = """
SELECT nodes.*, (SELECT count(*) FROM places
    WHERE places.incarnation = nodes.incarnation AND places.state = 'running')
    AS running FROM nodes """


def nodes(db: Database, *, every: bool) -> tuple[NodeRow, ...]:
    where = "" if every else "WHERE state = 'alive' "
    return tuple(map(read_node, db.execute((SELECT_NODES + where + "ORDER BY name, incarnation").encode())))


def node_of(db: Database, session_id: str) -> NodeRow | None:
    row = db.execute(
        (
            SELECT_NODES + "WHERE incarnation = (SELECT incarnation FROM sessions WHERE session_id = %s)"
        ).encode(),
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
