"""Kill, stop, fill and damage a node again and again, and count: is every answer and every event accounted for?

    python benchmarks/chaos.py [--rounds 15] [--minutes 0] [--seed N] [--keep FOLDER]

The node is `polarnode` in its own process with the simulated engine (it needs Podman, with or without root).
Agents of this process call it as captures and keep what they were answered. A trainer reads every event and
acknowledges; one reader is slow, one dies again and again. In each round the node is stopped for a moment
(SIGSTOP), or its disk is filled (a tmpfs, where one can be mounted), and then it is killed (SIGKILL); while it
is down, single bytes in random rows of its journal are changed, and each change is noted. Where libfaketime is
installed, each life has another date.

At the end every answer must be in exactly one turn, or in a turn whose row was damaged and is named, or be the
last of a session whose node was killed before it was on disk; every event must have come, each number once
under one key; every place of a group must have one session; and `polarnode check` must name every damaged row
that is still there. Exit code 1 otherwise.
"""

import http.client
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from attrs import define, field, frozen

for room in ("recovery", "live", "kits"):
    sys.path.append(str(Path(__file__).parents[1] / "tests" / room))

from recovery_kit import (  # noqa: E402
    AT_ONCE,
    EVERY,
    TOKEN,
    Place,
    ServingNode,
    fill,
    place_at,
    short_temporary,
    texts_of,
    until,
)

from polarnode.client import ClientError, PolarnodeClient, Unreachable  # noqa: E402
from polarnode.core.trajectory import Trajectory  # noqa: E402
from polarnode.journal.check import check_journal  # noqa: E402
from polarnode.journal.values import TASK_DISK_FREE_BYTES  # noqa: E402

BROKEN = (OSError, ValueError, http.client.HTTPException)  # what a call ends in when its node is killed
THINKS_S = 0.2  # between the calls of an agent, on average
AGENTS = 4  # at once: a kill meets some of them in the middle of a call
LIFE_S = (0.5, 3.0)  # that a life serves, besides its faults
STOPPED_S = (0.1, 1.5)
FULL_S = (0.5, 2.0)
ROOM = 64 << 20  # of the small disk, beyond what the node wants free
FAKETIME = ("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1", "/usr/lib/faketime/libfaketime.so.1")
LATE = 2 * AGENTS  # rows of the sessions that a kill met
DAYS = 3  # by which the clock of a life is wrong, at most
# what is changed, as table, column and weight; the rows are those in which it is not null
TARGETS = (
    ("turns", "body", 4),
    ("trajectories", "body", 3),
    ("events", "body", 2),
    ("events", "key", 1),
    ("sessions", "identity", 1),
    ("sessions", "outcome", 1),
    ("tasks", "spec", 1),
)


# ── agents ────────────────────────────────────────────────────────────────────


@define(eq=False)
class Ledger:
    """What one capture was answered, in order. `ended`: its end was answered too."""

    session_id: str
    task_id: str
    texts: list[str] = field(factory=list)
    ended: bool = False


