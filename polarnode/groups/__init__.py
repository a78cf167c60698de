"""Groups of sessions for trainers: which sessions are usable, when a group is complete, and their advantages.

Pure. A session counts once, however many rows it became. A session that was lost to the machine does not
count at all, because it is no failure of the agent.
"""

from polarnode.core.task import ForkPolicy
from polarnode.groups.group import (
    EARLY_STOP_REASON,
    NOT_FORKED_REASON,
    STALE_REASON,
    Group,
    GroupState,
    Member,
    SessionFacts,
    facts_of,
    group_json,
    judged,
    judged_again,
    lost_to_the_machine,
    make_member,
    read_group,
    stamp_staleness,
    stopped_early,
    updates_behind,
    with_rewards,
)
from polarnode.groups.policy_difference import SessionDifference
from polarnode.groups.training_rows import (
    Estimator,
    LossMean,
    Row,
    advantages_of,
    group_normalised,
    leave_one_out,
    rows_of,
)
from polarnode.groups.trees import TreeCredit, forests_of, tree_rows_of

__all__ = [
    "EARLY_STOP_REASON",
    "NOT_FORKED_REASON",
    "STALE_REASON",
    "Estimator",
    "ForkPolicy",
    "Group",
    "GroupState",
    "LossMean",
    "Member",
    "Row",
    "SessionDifference",
    "SessionFacts",
    "TreeCredit",
    "advantages_of",
    "facts_of",
    "forests_of",
    "group_json",
    "group_normalised",
    "judged",
    "judged_again",
    "leave_one_out",
    "lost_to_the_machine",
    "make_member",
    "read_group",
    "rows_of",
    "stamp_staleness",
    "stopped_early",
    "tree_rows_of",
    "updates_behind",
    "with_rewards",
]
