"""kill -9 in the middle of writing, ten times over one journal: nothing that was flushed is lost, no number
is given twice.

The child writes without end and says what is on disk, a line a flush; the parent kills it at some line, and
compares.
"""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import trio
from journal_samples import make_spec, make_trajectory, make_turn
from journal_writes import publish_end, submit_task

from polarnode.journal import queries
from polarnode.journal.journal import Journal, open_journal

KILLS = 10


async def write_for_ever(path: Path, life: int) -> None:
    """The child."""
    async with open_journal(path, now=lambda: 0.0) as journal:
        for number in range(10**6):
            name = f"{life}-{number}"
            submit_task(journal, make_spec(), task_id=name, session_ids=(name,), idempotency_key=None)
            for index in range(5):
                journal.writer.record_turn(make_turn(name, index, sampled=200))
            after = journal.commits.progress.last_seq
            if number % 3:
                publish_end(journal, make_trajectory(name, task_id=name, turns=5, sampled=200))
            await journal.writer.flush()
            await trio.lowlevel.checkpoint()
            page = await journal.reader.events(after)
            said = {
                "session": name,
                "published": bool(number % 3),
                "events": [[event.seq, event.key] for event in page.events],
            }
            sys.stdout.write(json.dumps(said) + "\n")
            sys.stdout.flush()


def killed_after(path: Path, life: int, lines: int) -> list[dict[str, object]]:
    """Start the child, kill it once it has said so many lines, and return all it said."""
    with subprocess.Popen(
        [sys.executable, __file__, str(path), str(life)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "kits")},
    ) as child:
        assert child.stdout is not None
        said = [child.stdout.readline() for _ in range(lines)]
        child.send_signal(signal.SIGKILL)
        said += child.stdout.readlines()
        assert child.wait() == -signal.SIGKILL
    return [json.loads(line) for line in said if line.endswith("\n")]


async def events_of(journal: Journal) -> dict[int, str]:
    found: dict[int, str] = {}
    seen = 0
    while (page := await journal.reader.events(seen)).events:
        assert all(event.seq not in found for event in page.events)
        found |= {event.seq: event.key for event in page.events}
        seen = page.seen
    return found


async def test_flushed_rows_survive_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    chance = random.Random(7)
    flushed: list[dict[str, object]] = []
    given: dict[int, str] = {}
    for life in range(KILLS):
        said = await trio.to_thread.run_sync(killed_after, path, life, chance.randint(1, 12))
        for line in said:
            for seq, key in line["events"]:  # type: ignore[attr-defined]
                assert given.setdefault(seq, key) == key, "a number was given twice"
        flushed += said
    assert len(flushed) >= KILLS
    async with open_journal(path, now=lambda: 0.0) as journal:
        kept = await events_of(journal)
        assert sorted(kept) == list(range(1, len(kept) + 1)), "numbers have no holes"
        assert len(set(kept.values())) == len(kept), "no event is there twice"
        assert {seq: kept[seq] for seq in given} == given
        unfinished = {
            left.identity.session_id: left.turns
            for left in await journal.reader.query(queries.unfinished_sessions)
        }
        for line in flushed:
            name = str(line["session"])
            expected = make_trajectory(name, task_id=name, turns=5, sampled=200)
            if line["published"]:
                assert await journal.reader.query(queries.trajectory, name) == expected
            else:
                assert unfinished[name] == expected.turns


if __name__ == "__main__":
    trio.run(write_for_ever, Path(sys.argv[1]), int(sys.argv[2]))
