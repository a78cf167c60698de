"""A trainer's client against a hostile server: malformed streams, answers and errors, cut anywhere. A caller
gets values or the client's own errors (docs/client.md); it neither hangs, nor is given an event twice.
"""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from attrs import define, field
from fuzz_json import ODD, changed, torn_bytes
from fuzz_kit import Target, check_sentence, play, watched
from hypothesis import strategies as st
from journal_samples import make_trajectory

from polarnode.client import requests, streams
from polarnode.client.requests import (
    Ask,
    ClientRequest,
    Close,
    Open,
    Read,
    Running,
    Script,
    SleepFor,
    YieldValue,
    ask,
)
from polarnode.client.scripts import Following, RetryPatience, StreamFollower
from polarnode.client.streams import Acknowledgements, Collector, GroupStream, events, objects
from polarnode.client.values import ClientError, Event, Unreachable, read_error
from polarnode.core.codec.trajectories import trajectory_json
from polarnode.core.cursors import Cursor
from polarnode.core.errors import PolarnodeError, Refused
from polarnode.core.task import GroupSpec
from polarnode.groups.group import facts_of, group_json, judged

# ── a server ──────────────────────────────────────────────────────────────────

PATIENCE_S = 30.0
MOST_COMMANDS = 5_000  # far more than any of these bodies needs


@define(eq=False)
class Server:
    """Answers what it is given to answer, in its own time."""

    body: bytes
    cuts: tuple[int, ...] = ()
    status: int = 200
    retry_after: str = ""
    content_type: str = "text/event-stream"
    now: float = 0.0
    _pieces: Iterator[bytes] = field(factory=lambda: iter(()), init=False)

    def answer(self, command: Any) -> Any:
        match command:
            case Ask() | Open() if self.status >= 300:
                raise read_error(self.status, "Odd", {"retry-after": self.retry_after}, self.body)
            case Ask():
                return self.body
            case Open():
                places = [0, *sorted(cut for cut in self.cuts if cut < len(self.body)), len(self.body)]
                parts = [self.body[a:b] for a, b in pairwise(places)]
                self._pieces = iter([part for part in parts if part])
                return self.content_type
            case Read():
                self.now += 0.1
                return next(self._pieces, b"")
            case SleepFor(seconds):
                assert 0 <= seconds <= PATIENCE_S
                self.now += seconds
        return None

    def run(self, script: Script[Any]) -> tuple[list[Any], PolarnodeError | None]:
        """What the script gave, and the error that it ended with."""
        running, given = Running(script), []
        try:
            for _ in range(MOST_COMMANDS):
                command = running.next()
                if command is None:
                    return given, None
                if isinstance(command, YieldValue):
                    given.append(command.value)
                try:
                    running.answered(
                        None if isinstance(command, YieldValue | Close) else self.answer(command)
                    )
                except PolarnodeError as error:
                    running.failed(error)
        except (ClientError, Unreachable, Refused) as error:
            check_sentence(str(error))
            return given, error
        # A node that is alive is followed for ever; but not by asking it again and again at once.
        assert self.now > MOST_COMMANDS / 100, "the script asks without a pause"
        return given, None


# ── streams ───────────────────────────────────────────────────────────────────

TRAJECTORY = trajectory_json(make_trajectory("s1", turns=2), turns="full", arrays="base64")
GROUP = group_json(judged(GroupSpec(), [facts_of(make_trajectory("s1"))], task_id="t", group_id="g"))
EVENTS: tuple[dict[str, Any], ...] = (
    {"seq": 1, "key": "trajectory:s1", "trajectory": TRAJECTORY},
    {"seq": 2, "key": "group:t", "group": GROUP},
    {"seq": 3, "key": "task:t", "task": {"task_id": "t"}},
    {"seq": 4, "key": "gap", "gap": {"first_seq": 9}},
    {"error": {"type": "journal", "message": "no"}},
)
KINDS = ("trajectory", "group", "task", "gap", "error", "attempt", "message", "", "\u0663")
NUMBERS = ("1", "2", "3", "9", "0", "-1", "1e3", "٣", "9" * 30, "9" * 5000, "", " 1", "x")


@st.composite
def blocks(draw: st.DrawFn) -> bytes:
    """An event of the stream, some of it wrong."""
    data = draw(st.sampled_from(EVENTS) | changed(EVENTS))
    kind = draw(st.sampled_from(KINDS)) if draw(st.booleans()) else _kind_of(data)
    lines = [
        f"event: {kind}".encode(),
        b"id: " + draw(st.sampled_from(NUMBERS)).encode(),
        b"data: " + json.dumps(data).encode(),
    ]
    match draw(
        st.sampled_from(("plain", "plain", "plain", "torn", "order", "no id", "comment", "cr", "many"))
    ):
        case "torn":
            lines[2] = draw(torn_bytes(lines[2]))
        case "order":
            lines.reverse()
        case "no id":
            del lines[1]
        case "comment":
            lines.insert(0, b": " + draw(st.binary(max_size=9)).replace(b"\n", b""))
        case "cr":
            lines = [line + b"\r" for line in lines]
        case "many":
            lines *= 3
    return b"\n".join(lines) + draw(st.sampled_from((b"\n\n", b"\n\n", b"\n\n", b"\r\n\r\n", b"\n", b"")))


