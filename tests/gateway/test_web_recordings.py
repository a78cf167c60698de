"""Recorded requests: as they came but for the key, numbered by session, and read back by `polarnode
replay`.
"""

import json
from pathlib import Path

import pytest
from plane_kit import Asgi, HandEngine, stage

from polarnode.gateway.endpoint import MASK, Recordings, recorded
from polarnode.gateway.recorded_request import read_recorded
from polarnode.providers.contract import NoMemory

BODY = b'{"model": "m",  "messages": [{"role": "user", "content": "h\\u00e9"}], "temperature": 1.0}'
KEYED = [(b"Authorization", b"Bearer sk-1"), (b"x-goog-api-key", b"sk-2"), (b"x-other", b"said")]


@pytest.mark.parametrize(
    "target", ["/v1/chat/completions", "/sessions/sk-1/v1/chat/completions", "/v1/chat/completions?key=sk-3"]
)
def test_a_request_is_kept_as_it_came_but_for_its_keys(target: str) -> None:
    content = recorded("POST", target, KEYED, BODY)
    said = json.loads(content)
    assert (said["method"], said["body"]) == ("POST", json.loads(BODY))
    assert BODY in content, "letter for letter"
    assert said["headers"] == [
        ["Authorization", f"Bearer {MASK}"],
        ["x-goog-api-key", MASK],
        ["x-other", "said"],
    ]
    assert said["target"] == target.replace("sk-1", MASK).replace("sk-3", MASK)
    assert b"sk-" not in content


def test_what_is_no_json_is_kept_as_text_and_no_body_as_none() -> None:
    assert json.loads(recorded("POST", "/v1/messages", [], b"\xff{"))["body"] == "\ufffd{"
    assert json.loads(recorded("GET", "/v1/models", [], b""))["body"] is None


async def test_sessions_have_folders_and_requests_numbers_and_replay_reads_them(tmp_path: Path) -> None:
    recordings = Recordings(tmp_path)
    for session_id in ("a", "b", "a"):
        await recordings.keep(session_id, "POST", "/v1/chat/completions", KEYED, BODY)
    assert found(tmp_path) == ["a/01-request.json", "a/02-request.json", "b/01-request.json"]
    read = read_recorded("01-request.json", content(tmp_path, "b/01-request.json"), NoMemory())
    assert (read.error, read.provider) == (None, "openai_chat")
    assert read.request is not None
    assert read.request.conversation.messages[0].text == "hé"


async def test_what_can_not_be_written_is_logged_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a").touch()
    await Recordings(tmp_path).keep("a", "GET", "/v1/models", [], b"")
    assert "was not recorded" in caplog.text


async def test_the_plane_keeps_what_comes_through_a_door_probes_too(tmp_path: Path) -> None:
    engine = HandEngine()
    here = stage(engine)
    here.plane.recordings = Recordings(tmp_path)
    for path in ("/v1/chat/completions", "/api/show"):
        engine.give("Yes.", "<|im_end|>", finish="stop")
        await Asgi().request(here.app, path, BODY)
    assert found(tmp_path) == ["s1/01-request.json", "s1/02-request.json"]
    assert b"key-s1" not in content(tmp_path, "s1/01-request.json")


def found(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*.json"))


def content(folder: Path, name: str) -> bytes:
    return (folder / name).read_bytes()