@define(eq=False)
class Agents:
    """Threads that open captures, call the model and end them, over every death of the node."""

    url: str
    seed: int
    ledgers: list[Ledger] = field(factory=list)
    over: threading.Event = field(factory=threading.Event)
    _threads: list[threading.Thread] = field(factory=list)

    def begin(self) -> None:
        for number in range(AGENTS):
            chance = random.Random(f"{self.seed}-{number}")
            self._threads.append(threading.Thread(target=self._work, args=(chance,), daemon=True))
            self._threads[-1].start()

    def end(self) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join()

    def _work(self, chance: random.Random) -> None:
        while not self.over.is_set():
            samples = chance.choice((1, 1, 2, 3))
            task_id = f"task-{uuid4().hex[:12]}"
            for index in range(samples):
                spec = {"task_id": task_id, "num_samples": samples, "sample_index": index}
                self._capture(spec, chance)

    def _capture(self, spec: dict[str, Any], chance: random.Random) -> None:
        opened = self._opened(spec)
        if opened is None:
            return
        ledger = Ledger(opened["session_id"], opened["task_id"])
        self.ledgers.append(ledger)
        messages: list[dict[str, str]] = [{"role": "user", "content": f"Begin {uuid4().hex}."}]
        for turn in range(chance.randint(1, 6)):
            try:
                env = opened["env"]
                body = {"model": "any", "messages": messages}
                answer = post(env["OPENAI_BASE_URL"] + "/chat/completions", body, env["OPENAI_API_KEY"])
                text = answer["choices"][0]["message"]["content"] or ""
            except BROKEN:
                return  # its node is dead, and its key with it
            ledger.texts.append(text)
            time.sleep(chance.expovariate(1 / THINKS_S))
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": f"Go on, step {turn}."},
            ]
        with suppress(*BROKEN):
            post(f"{self.url}/v1/capture/{ledger.session_id}", {"reward": 1.0}, TOKEN, method="DELETE")
            ledger.ended = True

    def _opened(self, spec: dict[str, Any]) -> dict[str, Any] | None:
        """Asked again until it is answered: opening is idempotent."""
        while not self.over.is_set():
            try:
                found: dict[str, Any] = post(f"{self.url}/v1/capture", spec, TOKEN)
                return found
            except urllib.error.HTTPError as error:
                if error.code == 409:
                    return None  # it was opened, and a kill ended it before the answer came
            except BROKEN:
                pass
            time.sleep(0.1)
        return None


def post(url: str, body: Any, key: str, *, method: str = "POST") -> Any:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method=method)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


# ── readers ───────────────────────────────────────────────────────────────────


@define(eq=False)
class Readers:
    """A trainer that acknowledges, a slow reader, and one that dies again and again."""

    client: PolarnodeClient
    url: str
    events: dict[int, str] = field(factory=dict)
    trajectories: dict[str, Trajectory] = field(factory=dict)  # by session, as they were delivered
    again: dict[int, str] = field(factory=dict)  # kinds, as a reader gets them that begins at the end
    unreadable: list[str | None] = field(factory=list)  # sessions
    repeats: int = 0
    faults: list[str] = field(factory=list)
    over: threading.Event = field(factory=threading.Event)

    def begin(self) -> None:
        for work in (self._train, self._slow, self._die):
            threading.Thread(target=self._guarded, args=(work,), daemon=True).start()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            if not self.over.is_set():
                self.faults.append(f"{type(error).__name__}: {error}")

    def _train(self) -> None:
        for event in self.client.trajectories(consumer="trainer", ack=True, kinds=EVERY, turns="full"):
            if event.kind == "gap":
                self.faults.append(f"a gap: {event.data}")
            if event.seq in self.events:
                self.repeats += 1
            if self.events.setdefault(event.seq, event.key) != event.key:
                self.faults.append(f"number {event.seq} is {self.events[event.seq]} and {event.key}")
            if event.unreadable is not None:
                self.unreadable.append(event.unreadable.session_id)
            elif (whole := event.trajectory) is not None:
                self.trajectories.setdefault(whole.session_id, whole)
            if self.over.is_set():
                return

    def _slow(self) -> None:
        """A few bytes at a time; where it stands is never acknowledged."""

        def take(stream: Any) -> None:
            while not self.over.is_set() and stream.read1(512):
                time.sleep(0.1)

        self._stream_again("slow", take)

    def _die(self) -> None:
        def take(stream: Any) -> None:
            stream.read1(4096)
            time.sleep(0.3)

        self._stream_again("dying", take)

    def _stream_again(self, consumer: str, take: Callable[[Any], None]) -> None:
        request = urllib.request.Request(
            f"{self.url}/v1/trajectories/stream?consumer={consumer}",
            headers={"Authorization": f"Bearer {TOKEN}"},
        )
        while not self.over.is_set():
            with suppress(*BROKEN), urllib.request.urlopen(request, timeout=60) as stream:
                take(stream)
            time.sleep(0.1)


# ── faults ────────────────────────────────────────────────────────────────────


