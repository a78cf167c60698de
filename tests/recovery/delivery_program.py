"""A node that only publishes, and readers as docs/delivery.md writes them, as programs of their own that may
be killed at any moment.

Run as a program it is told lines of JSON, each a function of this file and what it is given, and answers with
the id of a process that does it: forked from here, where all is imported already, so that a life begins in a
few milliseconds.
"""

import hashlib
import http.client
import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import trio

sys.path.append(str(Path(__file__).parents[1] / "kits"))

from control_plane_parts import Plane, open_plane
from journal_samples import make_identity, make_spec, make_trajectory
from journal_writes import publish_attempt, publish_end, submit_task

from polarnode.journal.values import RetentionLimits

PAGE = Path(__file__).parents[2] / "docs" / "delivery.md"
# what all have acknowledged goes soon: pruning must lose nothing
KEPT = RetentionLimits(acknowledged=1 << 20, everything=1 << 40)
PAUSE_S = 0.03  # between tasks: readers acknowledge each event by itself


def node(folder: str, port: int, seed: int) -> None:
    """A life: it publishes until there is a file `enough`, and serves until it is killed."""
    trio.run(_node, Path(folder), port, random.Random(seed))


async def _node(folder: Path, port: int, chance: random.Random) -> None:
    async with open_plane(folder / "journal.sqlite", port=port, retention=KEPT) as plane:
        while not (folder / "enough").exists():
            published = _publish(plane, chance)
            await plane.journal.writer.flush()
            note(folder / "published", *published)
            await trio.sleep(chance.uniform(0.0, 2 * PAUSE_S))
        await trio.sleep_forever()


def _publish(plane: Plane, chance: random.Random) -> list[str]:
    """A task and its sessions, some of which lost their place to another."""
    task_id = f"task-{chance.randbytes(6).hex()}"
    places = [f"{task_id}-{index}" for index in range(chance.randint(1, 3))]
    submit_task(plane.journal, make_spec(), task_id=task_id, session_ids=tuple(places), idempotency_key=None)
    published = []
    for index, session_id in enumerate(places):
        trajectory = make_trajectory(
            session_id,
            task_id=task_id,
            sample_index=index,
            turns=chance.randint(1, 3),
            sampled=chance.choice((3, 30, 3000, 20000)),
        )
        for turn in trajectory.turns:
            plane.journal.writer.record_turn(turn)
        if chance.random() < 0.2:
            after = attrs.evolve(trajectory, session_id=f"{session_id}-again", attempt=1, turns=(), traces=())
            whose = make_identity(after.session_id, task_id=task_id, sample_index=index)
            publish_attempt(
                plane.journal,
                attrs.evolve(trajectory, retried_as=after.session_id),
                attrs.evolve(whose, attempt=1),
            )
            publish_end(plane.journal, after)
            published.append(f"attempt:{session_id}")
            session_id = after.session_id
        else:
            publish_end(plane.journal, trajectory)
        published.append(f"trajectory:{session_id}")
    return published


def reader(folder: str, url: str, consumer: str) -> None:
    """Reads for ever. What comes is a line of `CONSUMER.came`, what was new of `CONSUMER.learned`; groups with
    their members are in `CONSUMER.groups`."""
    told = page_reader()
    came, read_json = Path(folder, f"{consumer}.came"), json.loads
    stream = 0

    def noting(line: bytes) -> Any:
        event = read_json(line)
        note(came, f"{os.getpid()}-{stream} {event['seq']} {event['key']} {hashlib.sha256(line).hexdigest()}")
        if "group" in event:
            members = [[each["sample_index"], each["session_id"]] for each in event["group"]["sessions"]]
            note(Path(folder, f"{consumer}.groups"), json.dumps([event["key"], members]))
        return event

    json.loads = noting  # type: ignore[assignment]  # the page's own name for it: what it reads is noted before it may be killed
    learned = Path(folder, f"{consumer}.learned")
    while True:
        stream += 1
        try:
            told["read"](
                url,
                "secret",
                consumer,
                str(Path(folder, f"{consumer}.keys")),
                lambda event: note(learned, event["key"]),
            )
        except (OSError, http.client.HTTPException):
            time.sleep(0.02)


def page_reader() -> dict[str, Any]:
    """The names of the page's program, `read` above all."""
    text = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)[0]
    told: dict[str, Any] = {}
    exec(text, told)
    return told


def note(path: Path, *lines: str) -> None:
    """Append lines, whole even when killed: one write each."""
    with path.open("ab", buffering=0) as file:
        for line in lines:
            file.write(line.encode() + b"\n")


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended: they are killed
    for line in sys.stdin:
        name, given = json.loads(line)
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(0)
            {"node": node, "reader": reader}[name](**given)
            os._exit(0)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
    os.killpg(0, signal.SIGKILL)  # whoever told us what to do is gone: so is all that was begun


if __name__ == "__main__":
    main()
