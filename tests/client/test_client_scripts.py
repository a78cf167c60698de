"""The client's scripts without a network: told what came, they say what to do. Cut anywhere, nothing is
missed and nothing comes twice.
"""

import itertools
import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from journal_samples import make_trajectory
from trainers_kit import one_row

from polarnode.client import ClientError, Event, Unreachable
from polarnode.client.api import Api, Reading, join_group, leave_group, named
from polarnode.client.requests import (
    Ask,
    Close,
    Open,
    Read,
    Running,
    Script,
    SleepFor,
    YieldValue,
    acknowledge,
    query_string,
    submit,
)
from polarnode.client.scripts import (
    PAUSES,
    SIGN_OF_LIFE,
    Block,
    Decoder,
    Following,
    RetryPatience,
    SignOfLife,
    StreamFollower,
    patiently,
    read_event,
)
from polarnode.client.streams import (
    CHECK_AFTER_S,
    LEAVE_TIMEOUT_S,
    Acknowledgements,
    Collector,
    GroupStream,
    events,
)
from polarnode.client.values import read_error
from polarnode.core.codec import dump_json, trajectory_json
from polarnode.core.codec.json import plain
from polarnode.core.cursors import Cursor
from polarnode.core.errors import PolarnodeError, Refused
from polarnode.core.status import Submitted, UnreadableEvent
from polarnode.core.task import CaptureSpec
from polarnode.core.weights import AdaptersState, AdapterState, WeightsStatus
from polarnode.groups import Group

GREETING = b": polarnode\n\n"


def wire(seq: int, kind: str, key: str, body: Any) -> bytes:
    data = dump_json({"seq": seq, "key": key, kind: body})
    return b"event: %b\nid: %d\ndata: %b\n\n" % (kind.encode(), seq, data)


def task_event(seq: int) -> bytes:
    return wire(seq, "task", f"task:{seq}", {"n": seq})


@attrs.define(eq=False)
class World:
    """A node that holds a log of events, as a script sees it: its streams are cut after so many bytes, its
    clock goes with what is slept.
    """

    log: "list[tuple[int, bytes]]"  # number, bytes
    cuts: "list[int]" = attrs.Factory(list)  # bytes a connection lasts, in turn; then they last for ever
    piece: int = 7
    now_s: float = 0.0
    position: int = 0
    closed: int = 0
    acked: "list[int]" = attrs.Factory(list)
    asked: "list[str]" = attrs.Factory(list)
    answers: "dict[str, Any]" = attrs.Factory(dict)  # what else it is asked for, by path
    slept: "list[float]" = attrs.Factory(list)
    # in the place of the next answers; None lets one through
    faults: "list[PolarnodeError | None]" = attrs.Factory(list)
    keys: "list[str]" = attrs.Factory(list)
    _body: bytes = b""
    _left: "int | None" = None

    def now(self) -> float:
        return self.now_s

    def obey(self, command: Any) -> Any:
        match command:
            case Open(request):
                after = int(request.headers.get("Last-Event-ID", self.position))
                self._body = GREETING + b"".join(body for seq, body in self.log if seq > after)
                self._left = self.cuts.pop(0) if self.cuts else None
                return "text/event-stream"
            case Read():
                return self._read()
            case Ask(request):
                return self._ask(request)
            case SleepFor(seconds):
                self.slept.append(seconds)
                self.now_s += seconds
                assert self.now_s < 86_400, "it never gives up"
            case Close():
                self.closed += 1
        return None

    def _read(self) -> bytes:
        count = self.piece if self._left is None else min(self.piece, self._left)
        data, self._body = self._body[:count], self._body[count:]
        if self._left is not None:
            self._left -= len(data)
            if not data:
                raise Unreachable("cut")
        return data

    def _ask(self, request: Any) -> bytes:
        self.asked.append(f"{request.method} {request.path}")
        self.keys.append(request.headers.get("Idempotency-Key", ""))
        if self.faults and (fault := self.faults.pop(0)) is not None:
            raise fault
        if request.path == "/v1/trajectories/ack":
            self.position = max(self.position, json.loads(request.body)["seq"])
            self.acked.append(self.position)
            return dump_json({"position": self.position})
        found = self.answers.get(request.path.partition("?")[0])
        if found is None:
            raise ClientError("no such thing", status=404, type="not_found")
        if isinstance(found, PolarnodeError):
            raise found
        return dump_json(found)


