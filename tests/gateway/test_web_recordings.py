"""Recorded requests: as they came but for the key, numbered by session, and read back by `polarnode
replay`.
"""

import json
from pathlib import Path

import httpx2
import pytest
import trio
from plane_kit import AsgiClient, HandEngine, served, stage

from polarnode.gateway.recorded_request import read_recorded
from polarnode.gateway.recordings import KEY_MASK, Recordings, recorded
from polarnode.providers.contract import NoMemory

BODY = b'{"model": "m",  "messages": [{"role": "user", "content": "h\\u00e9"}], "temperature": 1.0}'
STREAMED = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": true}'
KEYED = [(b"Authorization", b"Bearer sk-1"), (b"x-goog-api-key", b"sk-2"), (b"x-other", b"said")]


@pytest.mark.parametrize(
    "target", ["/v1/chat/completions", "/sessions/sk-1/v1/chat/completions", "/v1/chat/completions?key=sk-3"]
)
def test_request_kept_without_its_keys(target: str) -> None:
    """A request is kept as it came, but for its keys."""
    content = recorded("POST", target, KEYED, BODY)
    said = json.loads(content)
    assert (said["method"], said["body"]) == ("POST", json.loads(BODY))
    assert BODY in content, "letter for letter"
    assert said["headers"] == [
        ["Authorization", f"Bearer {KEY_MASK}"],
        ["x-goog-api-key", KEY_MASK],
        ["x-other", "said"],
    ]
    assert said["target"] == target.replace("sk-1", KEY_MASK).replace("sk-3", KEY_MASK)
    assert b"sk-" not in content


def test_non_json_body_kept_as_text() -> None:
    """A body that is no JSON is kept as text, and an absent one as none."""
    assert json.loads(recorded("POST", "/v1/messages", [], b"\xff{"))["body"] == "\ufffd{"
    assert json.loads(recorded("GET", "/v1/models", [], b""))["body"] is None


async def test_replay_reads_numbered_requests(tmp_path: Path) -> None:
    """Sessions have folders and requests have numbers, and replay reads them."""
    recordings = Recordings(tmp_path)
    for session_id in ("a", "b", "a"):
        await recordings.keep(session_id, "POST", "/v1/chat/completions", KEYED, BODY)
    assert found(tmp_path) == ["a/01-request.json", "a/02-request.json", "b/01-request.json"]
    read = read_recorded("01-request.json", content(tmp_path, "b/01-request.json"), NoMemory())
    assert (read.error, read.provider) == (None, "openai_chat")
    assert read.request is not None
    assert read.request.conversation.messages[0].text == "hé"


async def test_failed_write_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A write that fails is logged and ends nothing."""
    (tmp_path / "a").touch()
    await Recordings(tmp_path).keep("a", "GET", "/v1/models", [], b"")
    assert "was not recorded" in caplog.text


async def test_plane_records_requests_and_probes(tmp_path: Path) -> None:
    """The plane records requests at a session's door, probes too."""
    engine = HandEngine()
    here = stage(engine)
    here.plane.recordings = Recordings(tmp_path)
    clients = [AsgiClient(), AsgiClient()]
    for client, path in zip(clients, ("/v1/chat/completions", "/api/show"), strict=True):
        engine.give("Yes.", "<|im_end|>", finish="stop")
        await client.request(here.app, path, BODY)
    assert found(tmp_path) == ["s1/01-request.json", "s1/02-request.json"]
    assert b"key-s1" not in content(tmp_path, "s1/01-request.json")
    for number, client in enumerate(clients, 1):
        head, _, body = content(tmp_path, f"s1/{number:02}-response.txt").partition(b"\r\n\r\n")
        assert head.splitlines()[0] == f"HTTP/1.1 {client.status}".encode()
        assert body == client.body, "letter for letter"
    assert clients[0].status == 200
    assert b"Yes." in clients[0].body
    assert b"content-type: application/json\r\n" in content(tmp_path, "s1/01-response.txt")
    assert clients[1].status == 404


@pytest.mark.parametrize("sent", [BODY, STREAMED])
async def test_socket_bytes_are_the_recorded(tmp_path: Path, sent: bytes) -> None:
    """The recorded response is the bytes that the socket got."""
    engine = HandEngine()
    here = stage(engine)
    here.plane.recordings = Recordings(tmp_path)
    engine.give("Yes.", "<|im_end|>", finish="stop")
    async with served(here.app) as url, httpx2.AsyncClient() as client:
        headers = {"authorization": "Bearer key-s1", "content-type": "application/json"}
        answer = await client.post(f"{url}/v1/chat/completions", content=sent, headers=headers)
    head, _, body = content(tmp_path, "s1/01-response.txt").partition(b"\r\n\r\n")
    assert (answer.status_code, answer.content) == (200, body)
    assert b"Yes." in body
    assert f"x-request-id: {answer.headers['x-request-id']}".encode() in head


async def test_cut_stream_keeps_sent_bytes(tmp_path: Path) -> None:
    engine = HandEngine()
    here = stage(engine)
    here.plane.recordings = Recordings(tmp_path)
    client = AsgiClient()
    engine.give("One ")
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.request, here.app, "/v1/chat/completions", STREAMED)
            while b"One" not in client.body:  # noqa: ASYNC110 (a fake client has no event of it)
                await trio.sleep(0.001)
            client.leave()
    kept = content(tmp_path, "s1/01-response.txt")
    head, _, body = kept.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200\r\n")
    assert body.startswith(client.body)
    assert b"One" in body
    assert b"[DONE]" not in body
    read = read_recorded("1", content(tmp_path, "s1/01-request.json"), NoMemory(), response=kept)
    assert not read.failed


async def test_refusal_reads_back_without_answer(tmp_path: Path) -> None:
    """A refusal is read back as a request without an answer."""
    here = stage(HandEngine())
    here.plane.recordings = Recordings(tmp_path)
    await AsgiClient().request(here.app, "/v1/chat/completions", b'{"messages": 7}')
    kept = content(tmp_path, "s1/01-response.txt")
    assert kept.startswith(b"HTTP/1.1 400\r\n")
    assert read_recorded("1", content(tmp_path, "s1/01-request.json"), NoMemory(), response=kept).error
    right = recorded("POST", "/v1/chat/completions", KEYED, BODY)
    assert read_recorded("1", right, NoMemory(), response=kept).failed
    assert not read_recorded("1", right, NoMemory()).failed, "an older recording has no response"


def found(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*-request.json"))


def content(folder: Path, name: str) -> bytes:
    return (folder / name).read_bytes()
