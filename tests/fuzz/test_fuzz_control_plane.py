"""The control plane, captures and Polar's routes on a real socket: whatever is sent is answered as documented or
refused with a sentence, never 500, and the next ordinary request is answered as before.
"""

import atexit
import json
import tempfile
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import h11
import pytest
import trio
from attrs import frozen
from captures_kit import Desk, open_capture_node
from client_kit import Here, here, publish
from fakes_engine import ScriptedEngine
from fuzz_json import anything, mutated, repeated_keys, torn, torn_bytes
from fuzz_kit import Target, check_sentence, play, watched
from fuzz_tasks import CAPTURES, ENDS, TASKS
from hypothesis import strategies as st
from plane_kit import CONTEXT
from sources_kit import DATA

# ── one control plane for all inputs ──────────────────────────────────────────

STUCK = 60.0  # seconds of the real clock; an answer here takes a few milliseconds


@frozen(kw_only=True)
class Opened:
    here: Here
    desk: Desk

    @property
    def port(self) -> int:
        return int(self.desk.caller.url.rpartition(":")[2])


@cache
def opened() -> Opened:
    """The control plane in a thread, until the process ends."""
    stack = ExitStack()
    atexit.register(stack.close)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    found = stack.enter_context(here())
    desk = found.open(open_capture_node(folder, ScriptedEngine(context_length=CONTEXT)))
    for name in ("a", "b"):
        found.do(_publish, desk, name)
    return Opened(here=found, desk=desk)


async def _publish(desk: Desk, name: str) -> None:
    publish(desk.journal, name)
    await desk.journal.writer.flush()


# ── requests ──────────────────────────────────────────────────────────────────

POLAR = (json.loads((DATA / "polar" / "task.json").read_text()),)
ACKS = ({"consumer": "trainer", "seq": 1},)
EVALUATIONS = (
    {"sessions": ["a", "gone"], "reason": "r", "evaluator": {"name": "session_completed"}},
    {"task_id": "a"},
)
SESSIONS = ({"session_id": "s9", "task_id": "t"}, {"task_id": "mine"})
BODIES: dict[tuple[str, str], tuple[Any, ...]] = {
    ("POST", "/v1/tasks"): TASKS,
    ("POST", "/v1/trajectories/ack"): ACKS,
    ("POST", "/v1/capture"): CAPTURES,
    ("DELETE", "/v1/capture/s1"): ENDS,
    ("POST", "/v1/evaluations"): EVALUATIONS,
    ("POST", "/rollout/task/submit"): POLAR,
    ("POST", "/sessions"): SESSIONS,
}
PATHS = (
    *("/v1/tasks", "/v1/tasks/{}", "/v1/trajectories/stream", "/v1/trajectories/{}", "/v1/sessions/{}"),
    *("/v1/sessions/{}/artifacts", "/v1/sessions/{}/snapshots", "/v1/consumers", "/v1/consumers/{}", "/v1/export", "/v1/status", "/metrics"),
    *("/v1/capture", "/v1/capture/{}", "/v1/evaluations/{}", "/v1/openapi.json", "/rollout/task/{}", "/tasks", "/tasks/{}/sessions"),
    *("/sessions", "/sessions/{}", "/sessions/{}/completions", "/nodes/{}", "/rollout/status", "/health", "/{}"),
)  # fmt: skip
ODD_TEXTS = (
    "a", "", "t", "\x00", "..", "../..", "é", "\u0301", "x" * 300, "1", "-1", "9" * 18, "9" * 400, "1e400", "nan", "inf", "1_0", "٣", "true", "json",
    "base64", "trajectory,group", "task,,", "completed", "trl", "parquet", "sft", "%", "'; drop table turns;--", "\r\nx: y", "\ud7ff", "full", "😀",
)  # fmt: skip
PARAMETERS = (
    *("consumer", "after", "task_id", "group_id", "outcome", "min_reward", "arrays", "turns", "format"),
    *("kind", "limit", "before", "kinds", "status", "harness", "since", "register_if_missing", "other", ""),
)  # fmt: skip
HEADERS = (
    "Idempotency-Key",
    "Last-Event-ID",
    "X-Polar-Control-Token",
    "Origin",
    "Accept",
    "Content-Encoding",
    "Expect",
    "Range",
)
HEADER_TEXTS = (
    "",
    "1",
    "x",
    "9" * 400,
    "-1",
    "gzip",
    "100-continue",
    "a" * 3000,
    "\xff\xfe",
    "bytes=0-",
    "null",
    "t1",
)

Request = tuple[str, str, tuple[tuple[str, str], ...], bytes]


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """A method, a target, headers and a body: some of them odd."""
    texts = st.sampled_from(ODD_TEXTS)
    if draw(st.booleans()):
        (method, path), good = draw(st.sampled_from(sorted(BODIES.items(), key=lambda item: item[0])))
        names = tuple(good[0])
        body = draw(mutated(good) | mutated(good) | torn(good) | repeated_keys(good) | anything(names))
    else:
        method = draw(st.sampled_from(("GET", "GET", "GET", "DELETE", "POST", "PUT", "HEAD", "OPTIONS")))
        path = quote(
            draw(st.sampled_from(PATHS)).format(draw(texts)), safe="/%" if draw(st.booleans()) else "/"
        )
        body = draw(st.sampled_from((b"", b"", b"{}", b"x")))
    query = draw(st.lists(st.tuples(st.sampled_from(PARAMETERS), texts), max_size=3))
    if path == "/v1/trajectories/stream":
        query.append(("follow", "false"))  # a stream that is followed has no end
    if query and draw(st.booleans()) | (method == "GET"):
        path += "?" + "&".join(f"{quote(name)}={quote(text)}" for name, text in query)
    headers = draw(st.lists(st.tuples(st.sampled_from(HEADERS), st.sampled_from(HEADER_TEXTS)), max_size=2))
    return method, path, tuple(headers), body


