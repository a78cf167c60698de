"""`kill -9` of the node at random moments, again and again on one state folder, with a trainer that never stops
submitting and reading.

At the end nothing is lost, nothing is doubled, and nothing is left. The moments come from a seed that is
printed; POLARNODE_KILL_SEED gives it again, POLARNODE_KILLS another number of them. How long each restart
took is printed and not judged.
"""

import os
import random
import statistics
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field
from recovery_kit import (
    Account,
    Ledger,
    Place,
    ServingNode,
    Traces,
    account,
    ledgers_in_containers,
    ledgers_in_logs,
    place_at,
    short_temporary,
    until,
)

from polarnode.client import ClientError, PolarnodeClient, Unreachable

pytestmark = pytest.mark.podman

# some 7 s each; `make chaos` kills, stops, fills and damages a node for half an hour
KILLS = int(os.environ.get("POLARNODE_KILLS", "12"))
SEED = int(os.environ.get("POLARNODE_KILL_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
STARTING = 0.25  # of the kills fall while the node starts, the others while it serves
UNFINISHED = 4  # tasks under way at once: enough for every kill to meet some in each phase
SERVED_S = 2.5  # seconds a life serves at most, on a machine on which it starts in as many
# a life in so many is asked whether its containers are its own alone: each question takes Podman a moment
CHECKED = 5


@define(eq=False)
class Trainer:
    """Submits under idempotency keys, asks again, cancels now and then, and reads all events, over every
    death of its node.
    """

    client: PolarnodeClient
    place: Place
    chance: random.Random
    old_keys: list[str] = field(factory=list)
    # by key: the task as it was asked for, and its id
    submitted: "dict[str, tuple[dict[str, Any], str]]" = field(factory=dict)
    # by task: the sessions that held its places when the node had said so
    cancelled: "dict[str, set[str]]" = field(factory=dict)
    events: "dict[int, str]" = field(factory=dict)
    faults: list[Exception] = field(factory=list)
    enough: threading.Event = field(factory=threading.Event)
    over: threading.Event = field(factory=threading.Event)
    _threads: list[threading.Thread] = field(factory=list)

    def begin(self) -> None:
        for work in (self._submit_on_and_on, self._read_on_and_on):
            self._threads.append(threading.Thread(target=self._guarded, args=(work,), daemon=True))
            self._threads[-1].start()

    def stop_submitting(self) -> None:
        self.enough.set()
        self._threads[0].join()

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except Exception as fault:  # a thread of its own: the test looks at it
            self.faults.append(fault)

    def _submit_on_and_on(self) -> None:
        while not self.enough.is_set():
            if len(self.unfinished()) >= UNFINISHED:
                time.sleep(0.1)
                continue
            key = f"key-{len(self.submitted)}"
            retries, samples = self.chance.choice((0, 2, 10)), self.chance.randint(1, 3)
            harness = {
                "turns": self.chance.randint(1, 6),
                "stream": self.chance.random() < 0.5,
                "old_keys": self.old_keys[-2:],
            }
            task = self.place.task(retries=retries, num_samples=samples, **harness)
            self.submitted[key] = (task, self.client.submit(task, idempotency_key=key).task_id)
            if self.chance.random() < 0.3:
                self._ask_again(self.chance.choice(list(self.submitted)))
            if self.chance.random() < 0.2:
                self._cancel(self.chance.choice(list(self.submitted.values()))[1])

    def _ask_again(self, key: str) -> None:
        task, task_id = self.submitted[key]
        again = self.client.submit(task, idempotency_key=key)
        assert (again.task_id, again.created) == (task_id, False)

    def _cancel(self, task_id: str) -> None:
        if self._patiently(lambda: self.client.cancel(task_id)):
            self.cancelled[task_id] = {
                one["session_id"] for one in self._patiently(lambda: self.client.task(task_id))["sessions"]
            }

    def unfinished(self) -> "list[dict[str, Any]]":
        return [
            task for task in self._patiently(lambda: self.client.tasks(limit=1000)) if not task["finished"]
        ]

    def _patiently(self, ask: Any) -> Any:
        while True:
            try:
                return ask()
            except Unreachable:
                time.sleep(0.1)
            except ClientError as error:
                if error.status < 500:
                    raise
                time.sleep(0.1)

    def _read_on_and_on(self) -> None:
        for event in self.client.trajectories(
            consumer="trainer", ack=True, kinds=("trajectory", "group", "task", "attempt")
        ):
            assert self.events.setdefault(event.seq, event.key) == event.key, "a number was given twice"
            if self.over.is_set():
                return


@define(eq=False)
class Lives:
    """One life after another, each killed at some moment."""

    place: Place
    traces: Traces
    chance: random.Random
    ledgers: list[Ledger] = field(factory=list)
    restarts: list[float] = field(factory=list)
    orphans: list[int] = field(factory=list)  # containers that each death left
    _before: set[str] = field(factory=set)  # containers of dead lives

    def one(self, trainer: Trainer) -> None:
        began = time.monotonic()
        node = self.place.start()
        try:
            if self.chance.random() < STARTING and self.restarts:
                time.sleep(self.chance.uniform(0.0, statistics.median(self.restarts)))
            else:
                serves(node)
                self.restarts.append(time.monotonic() - began)
                self._check_own_containers()
                time.sleep(
                    self.chance.uniform(0.0, SERVED_S * max(1.0, statistics.median(self.restarts) / SERVED_S))
                )
            self.traces.note_processes(node)
        finally:
            node.process.kill()
            node.process.wait()
        self._look_at_what_it_left(trainer)

    def _check_own_containers(self) -> None:
        if len(self.restarts) % CHECKED == 0:
            assert not self._before & {each["Id"] for each in self.traces.note_containers()}, (
                "a container of a dead life is still there"
            )

    def _look_at_what_it_left(self, trainer: Trainer) -> None:
        left = self.traces.note_containers()
        self.ledgers += ledgers_in_containers(left)
        self._before |= {each["Id"] for each in left}
        self.orphans.append(len(left))
        trainer.old_keys += [ledger.key for ledger in self.ledgers[-3:]]
        if len(self.orphans) % CHECKED == 0:
            self.traces.note_mounts([each["Id"] for each in left])


def serves(node: ServingNode) -> None:
    def answers() -> bool:
        assert node.process.poll() is None, (
            f"the node ended with {node.process.returncode}: {node.said()[-3000:]}"
        )
        try:
            status = node.client.status()
        except Unreachable:
            return False
        return not status["scheduler"]["stopping"] and any(
            host["state"] == "ready" for host in status["engine"]["hosts"]
        )

    until(answers, "the node serves")


def test_repeated_kills_lose_nothing(podman_works: None, tmp_path: Path) -> None:
    print(f"POLARNODE_KILL_SEED={SEED}")
    chance = random.Random(SEED)
    with short_temporary() as temporary:
        place = place_at(tmp_path, temporary)
        lives = Lives(place, Traces(place), chance)
        trainer = Trainer(
            PolarnodeClient(
                f"http://127.0.0.1:{place.port}", token="live-control-plane-token", patience_s=3600.0
            ),
            place,
            random.Random(SEED + 1),
        )
        trainer.begin()
        began = time.monotonic()
        for _ in range(KILLS):
            lives.one(trainer)
            assert trainer.faults == []
        print(f"{KILLS} kills in {time.monotonic() - began:.0f} s")
        the_last_life(place, lives, trainer)
        lives.traces.check_nothing_left()
        found = account(place.state_dir)
        all_is_accounted_for(found, lives, trainer)
    print_figures(found, lives)


def the_last_life(place: Place, lives: Lives, trainer: Trainer) -> None:
    """Every task comes to its end, every event is read, and the node is asked to stop."""
    with place.serving() as node:
        trainer.stop_submitting()
        until(lambda: trainer.faults or not trainer.unfinished(), "every task is over")
        assert trainer.faults == []
        last = node.status()["journal"]["last_seq"]
        until(lambda: trainer.faults or max(trainer.events, default=0) >= last, "the trainer has read all")
        trainer.over.set()
        lives.traces.note_processes(node)
    assert node.process.returncode == 0, node.said()[-3000:]
    lives.ledgers += ledgers_in_logs(place.state_dir)


def all_is_accounted_for(found: Account, lives: Lives, trainer: Trainer) -> None:
    assert trainer.faults == []
    assert dict(found.events) == trainer.events, (
        "the trainer read what the journal holds, each number under one key"
    )
    assert set(found.tasks) == {task_id for _, task_id in trainer.submitted.values()}, (
        "a task was lost, or taken twice"
    )
    for task, task_id in trainer.submitted.values():
        budget = task["budgets"]["retries"]
        assert max(each.attempt for each in found.tasks[task_id]) <= budget
        for each in found.tasks[task_id]:
            assert each.outcome.status in ("completed", "cancelled") or (
                each.outcome.status == "interrupted" and each.attempt == budget
            ), each.outcome
    for task_id, held in trainer.cancelled.items():
        assert {each.session_id for each in found.tasks[task_id]} == held, "a cancelled place was given again"
    every_answer_is_in_one_trajectory(found, lives)
    asked = [status for ledger in lives.ledgers for status in ledger.old]
    assert set(asked) <= {401}, "a key of an old life opened something"
    assert asked, "no old key was tried"


def every_answer_is_in_one_trajectory(found: Account, lives: Lives) -> None:
    """Answers are random words, so one is known by its text. The last of a killed life may have been told
    before they were on disk, and only the last.
    """
    held = found.texts()
    # the longest a harness had
    told = {ledger.key: ledger for ledger in sorted(lives.ledgers, key=lambda each: len(each.texts))}
    lost = 0
    for ledger in told.values():
        found = [held[text] for text in ledger.texts]
        kept = sum(found)
        assert found == [1] * kept + [0] * (len(found) - kept), ledger
        lost += len(found) - kept
    print(
        f"{sum(len(ledger.texts) for ledger in told.values())} answers in {len(told)} ledgers; {lost} were"
        " told and not yet on disk when the node was killed"
    )


def print_figures(found: Account, lives: Lives) -> None:
    restarts = sorted(lives.restarts)
    quarter = max(1, len(restarts) // 20)
    print(
        f"serving again after: median {statistics.median(restarts):.2f} s, p95 {restarts[-quarter]:.2f} s,"
        f" most {restarts[-1]:.2f} s of {len(restarts)}; {sum(lives.orphans)} containers were left behind,"
        f" {max(lives.orphans)} at most by one death"
    )
    attempts = Counter(each.attempt for trajectories in found.tasks.values() for each in trajectories)
    turns = sum(len(each.turns) for each in found.trajectories.values())
    print(
        f"{len(found.tasks)} tasks, {len(found.trajectories)} sessions {dict(found.statuses())}, {turns}"
        f" turns; final sessions by attempt: {dict(sorted(attempts.items()))}"
    )
