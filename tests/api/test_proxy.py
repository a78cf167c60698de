"""Live things of a session that runs at another node: two hollow nodes with real control planes on one PostgreSQL."""

import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from ssl import PEM_cert_to_DER_cert
from subprocess import PIPE
from typing import Any

import h11
import hollow_node
import pytest
import trio
import trio.testing
from attrs import define, evolve, field
from control_plane_parts import Answer, Caller
from fakes_runtime import Call
from hollow_node import _record, open_hollow
from postgres_kit import Cluster, free_port, running_cluster
from quart import Response
from tls_kit import CertificateAuthority

from polarnode.api.app import control_plane
from polarnode.api.proxy import NODES_INTERVAL_S, PASSED_TO, NodeGone, PassingRoutes, open_others
from polarnode.client import AsyncPolarnodeClient
from polarnode.client.values import Unreachable
from polarnode.core.errors import Refused
from polarnode.core.status import SessionChanges
from polarnode.http.link import Link
from polarnode.http.server import Address, Certificate, open_server
from polarnode.journal.log.port import NodeFacts, NodeRow
from polarnode.node.config import NodeConfig


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as found:
        yield found


@define(eq=False)
class Two:
    """Node `a`, which is asked, and node `b`, which runs the sessions. `done`: they may end."""

    a: Caller
    b: Caller
    nodes: dict[str, Any]
    done: trio.Event = field(factory=trio.Event)
    ran: trio.Event = field(factory=trio.Event)  # a session has a turn

    async def submit(self, at: Caller, **more: Any) -> Any:
        """A task that runs at node b."""
        body = {
            "instruction": "x",
            "harness": {"name": "shell", "command": ["hold"]},
            "requires": {"node": "b"},
            **more,
        }
        answer = await at.post("/v1/tasks", body)
        assert answer.status == 202, answer.text
        return answer.json()

    async def running(self, at: Caller | None = None, **more: Any) -> str:
        """A session at node b that has one turn; its task is sent to node a."""
        task = await self.submit(at or self.a, **more)
        with trio.fail_after(30):
            await self.ran.wait()
        await self.nodes["b"].journal.writer.flush()
        return str(task["session_ids"][0])

    async def hold(self, call: Call) -> int:
        """The harness: a turn, words, and then it waits."""
        sessions = self.nodes["b"].scheduler.sessions_by_key
        live = sessions.by_key(call.env["OPENAI_API_KEY"])
        assert live is not None
        _record(live, 3)
        call.runtime.files["/work/answer"] = b"42"
        call.stdout.extend(b"said by b\n")
        self.ran.set()
        await self.done.wait()
        return 0


def settings(folder: Path, name: str, dsn: str, **more: Any) -> NodeConfig:
    return NodeConfig(
        engine="simulated",
        port=free_port(),
        token="secret",
        node_id=name,
        log=dsn,
        state_dir=str(folder / name),
        podman_dir=str(folder / "podman"),
        import_paths=("session_kit",),
        memory_reserve_mb=1,
        disk_reserve_mb=1,
        **more,
    )


@asynccontextmanager
async def two_nodes(folder: Path, dsn: str) -> AsyncIterator[Two]:
    failed: Exception | None = None
    async with AsyncExitStack() as stack:
        callers, nodes = dict[str, Caller](), dict[str, Any]()
        for name in ("a", "b"):
            node, address = await stack.enter_async_context(open_hollow(settings(folder, name, dsn)))
            callers[name], nodes[name] = Caller(url=f"http://{address.host}:{address.port}"), node
        two = Two(callers["a"], callers["b"], nodes)
        nodes["b"].runtimes.programs["hold"] = two.hold
        try:
            yield two
        except (
            Exception
        ) as error:  # raised below as itself: the nodes' nurseries would wrap it again and again
            failed = error
        two.done.set()
    if failed is not None:
        raise failed


async def until(look: Callable[[], Any], holds: Callable[[Any], bool]) -> Any:
    with trio.fail_after(30):
        while not holds(found := await look()):  # noqa: ASYNC110
            await trio.sleep(0.05)
    return found


def error(answer: Answer) -> str:
    return str(answer.json()["error"]["message"])


