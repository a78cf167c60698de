"""What an engine host does besides SGLang: its chunks as messages, its leftovers, its stand-in for torchvision. The rest: test_engine_real.py."""

import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from polarnode.engine_host import building, lifeline
from polarnode.engine_host.protocol import Failed, Generate, Piece
from polarnode.engine_host.words import AFTER, IMPOSSIBLE, piece, request

RID = "0" * 32


def meta(logprobs: list[float], finish: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """As SGLang 0.5.23 sends it, with what we do not read left out."""
    return {"weight_version": "v1", "output_token_logprobs": [(each, 1, None) for each in logprobs], "finish_reason": finish, **more}


def test_a_chunk_becomes_a_piece() -> None:
    found = piece(RID, [5, 70_000], meta([-0.5, -0.25], cached_tokens=12))
    assert found == Piece(
        rid=RID, ids=array("i", [5, 70_000]).tobytes(), logprobs=array("f", [-0.5, -0.25]).tobytes(), version="v1", cached_tokens=12
    )


def test_the_last_chunk_has_its_finish_and_its_spans() -> None:
    spans = [{"version": "v0", "start": 0, "end": 7}, {"version": "v1", "start": 7, "end": 9}]
    found = piece(RID, [5], meta([-0.5], {"type": "stop", "matched": 5}, weight_versions=spans))
    assert isinstance(found, Piece)
    assert found.finish == "stop"
    assert found.spans == (("v0", 0, 7), ("v1", 7, 9))


@pytest.mark.parametrize(
    ("finish", "kind"),
    [({"type": "length", "length": 1}, "length"), ({"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}, "abort")],
)
def test_other_ends_keep_their_names(finish: dict[str, Any], kind: str) -> None:
    found = piece(RID, [], meta([], finish))
    assert isinstance(found, Piece)
    assert found.finish == kind


@pytest.mark.parametrize(
    ("finish", "sentence", "retryable"),
    [
        ({"type": "stop", "matched": "NaN happened"}, "NaN logits", False),
        ({"type": "abort", "message": "too long", "status_code": 400}, "too long", False),
        ({"type": "abort", "message": "Grammar accept_token failed: Tokens", "status_code": 500}, "nothing to sample", False),
        ({"type": "abort", "message": "queue is full", "status_code": 503}, "queue is full", True),
    ],
)
def test_an_end_that_is_none_of_ours_is_a_failure(finish: dict[str, Any], sentence: str, retryable: bool) -> None:
    found = piece(RID, [5], meta([-0.5], finish))
    assert isinstance(found, Failed)
    assert sentence in found.message
    assert found.retryable is retryable


def test_tokens_without_their_logprobs_are_a_failure() -> None:
    found = piece(RID, [5, 6], meta([-0.5]))
    assert isinstance(found, Failed)
    assert "2 tokens with 1 logprobs" in found.message


def test_alternatives_follow_their_tokens() -> None:
    told = [[(-0.5, 5, None), (-3.4e38, 9, None)], [(-0.25, 6, None), (-2.0, 5, None)]]
    found = piece(RID, [5, 6], meta([-0.5, -0.25], output_top_logprobs=told), top_logprobs=2)
    assert isinstance(found, Piece)
    assert array("i", found.alternative_ids).tolist() == [5, 9, 6, 5]
    assert array("f", found.alternative_logprobs).tolist() == [-0.5, IMPOSSIBLE, -0.25, -2.0]
    assert piece(RID, [5, 6], meta([-0.5, -0.25], output_top_logprobs=told)) == piece(RID, [5, 6], meta([-0.5, -0.25]))


@pytest.mark.parametrize("told", [None, [None, None], [[(-0.5, 5, None)], [(-0.25, 6, None), (-2.0, 5, None)]], [[(-0.5, 5, None)] * 2]])
def test_alternatives_that_are_not_as_many_as_asked_for_are_a_failure(told: Any) -> None:
    found = piece(RID, [5, 6], meta([-0.5, -0.25], output_top_logprobs=told), top_logprobs=2)
    assert isinstance(found, Failed)
    assert "for 2 tokens of 2 each" in found.message


def test_an_order_is_spelled_for_sglang() -> None:
    order = Generate(rid=RID, prompt=array("i", [7, 8]).tobytes(), sampling={"regex": "a", "top_k": -1}, top_logprobs=2, processor="{}")
    said = request(order)
    assert (said["input_ids"], said["rid"], said["top_logprobs_num"], said["custom_logit_processor"]) == ([7, 8], RID, 2, "{}")
    assert said["sampling_params"] == {"regex": "a", "top_k": -1}
    assert not said["require_reasoning"]
    late = request(evolve(order, constraint_after=9))
    assert late["sampling_params"]["custom_params"] == {AFTER: 9}
    assert late["require_reasoning"]


def test_leftovers_are_what_bears_the_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_stand_in_for_torchvision_imports_and_refuses_to_work() -> None:
    ran = subprocess.run([sys.executable, "-c", TORCHVISION], env={"PYTHONPATH": str(building.STUBS)}, capture_output=True, text=True, check=False)
    assert ran.stderr == ""
    assert "torchvision.transforms.Compose needs the real torchvision" in ran.stdout
    assert "torchvision.transforms.v2.functional.resize needs" in ran.stdout


def test_the_host_refuses_to_share_a_session() -> None:
    """It ends with its whole session: in a shell's, that would be the shell."""
    command = [sys.executable, "-m", "polarnode.engine_host", "--fd", "0", "--lifeline-fd", "0", "--tag", "t"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "lead a session of its own" in ran.stderr
