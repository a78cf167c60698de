"""Random histories of five nodes and three fronts: whatever dies, no place is told twice.

Nodes are modelled by the laws of their routes; what fronts decide is the real `plans` and `majority`. Each
mutant drops one law, and the same histories must find it: otherwise they prove nothing. They do not find what
follows from dropping the majority, the terms, or the comparison of sessions within one epoch.
"""

from random import Random

import pytest
from attrs import define, evolve, field

from polarnode.core.fleet import Adoption, CopyRow, Epoch
from polarnode.fleet.ownership import KnownHomes, NodePlan, Seen, majority, plans
from polarnode.fleet.placement import second_of

JOURNALS = tuple("j" + letter * 16 for letter in "abcde")
PLACES = range(2)
STEPS = 120
HISTORIES = 2000  # 5 s on one core; the first 700 find every mutant


class Doubled(Exception):
    """A reader saw two sessions of one place."""


@define(eq=False)
class Node:
    """A journal, and the sessions that run beside it."""

    journal: str
    up: bool = True
    term: int = 0
    row: CopyRow | None = None
    commits: dict[int, str] = field(factory=dict)
    events: dict[int, str] = field(factory=dict)
    running: dict[int, str] = field(factory=dict)
    held: dict[int, str] = field(factory=dict)
    accepted: dict[int, str] = field(factory=dict)  # committed, not numbered yet: a stop falls here


@define(eq=False)
class Office:
    """What one front believes."""

    term: int = 0
    held: bool = False
    rows: dict[str, list[CopyRow]] = field(factory=dict)
    gone: set[str] = field(factory=set)
    homes: KnownHomes = field(factory=KnownHomes)


