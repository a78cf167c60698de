"""Hollow nodes, a consumer and PostgreSQL are killed, stopped and crashed under load: nothing is lost or doubled.

    python tests/kits/log_chaos.py --seconds 180 --nodes 6 --seed 1

Nodes are processes with the log's real functions and no sessions: what a session would have made is made at once,
and kept on the node's disk until the log has acknowledged it. They come back under their own names.
"""

import argparse
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import define, field
from journal_samples import make_spec
from log_kit import EVERY_KIND, end
from postgres_kit import Cluster, running_cluster

from polarnode.core.cursors import Cursor
from polarnode.core.task import Budgets, GroupSpec
from polarnode.core.trajectory import Outcome
from polarnode.journal.log.port import Claim, ClaimOffer, LogUnavailable, NodeFacts
from polarnode.journal.log.postgres import events, membership, places
from polarnode.journal.log.postgres.connection import LogConnection
from polarnode.journal.log.watching import SilenceWatch
from polarnode.journal.queries import ByteCache
from polarnode.journal.values import KEYS_ONLY, EventFilters

ROOM = 6  # sessions of a node
SESSION_S = (0.05, 1.5)
SAMPLES = 4
RETRIES = 6  # of a task: so many nodes may die under one place before its end is an error


# ── a node ────────────────────────────────────────────────────────────────────


@define
class Node:
    """A hollow node. `disk` holds what the log has not acknowledged."""

    dsn: str
    name: str
    disk: Path
    chance: random.Random
    incarnation: int = -1
    running: dict[str, tuple[Claim, float]] = field(factory=dict)
    lost: bool = False

    def run(self) -> None:
        log, watcher = LogConnection(self.dsn, self.name), LogConnection(self.dsn, f"{self.name} watcher")
        self._until(lambda: self._join(log))
        threading.Thread(target=self._watch, args=(watcher,), daemon=True).start()
        while True:
            try:
                if self.lost:
                    self._join(log)
                self._work(log)
            except LogUnavailable:
                time.sleep(0.2)
                self._until(lambda: self._find_claims(log))
            time.sleep(0.05)

    def _until(self, call: Any) -> None:
        while True:
            try:
                return call()
            except LogUnavailable:
                time.sleep(0.2)

    def _join(self, log: LogConnection) -> None:
        joined = log.run_now(membership.join, NodeFacts(name=self.name))
        self.incarnation, self.lost = joined.incarnation, False
        mine = {claim.session_id: claim for claim in joined.inherited}
        for path in self.disk.glob("*.ended"):
            claim, ended = pickle.loads(path.read_bytes())
            self._finish(log, mine.pop(claim.session_id, claim), ended, path)
        for session_id, claim in mine.items():
            if session_id in self.running:  # it was declared lost, and still has the session
                self.running[session_id] = (claim, self.running[session_id][1])
            elif self.chance.random() < 0.5:
                self._ended(log, claim, end(claim, status="interrupted", reward=None, turns=0))
            else:
                log.run_now(places.put_back, claim, None, counts=True, keep=False)

    def _find_claims(self, log: LogConnection) -> None:
        """The answer to a claim may have been lost: what the log says is held here runs here."""
        for claim in log.run_now(places.claims, self.incarnation):
            if claim.session_id not in self.running and not self._path(claim).exists():
                self._begin(claim)

    def _begin(self, claim: Claim) -> None:
        seconds = 0.0 if claim.ending else self.chance.uniform(*SESSION_S)
        self.running[claim.session_id] = (claim, time.monotonic() + seconds)

    def _path(self, claim: Claim) -> Path:
        return self.disk / f"{claim.session_id}.ended"

    def _work(self, log: LogConnection) -> None:
        for path in self.disk.glob("*.ended"):
            claim, ended = pickle.loads(path.read_bytes())
            self._finish(log, claim, ended, path)
        for claim in log.run_now(
            places.claim, ClaimOffer(incarnation=self.incarnation, room=ROOM - len(self.running))
        ):
            self._begin(claim)
        for claim in log.run_now(places.claim_endings, self.incarnation, 10):
            self._begin(claim)
        stop = log.run_now(places.sessions_to_stop, self.incarnation)
        for session_id, (claim, until) in list(self.running.items()):
            if session_id not in stop and time.monotonic() < until:
                continue
            if claim.ending or session_id in stop:
                cause = Outcome(status="cancelled", reason=claim.ending or stop[session_id])
                if claim.ending == "retries spent":
                    cause = Outcome(status="error", boundary="node", reason="its nodes were lost")
                ended = end(claim, outcome=cause, reward=None, turns=0)
            elif self.chance.random() < 0.05:
                log.run_now(
                    places.put_back,
                    claim,
                    end(claim, status="interrupted", reward=None),
                    counts=False,
                    keep=False,
                )
                del self.running[session_id]
                continue
            else:
                ended = end(claim, turns=2, sampled=self.chance.choice((100, 2_000, 200_000)))
            self._ended(log, claim, ended)
            del self.running[session_id]

    def _ended(self, log: LogConnection, claim: Claim, ended: Any) -> None:
        path = self._path(claim)
        half = path.with_suffix(".half")
        half.write_bytes(pickle.dumps((claim, ended)))
        half.rename(path)
        with suppress(LogUnavailable):  # it is on the disk, and is sent again
            self._finish(log, claim, ended, path)

    def _finish(self, log: LogConnection, claim: Claim, ended: Any, path: Path) -> None:
        answer = log.run_now(places.finish_claim, claim, ended)
        if answer == "another" and claim.ending is None:
            log.run_now(places.publish_session, ended, claim.incarnation, kind="attempt")
        path.unlink()

    def _watch(self, log: LogConnection) -> None:
        watch, opened = SilenceWatch(), 0
        while True:
            try:
                incarnation = self.incarnation
                asked = time.monotonic()
                beat = log.run_now(membership.give_sign, incarnation)
                opened = log.times_opened
                if not beat.signed and incarnation == self.incarnation:
                    self.lost = True
                for silent, sign in watch.find_silent(beat.signs, asked=asked, now=time.monotonic()):
                    if log.times_opened == opened and silent != self.incarnation:
                        log.run_now(membership.declare_lost, silent, sign)
                log.run_now(places.put_back_lost)
            except LogUnavailable:
                pass
            time.sleep(1)


