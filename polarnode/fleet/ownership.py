"""Who owns a task, and what follows: pure decisions from what the nodes' journals say.

The owner is the `home` row with the highest epoch. A command raises the epoch, so that whoever held the task
before is refused at the second home; a front that decides from old rows does no harm, because the nodes
compare epochs. Nothing is decided about a task that is being submitted.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Final

from attrs import define, field, frozen

from polarnode.core.fleet import Adoption, CopyRow, Epoch, Moved


@frozen(kw_only=True)
class Drop:
    """A copy that nobody needs. `ended`: its task has ended, and everybody has it."""

    task_id: str
    epoch: Epoch
    ended: bool = False


KNOWN: Final = 100_000  # tasks whose homes are remembered: 50 MB, some days of a large fleet


@define(eq=False)
class KnownHomes:
    """By task, the home of the highest epoch that this front saw or ordered, whether or not it answers."""

    known: dict[str, CopyRow] = field(factory=dict)
    ended: dict[str, None] = field(factory=dict)
    _of: dict[str, set[str]] = field(factory=dict)  # tasks by home

    def listed(self, journal: str, rows: Collection[CopyRow]) -> None:
        """All copies of a node that answers. A task of this home that is no longer among them has ended."""
        homes = {row.task_id: row for row in rows if row.role == "home"}
        for task_id in self._of.get(journal, set()) - {row.task_id for row in rows}:
            if task_id in self.known and self.known[task_id].home == journal:
                self.ended[task_id] = None
        self._of[journal] = set(homes)
        for row in homes.values():
            self._note(row)

    def ordered(self, journal: str, order: Adoption) -> None:
        """A node was ordered to be a task's home with this second home: it may be, whatever it answers."""
        row = CopyRow(
            task_id=order.task_id, role="home", epoch=order.epoch, home=journal, second=order.second
        )
        self._note(row)

    def later(self, row: CopyRow) -> bool:
        """Whether another home has a later epoch than this row."""
        known = self.known.get(row.task_id)
        return known is not None and known.epoch > row.epoch

    def _note(self, row: CopyRow) -> None:
        before = self.known.get(row.task_id)
        if before is not None and before.epoch > row.epoch:
            return
        self.ended.pop(row.task_id, None)
        self.known[row.task_id] = row
        if len(self.known) > KNOWN:
            oldest = next(iter(self.known))
            del self.known[oldest]
            self.ended.pop(oldest, None)


@define(kw_only=True)
class NodePlan:
    """What the front asks of one node."""

    adopt: list[Adoption] = field(factory=list)
    seconds: list[Adoption] = field(factory=list)
    own: list[str] = field(factory=list)
    moved: list[Moved] = field(factory=list)
    drop: list[Drop] = field(factory=list)

    def __bool__(self) -> bool:
        return bool(self.adopt or self.seconds or self.own or self.moved or self.drop)


@frozen(kw_only=True)
class Seen:
    """What a front knows when it decides. `rows`: by journal, of every node that answers. `gone`: journals
    that do not, or left the roster; of others nothing is known yet, and they are waited for. `choose`: a
    second home for a task and its home. `busy`: tasks that are being submitted.
    """

    rows: Mapping[str, Collection[CopyRow]]
    gone: Callable[[str], bool]
    choose: Callable[[str, str], str]
    term: int
    busy: Collection[str] = ()
    # by task, its home of the highest epoch that was ever seen or ordered; `ended`: tasks that it dropped,
    # because every reader had them
    known: Mapping[str, CopyRow] = field(factory=dict)
    ended: Collection[str] = ()
    leaving: Collection[str] = ()  # journals that keep no more copies
    complete: bool = False  # every node of the roster answers


def plans(seen: Seen) -> dict[str, NodePlan]:
    """What to ask of each node, by journal."""
    found: dict[str, NodePlan] = {journal: NodePlan() for journal in seen.rows}
    tasks: dict[str, dict[str, CopyRow]] = {}
    for journal, rows in seen.rows.items():
        for row in rows:
            tasks.setdefault(row.task_id, {})[journal] = row
    for task_id, by_journal in tasks.items():
        if task_id not in seen.busy:
            _decide(seen, by_journal, found)
    return {journal: plan for journal, plan in found.items() if plan}


def owner_of(by_journal: Mapping[str, CopyRow]) -> str | None:
    """The journal that owns a task, among those that answer."""
    homes = [journal for journal, row in by_journal.items() if row.role == "home"]
    return max(homes, key=lambda journal: by_journal[journal].epoch, default=None)


