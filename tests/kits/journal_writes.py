"""What a log writes into its journal, as plain calls that wait for nothing, for tests of what reads it."""

from attrs import evolve

from polarnode.core.task import TaskSpec
from polarnode.core.trajectory import Trajectory
from polarnode.journal import entries
from polarnode.journal.journal import Journal
from polarnode.journal.log.port import EndedSession, pack_ended
from polarnode.journal.log.sqlite import attempt_entry, end_entry
from polarnode.merge.trajectory import Identity


def submit_task(
    journal: Journal,
    spec: TaskSpec,
    *,
    task_id: str,
    session_ids: tuple[str, ...],
    idempotency_key: str | None = None,
) -> None:
    """An accepted task. Its sessions count as unfinished from now on."""
    journal.writer.write(
        entries.task_entry(
            spec,
            task_id=task_id,
            session_ids=session_ids,
            idempotency_key=idempotency_key,
            now=journal.now(),
        )
    )


def publish_end(journal: Journal, trajectory: Trajectory) -> None:
    """A session is over. Its turns are in the journal, or stay out of it."""
    journal.writer.write(end_entry(_ended(journal, trajectory)))


def publish_attempt(journal: Journal, trajectory: Trajectory, successor: Identity) -> None:
    """A session lost its place to `successor`, which begins."""
    begin = entries.session_entry(successor).apply
    journal.writer.write(attempt_entry(_ended(journal, trajectory), successor.session_id, begin))


def cancel_task(journal: Journal, task_id: str) -> None:
    journal.writer.write(entries.cancel_entry(task_id, now=journal.now()))


def serve_weights(journal: Journal, version: str) -> None:
    """A version of the weights, served from now on."""
    journal.writer.write(entries.weights_entry(version, {"version": version}, now=journal.now()))


def _ended(journal: Journal, trajectory: Trajectory) -> EndedSession:
    return pack_ended(evolve(trajectory, turns=()), finished=journal.now())