@frozen
class Change:
    """One row whose bytes were changed. `row` is as `polarnode check` names it; `session_id` is its own."""

    table: str
    row: str
    column: str
    session_id: str | None


def damaged(path: Path, chance: random.Random) -> Change | None:
    """Change one byte of one random row of a journal whose node is dead."""
    table, column, _ = chance.choices(TARGETS, [weight for *_, weight in TARGETS])[0]
    names = {
        "turns": "session_id || '/' || turn",
        "trajectories": "session_id",
        "events": "seq",
        "sessions": "session_id",
        "tasks": "task_id",
    }
    whose = "NULL" if table == "tasks" else "session_id"
    with closing(sqlite3.connect(path)) as db:
        query = (
            f"SELECT rowid, {names[table]}, {whose}, CAST({column} AS BLOB), typeof({column}) FROM {table}"
        )
        rows = db.execute(f"{query} WHERE {column} IS NOT NULL ORDER BY rowid").fetchall()
        if not rows:
            return None
        # most often a late row, which nobody may have read yet
        rowid, row, session_id, body, kind = chance.choice(rows[-LATE:] if chance.random() < 0.7 else rows)
        at = chance.randrange(len(body))
        changed = body[:at] + bytes([body[at] ^ (1 << chance.randrange(8))]) + body[at + 1 :]
        db.execute(f"UPDATE {table} SET {column} = CAST(? AS {kind}) WHERE rowid = ?", (changed, rowid))
        db.commit()
    return Change(table, str(row), column, session_id)


@contextmanager
def small_disk(at: Path) -> Iterator[bool]:
    """A tmpfs of the node's own; False where none can be mounted."""
    at.mkdir()
    size = TASK_DISK_FREE_BYTES + ROOM
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(at)], check=False)


@define(eq=False)
class Chaos:
    """The lives of one node."""

    place: Place
    chance: random.Random
    full_disk: bool
    faketime: str | None
    changes: list[Change] = field(factory=list)
    counts: "Counter[str]" = field(factory=Counter)

    def life(self) -> None:
        with self._clock():
            node = self.place.start()
        try:
            if self.counts["kills"] and self.chance.random() < 0.2:  # the first life makes the journal
                time.sleep(self.chance.uniform(0.0, 3.0))  # while it starts
                self.counts["kills in a start"] += 1
            else:
                self._serve(node)
        finally:
            node.process.kill()
            node.process.wait()
        self.counts["kills"] += 1
        for _ in range(self.chance.randint(1, 4)):
            if (change := damaged(self.place.state_dir / "journal.sqlite", self.chance)) is not None:
                self.changes.append(change)

    def _serve(self, node: ServingNode) -> None:
        until(lambda: serves(node), "the node serves", within=180.0)
        time.sleep(self.chance.uniform(*LIFE_S))
        fault = self.chance.choice(("stop", "full", "none"))
        if fault == "stop":
            os.kill(node.process.pid, signal.SIGSTOP)
            time.sleep(self.chance.uniform(*STOPPED_S))
            os.kill(node.process.pid, signal.SIGCONT)
            self.counts["stops"] += 1
        elif fault == "full" and self.full_disk:
            ballast = fill(self.place.state_dir.parent)
            time.sleep(self.chance.uniform(*FULL_S))
            ballast.unlink()
            self.counts["full disks"] += 1
            # what waits in memory is promised to be written when there is room, not to survive a kill before
            until(lambda: quiet(node, "backlog_entries"), "the backlog is written", within=60.0)
        time.sleep(self.chance.uniform(0.0, 1.0))

    @contextmanager
    def _clock(self) -> Iterator[None]:
        if self.faketime is None:
            yield
            return
        seconds = int(self.chance.uniform(-DAYS, DAYS) * 86400)
        added = {"LD_PRELOAD": self.faketime, "FAKETIME": f"{seconds:+d}s", "DONT_FAKE_MONOTONIC": "1"}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                del os.environ[name]
        self.counts["clock jumps"] += 1


