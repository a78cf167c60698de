"""The benchmark of the cache's policy: its shapes are read, and at four times what fits the policy is worth it."""

from pathlib import Path

import pytest
from attrs import evolve

from benchmarks import kv


@pytest.mark.parametrize("file", sorted(kv.SHAPES.glob("*.toml")), ids=lambda file: file.stem)
def test_every_shape_is_read(file: Path) -> None:
    assert kv.Shape.read(file).mean_own > 0


def test_policy_beats_none_and_matches_cap() -> None:
    """An hour of virtual time: figures of six hours are in docs/measurements.md."""
    base = kv.Shape.read(kv.SHAPES / "base.toml")
    found = {policy: kv.simulated(policy, 4.0, base, 1.0, 1) for policy in ("none", "cap=11", "residency")}
    speeds = {policy: each["tokens_per_s"] for policy, each in found.items()}
    assert speeds["residency"] > 2.0 * speeds["none"]
    assert speeds["residency"] > 0.9 * speeds["cap=11"]
    assert found["none"]["read_again"] > 0.3
    assert found["residency"]["read_again"] < 0.03
    assert found["residency"]["turn_wait_s"]["worst"] < 75


def test_simulation_with_sub_agents_and_growth() -> None:
    """The simulation with sub-agents, growth, short groups and heavy tails."""
    base = kv.Shape.read(kv.SHAPES / "base.toml")
    shape = evolve(
        base,
        slow_spread=1.0,
        short_share=0.5,
        short_turns=(3, 6),
        short_final_tokens=(14_000, 20_000),
        growth_per_hour=1.5,
        burst_share=0.1,
        burst=(2, 3),
        burst_turns=(2, 4),
        burst_final_tokens=(12_000, 16_000),
    )
    assert shape.mean_own < base.mean_own
    found = kv.simulated("residency", 2.0, shape, 0.5, 1)
    assert found["ended"] > 10, "sessions end that waited for sub-agents"
    assert found["turn_wait_s"]["worst"] < 75
