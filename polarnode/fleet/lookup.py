"""Which node has a task, by asking all of them.

Invariant: a task that some node may have is never answered as unknown. It would be begun anew, and its places
filled twice when that node comes back.
"""

from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import quote, urlencode

import trio
from attrs import define

from polarnode.client.values import ClientError, Unreachable
from polarnode.core.codec.json import structure
from polarnode.core.errors import Busy, PolarnodeError, Refused
from polarnode.core.fleet import CopyRow, CopyRows
from polarnode.core.task import ForkSpec
from polarnode.fleet.members import FleetMember, Roster
from polarnode.fleet.ownership import KnownHomes, owner_of
from polarnode.fleet.placement import BUSY_S

# for a task whose home has died to get another: a question about it is not worth an error before
CHANGING_S: Final = 5.0
LOOK_S: Final = 0.5  # between two looks for it
NEWS: Final = (Unreachable, ClientError)


@define(eq=False)
class TaskLookup:
    """Asks the nodes of a roster. `homes`: what the front knows of nodes that do not answer."""

    roster: Roster
    homes: KnownHomes

    async def find(self, task_id: str | None, key: str | None = None) -> FleetMember | None:
        """The node that owns a task, by its id or key; None where no node has it. Raises Busy while its owner
        is being changed, or a node that has it does not answer.
        """
        until = trio.current_time() + CHANGING_S
        while True:
            found = await self._rows_of(task_id, key)
            owner = owner_of(found)
            if owner is not None:
                return self.roster.of_journal(owner)
            if all(row.ended for row in found.values()):
                self._insist_here(task_id, found.values())
                return None
            if trio.current_time() >= until:
                raise Busy("the task changes hands: its node is gone, and another takes it", retry_after=2.0)
            await trio.sleep(LOOK_S)

    async def parent_of(self, fork: ForkSpec) -> FleetMember:
        """The node whose journal has the session that a fork goes on from. Raises Refused where none has."""
        found = await self.session(fork.session)
        if found is None:
            raise Refused(
                f"fork.session {fork.session!r} is in no journal of this fleet: it is unknown, or was pruned",
                path="$.fork.session",
            )
        return found[0]

    async def session(self, session_id: str) -> tuple[FleetMember, dict[str, Any]] | None:
        """The node that has a session, and the session's record. Raises Busy while a node that may have it
        does not answer.
        """
        path = f"/v1/sessions/{quote(session_id, safe='')}?arrays=base64"
        for member, answer in await self.ask_all("GET", path):
            if not isinstance(answer, Exception):
                return member, answer["session"]
        silent = [each.name for each in self.roster.members.values() if not each.answers]
        if silent:
            raise Busy(
                f"session {session_id!r} may be on {', '.join(silent)}, which does not answer",
                retry_after=BUSY_S,
            )
        return None

    def _insist_here(self, task_id: str | None, ended: Iterable[CopyRow]) -> None:
        """Raise Busy for a task that nobody has because its only home does not answer, as this front or a
        former second home remembers.
        """
        known = self.homes.known.get(task_id or "")
        for row in (*ended, *(() if known is None else (known,))):
            home = self.roster.of_journal(row.home)
            if (home is None and not self.roster.known) or (home is not None and not home.answers):
                name = "a node" if home is None else home.name
                raise Busy(
                    f"the task is on {name} alone, which does not answer: wait for it, or submit the task"
                    " under another id",
                    retry_after=BUSY_S,
                )

    async def _rows_of(self, task_id: str | None, key: str | None) -> dict[str, CopyRow]:
        """The rows of one task, by journal."""
        found: dict[str, CopyRow] = {}
        for name, value in (("task_id", task_id), ("key", key)):
            if found or not value:
                continue
            path = f"/v1/fleet/tasks?{urlencode({name: value})}"
            answers = await self.ask_all("GET", path)
            for member, answer in answers:
                rows = structure(answer, CopyRows).tasks if not isinstance(answer, PolarnodeError) else ()
                found.update((member.journal, row) for row in rows)
        return found

    async def ask_all(self, method: str, path: str, **more: Any) -> list[tuple[FleetMember, Any]]:
        """Ask every node that answers. Gives each one's JSON, or the error."""
        found: list[tuple[FleetMember, Any]] = []

        async def ask(member: FleetMember) -> None:
            try:
                found.append((member, await member.link.call(method, path, **more)))
            except NEWS as error:
                found.append((member, error))

        async with trio.open_nursery() as nursery:
            for member in self.roster.members.values():
                if member.answers:
                    nursery.start_soon(ask, member)
        return sorted(found, key=lambda each: each[0].link.url)
