"""What the benchmark of a real cache predicts, and the model it starts: the engine itself is started by hand."""

import json
from pathlib import Path

import pytest
from attrs import evolve

from benchmarks import kv_real
from polarnode.engine.kv_model import KvConstants

SMALL = KvConstants(
    capacity=6000, page=1, chunk=131_072, most_running=16, prefill_tokens_per_s=32_000, past_tokens=800,
    step_s=0.004, request_s=0.0014, context_s=3e-7,
)  # fmt: skip


def test_excess_sessions_lose_their_prefixes() -> None:
    few, many = (kv_real.predicted(SMALL, 0.01, count, 60, 1) for count in (3, 19))
    assert few["known_from_cache"] > 0.95
    assert many["known_from_cache"] < 0.3
    assert few["calls"] > 50
    assert 0 < many["tokens_per_s"] < 16 / SMALL.step_s
    assert kv_real.predicted(SMALL, 0.01, 3, 60, 1) == few, "the same load each time"


def test_endless_model_never_ends_turn(tmp_path: Path) -> None:
    folder = kv_real.endless(tmp_path / "model")
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] is None
    assert not (folder / "generation_config.json").exists()
    assert (folder / "model.safetensors").stat().st_size > 0


def test_session_grows_and_begins_again() -> None:
    (session,) = kv_real.sessions(1, 1)
    first = session.next_prompt()
    assert len(first) == kv_real.SYSTEM + kv_real.FIRST
    session.answered([7] * kv_real.SAMPLE)
    second = session.next_prompt()
    assert second[: len(first) + kv_real.SAMPLE] == [*first, *[7] * kv_real.SAMPLE]
    assert len(second) == len(first) + kv_real.SAMPLE + kv_real.RESULT
    for _ in range(kv_real.TURNS - 2):
        session.next_prompt()
    assert len(session.next_prompt()) == len(first)
    assert session.known == 0


def test_constants_between_measurements_are_means() -> None:
    slow = evolve(SMALL, prefill_tokens_per_s=8_000, step_s=0.008)
    constants, overhead_s = kv_real.between((SMALL, 0.01), (slow, 0.02))
    assert constants.prefill_tokens_per_s == pytest.approx(12_800)
    assert (constants.step_s, overhead_s) == (pytest.approx(0.006), pytest.approx(0.015))
    assert constants.past_tokens == pytest.approx(SMALL.past_tokens)