def gives(script: Script[None], world: World) -> Iterator[Any]:
    """What a script gives, in this world."""
    running = Running(script)
    while (command := running.next()) is not None:
        if isinstance(command, YieldValue):
            running.answered(None)
            try:
                yield command.value
            except GeneratorExit:
                running.left()
                while (command := running.next()) is not None:
                    _obey(running, command, world)
                raise
        else:
            _obey(running, command, world)


def _obey(running: Running[Any], command: Any, world: World) -> None:
    try:
        running.answered(world.obey(command))
    except PolarnodeError as error:
        running.failed(error)


def returned(script: Script[Any], world: World) -> Any:
    """What a script returns."""

    def given() -> Script[None]:
        yield YieldValue((yield from script))

    [found] = gives(given(), world)
    return found


def in_(world: World) -> Callable[[Script[None]], Any]:
    """How a client of this world runs what a group's `ack` asks of it."""
    return partial(returned, world=world)


def reading(**said: Any) -> Reading:
    usual: dict[str, Any] = dict.fromkeys(("consumer", "after", "task_id", "group_id"))
    return Reading(**(usual | {"follow": False, "ack": False, "arrays": "base64", "turns": "table"} | said))


def api(world: World, **said: Any) -> Api:
    return Api(patience_s=600.0, now=world.now, **({"ack_every_s": 0.0} | said))


# ── bytes ─────────────────────────────────────────────────────────────────────

blocks = st.lists(
    st.sampled_from(
        [b": life\n\n", task_event(1), task_event(20), wire(3, "gap", "gap", {"after": 1, "oldest": 4})]
    ),
    max_size=6,
)


@given(blocks, st.lists(st.integers(1, 40), max_size=20), st.sampled_from([b"\n", b"\r\n"]))
def test_events_survive_any_chunking(parts: "list[bytes]", sizes: "list[int]", end: bytes) -> None:
    """Events are the same however their bytes are cut."""
    body = b"".join(parts).replace(b"\n", end)
    whole, piecewise, rest = list(Decoder().feed(body)), [], body
    decoder = Decoder()
    for size in (*sizes, len(body)):
        piecewise += list(decoder.feed(rest[:size]))
        rest = rest[size:]
    assert [attrs.asdict(one) if isinstance(one, Block) else one for one in piecewise] == [
        attrs.asdict(one) if isinstance(one, Block) else one for one in whole
    ]
    assert len(whole) == len(parts)


def test_multiline_data_and_unknown_fields() -> None:
    [found] = Decoder().feed(b'retry: 5\nevent: task\ndata: {"task":\ndata: 1}\nid: 9\n\n')
    assert found == Block(kind="task", id="9", data=b'{"task":\n1}')
    assert read_event(found) == Event(seq=9, kind="task", key="task", data=1)
    assert list(Decoder().feed(b"event: task\n\n\n\n")) == [], "a block without data is none"


def test_endless_event_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polarnode.client.scripts.MOST_BYTES", 100)
    decoder = Decoder()
    with pytest.raises(Unreachable, match="larger than"):
        _ = [list(decoder.feed(b"data: x\n")) for _ in range(50)]


@given(st.binary(max_size=300))
def test_any_stream_is_event_or_error(data: bytes) -> None:
    """Whatever comes is an event a sign of life or no polarnodes."""
    for found in Decoder().feed(data + b"\n\n"):
        if isinstance(found, SignOfLife):
            assert found is SIGN_OF_LIFE
        else:
            try:
                read_event(found)
            except Unreachable:
                continue


# ── one stream through cuts ───────────────────────────────────────────────────


@given(
    st.integers(0, 30),
    st.lists(st.integers(0, 400), max_size=12),
    st.integers(1, 90),
    st.sets(st.integers(1, 30), max_size=8),
)
def test_cut_stream_delivers_exactly_once(
    count: int, cuts: "list[int]", piece: int, filtered: "set[int]"
) -> None:
    """Nothing is missed and nothing comes twice wherever it is cut."""
    numbers = [seq for seq in range(1, count + 1) if seq not in filtered]  # a filter leaves numbers out
    world = World([(seq, task_event(seq)) for seq in numbers], cuts=cuts, piece=piece)
    found = list(gives(api(world).trajectories(reading(), ()), world))
    assert [event.seq for event in found] == numbers
    assert [event.key for event in found] == [f"task:{seq}" for seq in numbers]


