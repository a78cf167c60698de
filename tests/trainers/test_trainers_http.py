"""Trainers' formats over HTTP: one trajectory, the stream and the export, as lists and as base64;
conversations and Parquet.
"""

import io
import json
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy
import pyarrow.parquet as pq
import pytest
from attrs import evolve, fields
from control_plane_parts import Caller, Plane, open_plane
from journal_writes import publish_end
from trainers_kit import one_row, session_of_two_rows, session_without_rows

from polarnode.api import exports, openapi_shapes
from polarnode.api.exports import ParquetFile
from polarnode.core.trajectory import Trajectory
from polarnode.journal import queries
from polarnode.trainers import FORMATS, project, trl


async def keep(plane: Plane, *trajectories: Trajectory) -> Caller:
    for trajectory in trajectories:
        for turn in trajectory.turns:
            plane.journal.writer.record_turn(evolve(turn, session_id=trajectory.session_id))
        publish_end(plane.journal, trajectory)
    await plane.journal.writer.flush()
    return Caller(url=plane.url)


def read(value: Any) -> Any:
    """Base64 arrays as a client reads them."""
    if (
        isinstance(value, dict)
        and value.keys() == {"dtype", "shape", "data"}
        and isinstance(value["data"], str)
    ):
        return (
            numpy.frombuffer(b64decode(value["data"]), dtype=value["dtype"]).reshape(value["shape"]).tolist()
        )
    if isinstance(value, dict):
        return {name: read(each) for name, each in value.items()}
    return [read(each) for each in value] if isinstance(value, list) else value


async def test_every_format_of_a_trajectory(tmp_path: Path) -> None:
    async with open_plane(tmp_path / "journal.sqlite") as plane:
        caller = await keep(plane, one_row())
        kept = await plane.journal.reader.query(queries.trajectory, "s0")
        assert kept is not None
        for name in FORMATS:
            said = (await caller.get("/v1/trajectories/s0", format=name)).json()
            packed = (await caller.get("/v1/trajectories/s0", format=name, arrays="base64")).json()
            assert (said["format"], said["session_id"], said["reward"], said["outcome"]["status"]) == (
                name,
                "s0",
                1.0,
                "completed",
            )
            expected = json.loads(json.dumps(project(name, kept), default=lambda data: "bytes"))
            if name != "prime_rl":  # whose experts are a struct with those very three fields
                assert said["value"] == expected
                assert read(packed["value"]) == expected
            else:
                assert (
                    said["value"][0]["token_ids"]
                    == expected[0]["token_ids"]
                    == read(packed["value"][0]["token_ids"])
                )
                assert len(b64decode(said["value"][0]["routed_experts"]["data"])) == 10 * 6


async def test_unsupported_or_unknown_format_is_400(tmp_path: Path) -> None:
    async with open_plane(tmp_path / "journal.sqlite") as plane:
        caller = await keep(plane, session_of_two_rows())
        for params, sentence in (
            ({"format": "trl"}, "has 2 rows and this format takes one a session"),
            ({"format": "trlx"}, f"must be one of {', '.join(FORMATS)}, parquet, not 'trlx'"),
            ({"format": "parquet"}, f"must be one of {', '.join(FORMATS)} here"),
            ({"format": "verl", "turns": "full"}, "turns=full is for a trajectory's own JSON"),
        ):
            refused = await caller.get("/v1/trajectories/s0", **params)
            assert refused.status == 400
            assert sentence in refused.json()["error"]["message"]
        assert (await caller.get("/v1/export", format="verl", kind="sft")).status == 400
        assert (await caller.get("/v1/trajectories/stream", format="parquet", follow="false")).status == 400