def _decide(seen: Seen, by_journal: Mapping[str, CopyRow], found: dict[str, NodePlan]) -> None:
    later = later_home(seen.known, seen.rows, seen.ended, by_journal)
    if later is not None:
        _await_home(seen, by_journal, later, found)
        return
    owner = owner_of(by_journal)
    heir = _heir(seen, by_journal, owner)
    if heir is not None:
        row = by_journal[heir]
        found[heir].adopt.append(_next(seen, row, heir, seen.choose(row.task_id, heir)))
        return
    if owner is None:
        _drop_unbegun(seen, by_journal, found)
        return
    mine = by_journal[owner]
    second = by_journal.get(mine.second)
    if mine.waiting:
        found[owner].own.append(mine.task_id)
    elif mine.acknowledged:
        _drop_settled(seen, by_journal, owner, found)
    elif (
        seen.gone(mine.second)
        or mine.second in seen.leaving
        or (
            mine.second in seen.rows
            and (second is None or second.role != "second" or second.epoch > mine.epoch)
        )
    ):
        chosen = seen.choose(mine.task_id, owner)
        if chosen and (chosen != mine.second or mine.second in seen.rows):
            found[owner].seconds.append(_next(seen, mine, owner, chosen))
    for journal, row in by_journal.items():
        if journal == owner or row.epoch > mine.epoch:
            continue
        if row.role == "home":
            found[journal].moved.append(Moved(task_id=row.task_id, epoch=mine.epoch, home=owner))
        elif (row.role == "second" and journal != mine.second) or (row.role == "former" and mine.finished):
            found[journal].drop.append(Drop(task_id=row.task_id, epoch=row.epoch))


def later_home(
    known: Mapping[str, CopyRow],
    rows: Collection[str],
    ended: Collection[str],
    by_journal: Mapping[str, CopyRow],
) -> CopyRow | None:
    """The home, of a later epoch than these rows, that may have told readers what none of them knows: it does
    not answer, and neither does its second home. Whoever went on from an older row would fill places twice.
    """
    row = max(by_journal.values(), key=lambda each: each.epoch)
    home = known.get(row.task_id)
    if home is None or home.epoch <= row.epoch:
        return None
    # a home tells nothing before its second home has the task; what it was only ordered, it does not have
    return None if row.task_id not in ended and (home.home in rows or home.second in rows) else home


def _await_home(
    seen: Seen, by_journal: Mapping[str, CopyRow], later: CopyRow, found: dict[str, NodePlan]
) -> None:
    """Nothing begins again. Of a task that ended, what earlier homes still have is retired."""
    if later.task_id in seen.ended:
        for journal, row in by_journal.items():
            if row.role == "home":
                moved = Moved(task_id=row.task_id, epoch=later.epoch, home=later.home)
                found[journal].moved.append(moved)
            elif row.role == "second":
                found[journal].drop.append(Drop(task_id=row.task_id, epoch=row.epoch))


def _heir(seen: Seen, by_journal: Mapping[str, CopyRow], owner: str | None) -> str | None:
    """The second home that has to adopt the task: its home is gone, and nobody has a later epoch."""
    seconds = [journal for journal, row in by_journal.items() if row.role == "second"]
    heir = max(seconds, key=lambda journal: by_journal[journal].epoch, default=None)
    if heir is None or not seen.gone(by_journal[heir].home):
        return None
    if owner is not None and by_journal[owner].epoch >= by_journal[heir].epoch:
        return None
    return heir


def _drop_settled(
    seen: Seen, by_journal: Mapping[str, CopyRow], owner: str, found: dict[str, NodePlan]
) -> None:
    """A task that everybody has. Its rows stay while a node is away that may think it its own."""
    if not seen.complete or any(row.role == "home" for each, row in by_journal.items() if each != owner):
        return
    mine = by_journal[owner]
    for journal in {owner, mine.second} & found.keys():
        found[journal].drop.append(Drop(task_id=mine.task_id, epoch=mine.epoch, ended=True))


def _drop_unbegun(seen: Seen, by_journal: Mapping[str, CopyRow], found: dict[str, NodePlan]) -> None:
    """A copy whose home answers and never began the task: its submission was not answered either."""
    for journal, row in by_journal.items():
        if row.role == "second" and row.home in seen.rows and row.home not in by_journal:
            found[journal].drop.append(Drop(task_id=row.task_id, epoch=row.epoch))


def _next(seen: Seen, row: CopyRow, journal: str, second: str) -> Adoption:
    known = seen.known.get(row.task_id, row)
    last = max(row.epoch, known.epoch)
    epoch = Epoch(max(seen.term, last.term), max(row.epoch.number, last.number) + 1)
    if known.epoch > row.epoch and known.second in seen.rows and known.second not in (second, journal):
        second = known.second  # a home that hangs finds the later epoch there, before it tells anybody
    return Adoption(task_id=row.task_id, epoch=epoch, second=second)


def majority(granted: int, rostered: int, own_vote: bool) -> bool:
    """Whether so many grants of so many nodes are a term. Below three nodes the front's own file votes too:
    otherwise the death of one of two nodes would leave nobody to act.
    """
    small = rostered < 3
    votes, all_votes = granted + (small and own_vote), rostered + small
    return votes * 2 > all_votes