@given(
    st.integers(1, 20),
    st.lists(st.integers(0, 400), max_size=8),
    st.integers(1, 90),
    st.lists(st.integers(1, 6), max_size=6),
)
def test_dead_reader_rereads_unacknowledged_only(
    count: int, cuts: "list[int]", piece: int, lives: "list[int]"
) -> None:
    """A reader that dies reads again only what it was still working on."""
    world = World([(seq, task_event(seq)) for seq in range(1, count + 1)], cuts=cuts, piece=piece)
    finished: list[int] = []
    for length in (*lives, count + 1):
        stream = gives(api(world).trajectories(reading(consumer="c", ack=True), ()), world)
        taken = list(itertools.islice(stream, length))
        whole = taken if len(taken) < length else taken[:-1]  # it dies while it works on its last
        assert [event.seq for event in taken] == list(
            range(len(finished) + 1, len(finished) + 1 + len(taken))
        )
        finished += [event.seq for event in whole]
        assert world.position == len(finished)
    assert finished == list(range(1, count + 1))


def test_repeatedly_failing_stream_is_abandoned() -> None:
    """A damaged event of the journal fails at every attempt, behind a greeting that says nothing."""
    failing = b'event: error\ndata: {"error":{"message":"damaged"}}\n\n'
    world = World([(1, task_event(1)), (2, failing)], piece=1000)
    stream = gives(api(world).trajectories(reading(follow=True), ()), world)
    assert next(stream).seq == 1
    with pytest.raises(Unreachable, match="damaged"):
        next(stream)
    assert 500 < world.now_s <= 600
    assert world.slept[:4] == [PAUSES.first_s, 0.2, 0.4, 0.8]
    assert max(world.slept) == PAUSES.longest_s


def test_trainer_time_is_no_node_silence() -> None:
    world = World([(1, task_event(1)), (2, task_event(2))], cuts=[len(GREETING + task_event(1))])
    stream = gives(api(world).trajectories(reading(), ()), world)
    assert next(stream).seq == 1
    world.now_s += 3600.0  # a long step, in which the node was restarted
    assert next(stream).seq == 2


def test_gap_and_restarted_numbers() -> None:
    gap = wire(0, "gap", "gap", {"after": 90, "oldest": 1})
    world = World([(100, gap), (101, task_event(1)), (102, task_event(2))], piece=1000)
    found = list(gives(api(world).trajectories(reading(after=90), ()), world))
    assert [(event.kind, event.seq) for event in found] == [("gap", 0), ("task", 1), ("task", 2)]


def test_repeated_event_is_given_once() -> None:
    world = World([(seq, task_event(seq)) for seq in (1, 1, 2, 1, 2, 3)], piece=1000)
    assert [event.seq for event in gives(api(world).trajectories(reading(), ()), world)] == [1, 2, 3]


def test_lost_acknowledgement_is_sent_later() -> None:
    world = World([(seq, task_event(seq)) for seq in range(1, 4)], piece=1000)
    world.faults = [Unreachable("away"), ClientError("full", status=503, type="busy")]
    found = list(gives(api(world).trajectories(reading(consumer="c", ack=True), ()), world))
    assert [event.seq for event in found] == [1, 2, 3]
    assert world.acked == [2, 3], "two were lost, and nothing with them"


def test_acknowledgements_once_a_second() -> None:
    world = World([(seq, task_event(seq)) for seq in range(1, 21)], piece=1000)
    for _ in gives(api(world, ack_every_s=1.0).trajectories(reading(consumer="c", ack=True), ()), world):
        world.now_s += 0.3
    assert world.acked == [4, 8, 12, 16, 20]


