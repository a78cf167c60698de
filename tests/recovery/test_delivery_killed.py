"""A node and its readers are killed with SIGKILL at random moments, again and again: nothing is missing, and
every repeat is known by its key.

The readers are the one of docs/delivery.md, word for word. POLARNODE_DELIVERY_SEED gives a run again,
POLARNODE_DELIVERY_ROUNDS another length.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from attrs import define, field
from delivery_program import page_reader
from recovery_kit import free_port, until

ROUNDS = int(os.environ.get("POLARNODE_DELIVERY_ROUNDS", "40"))
SEED = int(os.environ.get("POLARNODE_DELIVERY_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
CONSUMERS = ("quick", "steady", "often-killed")
LONGEST_S = 0.5  # of a round: some ten tasks and a few dozen acknowledgements


@define(eq=False)
class Stage:
    """The processes of one run. A process that is asked for again takes the place of the one before it, which
    is dead.
    """

    folder: Path
    port: int
    program: "subprocess.Popen[str]"
    chance: random.Random
    alive: dict[str, int] = field(factory=dict)
    kills: "Counter[str]" = field(factory=Counter)
    positions: dict[str, int] = field(factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, name: str) -> None:
        if name == "node":
            self._run(
                name, "node", folder=str(self.folder), port=self.port, seed=self.chance.randrange(1 << 30)
            )
        else:
            self._run(name, "reader", folder=str(self.folder), url=self.url, consumer=name)

    def _run(self, name: str, function: str, **given: Any) -> None:
        assert self.program.stdin is not None
        assert self.program.stdout is not None
        self.program.stdin.write(json.dumps([function, given]) + "\n")
        self.program.stdin.flush()
        self.alive[name] = int(self.program.stdout.readline())

    def kill(self, name: str) -> None:
        pid = self.alive.pop(name)
        os.kill(pid, signal.SIGKILL)  # an error if it was not alive: nobody ends here by itself
        until(lambda: not Path(f"/proc/{pid}").exists(), f"{name} is dead")
        self.kills[name] += 1

    def note_positions(self) -> dict[str, Any]:
        """As the node tells them; {} while it does not answer."""
        with suppress(OSError, ValueError):
            asked = urllib.request.Request(
                f"{self.url}/v1/consumers", headers={"Authorization": "Bearer secret"}
            )
            with urllib.request.urlopen(asked, timeout=30) as answer:
                found = {each["consumer"]: each for each in json.load(answer)["consumers"]}
            for name, each in found.items():
                assert each["position"] >= self.positions.get(name, 0), f"the position of {name} went back"
                assert each["missed"] == 0
                self.positions[name] = each["position"]
            return found
        return {}

    def end(self) -> None:
        for name in tuple(self.alive):
            self.kill(name)


@contextmanager
def stage_at(folder: Path) -> Iterator[Stage]:
    program = [sys.executable, str(Path(__file__).with_name("delivery_program.py"))]
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        stage = Stage(folder, free_port(), running, random.Random(SEED))
        try:
            for name in ("node", *CONSUMERS):
                stage.start(name)
            # nothing is pruned before all are known: one that comes later is owed a gap
            until(lambda: set(stage.note_positions()) == set(CONSUMERS), "every reader has begun")
            yield stage
        finally:
            stage.end()
            running.kill()


def killed_in_a_round(chance: random.Random) -> list[str]:
    """Together or alone, the node in every second."""
    chosen = ["node"] if chance.random() < 0.5 else []
    chosen += ["often-killed"] if chance.random() < 0.7 else []
    chosen += ["steady"] if chance.random() < 0.15 else []
    chance.shuffle(chosen)
    return chosen


def test_nothing_missing_and_repeats_recognised(tmp_path: Path) -> None:
    """Nothing is missing, and every repeat is known."""
    print(f"POLARNODE_DELIVERY_SEED={SEED}")
    with stage_at(tmp_path) as stage:
        began = time.monotonic()
        for _ in range(ROUNDS):
            time.sleep(stage.chance.uniform(0.0, LONGEST_S))
            stage.note_positions()
            chosen = killed_in_a_round(stage.chance)
            for name in chosen:
                stage.kill(name)
            for name in reversed(chosen):
                stage.start(name)
        (tmp_path / "enough").touch()
        took = time.monotonic() - began
        until(lambda: all_have_read_all(stage), "every reader has acknowledged every event")
        last = max(stage.positions.values())
        first = first_kept(stage)
    check(tmp_path, last)
    assert first > 1, "what all had acknowledged was pruned meanwhile"
    print(
        f"{sum(stage.kills.values())} kills {dict(stage.kills)} in {took:.0f} s; {last} events, {first - 1}"
        " of them pruned by the end"
    )


def all_have_read_all(stage: Stage) -> bool:
    found = stage.note_positions()
    return set(found) == set(CONSUMERS) and all(each["behind_events"] == 0 for each in found.values())


def first_kept(stage: Stage) -> int:
    asked = urllib.request.Request(f"{stage.url}/v1/status", headers={"Authorization": "Bearer secret"})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return int(json.load(answer)["journal"]["first_seq"])


# ── is all accounted for? ─────────────────────────────────────────────────────


def check(folder: Path, last: int) -> None:
    read = {consumer: came(folder / f"{consumer}.came") for consumer in CONSUMERS}
    told = {consumer: check_reader(lines, last) for consumer, lines in read.items()}
    assert told["quick"] == told["steady"] == told["often-killed"], "an event is another to another reader"
    keys = {key for key, _ in told["quick"].values()}
    published = (folder / "published").read_text().split()
    assert set(published) <= keys, "what was on disk is missing"
    for consumer, lines in read.items():
        learned = (folder / f"{consumer}.learned").read_text().split()
        assert set(learned) == keys
        repeats = len(lines) - last
        print(
            f"{consumer}: {len(lines)} deliveries of {last} events, {repeats} repeats, {len(learned) - last}"
            " of them not known: killed in learning"
        )
        assert len(learned) - last <= repeats
    assert len(read["often-killed"]) > last, "nothing was ever sent again: nothing was tried"


def came(path: Path) -> list[tuple[str, int, str, str]]:
    """Stream, number, key and digest of each delivery, in the order they came."""
    lines = (line.split(" ") for line in path.read_text().splitlines())
    return [(stream, int(seq), key, digest) for stream, seq, key, digest in lines]


def check_reader(lines: list[tuple[str, int, str, str]], last: int) -> dict[int, tuple[str, str]]:
    """One reader's deliveries: every number, each always the same event, in order."""
    found: dict[int, tuple[str, str]] = {}
    place: dict[str, int] = {}
    for stream, seq, key, digest in lines:
        assert not key.startswith("gap:"), "something was pruned that it had not acknowledged"
        assert seq > place.get(stream, 0), "a stream went back"
        assert seq <= len(found) + 1, "a number was passed over"
        assert found.setdefault(seq, (key, digest)) == (key, digest), "an event came back as another"
        place[stream] = seq
    assert sorted(found) == list(range(1, last + 1))
    assert len({key for key, _ in found.values()}) == last, "two events have one key"
    return found


# ── the page's reader alone ───────────────────────────────────────────────────


class Dying(BaseHTTPRequestHandler):
    """A node that dies between two chunks, in the middle of its second event's line."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        chunk = b'id: 1\ndata: {"key":"trajectory:a"}\n\nid: 2\ndata: {"key":"traj'
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        self.close_connection = True

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


def test_truncated_line_is_no_event(tmp_path: Path) -> None:
    """urllib gives what came of it and raises nothing."""
    learned: list[str] = []
    with HTTPServer(("127.0.0.1", 0), Dying) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        page_reader()["read"](
            url, "secret", "one", str(tmp_path / "keys"), lambda event: learned.append(event["key"])
        )
        server.shutdown()
    assert learned == ["trajectory:a"]
    assert (tmp_path / "keys").read_text() == "trajectory:a\n"
