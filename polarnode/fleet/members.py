"""The nodes of a fleet as its front sees them.

A member is `joining` until it has the front's term, its copies are known and it serves the desired weights;
`up` takes tasks; `suspect` was silent for SUSPECT_S, and takes none; `gone` refuses connections or was silent
for GONE_S: what it held is adopted. `stale` lacks weights, `draining` is to leave. Whatever it was, a node
that answers again begins as `joining`. Only silence and refusal count, never the word of a launcher.
"""

from collections.abc import Iterable
from typing import Final, Literal

from attrs import define, field

from polarnode.core.fleet import CopyRow, NodeReport, Peer
from polarnode.fleet.link import Link
from polarnode.fleet.placement import Candidate

MemberState = Literal["joining", "up", "suspect", "gone", "stale", "draining", "left"]

SUSPECT_S: Final = 6.0  # three reports of the feed
# a report may have been on its way when a task was placed: what was sent so lately counts besides it
COUNTED_S: Final = 1.0
GONE_S: Final = 12.0  # a process that hangs so long holds up its groups longer than running them again


@define(eq=False, kw_only=True)
class FleetMember:
    """One node of the roster. Times are of the front's clock, in seconds."""

    link: Link
    last_byte: float
    state: MemberState = "joining"
    since: float = 0.0
    report: NodeReport | None = None
    rows: dict[str, CopyRow] | None = None  # its copies, by task; None: not known yet, or not any more
    granted: int = 0  # the term that it wrote down last
    sent: list[tuple[float, int]] = field(factory=list)  # when, and how many sessions were placed lately
    stale: bool = False  # it has not got the desired weights
    problem: str = ""  # why it does not answer

    @property
    def journal(self) -> str:
        """Its journal's id, "" while it has never answered."""
        return "" if self.report is None else self.report.journal

    @property
    def name(self) -> str:
        """Its id in results, or its address."""
        return self.link.url if self.report is None else self.report.node

    @property
    def answers(self) -> bool:
        """Whether its feed is open and its copies are known."""
        return self.state not in ("gone", "left") and self.rows is not None

    @property
    def candidate(self) -> Candidate | None:
        """As placement sees it; None while it takes no tasks."""
        if self.state != "up" or self.report is None or not self.report.ready:
            return None
        return Candidate(report=self.report, placed=sum(count for _, count in self.sent))

    def reported(self, report: NodeReport, now: float) -> None:
        """A report came."""
        self.report, self.last_byte, self.problem = report, now, ""
        self.sent = [each for each in self.sent if each[0] > now - COUNTED_S]

    def become(self, state: MemberState, now: float) -> bool:
        """Change the state; True if it is another one."""
        if state == self.state:
            return False
        self.state, self.since = state, now
        if state == "gone":
            self.rows, self.granted = None, 0
        return True

    def look(self, now: float) -> MemberState:
        """The state that follows from the time without a byte, and from the last report."""
        silent = now - self.last_byte
        if self.state in ("gone", "left") or silent >= GONE_S:
            return "left" if self.state == "left" else "gone"
        if self.state == "joining" or self.report is None:
            return "joining"
        if silent >= SUSPECT_S:
            return "suspect"
        if self.report.draining:
            return "draining"
        return "stale" if self.stale else "up"


@define(eq=False)
class Roster:
    """The members by address."""

    members: dict[str, FleetMember] = field(factory=dict)

    def of_journal(self, journal: str) -> FleetMember | None:
        """The member that has a journal now."""
        return next((each for each in self.members.values() if journal and each.journal == journal), None)

    def in_state(self, *states: MemberState) -> list[FleetMember]:
        return [each for each in self.members.values() if each.state in states]

    @property
    def settled(self) -> bool:
        """Whether of every member either all copies are known, or that it is gone."""
        return all(each.answers or each.state in ("gone", "left") for each in self.members.values())

    @property
    def known(self) -> bool:
        """Whether every member's journal is known."""
        return all(each.journal for each in self.members.values())

    def gone(self, journal: str) -> bool:
        """Whether nothing is to be expected of a journal: its node is gone, or no node has it."""
        member = self.of_journal(journal)
        return self.settled if member is None else member.state in ("gone", "left")

    def peers(self) -> tuple[Peer, ...]:
        """How they reach one another."""
        return tuple(
            Peer(journal=each.journal, url=each.link.url, certificate=each.link.certificate)
            for each in self.members.values()
            if each.journal
        )

    def readable(self) -> dict[str, Link]:
        """The nodes whose events can be read, by journal."""
        able = [each for each in self.members.values() if each.state not in ("gone", "left")]
        return {each.journal: each.link for each in able if each.journal}

    def journals(self) -> set[str] | None:
        """The journals of all members; None while one has not named its own."""
        return {each.journal for each in self.members.values()} if self.known else None

    def name_of(self, journal: str) -> str:
        """The name of the member that has a journal; the journal's id while that is not known."""
        member = self.of_journal(journal)
        return journal if member is None else member.name

    def newest(self) -> dict[str, int]:
        """The number of the last event of each node that ever answered, by journal."""
        return {each.journal: each.last_seq for each in self.reports()}

    def reports(self) -> list[NodeReport]:
        """The last report of every member that ever answered."""
        return [each.report for each in self.members.values() if each.report is not None]

    def candidates(self) -> Iterable[Candidate]:
        """Those that take tasks."""
        found = (each.candidate for each in self.members.values())
        return [each for each in found if each is not None]
