"""How a session begins as a fork: which parents tasks may name, and what of its parent a session is given.

A task is checked against its parent when it is submitted, and each of its sessions again when it begins, with
the same sentences: the parent may be pruned, or the task run by another node, meanwhile. What a session has
inherited at its end is in its identity, which the journal has from its beginning.
"""

from collections.abc import Callable, Sequence

from attrs import evolve

from polarnode.core.errors import ForkError, Refused
from polarnode.core.task import ForkSpec, TaskSpec
from polarnode.core.trajectory import Turn
from polarnode.gateway.live_sessions import LiveSession
from polarnode.journal.forks import ForkParent
from polarnode.merge.attach import References
from polarnode.merge.lineage import DropsThinking, Lineages


def check_fork(spec: TaskSpec, fork: ForkSpec, parent: ForkParent | None) -> ForkParent:
    """The parent of a task's forks. Raises Refused, with the field's path, for one that they cannot go on
    from.
    """
    whose = f"fork.session {fork.session!r}"
    if parent is None:
        raise Refused(f"{whose} is not in the log: it is unknown here, or was pruned", path="$.fork.session")
    if parent.spec is None or not parent.spec.instruction:
        raise Refused(
            f"{whose} has no task that it can be forked by: it is a capture, or its task's row is damaged",
            path="$.fork.session",
        )
    if parent.spec.harness != spec.harness:
        raise Refused(
            f"harness must be that of {whose}, with the same settings: copy it from the parent's task",
            path="$.harness",
        )
    if parent.spec.instruction != spec.instruction:
        raise Refused(
            f"instruction must be that of {whose}, word for word: copy it from the parent's task",
            path="$.instruction",
        )
    # the state before a turn that was never recorded has a snapshot, and no answer to give again
    if fork.turn >= parent.count + (fork.by != "replay"):
        there = f"0 to {parent.count - 1}" if parent.count else "none yet"
        raise Refused(
            f"fork.turn is {fork.turn}, and the turns of session {fork.session!r} are {there}",
            path="$.fork.turn",
        )
    if parent.damaged:
        first = parent.damaged[0]
        raise Refused(
            f"{first.part} of session {fork.session!r} is damaged ({first.reason}): fork it before that turn",
            path="$.fork.turn",
        )
    return parent


def begin_fork(
    live: LiveSession, spec: TaskSpec, parent: ForkParent | None, on_end: Callable[[int, str | None], None]
) -> None:
    """Give a session that begins what it has of its parent. Raises ForkError where the parent cannot be gone
    on from any more. `on_end`: as `LiveSession.inherit_answers` calls it.
    """
    if spec.fork is None:
        return
    try:
        found = check_fork(spec, spec.fork, parent)
    except Refused as refused:
        raise ForkError(str(refused)) from refused
    compared = found.turns if found.next is None else (*found.turns, found.next)
    live.inherit_answers(compared, spec.fork.turn, on_end)


def begin_resumed(
    live: LiveSession,
    turns: Sequence[Turn],
    references: References,
    drops_thinking: DropsThinking | None,
    inherited: int,
) -> None:
    """Give a session its parent's turns, and the references that the parent's harness has in its history.
    Turns with an index below `inherited` are trained in another session.
    """
    own = [evolve(turn, session_id=live.session_id) for turn in turns]
    lineages = Lineages.restore(
        session_id=live.session_id,
        secret=b"",  # every reference is the parent's
        turns=own,
        drops_thinking=drops_thinking,
        references=references,
    )
    for turn in own:  # those that the parent inherited by replay are another session's
        for call in () if turn.answer is None else turn.answer.calls:
            lineages.references.adopt(turn.index, call.id)
    live.begin_with(own, lineages, inherited=inherited)
