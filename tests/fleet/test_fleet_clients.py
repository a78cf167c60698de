"""The contract of test_client_contract.py in short, at one of two nodes that share a log: every kind of client has of
it what it has of a node alone. Positions are opaque here, so no event is counted by its number.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import attrs
import pytest
from client_kit import KINDS, here, open_client
from fleet_kit import hollow_task, open_fleet_in_thread
from hollow_node import NO_IMAGE
from sources_kit import DATA

from polarnode.client import ClientError
from polarnode.client.values import read_error
from polarnode.core.codec import read_json
from polarnode.core.errors import Refused

TOKEN = "secret"
SAMPLES = 2


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One of two hollow nodes on one log, for every test of this file."""
    folder = tmp_path_factory.mktemp("fleet")
    with here() as thread:
        url = open_fleet_in_thread(thread, folder, nodes=2, token=TOKEN)
        for name in ("node-0", "node-1"):
            (folder / name / name / "node.log").write_text(f"of {name}\n")
        yield url


@attrs.define(eq=False)
class Trainer:
    """One kind of client, and names that no other test uses."""

    kind: str
    url: str
    stack: ExitStack
    mark: str

    def client(self, **more: Any) -> Any:
        given = {"token": TOKEN, "patience_s": 60.0, "ack_every_s": 0.0} | more
        return self.stack.enter_context(open_client(self.kind, self.url, **given))

    def task(self, name: str, **more: Any) -> dict[str, Any]:
        return hollow_task(task_id=f"{self.mark}-{name}", **({"samples": SAMPLES, "seconds": 0.1} | more))


@pytest.fixture(params=KINDS)
def trainer(request: Any, url: str) -> Iterator[Trainer]:
    with ExitStack() as stack:
        yield Trainer(request.param, url, stack, f"{request.param}-{request.node.originalname[5:20]}")


def of(trainer: Trainer, client: Any, *names: str) -> list[Any]:
    """The groups of these tasks, in the order of the names."""
    wanted = {f"{trainer.mark}-{name}" for name in names}
    found: dict[str, Any] = {}
    groups = client.groups()
    while wanted - found.keys():
        group = next(groups)
        if group.task_id in wanted:
            found[group.task_id] = group
    groups.close()
    return [found[f"{trainer.mark}-{name}"] for name in names]


def test_task_is_submitted_seen_and_cancelled(trainer: Trainer) -> None:
    client, spec = trainer.client(), trainer.task("slow", seconds=600)
    taken = client.submit(spec)
    assert (taken.task_id, taken.created, len(taken.session_ids)) == (spec["task_id"], True, SAMPLES)
    assert client.submit(spec) == attrs.evolve(taken, created=False)
    keyed = hollow_task(samples=1, seconds=600)
    again = client.submit(keyed, idempotency_key=trainer.mark)
    assert client.submit(keyed, idempotency_key=trainer.mark) == attrs.evolve(again, created=False)
    status = client.task_status(taken.task_id)
    assert (status.finished, [each.session_id for each in status.sessions]) == (
        False,
        list(taken.session_ids),
    )
    assert client.task(taken.task_id)["spec"]["num_samples"] == SAMPLES
    assert taken.task_id in [task["task_id"] for task in client.tasks()]
    assert taken.task_id in [task["task_id"] for task in client.tasks(before=again.task_id)]
    assert client.session(taken.session_ids[1])["session"]["task_id"] == taken.task_id
    assert (client.cancel(taken.task_id), client.cancel(again.task_id)) == (True, True)
    [group] = of(trainer, client, "slow")
    assert group.usable == ()
    assert client.cancel(taken.task_id) is False
    assert client.status()["node"] == "node-0"
    assert "polarnode_live_sessions" in client.metrics()