async def test_remote_turns_until_their_end(tmp_path: Path, cluster: Cluster) -> None:
    async with two_nodes(tmp_path, cluster.database()) as two:
        session = await two.running()
        live = (await two.a.get(f"/v1/sessions/{session}")).json()
        assert len(live["turns"]) == 1, "the node that runs it was asked"
        assert live == (await two.b.get(f"/v1/sessions/{session}")).json()
        asked = await two.a.call("GET", f"/v1/sessions/{session}", headers={PASSED_TO: "a"})
        assert asked.json()["turns"] == [], "what was passed on is not passed on again"
        two.done.set()

        async def whole() -> Any:
            return (await two.a.get(f"/v1/sessions/{session}")).json()

        over = await until(whole, lambda found: found["session"]["outcome"] is not None)
        assert len(over["turns"]) == 1
        here = await two.a.call("GET", f"/v1/sessions/{session}", headers={PASSED_TO: "a"})
        assert here.json() == over, "the log has it"
        printed = await two.a.get(f"/v1/sessions/{session}/log", tail=5)
        assert printed.json()["text"] == "said by b\n", "its file stays where it ran"


async def test_remote_live_stream_logs_and_drain(tmp_path: Path, cluster: Cluster) -> None:
    async with two_nodes(tmp_path, cluster.database()) as two:
        session = await two.running()
        async with AsyncPolarnodeClient(two.a.url, "secret") as client, client.live_sessions() as events:
            heard: dict[str, SessionChanges] = {}
            with trio.fail_after(30):
                while heard.keys() != {"a", "b"}:
                    changes = await anext(events)
                    heard.setdefault(changes.node, changes)
            assert [each.session_id for each in heard["b"].sessions] == [session]
            assert heard["a"].sessions == (), "no session is told of twice"
            two.done.set()
            with trio.fail_after(30):
                while (changes := await anext(events)).sessions[0].phase != "ended":
                    assert changes.node == "b"
        drained = await two.a.post("/v1/fleet/drain", {"node": "b", "draining": True})
        assert drained.json() == {"name": "b", "draining": True}
        assert two.nodes["b"].membership.draining
        assert not two.nodes["a"].membership.draining
        nodes = (await two.a.get("/v1/status")).json()["nodes"]
        assert [(each["name"], each["draining"]) for each in nodes] == [("a", False), ("b", True)]
        assert (await two.a.post("/v1/fleet/drain", {"draining": True})).json()["name"] == "a"
        unknown = await two.a.post("/v1/fleet/drain", {"node": "c", "draining": True})
        assert (unknown.status, error(unknown)) == (
            404,
            "no node that is alive is called 'c': there are a, b",
        )
        (tmp_path / "b" / "engine-0.log").write_text("words of an engine\n")
        names = [each["name"] for each in (await two.a.get("/v1/logs")).json()["logs"]]
        assert "b/engine-0" in names
        piece = (await two.a.get("/v1/logs/b/engine-0", tail=1)).json()
        assert (piece["name"], piece["text"]) == ("b/engine-0", "words of an engine\n")
        assert (await two.a.get("/v1/logs/b/none")).status == 404


async def test_remote_artifacts_captures_and_pause(tmp_path: Path, cluster: Cluster) -> None:
    async with two_nodes(tmp_path, cluster.database()) as two:
        two.done.set()
        session = await two.running(runtime={"artifacts": ["/work/answer"]})

        async def kept() -> Answer:
            return await two.a.get(f"/v1/sessions/{session}/artifacts")

        answer = await until(kept, lambda answer: answer.status == 200)
        assert answer.body == (await two.b.get(f"/v1/sessions/{session}/artifacts")).body
        assert answer.headers["content-disposition"] == f'attachment; filename="{session}.artifacts.tar"'
        opened = await two.a.post("/v1/capture", {"requires": {"node": "b"}})
        capture = opened.json()["session_id"]
        assert opened.status == 201
        assert [each["session_id"] for each in (await two.a.get("/v1/capture")).json()["captures"]] == [
            capture
        ]
        assert (await two.a.get(f"/v1/capture/{capture}")).json()["outcome"] is None
        ended = await two.a.call("DELETE", f"/v1/capture/{capture}", json_body={"reward": 1.0})
        assert ended.status == 200, ended.text
        other = await two.a.call("POST", "/v1/score", params={"model": "none"}, json_body={"rows": []})
        assert (other.status, other.json()["error"]["path"]) == (400, "?model")
        assert (await two.a.post("/v1/engine/pause", {"mode": "retract"})).status == 200
        assert [two.nodes[name].engines.paused for name in "ab"] == ["retract", "retract"]
        assert await two.nodes["a"].log.generation_hold(model="any") == "retract", "for who joins"
        assert (await two.a.post("/v1/engine/resume", None)).status == 200
        assert [two.nodes[name].engines.paused for name in "ab"] == [None, None]
        assert await two.nodes["a"].log.generation_hold(model="any") is None


