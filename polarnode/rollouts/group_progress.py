"""How far the groups of this node's tasks are: which have enough sessions, and how each is judged at its end.

Both counts are of samples that ended here. The log is asked about samples that ended at other nodes or in an
earlier run.
"""

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Final

import trio
from attrs import define, evolve, field

from polarnode.core.task import CAPTURE_HARNESS
from polarnode.core.trajectory import Trajectory
from polarnode.groups.group import SessionFacts, facts_of, judged, make_member
from polarnode.journal.log.patience import retry_until_answered
from polarnode.journal.log.port import Claim, EndedSession, FinishAnswer, Log
from polarnode.support.bounded import remember
from polarnode.support.metrics import NodeCounters

MAX_OPEN_GROUPS: Final = 1_000  # groups that are not over; the log is asked about the others


@define(eq=False)
class GroupProgress:
    """The groups of one node's tasks. `tally` counts each sample and each group that is over."""

    log: Log
    tally: NodeCounters
    # For groups that stop early: how many usable sessions of each task ended here.
    _usable: "Counter[str]" = field(factory=Counter, init=False)
    # For each task: the facts of the samples that ended here, by which its group is judged.
    _filled: dict[str, dict[int, SessionFacts]] = field(factory=dict, init=False)

    def count_session(self, claim: Claim, ended: Trajectory) -> None:
        """Count a session that is over towards the early stop of its group."""
        self._usable[claim.task_id] += make_member(claim.spec.group, facts_of(ended)).usable

    def has_enough(self, claim: Claim) -> bool:
        """Whether the group of a claim stops early and has the sessions that it needs."""
        enough = claim.spec.group.early_stop_min
        return enough is not None and self._usable[claim.task_id] >= enough

    async def count_filled_place(self, claim: Claim, ended: EndedSession, answer: FinishAnswer) -> None:
        """Count a sample whose place the log has now filled, and with the last sample its group."""
        if answer == "already":
            return
        policy = claim.spec.group
        self.tally.place(make_member(policy, ended.facts))
        if claim.spec.harness.name == CAPTURE_HARNESS:  # Nobody asked for groups of captures.
            return
        filled = self._filled.get(claim.task_id, {})
        filled[claim.sample_index] = evolve(ended.facts, outcome=evolve(ended.outcome, log_tail=None))
        remember(self._filled, claim.task_id, filled, most=MAX_OPEN_GROUPS)
        if answer == "now":
            return
        await trio.lowlevel.checkpoint()  # Samples that were written with this one are counted first.
        self._usable.pop(claim.task_id, None)
        self._filled.pop(claim.task_id, None)
        facts: Iterable[SessionFacts] = filled.values()
        if len(filled) < claim.spec.num_samples:  # The others ended at another node or in an earlier run.
            ask = partial(self.log.finished_places, claim.task_id)
            facts = await retry_until_answered(ask)
        group = judged(policy, facts, task_id=claim.task_id, group_id=ended.identity.group_id)
        self.tally.groups[group.state] += 1