def serves(node: ServingNode) -> bool:
    if node.process.poll() is not None:
        raise SystemExit(f"the node ended by itself with {node.process.returncode}: {node.said()[-3000:]}")
    try:
        return any(host["state"] == "ready" for host in node.status()["engine"]["hosts"])
    except (Unreachable, ClientError):
        return False


def quiet(node: ServingNode, figure: str) -> bool:
    try:
        return not node.status()["journal"][figure]
    except (Unreachable, ClientError):
        return False


# ── the count ─────────────────────────────────────────────────────────────────


@define(eq=False)
class Account:
    """What became of every answer and event. `faults` are sentences; with none, all is accounted for."""

    figures: "Counter[str]" = field(factory=Counter)
    faults: list[str] = field(factory=list)

    def answers(self, ledgers: list[Ledger], readers: Readers, changes: list[Change]) -> None:
        """Every answer is in one turn, or in a named one, or was the last before a kill."""
        held = Counter(text for each in readers.trajectories.values() for text in texts_of(each))
        hurt = Counter(each.session_id for each in changes if each.table == "turns")
        for ledger in ledgers:
            self.figures["sessions"] += 1
            whole = readers.trajectories.get(ledger.session_id)
            if whole is None:
                self.faults.append(f"session {ledger.session_id} was never delivered")
                continue
            named = sum(each.part.startswith("turns[") for each in whole.damaged)
            self.figures["turns named as damaged"] += named
            self.figures["trajectories with damage"] += bool(whole.damaged)
            if named > hurt[ledger.session_id]:
                self.faults.append(f"session {ledger.session_id}: {named} turns named, fewer were damaged")
            self._ledger(ledger, held, named)
        self.figures["answers twice"] = sum(count > 1 for count in held.values())
        if self.figures["answers twice"]:
            self.faults.append(f"{self.figures['answers twice']} answers are in two turns")

    def _ledger(self, ledger: Ledger, held: "Counter[str]", named: int) -> None:
        found = [held[text] > 0 for text in ledger.texts]
        self.figures["answers"] += len(found)
        self.figures["answers delivered"] += sum(found)
        if not ledger.ended and found and not found[-1] and found.count(False) > named:
            self.figures["answers not on disk when the node was killed"] += 1
            found.pop()
        missing = found.count(False)
        self.figures["answers in damaged turns"] += min(missing, named)
        if missing > named:
            self.faults.append(f"session {ledger.session_id} lost {missing - named} of {len(found)} answers")

    def events(self, readers: Readers, last: int) -> None:
        self.figures["events"] = last
        self.figures["events repeated"] = readers.repeats
        self.figures["events unreadable"] = len(readers.unreadable)
        missing = sorted(set(range(1, last + 1)) - set(readers.events))
        self.figures["events missing"] = len(missing)
        if missing:
            self.faults.append(f"events {missing[:10]} never came")
        self.figures["events read again"] = len(readers.again)
        self.figures["events unreadable then"] = list(readers.again.values()).count("unreadable")
        if readers.again and sorted(readers.again) != list(range(min(readers.again), last + 1)):
            self.faults.append("a reader that begins at the end does not get every event that is kept")
        doubled = len(readers.events) - len(set(readers.events.values()))
        if doubled > len(readers.unreadable):
            self.faults.append(f"{doubled} keys came under two numbers")

    def places(self, readers: Readers) -> None:
        """Each place of a group has one session that was not replaced."""
        final = [each for each in readers.trajectories.values() if each.retried_as is None]
        places = Counter((each.task_id, each.sample_index) for each in final)
        self.figures["places"] = len(places)
        doubled = [place for place, count in places.items() if count > 1]
        self.figures["doubled places"] = len(doubled)
        if doubled:
            self.faults.append(f"places with two sessions: {doubled[:5]}")

    def named(self, path: Path, changes: list[Change]) -> None:
        """`polarnode check` names what is damaged and still there, and nothing else."""
        report = check_journal(path)
        found = {(each.table, each.row) for each in report.faults}
        hurt = {(each.table, each.row) for each in changes}
        with closing(sqlite3.connect(path)) as db:
            first = db.execute("SELECT value FROM meta WHERE name = 'pruned'").fetchone()[0] + 1
        self.figures["rows damaged"] = len(hurt)
        self.figures["rows named by check"] = len(found & hurt)
        for table, row in sorted(found - hurt):
            self.faults.append(f"polarnode check names row {row} of {table}, which was not damaged")
        if first == 1:
            for table, row in sorted(hurt - found):
                self.faults.append(f"polarnode check does not name row {row} of {table}")