def test_early_exit_acknowledges_finished_work() -> None:
    """Acknowledgements wait for a second to pass; a loop that ends meanwhile still owes them."""
    world = World([(seq, task_event(seq)) for seq in range(1, 6)], piece=1000)
    stream = gives(api(world, ack_every_s=1.0).trajectories(reading(consumer="c", ack=True), ()), world)
    assert [next(stream).seq for _ in range(3)] == [1, 2, 3]
    assert world.acked == []
    stream.close()
    assert world.acked == [2], "the third is still being worked on"


def test_leaving_silent_node_is_bounded() -> None:
    world = World([(seq, task_event(seq)) for seq in range(1, 4)], piece=1000)
    stream = gives(api(world, ack_every_s=1.0).trajectories(reading(consumer="c", ack=True), ()), world)
    _ = (next(stream), next(stream))
    world.faults = [Unreachable("away")] * 1000
    stream.close()
    assert world.acked == []
    assert 0 < world.now_s <= LEAVE_TIMEOUT_S


# ── patience ──────────────────────────────────────────────────────────────────


def test_permanent_errors_are_not_retried() -> None:
    patience = RetryPatience(600.0, lambda: 0.0)
    for status in (400, 401, 404, 409, 500, 507):
        with pytest.raises(ClientError):
            patience.pause(ClientError("no", status=status, type="x"))
    assert patience.pause(ClientError("full", status=429, type="busy", retry_after=30.0)) == 30.0
    with pytest.raises(ClientError, match="full"):
        patience.pause(ClientError("full", status=503, type="busy", retry_after=601.0))


@pytest.mark.parametrize(
    ("said", "seconds"), [("12", 12.0), ("", None), ("Wed, 21 Oct 2026 07:28:00 GMT", None), ("-3", None)]
)
def test_retry_after_is_parsed(said: str, seconds: "float | None") -> None:
    error = read_error(503, "Service Unavailable", {"retry-after": said}, b"")
    assert (error.retry_after, error.passes) == (seconds, True)


def test_resubmission_uses_same_key() -> None:
    world = World([], answers={"/v1/tasks": {"task_id": "t", "session_ids": ["s"], "created": True}})
    world.faults = [Unreachable("cut"), ClientError("full", status=429, type="busy", retry_after=3.0)]
    script = patiently(submit({}, idempotency_key="k"), RetryPatience(60.0, world.now))
    assert returned(script, world) == Submitted(task_id="t", session_ids=("s",), created=True)
    assert (world.keys, world.slept) == (["k"] * 3, [PAUSES.first_s, 3.0])


def test_invalid_request_is_not_sent() -> None:
    with pytest.raises(Refused, match="ack needs a consumer"):
        api(World([])).groups(reading(ack=True), (), 0, in_(World([])))
    for said in ({"path": None, "source": None}, {"path": "/a", "source": {}}):
        with pytest.raises(Refused, match="weights come from one place"):
            api(World([])).update_weights("1", mode="in_place", **said)  # type: ignore[arg-type]
    assert query_string(a=None, b=False, c="x y") == "?b=false&c=x+y"
    assert named(CaptureSpec(task_id="t"), sample_index=3) == CaptureSpec(task_id="t", sample_index=3)
    assert str(named(None).task_id).startswith("capture-")


# ── weights in buckets ────────────────────────────────────────────────────────

UPDATE = "/v1/weights/updates"
SERVED = {
    "version": "7",
    "mode": "in_place",
    "source": {"kind": "tensor", "buckets": "2"},
    "seconds": 1.0,
    "hosts": [],
}
BUCKETS = ({"payloads": ["a"]}, {"payloads": ["b"]})


def push_world(**more: Any) -> World:
    return World(
        [],
        answers={UPDATE: {"update_id": "u"}, f"{UPDATE}/u/buckets": {}, f"{UPDATE}/u/commit": SERVED, **more},
    )


def test_push_begins_fills_and_commits() -> None:
    world = push_world()
    report = returned(api(world).push_weights("7", iter(BUCKETS), "tensor", None, "in_place"), world)
    assert (report.version, report.created) == ("7", True)
    assert world.asked == [
        f"POST {UPDATE}",
        f"POST {UPDATE}/u/buckets",
        f"POST {UPDATE}/u/buckets",
        f"POST {UPDATE}/u/commit",
    ]