def test_session_is_forked_at_any_node(trainer: Trainer) -> None:
    client, names = trainer.client(), [f"fork-{number}" for number in range(3)]
    client.submit(trainer.task("parent", samples=1))
    [group] = of(trainer, client, "parent")
    [parent] = group.usable
    for name in names[:2]:
        taken = client.fork(
            parent.session_id, 0, num_samples=2, by="replay", task_id=f"{trainer.mark}-{name}"
        )
        assert (len(taken.session_ids), taken.created) == (2, True)
    spec = client.task(f"{trainer.mark}-parent")["spec"]
    fork = {"session": parent.session_id, "turn": 0, "by": "replay"}
    client.submit({**spec, "task_id": f"{trainer.mark}-{names[2]}", "fork": fork})
    forks = [each for found in of(trainer, client, *names) for each in found.trajectories]
    assert len(forks) == 5
    assert {each.forked_from.session_id for each in forks} == {parent.session_id}
    with pytest.raises(ClientError, match="no session 'nobody' is in the log") as missing:
        client.fork("nobody", 0, by="replay")
    assert missing.value.status == 404
    with pytest.raises(ClientError, match="'nobody' is not in the log") as refused:
        client.submit({**spec, "task_id": None, "fork": fork | {"session": "nobody"}})
    assert (refused.value.status, refused.value.path) == (400, "$.fork.session")


def test_live_sessions_of_every_node(trainer: Trainer) -> None:
    client, specs = trainer.client(), [trainer.task(name, seconds=600) for name in ("one", "two")]
    stream = client.live_sessions()
    taken = {each for spec in specs for each in client.submit(spec).session_ids}
    nodes, running, ended = set[str](), set[str](), set[str]()
    for changes in stream:
        nodes.add(changes.node)
        mine = [each for each in changes.sessions if each.session_id in taken]
        running |= {each.session_id for each in mine if each.phase == "run"}
        ended |= {each.session_id for each in mine if each.phase == "ended"}
        if running == taken and not ended:
            running = set()
            assert all(client.cancel(spec["task_id"]) for spec in specs)
        if ended == taken:
            break
    assert nodes == {"node-0", "node-1"}
    stream.close()


def test_source_is_submitted_by_task(trainer: Trainer) -> None:
    client = trainer.client()
    path, more = DATA / "polar" / "task.json", {"runtime": {"volumes": []}, "task_id": trainer.mark}
    [submitted] = client.submit_source(path, harness="pi", samples=3, over=more)
    assert (submitted.task_id, len(submitted.session_ids)) == (trainer.mark, 3)
    assert client.cancel(submitted.task_id)
    with pytest.raises(Refused, match="no convention is known for somebody/else"):
        client.submit_source(DATA / "swe" / "rows.jsonl", harness="codex")


def test_error_is_the_nodes_sentence(trainer: Trainer) -> None:
    client = trainer.client()
    with pytest.raises(ClientError, match="did you mean num_samples") as caught:
        client.submit({"instruction": "x", "harness": {"name": "pi"}, "nun_samples": 1})
    error = caught.value
    assert (error.status, error.type, error.path) == (400, "invalid_request", "$.nun_samples")
    lost = trainer.task("lost") | {"runtime": {"image": NO_IMAGE}}
    with pytest.raises(ClientError, match=f"runtime.image: no image is called {NO_IMAGE}") as no_image:
        client.submit(lost)
    assert (no_image.value.status, no_image.value.path) == (400, "$.runtime.image")
    for ask in (client.task, client.task_status, client.cancel):
        with pytest.raises(ClientError, match="no task 'none'") as missing:
            ask("none")
        assert missing.value.status == 404
    with pytest.raises(ClientError, match="no session 'none'") as missing:
        client.trajectory("none")
    assert missing.value.status == 404
    with pytest.raises(ClientError, match="token") as stranger:
        next(trainer.client(token="wrong").trajectories())
    assert stranger.value.status == 401
    with pytest.raises(Refused, match="ack needs a consumer"):
        client.trajectories(ack=True)


