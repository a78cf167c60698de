"""Logs over a real socket: pieces of files as they grow, ends, rotations, and what is no log."""

from pathlib import Path

import pytest
from control_plane_parts import Caller, open_plane
from journal_samples import make_spec, make_trajectory
from journal_writes import publish_end

from polarnode.api.logs import MAX_PIECE_BYTES, list_log_files, read_piece
from polarnode.api.query import Query
from polarnode.rollouts.session import MAX_HARNESS_LOG_BYTES

EMPTY = {"text": "", "offset": 0, "next_offset": 0, "size": 0, "ended": False, "wrapped": False}


async def test_growing_session_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t-0.log"
    async with open_plane(tmp_path / "journal.sqlite") as plane:
        caller = Caller(url=plane.url)
        await plane.service.submit(make_spec(task_id="t", num_samples=2), idempotency_key=None)
        await plane.journal.writer.flush()
        assert (await caller.get("/v1/sessions/t-0/log")).json() == {"name": "t-0", **EMPTY}
        path.write_bytes("one\ntwo\nthrée".encode()[:-2])  # cut in the middle of a character
        first = (await caller.get("/v1/sessions/t-0/log")).json()
        assert (first["text"], first["next_offset"], first["size"]) == ("one\ntwo\nthr", 11, 12)
        path.write_bytes("one\ntwo\nthrée\n".encode())
        second = (await caller.get("/v1/sessions/t-0/log", offset=first["next_offset"])).json()
        assert (second["text"], second["offset"], second["ended"]) == ("ée\n", 11, False)
        last = (await caller.get("/v1/sessions/t-0/log", tail=2)).json()
        assert (last["text"], last["offset"]) == ("two\nthrée\n", 4)
        publish_end(plane.journal, make_trajectory("t-0", task_id="t"))
        publish_end(plane.journal, make_trajectory("t-1", task_id="t", sample_index=1))
        await plane.journal.writer.flush()
        ended = (await caller.get("/v1/sessions/t-0/log", offset=second["next_offset"])).json()
        assert (ended["text"], ended["ended"]) == ("", True)
        never = await caller.get("/v1/sessions/t-1/log")
        unknown = await caller.get("/v1/sessions/none/log")
    assert (never.status, never.json()["error"]["message"]) == (
        404,
        "session 't-1' has no log: its harness did not start, or is run by its caller",
    )
    assert (unknown.status, "no session 'none'" in unknown.text) == (404, True)


@pytest.mark.parametrize(
    ("parameters", "path", "sentence"),
    [
        ({"tail": 0}, "?tail", "tail must be 1 to 10000, not 0"),
        ({"tail": 20_000}, "?tail", "tail must be 1 to 10000, not 20000"),
        ({"tail": 1, "offset": 1}, "?tail", "tail cannot go with offset: send one of them"),
        ({"offset": "x"}, "?offset", "offset must be a whole number, not 'x'"),
        ({"limit": 3}, "?limit", "limit is not a parameter of this route: it takes offset, tail"),
    ],
)
async def test_invalid_log_position_is_refused(
    tmp_path: Path, parameters: dict[str, object], path: str, sentence: str
) -> None:
    (tmp_path / "node.log").write_text("line\n")
    async with open_plane(tmp_path / "journal.sqlite") as plane:
        answer = await Caller(url=plane.url).get("/v1/logs/node", **parameters)
    assert (answer.status, answer.json()["error"]["path"]) == (400, path)
    assert answer.json()["error"]["message"] == sentence


async def test_node_logs_are_listed_and_read(tmp_path: Path) -> None:
    for name in ("engine-0", "node", "teacher-big/engine-0"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.log").write_text(f"{name}\n")
    (tmp_path / "sessions").mkdir()
    (tmp_path / "sessions" / "s.log").write_text("a session's")
    (tmp_path / "node.log.1").write_text("older")
    async with open_plane(tmp_path / "journal.sqlite") as plane:
        caller = Caller(url=plane.url)
        listed = (await caller.get("/v1/logs")).json()["logs"]
        assert [each["name"] for each in listed] == ["node", "engine-0", "teacher-big/engine-0"]
        for each in listed:
            piece = (await caller.get(f"/v1/logs/{each['name']}")).json()
            assert (piece["text"], piece["size"]) == (f"{each['name']}\n", each["size"])
        for name in ("sessions/s", "../node", "node.log", "%2e%2e/node", "journal"):
            answer = await caller.get(f"/v1/logs/{name}")
            assert answer.status == 404, name
        assert "there are node, engine-0, teacher-big/engine-0" in answer.json()["error"]["message"]


def test_long_log_comes_in_pieces(tmp_path: Path) -> None:
    path, line = tmp_path / "s.log", "x" * 99 + "\n"
    path.write_text(line * 9000)
    text, offset = "", 0
    while (piece := read_piece(path, Query(offset=offset), name="s", ended=True)) and piece.text:
        assert len(piece.text) <= MAX_PIECE_BYTES
        text, offset = text + piece.text, piece.next_offset
    assert text == line * 9000
    tail = read_piece(path, Query(tail=10_000), name="s")
    assert tail is not None
    assert tail.text.count("\n") == MAX_PIECE_BYTES // 100 + 1  # the first is cut
    assert tail.next_offset == tail.size == 900_000


def test_rotated_and_full_logs(tmp_path: Path) -> None:
    """A rotated log begins again, and a full one says so."""
    path = tmp_path / "node.log"
    path.write_text("new\n")
    piece = read_piece(path, Query(offset=16 << 20), name="node")
    assert piece is not None
    assert (piece.text, piece.offset) == ("new\n", 0)
    assert not piece.wrapped
    with path.open("wb") as file:
        file.truncate(MAX_HARNESS_LOG_BYTES)
    running = read_piece(path, Query(tail=1), name="s", ring=MAX_HARNESS_LOG_BYTES)
    over = read_piece(path, Query(tail=1), name="s", ended=True, ring=MAX_HARNESS_LOG_BYTES)
    assert running is not None
    assert over is not None
    assert (running.wrapped, over.wrapped) == (True, False)


def test_invalid_text_bytes_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "s.log"
    path.write_bytes(b"a\xff\xfeb\xc3")
    piece = read_piece(path, Query(), name="s", ended=True)
    assert piece is not None
    assert (piece.text, piece.next_offset) == ("a\ufffd\ufffdb\ufffd", 5)


def test_empty_folder_has_no_logs(tmp_path: Path) -> None:
    assert list_log_files(tmp_path) == {}