def test_unanswered_commit_is_retried() -> None:
    world = push_world()
    world.faults = [None, None, None, Unreachable("cut")]
    assert (
        returned(api(world).push_weights("7", iter(BUCKETS), "tensor", None, "in_place"), world).version
        == "7"
    )
    assert world.asked[-2:] == [f"POST {UPDATE}/u/commit"] * 2


@pytest.mark.parametrize(("end", "said"), [({}, False), (None, False), (Unreachable("away"), True)])
def test_failed_bucket_aborts_update(end: Any, said: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Also where the node has given it up by itself (404), and where it is not there to be told."""
    world = push_world(**({} if end is None else {f"{UPDATE}/u": end}))
    world.faults = [None, ClientError("has shape [3, 3]", status=400, type="invalid_request")]
    with pytest.raises(ClientError, match="has shape"):
        returned(api(world).push_weights("7", iter(BUCKETS), "tensor", None, "in_place"), world)
    assert world.asked == [f"POST {UPDATE}", f"POST {UPDATE}/u/buckets", f"DELETE {UPDATE}/u"]
    assert ("was not told" in caplog.text) is said


def test_broadcast_group_is_named() -> None:
    assert leave_group("w/w").path == "/v1/weights/groups/w%2Fw"
    body = json.loads(join_group("weights", "10.0.0.1", 29600, 9, 1, "nccl").body or b"")
    assert body == {
        "name": "weights",
        "address": "10.0.0.1",
        "port": 29600,
        "world_size": 9,
        "rank_offset": 1,
        "backend": "nccl",
    }


# ── groups ────────────────────────────────────────────────────────────────────


def session_event(seq: int, task_id: str, index: int) -> bytes:
    trajectory = make_trajectory(f"{task_id}-{index}", task_id=task_id, sample_index=index)
    return wire(
        seq, "trajectory", f"trajectory:{task_id}-{index}", trajectory_json(trajectory, arrays="base64")
    )


def group_event(seq: int, task_id: str, size: int) -> bytes:
    sessions = [
        {
            "session_id": f"{task_id}-{index}",
            "sample_index": index,
            "status": "completed",
            "reward": 1.0,
            "usable": True,
        }
        for index in range(size)
    ]
    return wire(
        seq,
        "group",
        f"group:{task_id}",
        {"task_id": task_id, "group_id": task_id, "sessions": sessions, "state": "complete", "reason": None},
    )


@st.composite
def interleaved(draw: st.DrawFn) -> "list[tuple[int, bytes]]":
    """Tasks whose sessions lie between one another's; some never end."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    places = [task for task, size in enumerate(sizes) for _ in range(size)]
    order, counts, log = draw(st.permutations(places)), dict.fromkeys(range(len(sizes)), 0), []
    endless = draw(st.sets(st.integers(0, len(sizes) - 1), max_size=1))
    numbers = itertools.count(1)
    for task in order:
        log.append((seq := next(numbers), session_event(seq, f"t{task}", counts[task])))
        counts[task] += 1
        if counts[task] == sizes[task] and task not in endless:
            log.append((seq := next(numbers), group_event(seq, f"t{task}", sizes[task])))
    return log


def world_of(log: "Sequence[tuple[int, bytes]]", **said: Any) -> World:
    """Every trajectory of the log can be asked for by its id, too."""
    answers = {}
    for _, body in log:
        [block] = [each for each in Decoder().feed(body) if isinstance(each, Block)]
        event = read_event(block)
        if event.kind == "trajectory":
            answers[f"/v1/trajectories/{event.data['session_id']}"] = event.data
    return World(list(log), answers=answers, piece=4096, **said)


def whole(group: Group) -> bool:
    return [each.session_id for each in group.trajectories] == [member.session_id for member in group.members]


@given(
    interleaved(),
    st.lists(st.integers(1, 3), max_size=6),
    st.sampled_from([0, 700, 1 << 30]),
    st.lists(st.integers(0, 3000), max_size=4),
)
def test_groups_whole_after_trainer_deaths(
    log: "list[tuple[int, bytes]]", lives: "list[int]", kept_bytes: int, cuts: "list[int]"
) -> None:
    """The position never passes what an unfinished group needs; what was finished and comes again is known by
    its task.
    """
    world, finished = world_of(log, cuts=cuts), []
    ends = [seq for seq, body in log if body.startswith(b"event: group")]
    for length in (*lives, len(log)):
        stream = gives(
            api(world).groups(reading(consumer="c", ack=True), frozenset(finished), kept_bytes, in_(world)),
            world,
        )
        taken = list(itertools.islice(stream, length))
        assert all(whole(group) for group in taken)
        finished += [group.task_id for group in (taken if len(taken) < length else taken[:-1])]
        needed = [seq for seq, body in log for event in [body] if _task_of(event) not in finished]
        assert world.position < min(needed, default=len(log) + 1), "what is not finished comes again"
    assert len(finished) == len(set(finished)) == len(ends)


def _task_of(body: bytes) -> str:
    data = json.loads(body.partition(b"data: ")[2])
    return str(next(value["task_id"] for name, value in data.items() if name in ("trajectory", "group")))


@given(interleaved())
def test_finished_group_repeats_behind_unfinished(
    log: "list[tuple[int, bytes]]",
) -> None:
    """Without skip a finished group comes again only behind one that is not."""
    world = world_of(log)
    first, again = (
        list(gives(api(world).groups(reading(consumer="c", ack=True), (), 0, in_(world)), world))
        for _ in range(2)
    )
    behind = [
        group
        for group in first
        if any(seq > world.position and f"group:{group.task_id}".encode() in body for seq, body in log)
    ]
    assert again == behind


def three_groups() -> World:
    """Groups a, b and c of one session each, one after the other."""
    log: list[tuple[int, bytes]] = []
    for task_id in "abc":
        log += [(len(log) + 1, session_event(len(log) + 1, task_id, 0))]
        log += [(len(log) + 1, group_event(len(log) + 1, task_id, 1))]
    return world_of(log)


def grouped(world: World, **said: Any) -> Iterator[Any]:
    script = api(world, ack_every_s=1.0).groups(reading(consumer="c", **said), (), 1 << 30, in_(world))
    return gives(script, world)


@pytest.mark.parametrize("on_request", [False, True])
def test_acknowledged_groups_stay_away(on_request: bool) -> None:
    world = three_groups()
    for group in grouped(world, ack=on_request):
        group.ack()
        assert world.position == {"a": 2, "b": 4}[group.task_id]
        if group.task_id == "b":
            break
    assert [group.task_id for group in grouped(world, ack=on_request)] == ["c"]


def test_unacknowledged_groups_come_again() -> None:
    """Without ack=True nothing moves but what the caller acknowledges, and never past an older group."""
    world = three_groups()
    assert [group.task_id for group in grouped(world)] == ["a", "b", "c"]
    assert world.acked == []
    given = list(grouped(world))
    given[1].ack()
    assert world.position == 0, "a is still being worked on"
    given[0].ack()
    assert world.position == 4
    assert [group.task_id for group in grouped(world)] == ["c"]
    given[2].ack()
    assert list(grouped(world)) == []


def test_groups_without_consumer_refuse_acknowledgement() -> None:
    world = three_groups()
    [first, *_] = gives(api(world).groups(reading(), (), 1 << 30, in_(world)), world)
    with pytest.raises(Refused, match="consumer=NAME"):
        first.ack()
    [given, *_] = grouped(world)
    copy = pickle.loads(pickle.dumps(given))
    assert copy == given
    with pytest.raises(Refused, match="not a copy"):
        copy.ack()


def test_failed_acknowledgements_are_raised() -> None:
    world = three_groups()
    given = next(grouped(world))
    world.faults = [Unreachable("away"), ClientError("no", status=400, type="invalid_request")]
    with pytest.raises(ClientError, match="no"):
        given.ack()
    assert world.slept == [PAUSES.first_s], "a node that is away is waited for"


def groups_of(world: World, *, kept_bytes: int = 1 << 30, consumer: str = "c") -> GroupStream:
    follower = StreamFollower(Following(path="/s", after=None, goes_on=False), RetryPatience(60.0, world.now))
    return GroupStream(
        follower,
        Acknowledgements(consumer, 60.0, world.now, 0.0),
        Collector(kept_bytes=kept_bytes),
        patience_s=60.0,
        now=world.now,
        run=in_(world),
    )


def test_memory_limit_refetches_the_rest() -> None:
    log = [(index + 1, session_event(index + 1, "t", index)) for index in range(4)] + [
        (5, group_event(5, "t", 4))
    ]
    size = len(session_event(1, "t", 0))
    world = world_of(log)
    [group] = gives(groups_of(world, kept_bytes=2 * size).script(), world)
    assert whole(group)
    assert [path.partition("?")[0] for path in world.asked if "ack" not in path] == [
        "GET /v1/trajectories/t-2",
        "GET /v1/trajectories/t-3",
    ]


def test_missing_session_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    world = World([(2, session_event(2, "t", 1)), (3, group_event(3, "t", 2))], piece=1000)
    [group] = gives(groups_of(world).script(), world)
    assert [each.session_id for each in group.trajectories] == ["t-1"]
    assert "cannot give the trajectory of session t-0" in caplog.text


def unreadable_event(seq: int, kind: str | None, task_id: str | None) -> Event:
    data = {"kind": kind, "session_id": None, "task_id": task_id, "reason": "its row is damaged"}
    return Event(seq=seq, kind="unreadable", key=f"event:{seq}", data=data)


def test_unreadable_group_releases_position(caplog: pytest.LogCaptureFixture) -> None:
    collector = Collector()
    data = trajectory_json(make_trajectory("t-0", task_id="t"))
    session = Event(seq=1, kind="trajectory", key="trajectory:t-0", data=data)
    assert collector.add(session) is None
    assert collector.position.position == 0
    assert collector.add(unreadable_event(2, "trajectory", "t")) is None
    assert collector.position.position == 0, "its group is still to come"
    assert collector.add(unreadable_event(3, "group", "t")) is None
    assert collector.position.position == 3
    assert "its row is damaged" in caplog.text


def test_unreadable_event_is_typed() -> None:
    found = unreadable_event(3, None, "t").unreadable
    assert found == UnreadableEvent(task_id="t", reason="its row is damaged")
    assert unreadable_event(3, None, "t").trajectory is None


def test_recordless_task_releases_position() -> None:
    log = [
        (1, session_event(1, "lost", 0)),
        *((seq, session_event(seq, "t", seq)) for seq in range(2, 5)),
        (5, group_event(5, "t", 1)),
    ]
    world = world_of(log)
    stream = gives(groups_of(world).script(), world)
    assert next(stream).task_id == "t"
    world.now_s += CHECK_AFTER_S
    assert list(stream) == []
    assert "GET /v1/tasks/lost" in world.asked
    assert world.position == 5


def test_repeated_group_is_given_once() -> None:
    collector = Collector()
    events_ = [
        Event(
            seq=1,
            kind="group",
            key="group:t",
            data={"task_id": "t", "group_id": "t", "sessions": [], "state": "complete"},
        )
    ]
    gathered = collector.add(events_[0])
    assert gathered is not None
    collector.done(gathered.group.task_id)
    assert collector.add(attrs.evolve(events_[0], seq=2)) is None
    assert collector.position.position == 2


def test_other_journals_task_is_dropped() -> None:
    collector = Collector()
    value = trajectory_json(make_trajectory("a-0", task_id="a"), arrays="base64")
    collector.add(Event(seq=40, kind="trajectory", key="trajectory:a-0", data=value, size=10))
    assert (collector.oldest, collector.position.position) == ("a", 39)
    collector.add(Event(seq=0, kind="gap", key="gap", data={"after": 40, "oldest": 1}))
    assert (collector.oldest, collector.position.position) == (None, 0)


def test_repeatedly_ending_stream_is_abandoned() -> None:
    world = World([(1, task_event(1))], piece=1000)
    script = events(
        StreamFollower(Following(path="/s", after=None, goes_on=True), RetryPatience(0.0, world.now)),
        Acknowledgements(None, 0.0, world.now),
    )
    found = gives(script, world)
    assert next(found).seq == 1
    with pytest.raises(Unreachable, match="keeps ending"):
        next(found)
    assert world.closed == 1


# ── a log that nodes share ────────────────────────────────────────────────────

OLD, NEW = "7f-1-0", "7f-2-0"


def shared_event(seq: int, kind: str, key: str, data: object, log: str = OLD) -> Event:
    return Event(seq=seq, kind=kind, key=key, data=data, journal=log, id=f"{log}:{seq}", size=10)


def test_event_names_its_shared_log() -> None:
    data = b'{"seq":4,"journal":"7f-1-0","key":"task:t","task":{}}'
    found = read_event(Block(kind="task", id="7f-1-0:4", data=data))
    assert (found.seq, found.journal, found.cursor) == (4, OLD, Cursor(position=4, log=OLD))
    assert read_event(Block(kind="task", id="4", data=data)).cursor == Cursor(position=4)
    with pytest.raises(Unreachable, match="no number"):
        read_event(Block(kind="task", id="vAAAAAAAAAAAB", data=data))


def test_acknowledgement_names_shared_log() -> None:
    assert acknowledge("c", Cursor(position=4, log=OLD)).body == dump_json(
        {"consumer": "c", "id": "7f-1-0:4"}
    )
    assert acknowledge("c", Cursor(position=4)).body == dump_json({"consumer": "c", "seq": 4})


def test_failover_keeps_remaining_groups() -> None:
    """A group that began before the gap holds the position still; one that is lost comes again, or never."""
    collector = Collector()
    value = trajectory_json(make_trajectory("a-0", task_id="a"), arrays="base64")
    collector.add(shared_event(4, "trajectory", "trajectory:a-0", value))
    collector.add(shared_event(9, "trajectory", "trajectory:b-0", value | {"task_id": "b"}))
    body = {"task_id": "c", "group_id": "c", "sessions": [], "state": "complete"}
    given = collector.add(shared_event(10, "group", "group:c", body))
    assert given is not None
    collector.mark_given("c")
    collector.add(shared_event(7, "gap", "gap", {"after": 10, "oldest": 8, "reason": "lost"}, NEW))
    assert collector.position == Cursor(position=3, log=NEW)
    collector.forget("a")
    assert (collector.oldest, collector.position.position) == (None, 7)
    assert collector.add(shared_event(8, "group", "group:c", body, NEW)) is None, "its caller has it already"
    assert collector.position.position == 7, "and works on it still"
    collector.done("c")
    assert collector.position == Cursor(position=8, log=NEW)


def slow_reader(requires: dict[str, Any] | None, **answers: Any) -> World:
    """A group whose one session was sampled by versions 7 and 8, and a node that answers so."""
    session = attrs.evolve(one_row(), session_id="a-0", task_id="a", group_id="a", staleness=1)
    body = {"session_id": "a-0", "sample_index": 0, "status": "completed", "reward": 1.0, "usable": True}
    group = {"task_id": "a", "group_id": "a", "sessions": [body], "state": "complete", "requires": requires}
    log = [
        (1, wire(1, "trajectory", "trajectory:a-0", trajectory_json(session, arrays="base64"))),
        (2, wire(2, "group", "group:a", group)),
    ]
    world = world_of(log)
    world.answers |= {path.replace("_", "/"): plain(answer) for path, answer in answers.items()}
    return world


def test_group_staleness_judged_at_read() -> None:
    """By what the node serves at that moment, its weights or an adapter; and it is asked nothing without a limit."""
    limit = {"max_staleness": 1}
    served = WeightsStatus(version="9", versions=("7", "8", "9"))
    world = slow_reader(limit, _v1_weights=served)
    [group] = grouped(world)
    assert (group.state, group.usable, group.members[0].staleness) == ("dropped", (), 2)
    [group] = grouped(slow_reader(limit | {"stale": "mark"}, _v1_weights=served))
    assert (group.state, len(group.usable), group.members[0].stale) == ("complete", 1, True)
    adapter = AdaptersState(adapters=(AdapterState(name="r", version="9", versions=("7", "8", "9")),))
    base = WeightsStatus(version="0", versions=("0",))
    [group] = grouped(slow_reader(limit, _v1_weights=base, _v1_adapters=adapter))
    assert group.members[0].staleness == 2
    world = slow_reader(None)
    assert [group.state for group in grouped(world)] == ["complete"]
    assert not any("weights" in each for each in world.asked)


def test_unserved_weights_judge_at_end() -> None:
    [group] = grouped(slow_reader({"max_staleness": 1}))
    assert (group.state, len(group.usable)) == ("complete", 1)
