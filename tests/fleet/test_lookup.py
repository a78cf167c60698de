"""Which node has a task: what nodes answer is given, and no clock but Trio's jumps."""

from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import pytest
import trio

from polarnode.client.values import Unreachable
from polarnode.core.codec.json import plain
from polarnode.core.errors import Busy
from polarnode.core.fleet import CopyRow, CopyRows, Epoch, NodeReport
from polarnode.fleet.link import Link
from polarnode.fleet.lookup import TaskLookup
from polarnode.fleet.members import FleetMember, Roster
from polarnode.fleet.ownership import KnownHomes

A, B = ("j" + letter * 16 for letter in "ab")


class StubLink:
    """A node that has these rows, found by task id or as the task of the key `k`."""

    def __init__(self, url: str, rows: tuple[CopyRow, ...], fails: bool = False) -> None:
        self.url, self.rows, self.fails = url, rows, fails

    async def call(self, method: str, path: str) -> Any:
        await trio.lowlevel.checkpoint()
        if self.fails:
            raise Unreachable("gone")
        query = parse_qs(urlsplit(path).query)
        wanted = query.get("task_id", ["t" if query.get("key") == ["k"] else ""])
        return plain(CopyRows(tasks=tuple(row for row in self.rows if row.task_id in wanted)))


def row(role: str, home: str, **more: Any) -> CopyRow:
    return CopyRow(task_id="t", role=role, epoch=Epoch(1, 0), home=home, second="", **more)  # type: ignore[arg-type]


def lookup(*rows: CopyRow | None, away: str = "", unknown: bool = False) -> TaskLookup:
    """Node a has the first rows and b the second ones; `away` does not answer."""
    roster = Roster()
    for journal, own in zip((A, B), rows, strict=True):
        link = cast(Link, StubLink(f"http://{journal}", () if own is None else (own,)))
        member = FleetMember(link=link, last_byte=0.0, state="up", rows={})
        member.report = NodeReport(node=journal[:2], journal=journal, model="m")
        if journal == away:
            member.state, member.rows = "gone", None
            member.report = None if unknown else member.report
        roster.members[link.url] = member
    return TaskLookup(roster, KnownHomes())


async def owner(found: TaskLookup, task_id: str | None = "t", key: str | None = None) -> str | None:
    member = await found.find(task_id, key)
    return None if member is None else member.journal


async def test_the_home_of_a_task_is_found_by_id_and_by_key() -> None:
    found = lookup(row("home", A), row("second", A))
    assert await owner(found) == A
    assert await owner(found, None, "k") == A
    assert await owner(found, "other", "another") is None
    cast(StubLink, found.roster.members[f"http://{B}"].link).fails = True
    assert await owner(found) == A


async def test_a_task_whose_home_is_away_waits_for_its_next_one(autojump_clock: Any) -> None:
    with pytest.raises(Busy, match="changes hands"):
        await lookup(None, row("second", A), away=A).find("t")


@pytest.mark.parametrize("unknown", [False, True])
async def test_a_task_that_ended_where_nobody_answers_is_not_unknown(unknown: bool) -> None:
    remembered = row("former", A, ended=True)
    for wanted in (("t", None), (None, "k")):
        with pytest.raises(Busy, match="alone, which does not answer"):
            await lookup(None, remembered, away=A, unknown=unknown).find(*wanted)
    assert await owner(lookup(None, remembered)) is None, "its home answers, and has forgotten it"
    left = lookup(None, remembered)
    del left.roster.members[f"http://{A}"]
    assert await owner(left) is None, "its home left the fleet"


async def test_a_task_that_this_front_saw_at_a_node_that_is_gone_is_not_unknown() -> None:
    found = lookup(None, None, away=A)
    found.homes.listed(A, [row("home", A)])
    with pytest.raises(Busy, match="is on ja alone"):
        await found.find("t")
    assert await owner(found, "other") is None
