"""What an engine host does besides SGLang: its chunks as messages, its leftovers, its stand-in for
torchvision. The rest: test_engine_real.py.
"""

import asyncio
import subprocess
import sys
from array import array
from base64 import b64encode
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from attrs import evolve

from polarnode.engine.embedded import building, control, lifeline
from polarnode.engine.embedded.control import (
    AFTER_KEY,
    IMPOSSIBLE_LOGPROB,
    LATE_GRAMMAR,
    NOTHING_TO_SAMPLE,
    SESSION,
    TOO_COSTLY,
    piece,
    request,
    routed,
)
from polarnode.engine.embedded.serving import Serving
from polarnode.engine.protocol import ExpertShape, Failed, Generate, Piece, RoutedRows

RID = "0" * 32


def meta(logprobs: list[float], finish: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """As SGLang 0.5.23 sends it, with what we do not read left out."""
    return {
        "weight_version": "v1",
        "output_token_logprobs": [(each, 1, None) for each in logprobs],
        "finish_reason": finish,
        **more,
    }


def test_chunk_becomes_a_piece() -> None:
    found = piece(RID, [5, 70_000], meta([-0.5, -0.25], cached_tokens=12))
    assert found == Piece(
        rid=RID,
        ids=array("i", [5, 70_000]).tobytes(),
        logprobs=array("f", [-0.5, -0.25]).tobytes(),
        version="v1",
        cached_tokens=12,
    )


def test_last_chunk_has_finish_and_spans() -> None:
    spans = [{"version": "v0", "start": 0, "end": 7}, {"version": "v1", "start": 7, "end": 9}]
    found = piece(RID, [5], meta([-0.5], {"type": "stop", "matched": 5}, weight_versions=spans))
    assert isinstance(found, Piece)
    assert found.finish == "stop"
    assert found.spans == (("v0", 0, 7), ("v1", 7, 9))


@pytest.mark.parametrize(
    ("finish", "kind"),
    [
        ({"type": "length", "length": 1}, "length"),
        ({"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}, "abort"),
        # so SGLang ends a request whose grammar it still compiles
        ({"type": "abort", "message": "Aborted by AbortReq.", "status_code": 400}, "abort"),
    ],
)
def test_other_finishes_keep_their_names(finish: dict[str, Any], kind: str) -> None:
    found = piece(RID, [], meta([], finish))
    assert isinstance(found, Piece)
    assert found.finish == kind


@pytest.mark.parametrize(
    ("finish", "sentence", "retryable", "refused"),
    [
        ({"type": "stop", "matched": "NaN happened"}, "NaN logits", False, False),
        ({"type": "abort", "message": "Failed to compile", "status_code": 400}, "compile", False, True),
        (
            {"type": "abort", "message": "Grammar accept_token failed: Tokens", "status_code": 500},
            "nothing to sample",
            False,
            True,
        ),
        ({"type": "abort", "message": "queue is full", "status_code": 503}, "queue is full", True, False),
        (
            {"type": "abort", "message": f"{LATE_GRAMMAR}: req.grammar_key=('a',)", "status_code": 400},
            "costs too much to compile",
            False,
            True,
        ),
        (
            {"type": "abort", "message": f"Grammar accept_token failed: {TOO_COSTLY}", "status_code": 500},
            "costs too much to compile or to follow",
            False,
            True,
        ),
    ],
)
def test_unknown_finish_is_a_failure(
    finish: dict[str, Any], sentence: str, retryable: bool, refused: bool
) -> None:
    found = piece(RID, [5], meta([-0.5], finish))
    assert isinstance(found, Failed)
    assert sentence in found.message
    assert (found.retryable, found.refused) == (retryable, refused)


def test_impossible_constraint_fails_with_reason() -> None:
    """SGLang samples a token all the same, with the logprob NaN, and aborts in its next chunk."""
    found = piece(RID, [5], meta([float("nan")]), constrained=True)
    assert found == Failed(rid=RID, message=NOTHING_TO_SAMPLE, retryable=False, refused=True)
    assert isinstance(piece(RID, [5], meta([-0.5]), constrained=True), Piece)


def test_missing_logprobs_are_a_failure() -> None:
    found = piece(RID, [5, 6], meta([-0.5]))
    assert isinstance(found, Failed)
    assert "2 tokens with 1 logprobs" in found.message


def test_alternatives_follow_their_tokens() -> None:
    told = [[(-0.5, 5, None), (-3.4e38, 9, None)], [(-0.25, 6, None), (-2.0, 5, None)]]
    found = piece(RID, [5, 6], meta([-0.5, -0.25], output_top_logprobs=told), top_logprobs=2)
    assert isinstance(found, Piece)
    assert array("i", found.alternative_ids).tolist() == [5, 9, 6, 5]
    assert array("f", found.alternative_logprobs).tolist() == [-0.5, IMPOSSIBLE_LOGPROB, -0.25, -2.0]
    assert piece(RID, [5, 6], meta([-0.5, -0.25], output_top_logprobs=told)) == piece(
        RID, [5, 6], meta([-0.5, -0.25])
    )


@pytest.mark.parametrize(
    "told",
    [None, [None, None], [[(-0.5, 5, None)], [(-0.25, 6, None), (-2.0, 5, None)]], [[(-0.5, 5, None)] * 2]],
)
def test_wrong_alternative_count_is_failure(told: Any) -> None:
    found = piece(RID, [5, 6], meta([-0.5, -0.25], output_top_logprobs=told), top_logprobs=2)
    assert isinstance(found, Failed)
    assert "for 2 tokens of 2 each" in found.message


def test_order_becomes_sglang_request() -> None:
    order = Generate(
        rid=RID,
        prompt=array("i", [7, 8]).tobytes(),
        sampling={"regex": "a", "top_k": -1},
        top_logprobs=2,
        processor="{}",
    )
    said = request(order)
    assert (said["input_ids"], said["rid"], said["top_logprobs_num"], said["custom_logit_processor"]) == (
        [7, 8],
        RID,
        2,
        "{}",
    )
    assert said["sampling_params"] == {
        "regex": "a",
        "top_k": -1,
        "custom_params": {"polarnode_session": ""},
    }
    named = request(evolve(order, session="s1/chain", constraint_after=5))["sampling_params"]
    assert named["custom_params"] == {"polarnode_session": "s1", "polarnode_constraint_after": 5}
    assert not said["require_reasoning"]
    assert not said["return_routed_experts"]
    carried = request(evolve(order, routed_from=1))
    assert (carried["return_routed_experts"], carried["routed_experts_start_len"]) == (True, 1)
    late = request(evolve(order, constraint_after=9))
    assert late["sampling_params"]["custom_params"] == {SESSION: "", AFTER_KEY: 9}
    assert late["require_reasoning"]
    named = evolve(order, session="s1")
    assert "session_id" not in request(named)  # SGLang would look for a session that was opened
    assert request(named, sessions=True)["session_id"] == "s1"
    assert "session_id" not in request(order, sessions=True)


async def test_forget_skips_engine_without_sessions() -> None:
    """It would answer with a warning; test_engine_cache_real.py has one that does."""
    engine = SimpleNamespace(server_args=SimpleNamespace(enable_session_radix_cache=False))
    found = control.Control(engine=engine, version="0")
    assert not found.sessions
    await found.forget("s1")


# ── routed experts, as SGLang 0.5.23 sends them: int32 in base64, [positions, layers, experts a token] ──

MIXTURE = ExpertShape(layers=3, top_k=2, number=8)
CARRIED = Generate(rid=RID, prompt=array("i", range(5)).tobytes(), sampling={}, routed_from=3)
# Recorded of a Qwen3-MoE of 3 layers and 8 experts, asked from position 3 on: positions 3 to 7.
RECORDED = "AgAAAAcAAAAEAAAAAAAAAAEAAAAFAAAABAAAAAYAAAAFAAAAAQAAAAIAAAAFAAAABAAAAAcAAAABAAAABAAAAAYAAAACAAAAAAAAAAUAAAAFAAAAAAAAAAIAAAAGAAAABQAAAAAAAAAFAAAABAAAAAYAAAAFAAAA"


def experts(rows: Any) -> dict[str, Any]:
    return {"routed_experts": b64encode(numpy.array(rows, "<i4").tobytes()).decode()}


def test_experts_start_at_requested_position() -> None:
    found = routed(CARRIED, MIXTURE, 9, {"routed_experts": RECORDED})
    assert found == [
        RoutedRows(rid=RID, start=3, layers=3, top_k=2, wide=False, data=bytes([2, 7, 4, 0, 1, 5, 4, 6, 5, 1, 2, 5, 4, 7, 1, 4, 6, 2, 0, 5, 5, 0, 2, 6, 5, 0, 5, 4, 6, 5]))
    ]  # fmt: skip


def test_older_builds_expert_rows_are_cut() -> None:
    """A build that ignores the requested start is understood."""
    rows = [[[place % 8] * 2] * 3 for place in range(8)]
    assert routed(CARRIED, MIXTURE, 9, experts(rows)) == routed(CARRIED, MIXTURE, 9, experts(rows[3:]))
    whole = routed(evolve(CARRIED, routed_from=0), MIXTURE, 9, experts(rows))
    assert isinstance(whole, list)
    assert (whole[0].start, len(whole[0].data)) == (0, 8 * 6)


def test_many_experts_take_two_bytes() -> None:
    found = routed(CARRIED, ExpertShape(layers=1, top_k=2, number=384), 6, experts([[383, 2], [0, 256]]))
    assert isinstance(found, list)
    assert (found[0].wide, array("h", found[0].data).tolist()) == (True, [383, 2, 0, 256])


@pytest.mark.parametrize(
    ("meta", "sentence"),
    [
        ({}, "returned no routed experts"),
        (experts([[[1, 2]] * 3] * 4), "24 numbers for 5 positions of 3 layers with 2 experts each"),
        (experts([[[1, 2]] * 3] * 6), "36 numbers for 5 positions"),
        (experts([1] * 29), "29 numbers for 5 positions"),
        (experts([[[1, 8]] * 3] * 5), "experts from 1 to 8, this model has 0 to 7"),
        (experts([[[-1, 2]] * 3] * 5), "experts from -1 to 2"),
    ],
)
def test_wrong_expert_shape_is_failure(meta: dict[str, Any], sentence: str) -> None:
    found = routed(CARRIED, MIXTURE, 9, meta)
    assert isinstance(found, Failed)
    assert sentence in found.message


def test_expert_messages_split_between_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "SLAB", 14)
    rows = [[[place % 8] * 2] * 3 for place in range(8)]
    found = routed(evolve(CARRIED, routed_from=0), MIXTURE, 9, experts(rows))
    assert isinstance(found, list)
    assert [(each.start, len(each.data)) for each in found] == [(0, 12), (2, 12), (4, 12), (6, 12)]
    assert b"".join(each.data for each in found) == bytes(place for place in range(8) for _ in range(6))


def test_single_token_has_no_expert_row() -> None:
    """A sample of one token behind a whole prompt has no new row of experts."""
    found = routed(evolve(CARRIED, routed_from=5), MIXTURE, 6, experts([]))
    assert found == [RoutedRows(rid=RID, start=5, layers=3, top_k=2, wide=False, data=b"")]


def test_tagged_leftovers_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "SHARED_MEMORY", tmp_path / "shm")
    for name in ("shm/sem.pnx-1", "shm/sglang_loads_pnx_2.shm", "shm/sem.other-1", "scratch/tmp1"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    lifeline.remove_leftovers(tag="pnx", scratch=tmp_path / "scratch")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["sem.other-1", "shm"]


TORCHVISION = """
import torchvision, torchvision.transforms as T
from torchvision.transforms.functional import InterpolationMode
from torchvision.transforms.v2 import functional as tvF
{InterpolationMode.NEAREST: 1}
class Mine(T.Resize): pass
for attempt in (lambda: T.Compose([]), lambda: tvF.resize(1), lambda: torchvision.__path_of_nothing__):
    try:
        attempt()
    except (ImportError, AttributeError) as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("cache", "tokens"),
    [
        (SimpleNamespace(), 0),
        (SimpleNamespace(token_to_kv_pool_host=None), 0),
        (SimpleNamespace(token_to_kv_pool_host=SimpleNamespace(logical_size=64)), 64),
        (SimpleNamespace(full_kv_pool_host=SimpleNamespace(logical_size=128)), 128),
    ],
)
def test_host_cache_tokens_are_of_pool(cache: Any, tokens: int) -> None:
    """The tokens of main memory are those of the cache's pool."""
    assert building.host_tokens(cache) == tokens


def test_torchvision_stub_imports_and_refuses() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", TORCHVISION],
        env={"PYTHONPATH": str(building.STUBS_FOLDER)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stderr == ""
    assert "torchvision.transforms.Compose needs the real torchvision" in ran.stdout
    assert "torchvision.transforms.v2.functional.resize needs" in ran.stdout


def test_host_refuses_shared_session() -> None:
    """It ends with its whole session: in a shell's, that would be the shell."""
    command = [
        sys.executable,
        "-m",
        "polarnode.engine.embedded",
        "--fd",
        "0",
        "--lifeline-fd",
        "0",
        "--tag",
        "t",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "lead a session of its own" in ran.stderr


@pytest.mark.parametrize(("adapter", "refused"), [("", True), ("a-1", True), ("a-2", False)])
def test_sglang_validation_is_request_fault(adapter: str, refused: bool) -> None:
    """Also under an adapter, unless it is the adapter that SGLang has not."""

    async def generate(**_: Any) -> None:
        raise ValueError("logit_bias has a token that is none")

    registry = SimpleNamespace(get_all_adapters=lambda: {"a-1": None})
    engine = SimpleNamespace(
        async_generate=generate,
        tokenizer_manager=SimpleNamespace(lora_registry=registry),
        server_args=SimpleNamespace(enable_session_radix_cache=False),
    )
    ours = control.Control(engine, version="0")
    nothing: Any = None
    host = Serving(engine, nothing, nothing, nothing, ours)
    order = Generate(rid=RID, prompt=array("i", [1]).tobytes(), sampling={}, adapter=adapter)

    async def answered() -> None:
        ours.resumed.set()
        await host._generate(order)

    asyncio.run(answered())
    (end,) = host._outbox
    assert end == Failed(
        rid=RID, message="logit_bias has a token that is none", retryable=False, refused=refused
    )
