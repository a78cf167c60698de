"""Groups of sessions for trainers: which sessions are usable, when a group is complete, and their advantages.

Pure. A session counts once, however many rows it became; a session lost to the machine counts as nothing, not
as a failure of the agent.
"""

from polarnode.core.task import ForkPolicy
from polarnode.groups.group import (
    EARLY_STOP,
    NOT_FORKED,
    STALE,
    Facts,
    Group,
    GroupState,
    Member,
    facts_of,
    group_json,
    judged,
    judged_again,
    lost_to_the_machine,
    member_of,
    read_group,
    stamped,
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
    "EARLY_STOP",
    "NOT_FORKED",
    "STALE",
    "Estimator",
    "Facts",
    "ForkPolicy",
    "Group",
    "GroupState",
    "LossMean",
    "Member",
    "Row",
    "SessionDifference",
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
    "member_of",
    "read_group",
    "rows_of",
    "stamped",
    "stopped_early",
    "tree_rows_of",
    "updates_behind",
    "with_rewards",
]