@define(eq=False)
class History:
    """One task of two places, in a fleet where anything may happen but the loss of both its homes."""

    random: Random
    mutant: str = ""
    nodes: dict[str, Node] = field(factory=lambda: {each: Node(each) for each in JOURNALS})
    fronts: list[Office] = field(factory=lambda: [Office() for _ in range(3)])
    cut: set[tuple[int, str]] = field(factory=set)  # a front and a node that do not reach each other
    seen: dict[int, str] = field(factory=dict)  # what a reader has, by place
    sessions: int = 0

    def step(self) -> None:
        moves = [self.stand, self.look, self.decide, self.finish, self.commit, self.number]
        moves += [self.kill, self.rise, self.part]
        (move,) = self.random.choices(moves, [1, 9, 6, 1, 2, 2, 1, 2, 2])
        move()

    def _node(self) -> Node:
        holders = [each for each in self.nodes.values() if each.row is not None]
        if self.random.random() < 0.5:
            return self.random.choice(holders)
        return self.nodes[self.random.choice(JOURNALS)]

    def _reach(self, front: Office, node: Node) -> bool:
        return node.up and (self.fronts.index(front), node.journal) not in self.cut

    def _obeys(self, front: Office, node: Node) -> bool:
        """Whether a command arrives and its term is not superseded."""
        if not self._reach(front, node) or (node.term > front.term):
            return False
        node.term = max(node.term, front.term)
        return True

    # ── what fronts do ────────────────────────────────────────────────────────

    def stand(self) -> None:
        front = self.random.choice(self.fronts)
        reached = [each for each in self.nodes.values() if self._reach(front, each)]
        front.term = max([front.term, *(each.term for each in reached)]) + 1
        for each in reached:
            each.term = front.term
        front.held = majority(len(reached), len(JOURNALS), own_vote=True)
        front.rows.clear()

    def look(self) -> None:
        """A front reads the copies of all nodes that it reaches, or of one of them."""
        front = self.random.choice(self.fronts)
        for node in self.nodes.values() if self.random.random() < 0.7 else [self._node()]:
            if not self._reach(front, node):
                front.rows.pop(node.journal, None)
                front.gone.add(node.journal)
                continue
            front.gone.discard(node.journal)
            front.rows[node.journal] = [] if node.row is None else [node.row]
            front.homes.listed(node.journal, front.rows[node.journal])

    def decide(self) -> None:
        front = self.random.choice(self.fronts)
        if not front.held or set(front.rows) | front.gone != set(JOURNALS):
            return
        found = Seen(
            rows=front.rows,
            gone=lambda journal: journal in front.gone or journal == "",
            choose=lambda task_id, home: second_of(task_id, home, front.rows),
            term=front.term,
            known=front.homes.known,
            ended=front.homes.ended,
        )
        for journal, plan in plans(found).items():
            for each in (*plan.adopt, *plan.seconds):
                front.homes.ordered(journal, each)
            if self._obeys(front, self.nodes[journal]):
                self._carry_out(self.nodes[journal], plan)

    # ── what nodes do ─────────────────────────────────────────────────────────

    def _carry_out(self, node: Node, plan: NodePlan) -> None:
        row = node.row
        if row is None:
            return
        for each in plan.adopt:
            if row.role == "second" and each.epoch > row.epoch and self._copy(node, row, each, node.commits):
                node.row = evolve(
                    row, role="home", epoch=each.epoch, home=node.journal, second=each.second, waiting=False
                )
                for place, session in node.commits.items():
                    self._tell(node, place, session)
                self._begin(node)
        for each in plan.seconds:
            if row.role == "home" and each.epoch > row.epoch and self._copy(node, row, each, node.events):
                node.row = evolve(row, epoch=each.epoch, second=each.second)
                node.accepted.clear()
        if plan.own and row.role == "home" and row.waiting:
            node.row = evolve(row, waiting=False)
            self._begin(node)
        for moved in plan.moved:
            if row.role == "home" and moved.epoch > row.epoch:
                node.row = evolve(row, role="former", epoch=moved.epoch, home=moved.home)
                node.running, node.held, node.accepted = {}, {}, {}
        for drop in plan.drop:
            if drop.epoch >= row.epoch:
                node.row, node.commits = None, {}

    def _copy(self, node: Node, row: CopyRow, order: Adoption, places: dict[int, str]) -> bool:
        """Give the new second home the task and its places: before anything else is done."""
        second = self.nodes.get(order.second)
        if second is None:
            return True
        if not second.up or (second.row is not None and second.row.epoch >= order.epoch):
            return False
        second.row = evolve(
            row, role="second", epoch=order.epoch, home=node.journal, second=order.second, waiting=False
        )
        second.commits = {} if self.mutant == "empty copy" else dict(places)
        second.running, second.held, second.accepted = {}, {}, {}
        return True

    def _begin(self, node: Node) -> None:
        for place in PLACES:
            if place not in node.events and place not in node.held and place not in node.running:
                self.sessions += 1
                node.running[place] = f"s{self.sessions}"

    def _home(self) -> Node | None:
        """A node that holds itself to be the task's home: there may be two."""
        able = [
            each
            for each in self.nodes.values()
            if each.up and each.row is not None and each.row.role == "home" and not each.row.waiting
        ]
        return self.random.choice(able) if able else None

    def finish(self) -> None:
        node = self._home()
        if node is not None and node.running:
            node.held.update([node.running.popitem()])

    def commit(self) -> None:
        """A home asks its second home for a place."""
        node = self._home()
        if node is None or node.row is None or not node.held:
            return
        place, session = next(iter(node.held.items()))
        if self.mutant == "number first":
            self._tell(node, place, session)
        second = self.nodes.get(node.row.second)
        if second is None:
            node.accepted[place] = session
            return
        if not second.up or second.row is None:
            return
        if self.mutant != "any epoch" and (second.row.role != "second" or second.row.epoch > node.row.epoch):
            return
        if second.commits.setdefault(place, session) == session:
            node.accepted[place] = session

    def number(self) -> None:
        node = self._home()
        for place, session in list(node.accepted.items()) if node is not None else ():
            assert node is not None
            self._tell(node, place, session)
            node.held.pop(place, None)
            del node.accepted[place]

    def _tell(self, node: Node, place: int, session: str) -> None:
        node.events.setdefault(place, session)
        if self.seen.setdefault(place, session) != session:
            raise Doubled(f"place {place}: {self.seen[place]} and {session}")

    # ── what happens to them ──────────────────────────────────────────────────

    def kill(self) -> None:
        """A process dies; its journal stays. Never both homes of the last epoch: that is not covered."""
        node = self._node()
        holders = [each for each in self.nodes.values() if each.row is not None and each.row.role != "former"]
        last = max(holders, key=lambda each: each.row.epoch if each.row is not None else Epoch(0, 0))
        pair = (last.row.home, last.row.second) if last.row is not None else ()
        if node.journal in pair and not all(each.up for each in holders if each.journal in pair):
            return
        node.up, node.running, node.accepted = False, {}, {}
        if node.row is not None and node.row.role == "home":
            node.row = evolve(node.row, waiting=True)

    def rise(self) -> None:
        self._node().up = True

    def part(self) -> None:
        if self.random.random() < 0.5:
            self.cut.clear()
        else:
            self.cut.add((self.random.randrange(len(self.fronts)), self._node().journal))


def replay(seed: int, mutant: str = "") -> History:
    """One history. Raises Doubled."""
    history = History(Random(seed), mutant)
    home, second = JOURNALS[:2]
    row = CopyRow(task_id="t", role="home", epoch=Epoch(0, 0), home=home, second=second)
    history.nodes[home].row = row
    history.nodes[second].row = evolve(row, role="second")
    history._begin(history.nodes[home])
    for _ in range(STEPS):
        history.step()
    return history


def test_no_place_is_told_twice_whatever_dies() -> None:
    ended = sum(len(replay(seed).seen) == len(PLACES) for seed in range(HISTORIES))
    assert ended > HISTORIES // 4, "histories in which nothing ends show nothing"


@pytest.mark.parametrize("mutant", ["number first", "any epoch", "empty copy"])
def test_a_dropped_law_is_found(mutant: str) -> None:
    def replay_all() -> None:
        for seed in range(HISTORIES):
            replay(seed, mutant)

    with pytest.raises(Doubled):
        replay_all()