async def test_cancel_and_invalid_request_reach_node(tmp_path: Path, cluster: Cluster) -> None:
    async with two_nodes(tmp_path, cluster.database()) as two:
        session = await two.running()
        refused = await two.a.get(f"/v1/sessions/{session}/log", tail=0)
        assert refused.json()["error"]["path"] == "?tail", "the other node's own words"
        fork = await two.a.post(f"/v1/sessions/{session}/fork", {"turn": 7})
        assert fork.status == 400, fork.text
        assert "turn" in error(fork), "the parent's turns are known where it runs"
        task = (await two.a.get(f"/v1/sessions/{session}")).json()["session"]["task_id"]
        assert (await two.a.call("DELETE", f"/v1/tasks/{task}")).json()["cancelled"]

        async def over() -> Any:
            return (await two.a.get(f"/v1/sessions/{session}")).json()["session"]

        assert (await until(over, lambda found: found["outcome"] is not None))["status"] == "cancelled"


async def test_wrong_node_at_address_answers_502(tmp_path: Path, cluster: Cluster) -> None:
    async with two_nodes(tmp_path, cluster.database()) as two:
        session = await two.running()
        for path in (f"/v1/sessions/{session}", "/v1/sessions/live"):
            astray = await two.a.call("GET", path, headers={PASSED_TO: "b"})
            assert (astray.status, astray.json()["error"]["type"]) == (502, "astray")
            assert "give that one a url at which it alone is reached" in error(astray)


# ── nodes that do not answer ──────────────────────────────────────────────────


@define(eq=False)
class NodesOnly:
    """A log that knows one session, and nodes."""

    row: NodeRow
    rows: tuple[NodeRow, ...]

    async def node_of(self, session_id: str) -> NodeRow | None:
        await trio.lowlevel.checkpoint()
        return self.row if session_id == "s" else None

    async def nodes(self) -> tuple[NodeRow, ...]:
        await trio.lowlevel.checkpoint()
        return self.rows


def row(name: str, incarnation: int, **more: Any) -> NodeRow:
    facts = NodeFacts(name=name, url=more.pop("url", "http://127.0.0.1:9"), certificate=more.pop("pin", ""))
    return NodeRow(incarnation=incarnation, facts=facts, sign=0, state=more.pop("state", "alive"), **more)


@pytest.mark.parametrize(
    ("runs", "nodes", "found"),
    [
        (row("b", 2), (row("a", 1), row("b", 2)), 2),
        (row("a", 1), (row("a", 3),), None),
        (row("b", 2, state="lost"), (row("a", 1), row("b", 4)), 4),
        (row("b", 2, state="left"), (row("a", 1), row("c", 5)), "gone"),
    ],
    ids=["elsewhere", "here", "came back", "gone"],
)
async def test_node_of_a_session(runs: NodeRow, nodes: tuple[NodeRow, ...], found: Any) -> None:
    log: Any = NodesOnly(runs, nodes)
    async with open_others(log, name="a", token=None) as others:
        assert await others.of_session("unknown") is None
        if found != "gone":
            where = await others.of_session("s")
            assert (None if where is None else where.incarnation) == found
            return
        with pytest.raises(NodeGone, match="its node is gone; its place runs elsewhere"):
            await others.of_session("s")


async def test_first_look_is_awaited() -> None:
    """Whoever asks while the first answer of the log is under way is not told that the node is alone."""
    log: Any = NodesOnly(row("b", 2), (row("b", 2),))
    found: list[tuple[NodeRow, ...]] = []
    async with open_others(log, name="a", token=None) as others:

        async def look() -> None:
            found.append(await others.alive())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            nursery.start_soon(look)
        log.rows += (row("c", 3),)
        assert len(await others.alive()) == 1
        assert len(await others.alive(fresh=True)) == 2
    assert [len(each) for each in found] == [1, 1]


@pytest.mark.parametrize(("url", "name"), [("http://127.0.0.1:9", "nœud"), ("http://[::1", "b"), ("", "b")])
async def test_unreachable_row_is_tolerated(url: str, name: str) -> None:
    """Whatever another node wrote of itself, who asks it goes on."""
    log: Any = NodesOnly(row(name, 2, url=url), (row(name, 2, url=url),))
    async with open_others(log, name="a", token=None) as others:
        ((_, found),) = await others.ask_all("GET", "/v1/logs")
        assert isinstance(found, Unreachable)