def spelled(request: Request) -> bytes:
    """The bytes of a request that closes its connection."""
    method, target, headers, body = request
    head = [
        f"{method} {target} HTTP/1.1",
        "Host: 127.0.0.1",
        "Authorization: Bearer secret",
        "Connection: close",
    ]
    head += [f"Content-Length: {len(body)}", "Content-Type: application/json"]
    head += [f"{name}: {text}" for name, text in headers]
    return "\r\n".join(head).encode("latin-1", "replace") + b"\r\n\r\n" + body


CHECKED = (200, 201, 202, 204, 400, 401, 403, 404, 405, 406, 409, 413, 415, 416, 417, 422, 429, 431, 503, 507)
GOOD: Request = ("POST", "/v1/tasks", (), json.dumps(TASKS[0] | {"task_id": "ordinary"}).encode())


async def asked(
    port: int, sent: bytes, method: str, cut: int | None = None, leaves: bool = False
) -> tuple[int, str, bytes]:
    """The status, content type and body of the answer; status 0 where there is none. `leaves`: the client
    sends nothing more and says so.
    """
    wire = h11.Connection(h11.CLIENT)
    wire.send(h11.Request(method=method, target="/", headers=[("Host", "x")]))
    wire.send(h11.EndOfMessage())
    status, kind, body = 0, "", b""
    with trio.fail_after(STUCK):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            try:
                for part in (sent[:cut], sent[cut:]) if cut is not None else (sent,):
                    await stream.send_all(part)
                if leaves:
                    await stream.send_eof()
                while data := await stream.receive_some():
                    wire.receive_data(data)
            except trio.BrokenResourceError:
                pass  # refused before all of it was sent
            wire.receive_data(b"")
    with suppress(h11.RemoteProtocolError):  # of no answer at all; a broken one has no end
        while not isinstance(event := wire.next_event(), h11.EndOfMessage | h11.ConnectionClosed):
            match event:
                case h11.Response():
                    status, kind = event.status_code, dict(event.headers).get(b"content-type", b"").decode()
                case h11.Data(data=data):
                    body += data
                case h11.NEED_DATA | h11.PAUSED:
                    break
        return status, kind, body
    # an end of what is sent counts as a client that has left, and what it is not there for may be cut
    assert status == 0 or leaves, f"an answer without its end: {body[:400]!r}"
    return status, kind, body


async def exchange(cost: Any, *request: Any) -> Any:
    """The answer, with the longest step of the server's loop meanwhile."""
    trio.lowlevel.add_instrument(cost.steps)
    try:
        return await asked(*request)
    finally:
        trio.lowlevel.remove_instrument(cost.steps)


def check_request(value: tuple[Request, int | None]) -> None:
    request, cut = value
    plane, sent = opened(), spelled(request)
    with watched(len(sent), on_loop=True, descriptors=False) as cost:
        status, kind, body = plane.here.do(exchange, cost, plane.port, sent, request[0], cut)
    assert status in CHECKED, f"status {status}: {body[:400]!r}"
    if status >= 400 and request[0] != "HEAD":
        error = json.loads(body)
        sentence = error["error"]["message"] if "error" in error else error["detail"]
        for each in [part["msg"] for part in sentence] if isinstance(sentence, list) else [sentence]:
            check_sentence(each)
    elif "json" in kind and request[0] != "HEAD" and status != 204:
        [json.loads(line) for line in body.splitlines()]
    check_ordinary(plane)


def check_ordinary(plane: Opened) -> None:
    """A task is taken, and taken once; the stream gives what it gave."""
    status, _, body = plane.here.do(asked, plane.port, spelled(GOOD), "POST")
    assert status == 202
    assert json.loads(body)["task_id"] == "ordinary"
    status, _, body = plane.here.do(
        asked, plane.port, spelled(("GET", "/v1/trajectories/stream?follow=false&task_id=t", (), b"")), "GET"
    )
    assert status == 200
    assert body.count(b"event: trajectory") == 2


@st.composite
def wires(draw: st.DrawFn) -> bytes:
    """The bytes of a request, cut or with others put in."""
    return draw(torn_bytes(spelled(draw(requests()))))


def check_wire(sent: bytes) -> None:
    plane = opened()
    with watched(len(sent), on_loop=True, descriptors=False) as cost:
        status, _, body = plane.here.do(exchange, cost, plane.port, sent, "GET", None, True)
    assert status < 500 or status == 501, f"status {status}: {body[:400]!r}"
    check_ordinary(plane)


TARGETS = (
    Target(
        name="control_plane",
        inputs=st.tuples(requests(), st.none() | st.integers(0, 600)),
        check=check_request,
        examples=100,
        # it was answered by a redirect, in HTML
        always=((("GET", "/sessions//completions", (), b""), None),),
    ),
    Target(name="control_plane_http", inputs=wires(), check=check_wire, examples=40),
)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_any_control_request_answered_or_refused(target: Target) -> None:
    """Whatever is sent to the control plane is answered or refused."""
    play(target)