def test_session_is_equal_by_every_route(trainer: Trainer, tmp_path: Path) -> None:
    client, spec = trainer.client(), trainer.task("one", samples=1)
    client.submit(spec)
    [group] = of(trainer, client, "one")
    [trajectory] = group.trajectories
    name = trajectory.session_id
    events = client.trajectories(task_id=spec["task_id"], follow=False)
    streamed = {event.key: event for event in events}
    assert streamed[f"trajectory:{name}"].trajectory == client.trajectory(name) == trajectory
    assert f"group:{spec['task_id']}" in streamed
    assert client.trajectory(name, arrays="json").traces == trajectory.traces
    assert [line["session_id"] for line in client.export(task_id=spec["task_id"])] == [name]
    one = client.formatted(name, "slime", arrays="json")
    pieces = client.export_bytes(format="slime", arrays="json", task_id=spec["task_id"])
    assert [read_json(line) for line in b"".join(pieces).splitlines()] == [one]
    with pytest.raises(ClientError, match="format must be one of"):
        client.formatted(name, "nobodys")
    assert client.snapshots(name) == ()
    with pytest.raises(ClientError) as missing:
        client.artifacts(name, tmp_path / "never.tar")
    assert (missing.value.status, (tmp_path / "never.tar").exists()) == (404, False)


def test_unheld_weights_give_nodes_sentence(trainer: Trainer) -> None:
    client, spec = trainer.client(), trainer.task("held", samples=1)
    (session,) = client.submit(spec).session_ids
    of(trainer, client, "held")
    with pytest.raises(Refused, match="the node does not hold the weights 'nosuch'"):
        client.score_session(session, weights="nosuch")


def test_acknowledged_events_do_not_return(trainer: Trainer) -> None:
    client, consumer = trainer.client(), trainer.mark
    names = [f"{number}" for number in range(4)]
    for name in names:
        client.submit(trainer.task(name, samples=1))
    of(trainer, client, *names)
    stream = client.trajectories(consumer=consumer, ack=True, follow=False)
    first = [next(stream) for _ in range(3)]
    stream.close()
    [row] = [each for each in client.consumers() if each.consumer == consumer]
    assert row.holds
    assert row.behind_events > 0, "the third is still being worked on"
    rest = list(client.trajectories(consumer=consumer, ack=True, follow=False))
    assert first[2].key in [event.key for event in rest]
    keys = [event.key for event in (*first[:2], *rest)]
    assert len(keys) == len(set(keys))
    assert {f"group:{trainer.mark}-{name}" for name in names} <= set(keys)
    assert list(client.trajectories(consumer=consumer, ack=True, follow=False)) == []
    client.acknowledge(consumer, first[0].id)
    assert list(client.trajectories(consumer=consumer, follow=False)) == [], "it takes nothing back"
    after = client.trajectories(after=first[1].id, follow=False)
    assert {event.key for event in after} == {event.key for event in rest}
    assert client.forget_consumer(consumer) is None
    assert consumer not in [each.consumer for each in client.consumers()]


def test_groups_come_whole_and_once(trainer: Trainer) -> None:
    client, consumer = trainer.client(), trainer.mark
    tasks = [client.submit(trainer.task(f"{number}")) for number in range(4)]
    expected = {task.task_id: list(task.session_ids) for task in tasks}
    found: dict[str, Any] = {}
    groups = client.groups(consumer=consumer, ack=True)
    while expected.keys() - found.keys():
        group = next(groups)
        assert group.task_id not in found
        found[group.task_id] = group
    groups.close()
    for task_id, sessions in expected.items():
        assert [member.session_id for member in found[task_id].members] == sessions
        assert [each.session_id for each in found[task_id].trajectories] == sessions
    again = {group.task_id for group in client.groups(consumer=consumer, ack=True, follow=False)}
    assert again <= found.keys(), "what was not acknowledged because the last was still being worked on"
    assert list(client.groups(consumer=consumer, ack=True, follow=False)) == []