async def test_renewed_certificate_is_pinned_again() -> None:
    log: Any = NodesOnly(row("b", 2), (row("b", 2),))
    async with open_others(log, name="a", token=None) as others:
        renewed = evolve(log.rows[0], facts=evolve(log.rows[0].facts, certificate="22"))
        assert others.link(renewed) is not others.link(log.rows[0])
        assert others.link(renewed) is others.link(renewed)


async def test_links_of_lost_nodes_close_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing one waits, and another request looks at the nodes meanwhile."""
    log: Any = NodesOnly(row("b", 2), (row("b", 2), row("c", 3)))
    async with open_others(log, name="a", token=None) as others:
        for each in await others.alive():
            others.link(each)
        log.rows = ()

        async def close(_: Link) -> None:
            await trio.sleep(NODES_INTERVAL_S + 0.1)

        monkeypatch.setattr(Link, "close", close)
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                others._until = float("-inf")
                nursery.start_soon(others.alive)
                await trio.testing.wait_all_tasks_blocked()


async def test_silent_and_lost_nodes(tmp_path: Path, cluster: Cluster) -> None:
    async with two_nodes(tmp_path, cluster.database()) as two:
        session = await two.running(two.b)
        log, nodes = two.nodes["b"].log, {each.facts.name: each for each in await two.nodes["a"].log.nodes()}
        address = nodes["b"].facts.url.encode()
        await log._write(_moved, "http://127.0.0.1:9", nodes["b"].incarnation)
        silent = await two.a.get(f"/v1/sessions/{session}")
        assert (silent.status, silent.headers.get("retry-after")) == (503, "5"), silent.text
        assert "does not answer" in error(silent)
        await log._write(_moved, address.decode(), nodes["b"].incarnation)
        two.nodes["b"].membership.draining = True
        await log.leave(nodes["b"].incarnation)
        gone = await two.a.get(f"/v1/sessions/{session}/log")
        assert gone.status == 404
        assert "its node is gone; its place runs elsewhere" in error(gone)


def _moved(db: Any, url: str, incarnation: int) -> None:
    db.execute("UPDATE nodes SET url = %s WHERE incarnation = %s", (url, incarnation))


async def test_other_certificate_is_sent_nothing(tmp_path: Path) -> None:
    chain, key = CertificateAuthority(tmp_path).issue("elsewhere.invalid")
    pin = sha256(PEM_cert_to_DER_cert(await trio.Path(chain).read_text())).hexdigest()
    asked: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    served: Any = app
    async with open_server(
        served, Address(host="127.0.0.1", port=0), certificate=Certificate(chain, key)
    ) as address:
        url = f"https://127.0.0.1:{address.port}"
        right, wrong = row("b", 2, url=url, pin=pin), row("c", 3, url=url, pin="00" * 32)
        log: Any = NodesOnly(right, (row("a", 1), right, wrong))
        async with open_others(log, name="a", token="secret") as others:
            words = {each.facts.name: word for each, word in await others.ask_all("GET", "/v1/capture")}
    assert words["b"] == {}
    assert isinstance(words["c"], Unreachable)
    assert "another certificate than the one that was pinned" in str(words["c"])
    assert asked == ["/v1/capture"], "the token went to nobody else"


@pytest.mark.parametrize(
    ("requires", "engines", "found"),
    [
        ({"gpu": "y"}, False, None),
        ({"gpu": "x"}, False, 1),
        ({"gpu": "z"}, False, None),
        ({}, True, 2),
        ({"gpu": "x"}, True, 3),
    ],
    ids=["here", "least to do", "nobody", "has engines", "both"],
)
async def test_node_chosen_for_task(requires: dict[str, str], engines: bool, found: int | None) -> None:
    def made(name: str, number: int, gpu: str, **more: Any) -> NodeRow:
        facts = NodeFacts(name=name, labels={"gpu": gpu})
        return NodeRow(incarnation=number, facts=facts, state="alive", sign=0, **more)

    rows = (
        made("a", 0, "y"),
        made("b", 1, "x", running=1),
        made("c", 2, "y", running=2, serving={"": "0"}),
        made("d", 3, "x", running=3, serving={"": "0"}),
    )
    log: Any = NodesOnly(rows[0], rows)
    async with open_others(log, name="a", token=None) as others:
        row = await PassingRoutes(others)._least_busy_node(requires, engines=engines)
        assert (None if row is None else row.incarnation) == found


async def test_request_without_model_is_refused() -> None:
    """A capture, or rows to score, would be of whichever model's node has the least to do."""
    rows = tuple(
        NodeRow(
            incarnation=number,
            facts=NodeFacts(name=name, labels={"model": name}),
            state="alive",
            sign=0,
            serving={"": "0"},
        )
        for number, name in enumerate(("judge", "policy"))
    )
    log: Any = NodesOnly(rows[0], rows)
    async with open_others(log, name="here", token=None) as others:
        routes = PassingRoutes(others)
        with pytest.raises(Refused, match="serve judge, policy") as refused:
            await routes._least_busy_node({}, engines=True, path="?model")
        assert refused.value.path == "?model"
        assert await routes._least_busy_node({"model": "policy"}, engines=True) == rows[1]