# ── one run ───────────────────────────────────────────────────────────────────


def run(given: Namespace, folder: Path) -> Account:
    faketime = next((path for path in FAKETIME if Path(path).exists()), None)
    with short_temporary() as temporary, small_disk(folder / "disk") as mounted:
        place = place_at(folder / "disk", temporary, settings=AT_ONCE)
        skipped = {"full disks (no tmpfs can be mounted)": mounted, "clock jumps (no libfaketime)": faketime}
        for what, possible in skipped.items():
            print(f"skipped: {what}" if not possible else f"tried: {what.partition(' (')[0]}")
        chaos = Chaos(place, random.Random(given.seed), full_disk=mounted, faketime=faketime)
        url = f"http://127.0.0.1:{place.port}"
        agents = Agents(url, given.seed)
        readers = Readers(PolarnodeClient(url, token=TOKEN, patience_s=3600.0), url)
        agents.begin()
        readers.begin()
        deadline = time.monotonic() + given.minutes * 60
        while chaos.counts["kills"] < given.rounds or time.monotonic() < deadline:
            chaos.life()
            print(
                f"round {chaos.counts['kills']}: {dict(chaos.counts)}, {len(chaos.changes)} rows damaged",
                flush=True,
            )
        last = the_last_life(chaos, agents, readers)
        found = Account(faults=list(readers.faults))
        found.figures.update(chaos.counts)
        found.answers(agents.ledgers, readers, chaos.changes)
        found.events(readers, last)
        found.places(readers)
        found.named(place.state_dir / "journal.sqlite", chaos.changes)
    return found


def the_last_life(chaos: Chaos, agents: Agents, readers: Readers) -> int:
    """Every capture ends, every task is over, every event is read; then the node is asked to stop."""
    with chaos.place.serving() as node:
        agents.end()
        for task in node.client.tasks(limit=1000):
            if not task["finished"]:
                node.client.cancel(task["task_id"])
        until(lambda: all(task["finished"] for task in node.client.tasks(limit=1000)), "every task is over")
        last = int(node.status()["journal"]["last_seq"])
        until(lambda: readers.faults or max(readers.events, default=0) >= last, "all is read", within=120.0)
        for session_id in filter(None, readers.unreadable):
            with suppress(ClientError):  # of an event of which it is not known which it is: by its session
                readers.trajectories[session_id] = node.client.trajectory(session_id, turns="full")
        readers.over.set()
        for event in node.client.trajectories(
            follow=False, kinds=EVERY
        ):  # all again, as damaged as it is now
            readers.again[event.seq] = event.kind
    return last


def arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15, help="lives that are killed, at least")
    parser.add_argument("--minutes", type=float, default=0.0, help="go on for so long")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1, 10**6))
    parser.add_argument("--keep", type=Path, help="folder for the report, chaos.json")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    print(f"seed {given.seed}")
    with tempfile.TemporaryDirectory(prefix="chaos") as folder:
        found = run(given, Path(folder))
    for name, count in found.figures.items():
        print(f"{count:8d} {name}")
    for fault in found.faults:
        print(f"LOST: {fault}")
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
        report = {"seed": given.seed, "figures": dict(found.figures), "faults": found.faults}
        (given.keep / "chaos.json").write_text(json.dumps(report, indent=1) + "\n")
    print("all is accounted for" if not found.faults else f"{len(found.faults)} faults")
    return 1 if found.faults else 0


if __name__ == "__main__":
    sys.exit(main())