def _kind_of(data: Any) -> str:
    return next((kind for kind in KINDS if isinstance(data, dict) and kind in data), "task")


CUTS = st.lists(st.integers(0, 3000), max_size=5).map(tuple)
STREAMS = st.tuples(
    st.lists(blocks(), max_size=5).map(b"".join),
    CUTS,
    st.sampled_from((200, 200, 200, 200, 404, 429, 500, 503)),
    st.sampled_from(("", "1", "9" * 400, "-1", "soon", "1e3")),
    st.booleans(),
)


def read_stream(value: tuple[bytes, tuple[int, ...], int, str, bool], *, grouped: bool) -> None:
    body, cuts, status, wait, goes_on = value
    server = Server(body=body, cuts=cuts, status=status, retry_after=wait)

    def now() -> float:
        return server.now

    follower = StreamFollower(
        following=Following(path="/v1/trajectories/stream", after=None, goes_on=goes_on),
        patience=RetryPatience(PATIENCE_S, now),
    )
    acks = Acknowledgements(consumer=None, patience_s=PATIENCE_S, now=now)
    script = (
        GroupStream(
            follower=follower,
            acks=acks,
            collector=Collector(),
            patience_s=PATIENCE_S,
            now=now,
            run=server.run,
        ).script()
        if grouped
        else events(follower, acks)
    )
    with watched(len(body)):
        given, _ = server.run(script)
    if grouped:
        return
    last: int | None = None
    for event in given:
        assert isinstance(event, Event)
        assert event.kind == "gap" or last is None or event.seq > last
        last = event.seq
        for read in (lambda event=event: event.trajectory, lambda event=event: event.group):
            try:
                read()
            except PolarnodeError as error:
                check_sentence(str(error))


# ── answers ───────────────────────────────────────────────────────────────────

READS: tuple[Callable[[], ClientRequest[Any]], ...] = (
    lambda: requests.submit({}, idempotency_key="k"),
    lambda: requests.task_status("t"),
    lambda: requests.tasks(limit=1, before=None),
    lambda: requests.cancel("t"),
    lambda: requests.acknowledge("c", Cursor(position=1)),
    lambda: requests.trajectory("s1"),
    requests.consumers,
    requests.status,
    requests.metrics,
)
ANSWERS: tuple[Any, ...] = (
    TRAJECTORY,
    {"task_id": "t", "session_ids": ["a"], "created": True},
    {"tasks": [{"task_id": "t"}]},
    {"task_id": "t", "cancelled": True},
    {"consumer": "c", "position": 3},
    {"consumer": "c", "position": 3, "id": "7f-1-0:3", "pending": []},
    {"consumers": [{"consumer": "c", "position": 1, "acknowledged": 1.0, "behind": 0, "held_bytes": 0}]},
    {"error": {"type": "conflict", "message": "another task has it", "path": "$.task_id"}},
)


@st.composite
def answers(draw: st.DrawFn) -> tuple[int, bytes, int, str]:
    data = json.dumps(draw(st.sampled_from(ANSWERS) | changed(ANSWERS) | st.sampled_from(ODD))).encode()
    if draw(st.booleans()):
        data = draw(torn_bytes(data) | st.binary(max_size=40))
    status = draw(st.sampled_from((200, 200, 200, 400, 409, 429, 503, 599)))
    return draw(st.integers(0, len(READS))), data, status, draw(st.sampled_from(("", "7", "x", "9" * 400)))


def read_one(value: tuple[int, bytes, int, str]) -> None:
    which, body, status, wait = value
    server = Server(body=body, status=status, retry_after=wait)
    script: Script[Any] = objects(requests.export()) if which == len(READS) else ask(READS[which]())
    with watched(len(body)):
        server.run(script)


TARGETS = (
    Target(
        name="client_events",
        inputs=STREAMS,
        check=lambda value: read_stream(value, grouped=False),
        examples=200,
    ),
    Target(
        name="client_groups",
        inputs=STREAMS,
        check=lambda value: read_stream(value, grouped=True),
        examples=120,
    ),
    Target(name="client_answers", inputs=answers(), check=read_one, examples=300),
)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_hostile_server_raises_client_errors(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile server gives values or the clients own errors."""
    monkeypatch.setattr(streams.logger, "disabled", True)  # pytest keeps each line, with its event
    play(target)