async def test_interrupted_answer_is_cut(tmp_path: Path) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        # it returns without the last piece: the connection is cut

    served: Any = app
    async with open_server(served, Address(host="127.0.0.1", port=0)) as address:
        there = row("b", 2, url=f"http://127.0.0.1:{address.port}")
        log: Any = NodesOnly(there, (row("a", 1), there))

        async def nothing(session_id: str) -> Response:
            raise AssertionError(session_id)

        async with open_others(log, name="a", token=None) as others:
            route = ("GET", "/v1/sessions/<session_id>/artifacts", nothing)
            plane = control_plane(PassingRoutes(others).rows([route]), token=None)
            async with open_server(plane, Address(host="127.0.0.1", port=0)) as mine:
                caller = Caller(url=f"http://127.0.0.1:{mine.port}")
                with pytest.raises(h11.RemoteProtocolError):
                    await caller.get("/v1/sessions/s/artifacts")


@asynccontextmanager
async def process(folder: Path, dsn: str) -> AsyncIterator[tuple[trio.Process, Caller]]:
    """Hollow node `b` in a process of its own, which a test may kill."""
    program, port = Path(hollow_node.__file__), free_port()
    command = [sys.executable, str(program), "--folder", str(folder / "b"), "--ports", str(port)]
    command += ["--token", "secret", "--settings", json.dumps({"log": dsn})]
    async with trio.open_nursery() as nursery:
        start = partial(trio.run_process, command, stdin=PIPE, stdout=PIPE, check=False, cwd=program.parent)
        found: trio.Process = await nursery.start(start)
        caller = Caller(url=f"http://127.0.0.1:{port}")
        assert found.stdout is not None
        with trio.fail_after(60):
            assert b'"b"' in await found.stdout.receive_some()
        try:
            yield found, caller
        finally:
            found.kill()


async def test_killed_node_is_silent_then_gone(tmp_path: Path, cluster: Cluster) -> None:
    dsn = cluster.database()
    async with (
        open_hollow(settings(tmp_path, "a", dsn)) as (_, address),
        process(tmp_path, dsn) as (killed, b),
    ):
        a = Caller(url=f"http://127.0.0.1:{address.port}")
        harness = {"name": "shell", "command": ["hollow", "600", "1"]}
        body = {"instruction": "x", "harness": harness, "requires": {"node": "b"}}
        session = (await b.post("/v1/tasks", body)).json()["session_ids"][0]

        async def look() -> Answer:
            return await a.get(f"/v1/sessions/{session}/log")

        await until(look, lambda answer: answer.status == 200)
        killed.kill()
        await killed.wait()
        silent = await look()
        if silent.status != 404:  # on a busy machine its lease may be over before it is asked for
            assert (silent.status, silent.headers.get("retry-after")) == (503, "5"), silent.text
        gone = await until(look, lambda answer: answer.status == 404)
        assert "its node is gone; its place runs elsewhere" in error(gone)
        live = await a.get("/v1/sessions/live", follow="false")
        assert '"node":"b"' not in live.text


async def test_polar_ends_one_session_of_two(tmp_path: Path, cluster: Cluster) -> None:
    async with two_nodes(tmp_path, cluster.database()) as two:
        session = await two.running(num_samples=2)
        assert len((await two.a.get(f"/sessions/{session}/completions")).json()["completions"]) == 1
        assert (await two.a.call("DELETE", f"/sessions/{session}")).json()["deleted"]

        async def over() -> Any:
            return (await two.a.get(f"/v1/sessions/{session}")).json()["session"]

        found = await until(over, lambda found: found["outcome"] is not None)
        assert found["status"] == "cancelled"
        task = (await two.a.get(f"/v1/tasks/{found['task_id']}")).json()
        assert task["counts"] == {"cancelled": 1, "pending": 1}