def test_own_agent_is_captured(trainer: Trainer) -> None:
    client = trainer.client()
    with client.capture(task_id=f"{trainer.mark}-mine", metadata={"row": 7}) as session:
        session.reward = 0.5
    found = client.trajectory(session.session_id)
    assert (found.task_id, found.reward, found.metadata) == (f"{trainer.mark}-mine", 0.5, {"row": 7})
    with pytest.raises(ZeroDivisionError), client.capture() as broken:
        raise ZeroDivisionError("of the agent")
    assert broken.result.outcome.status == "failed"


def test_page_shows_groups_of_all_nodes(trainer: Trainer) -> None:
    """The page is served with the groups and pieces of all nodes."""
    client = trainer.client()
    tasks = [client.submit(trainer.task(name, samples=1)) for name in ("page-a", "page-b")]
    of(trainer, client, "page-a", "page-b")

    def answer(path: str) -> Any:
        asked = Request(f"{trainer.url}{path}", headers={"Authorization": f"Bearer {TOKEN}"})
        with urlopen(asked, timeout=30) as found:
            return read_json(found.read())

    listed = [each["task_id"] for each in answer("/v1/groups?limit=1000")["groups"]]
    assert {task.task_id for task in tasks} <= set(listed)
    assert len(listed) == len(set(listed)), "a group that two journals have is listed once"
    [one] = answer(f"/v1/groups?task_id={tasks[0].task_id}")["groups"]
    assert [each["session_id"] for each in one["sessions"]] == list(tasks[0].session_ids)
    assert len(answer("/v1/groups?limit=1")["groups"]) == 1
    found = answer(f"/v1/trajectories/{tasks[0].session_ids[0]}?pieces=true")
    assert found["pieces"]["tokens"].keys() == {
        str(each) for row in found["traces"] for each in row["token_ids"]
    }
    with urlopen(f"{trainer.url}/ui/", timeout=30) as page:
        assert page.headers["Content-Security-Policy"].startswith("default-src 'none'")


def test_session_and_node_logs_are_read(trainer: Trainer) -> None:
    client = trainer.client()
    taken = client.submit(trainer.task("log", samples=1))
    of(trainer, client, "log")
    [session] = taken.session_ids
    assert client.log(session, tail=5).ended
    with pytest.raises(ClientError, match="no session 'none'"):
        client.log("none")
    assert {"node", "node-1/node"} <= {each.name for each in client.node_logs()}
    piece = client.node_log("node-1/node", offset=3)
    assert (piece.name, piece.text) == ("node-1/node", "node-1\n")
    for wrong in ("nosuch", "nobody/node"):
        with pytest.raises(ClientError, match=r"no log|look at GET /v1/logs") as missing:
            client.node_log(wrong)
        assert missing.value.status == 404


def test_fresh_reader_begins_at_newest(trainer: Trainer) -> None:
    client, consumer = trainer.client(), f"{trainer.mark}-fresh"
    client.submit(trainer.task("old", samples=1))
    of(trainer, client, "old")
    assert list(client.trajectories(after="newest", consumer=consumer, follow=False)) == []
    assert list(client.trajectories(after="newest", follow=False)) == []
    client.submit(trainer.task("new", samples=1))
    of(trainer, client, "new")
    again = client.trajectories(after="newest", consumer=consumer, follow=False)
    tasks = {event.key for event in again if event.kind == "group"}
    assert tasks == {f"group:{trainer.mark}-new"}
    with pytest.raises(ClientError, match="begin cannot go with after"):
        raise_of(trainer.url)


def raise_of(url: str) -> None:
    """Ask a node for what no client of ours asks."""
    request = Request(f"{url}/v1/trajectories/stream?begin=newest&after=0")
    request.add_header("Authorization", f"Bearer {TOKEN}")
    try:
        urlopen(request, timeout=30)
    except HTTPError as error:
        raise read_error(error.code, error.reason, {}, error.read()) from error
