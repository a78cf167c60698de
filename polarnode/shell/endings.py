"""How a run ended: one Outcome from all that is known of it.

The rule for whoever edits it: the first cause counts, and a machine's fault is never called the agent's, because the one is tried again and the
other is what a trainer learns from.
"""

from os import SEEK_END
from pathlib import Path

from attrs import evolve, frozen

from polarnode.errors import PolarnodeError, RuntimeFault
from polarnode.harnesses.exits import exit_outcome
from polarnode.records import Clock, Outcome, Turn
from polarnode.shell.orders import SessionOrder

LOG_TAIL = 2000  # characters of a harness's log shown in the outcome: a traceback's end


@frozen(kw_only=True)
class Ending:
    """What is known when a harness's run is over. `ended`: its exit code, what failed instead, or None where its time was over.

    `cancelled`: the word for why it was, where it was.

    `because`: why the node ended all that ran in its container; `for_room`: because the machine had no room, and not for the session's own limit.
    `oom_kills`: how many of its programs the kernel ended for want of memory.
    """

    ended: int | PolarnodeError | None
    cancelled: str | None = None
    spent_clock: Clock | None = None
    because: str | None = None
    for_room: bool = False
    oom_kills: int = 0
    turns: tuple[Turn, ...] = ()
    log_tail: str | None = None


def run_outcome(order: SessionOrder, ending: Ending) -> Outcome:
    """The outcome of a run."""
    exit_code = ending.ended if isinstance(ending.ended, int) else None
    if ending.cancelled is not None:
        return Outcome(status="cancelled", exit_code=exit_code, reason=f"{ending.cancelled} in run", log_tail=ending.log_tail)
    if ending.because is not None and ending.for_room:
        return evolve(fault_outcome(RuntimeFault(ending.because)), log_tail=ending.log_tail)
    if ending.because is not None:
        return Outcome(status="failed", exit_code=exit_code, reason=ending.because, log_tail=ending.log_tail)
    if isinstance(ending.ended, RuntimeFault) and ending.oom_kills:  # the kernel took the container's first process too: still the agent's doing
        return _short_of_memory(Outcome(status="failed", reason=str(ending.ended), log_tail=ending.log_tail), order, ending.oom_kills)
    if isinstance(ending.ended, PolarnodeError):
        return evolve(fault_outcome(ending.ended), log_tail=ending.log_tail)
    if ending.spent_clock is not None:
        return Outcome(status="timeout", clock=ending.spent_clock, exit_code=exit_code, reason="its budget is spent", log_tail=ending.log_tail)
    if exit_code is None:
        reason = f"the harness ran {order.spec.budgets.run_s:g} s and was ended"
        return Outcome(status="timeout", clock="run", reason=reason, log_tail=ending.log_tail)
    judged = exit_outcome(order.harness, exit_code, ending.turns)
    log_tail = None if judged == Outcome(status="completed", exit_code=0) else ending.log_tail
    return evolve(_short_of_memory(judged, order, ending.oom_kills), log_tail=log_tail)


def fault_outcome(error: PolarnodeError) -> Outcome:
    """A session that an error of the house's ended."""
    return Outcome(status="error", boundary=error.boundary, reason=str(error))


def _short_of_memory(outcome: Outcome, order: SessionOrder, kills: int) -> Outcome:
    if not kills or outcome.status == "completed":
        return outcome
    said = f"the kernel ended {kills} of its programs: its {order.runtime.memory_mb} MiB of memory were spent"
    return evolve(outcome, reason=f"{outcome.reason}; {said}" if outcome.reason else said)


def tail(log: Path) -> str | None:
    """The end of a harness's log, read at once: it is small and on local disk."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, SEEK_END) - 4 * LOG_TAIL))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    return text[-LOG_TAIL:] or None