async def test_stream_reports_unformattable_and_continues(tmp_path: Path) -> None:
    """A stream in a format tells what it cannot carry, and goes on."""
    async with open_plane(tmp_path / "journal.sqlite") as plane:
        caller = await keep(
            plane,
            one_row(),
            session_of_two_rows(sample_index=1),
            session_without_rows(sample_index=2),
            one_row(sample_index=3),
        )
        async with caller.stream(format="trl", follow="false") as stream:
            told = [(await stream.event())["data"] for _ in range(4)]
        assert [each["key"] for each in told] == [f"trajectory:s{place}" for place in range(4)]
        bodies = [each["trajectory"] for each in told]
        assert [body.get("refused") is None for body in bodies] == [True, False, False, True]
        assert bodies[3]["value"] == trl.rollout_output([one_row(sample_index=3)])
        assert bodies[1]["value"] is None
        lines = (await caller.get("/v1/export", format="trl")).text.splitlines()
        assert [json.loads(line) for line in lines] == bodies
        assert [
            json.loads(line)["session_id"]
            for line in (await caller.get("/v1/export", format="slime", outcome="error")).text.splitlines()
        ] == ["s2"]


async def test_rows_of_tokens_as_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "ROW_GROUP_TOKENS", 12)  # several row groups
    async with open_plane(tmp_path / "journal.sqlite") as plane:
        caller = await keep(
            plane,
            one_row(),
            session_of_two_rows(sample_index=1),
            session_without_rows(sample_index=2),
            one_row(sample_index=3),
        )
        said = await caller.get("/v1/export", format="parquet")
        assert said.headers["content-type"] == "application/vnd.apache.parquet"
        file = pq.ParquetFile(io.BytesIO(said.body))
        assert file.num_row_groups > 1
        rows = file.read().to_pylist()
        assert [row["session_id"] for row in rows] == ["s0", "s1", "s1", "s3"]
        assert rows[0]["token_ids"] == one_row().traces[0].token_ids.tolist()
        assert rows[0]["logprobs"] == one_row().traces[0].logprobs.tolist()
        few = pq.ParquetFile(
            io.BytesIO((await caller.get("/v1/export", format="parquet", outcome="error")).body)
        )
        assert (few.metadata.num_rows, few.schema_arrow.names[0]) == (0, "session_id")


async def test_parquet_without_pyarrow_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    async with open_plane(tmp_path / "journal.sqlite") as plane:
        refused = await (await keep(plane, one_row())).get("/v1/export", format="parquet")
    assert (refused.status, refused.json()["error"]["type"]) == (500, "config")
    assert "pip install 'polarnode[data]'" in refused.json()["error"]["message"]


def test_parquet_file_is_streamed() -> None:
    from polarnode.offline.rows import rows_of

    file = ParquetFile()
    pieces = [
        file.written(rows_of(one_row(sample_index=place), accepted=True, held_out=False))
        for place in range(3)
    ]
    whole = b"".join([*pieces, file.written(()), file.ended()])
    assert all(pieces)
    assert file.tell() == len(whole)
    assert pq.ParquetFile(io.BytesIO(whole)).num_row_groups == 3


async def test_conversation_lines_per_session(tmp_path: Path) -> None:
    """Words are those of the turns: sessions without any have no line."""
    from merge_toys import Session, ask, system, user
    from trainers_kit import publish

    session = Session("s0")
    session.say(ask(system(), user()), "done")
    async with open_plane(tmp_path / "journal.sqlite") as plane:
        caller = await keep(
            plane,
            publish(session.turns),
            one_row(sample_index=1),
            publish(session.turns, sample_index=2, reward=0.0),
        )
        [line] = [
            json.loads(line)
            for line in (await caller.get("/v1/export", kind="sft", min_reward=0.5)).text.splitlines()
        ]
    assert [message["role"] for message in line["messages"]] == ["system", "user", "assistant"]
    assert line["tools"][0]["function"]["name"] == "bash"
    assert (line["session_id"], line["reward"], line["sampled"]) == ("s0", 1.0, [2])


def test_api_document_names_formats() -> None:
    assert exports.format_json("slime", one_row(), "json").keys() | {"refused"} == {
        field.name for field in fields(openapi_shapes.Formatted)
    }


def test_refusals_replace_values() -> None:
    said = json.loads(exports.format_bytes("areal", one_row(reward=None), "json"))
    assert said["value"] is None
    assert "has no reward" in said["refused"]