# ── a consumer ────────────────────────────────────────────────────────────────


def consume(dsn: str, file: Path) -> None:
    """Write what is read, then acknowledge it: a kill in between reads it again, under the same position."""
    log, recent = LogConnection(dsn, "consumer"), ByteCache()
    while True:
        try:
            cursor = log.run_now(events.consumer_cursor, "c")
            while True:
                found = log.run_now(
                    events.events, cursor, 64, EventFilters(kinds=EVERY_KIND), KEYS_ONLY, recent
                )
                if found.gap is not None:
                    raise SystemExit(f"a gap: {found.gap}")
                with file.open("a") as lines:
                    lines.writelines(f"{each.seq} {each.key}\n" for each in found.page.events)
                    lines.flush()
                    os.fsync(lines.fileno())
                cursor = Cursor(position=found.page.seen, log=found.log)
                if found.page.events:
                    log.run_now(events.acknowledge, "c", cursor, time.time(), 1e9)
                else:
                    time.sleep(0.05)
        except LogUnavailable:
            time.sleep(0.2)


# ── the run ───────────────────────────────────────────────────────────────────


@define
class Run:
    """What was done, and what came of it."""

    cluster: Cluster
    dsn: str
    folder: Path
    chance: random.Random
    done: "Counter[str]" = field(factory=Counter)
    children: dict[str, "subprocess.Popen[bytes]"] = field(factory=dict)
    tasks: dict[str, int] = field(factory=dict)

    def start(self, name: str) -> None:
        arguments = ["consumer"] if name == "consumer" else ["node", name]
        seed = str(self.chance.random())
        with (self.folder / f"{name}.log").open("ab") as log:
            self.children[name] = subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    *arguments,
                    "--dsn",
                    self.dsn,
                    "--folder",
                    str(self.folder),
                    "--seed",
                    seed,
                ],
                stderr=log,
            )

    def submit(self, log: LogConnection, number: int) -> None:
        early = self.chance.random() < 0.1
        spec = make_spec(
            num_samples=SAMPLES,
            budgets=Budgets(retries=RETRIES),
            group=GroupSpec(early_stop_min=2 if early else None),
            priority=self.chance.choice((50, 60)),
        )
        name = f"task-{number}"
        while True:
            try:
                log.run_now(
                    places.submit,
                    spec,
                    task_id=name,
                    session_ids=tuple(f"{name}-{index}" for index in range(SAMPLES)),
                    idempotency_key=f"key-{number}",
                    callback_kinds=("task",),
                    submitted=time.time(),
                )
                break
            except LogUnavailable:
                time.sleep(0.2)
        self.tasks[name] = SAMPLES
        if self.chance.random() < 0.03:
            with suppress(LogUnavailable):
                log.run_now(places.cancel, name, time.time())

    def disturb(self) -> None:
        what = self.chance.choices(("kill", "stop", "consumer", "crash", "freeze"), (10, 5, 4, 1.5, 0.5))[0]
        nodes = [name for name in self.children if name != "consumer"]
        if what in ("kill", "consumer"):
            name = self.chance.choice(nodes) if what == "kill" else "consumer"
            self.children[name].kill()
            self.children[name].wait()
            if what == "kill" and self.chance.random() < 0.4:
                time.sleep(self.chance.uniform(0, 6))  # some are back within their lease, some are not
            self.start(name)
        elif what == "stop":
            child = self.children[self.chance.choice(nodes)]
            child.send_signal(signal.SIGSTOP)
            time.sleep(self.chance.uniform(0.5, 7))
            child.send_signal(signal.SIGCONT)
        elif what == "freeze":
            with self.cluster.frozen():
                time.sleep(self.chance.uniform(0.5, 6))
        else:
            self.cluster.crash()
            time.sleep(self.chance.uniform(0, 2))
            self.cluster.start()
        self.done[what] += 1

    def rest(self, log: LogConnection, seconds: float) -> None:
        """Wait until every place is over and everything is read."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.5)
            with suppress(LogUnavailable):
                row = log.run_now(
                    lambda db: db.execute(
                        "SELECT (SELECT count(*) FROM places WHERE state <> 'over') AS open, log.position AS last,"
                        " (SELECT coalesce(min(position), 0) FROM consumers) AS read FROM log"
                    ).fetchone()
                )
                if row is not None and row["open"] == 0 and row["read"] == row["last"]:
                    time.sleep(1)  # attempts of those that lost may follow
                    return
        raise AssertionError("places were still open, or events unread")

    def check(self) -> dict[str, Any]:
        """Compare what the consumer read with what was submitted."""
        read: dict[int, str] = {}
        for line in (self.folder / "consumed").read_text().splitlines():
            position, key = line.split(" ", 1)
            assert read.setdefault(int(position), key) == key, f"another event at {position}"
        counts = Counter(read.values())
        with LogConnection(self.dsn, "check")._open_if_needed() as db:
            rows = db.execute(
                "SELECT e.key, s.task_id, s.place, s.attempt, s.outcome FROM events e JOIN sessions s USING (session_id)"
                " WHERE kind = 'trajectory'"
            ).fetchall()
        filled = Counter((row["task_id"], row["place"]) for row in rows if row["key"] in counts)
        wanted = {(name, place) for name, samples in self.tasks.items() for place in range(samples)}
        groups = Counter(key for key in counts.elements() if key.startswith(("group:", "task:")))
        ends = {f"{kind}:{name}" for kind in ("group", "task") for name in self.tasks}
        return {
            "tasks": len(self.tasks),
            "places": len(wanted),
            "lost": len(wanted - filled.keys()) + len(ends - groups.keys()),
            "doubled": sum(count - 1 for count in (*filled.values(), *counts.values())),
            "gaps": max(read, default=0) - len(read),
            "events": len(read),
            "attempts": sum(key.startswith("attempt:") for key in counts),
            "retried": sum(row["attempt"] > 0 for row in rows),
            "spent": sum(b"its nodes were lost" in bytes(row["outcome"]) for row in rows),
            **{f"disturbed: {what}": count for what, count in sorted(self.done.items())},
        }


def run_chaos(
    *, seconds: float, nodes: int, seed: int, pause_s: float = 1.0, tasks_s: float = 0.25
) -> dict[str, Any]:
    """Load and disturb for so many seconds, let it rest, and compare."""
    chance = random.Random(seed)
    with running_cluster() as cluster:
        run = Run(cluster, cluster.database(), cluster.folder / "run", chance)
        run.folder.mkdir()
        (run.folder / "consumed").touch()
        log = LogConnection(run.dsn, "submitter")
        log.run_now(events.acknowledge, "c", Cursor(), time.time(), 1e9)
        stopping = threading.Event()

        def load() -> None:
            number = 0
            while not stopping.wait(tasks_s):
                run.submit(log, number)
                number += 1

        loader = threading.Thread(target=load)
        try:
            for number in range(nodes):
                run.start(f"node{number}")
            run.start("consumer")
            loader.start()
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                time.sleep(chance.uniform(0, 2 * pause_s))
                run.disturb()
            stopping.set()
            loader.join()
            for name, child in run.children.items():
                if child.poll() is not None:
                    raise AssertionError(f"{name} ended: {(run.folder / f'{name}.log').read_text()[-2000:]}")
            run.rest(log, 60 + len(run.tasks) * 0.3)
            return run.check()
        finally:
            stopping.set()
            for child in run.children.values():
                child.kill()
                child.wait()
            log.close_now()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", nargs="?", default="run")
    parser.add_argument("name", nargs="?", default="consumer")
    parser.add_argument("--dsn", default="")
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--seed", default="1")
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--nodes", type=int, default=6)
    options = parser.parse_args()
    if options.role == "consumer":
        consume(options.dsn, options.folder / "consumed")
    elif options.role == "node":
        disk = options.folder / options.name
        disk.mkdir(exist_ok=True)
        Node(options.dsn, options.name, disk, random.Random(options.seed)).run()
    else:
        found = run_chaos(seconds=options.seconds, nodes=options.nodes, seed=int(options.seed))
        print("\n".join(f"{name}: {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
