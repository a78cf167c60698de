"""Trajectories from files and from the journal, and recorded calls for `merge`: damaged in any way they are read, or
refused with a sentence; what is read is written again the same.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
from attrs import evolve
from click.testing import CliRunner
from fuzz_json import changed, mutated, torn, torn_bytes
from fuzz_kit import Target, check_sentence, play, watched
from hypothesis import strategies as st
from journal_samples import make_trajectory

from polarnode.cli.main import main
from polarnode.core.codec.json import dump_json, read_json
from polarnode.core.codec.packing import (
    PACKED_FORMAT,
    pack_trajectory,
    pack_turn,
    unpack_trajectory,
    unpack_turn,
)
from polarnode.core.codec.trajectories import read_trajectory, trajectory_json
from polarnode.core.errors import Refused
from polarnode.journal.damage import Unreadable, decode_boundary

TRAJECTORY = make_trajectory("s1", turns=3)
# a trace of no turn: its arrays are packed as they are
WILD = evolve(
    TRAJECTORY, traces=tuple(evolve(trace, token_ids=trace.token_ids[::-1]) for trace in TRAJECTORY.traces)
)
JSONS = tuple(
    trajectory_json(TRAJECTORY, turns=turns, arrays=arrays)  # type: ignore[arg-type]
    for turns in ("full", "table")
    for arrays in ("json", "base64")
)
CALLS = tuple(
    {"session_id": "s", "turn_id": turn, "prompt_ids": prompt, "sampled_ids": [9, 8], "logprobs": [-0.5, -1], "weight_version": "1"}
    for turn, prompt in ((1, [1, 2]), (2, [1, 2, 9, 8, 3]))
)  # fmt: skip


def read_file(body: bytes) -> None:
    """A line of trajectories.jsonl: refused with a path, or written and read again the same."""
    with watched(len(body)):
        try:
            found = read_trajectory(read_json(body))
        except Refused as refused:
            check_sentence(str(refused))
            return
        written = dump_json(trajectory_json(found, turns="full", arrays="base64"))
        again = read_trajectory(read_json(written))
        assert dump_json(trajectory_json(again, turns="full", arrays="base64")) == written


@st.composite
def rows(draw: st.DrawFn) -> tuple[str, bytes]:
    """A packed turn or trajectory, with values or bytes changed."""
    kind = draw(st.sampled_from(("turn", "trajectory")))
    packed = draw(st.sampled_from([pack_turn(turn) for turn in TRAJECTORY.turns]))
    if kind == "trajectory":
        packed = pack_trajectory(draw(st.sampled_from((TRAJECTORY, WILD))))
    if draw(st.booleans()):
        values = msgpack.unpackb(packed[1:], raw=False, strict_map_key=False, unicode_errors="surrogatepass")
        odd = draw(changed((values,)))
        try:
            return kind, PACKED_FORMAT + msgpack.packb(odd, unicode_errors="surrogatepass")
        except (OverflowError, ValueError):  # an odd value that msgpack does not have
            return kind, packed
    return kind, draw(torn_bytes(packed))


def read_row(value: tuple[str, bytes]) -> None:
    """Without a checksum, as in journals of versions before 5: unreadable, or a value."""
    kind, packed = value
    with watched(len(packed)):
        try:
            with decode_boundary():
                if kind == "turn":
                    unpack_turn(packed)
                else:
                    unpack_trajectory(packed, TRAJECTORY.turns)
        except Unreadable as error:
            check_sentence(str(error))


def invoked(body: bytes, *arguments: str) -> None:
    """A command that reads stdin or a file: exit status 0, 1 or 2 and sentences, never a traceback."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "in.jsonl")
        file.write_bytes(body)
        with watched(len(body), descriptors=False):
            result = CliRunner().invoke(main, [*arguments, str(file)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 1, 2)
    if result.exit_code:
        check_sentence(result.stderr)


def several(*good: Any) -> st.SearchStrategy[bytes]:
    line = (mutated(good) | torn(good)).map(lambda data: data.replace(b"\n", b" "))
    whole = st.sampled_from([json.dumps(each).encode() for each in good])
    return st.lists(line | whole, min_size=1, max_size=4).map(b"\n".join)


def commanded(*arguments: str) -> Callable[[bytes], None]:
    return lambda body: invoked(body, *arguments)


TARGETS = (
    Target(name="trajectory_files", inputs=mutated(JSONS) | torn(JSONS), check=read_file, examples=200),
    Target(name="journal_rows", inputs=rows(), check=read_row, examples=200),
    Target(name="merge", inputs=several(*CALLS), check=commanded("merge"), examples=80),
    Target(name="inspect", inputs=several(*JSONS), check=commanded("inspect", "s1", "--from"), examples=80),
)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_a_damaged_trajectory_is_read_or_refused(target: Target) -> None:
    play(target)
