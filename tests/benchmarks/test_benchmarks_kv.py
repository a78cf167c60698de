"""The benchmark of the cache's policy: its shapes are read, and at four times what fits the policy is worth it."""

from pathlib import Path

import pytest

from benchmarks import kv


@pytest.mark.parametrize("file", sorted(kv.SHAPES.glob("*.toml")), ids=lambda file: file.stem)
def test_every_shape_is_read(file: Path) -> None:
    assert kv.Shape.read(file).mean_own > 0


def test_the_policy_against_none_and_against_a_cap() -> None:
    """An hour of virtual time: figures of six hours are in docs/measurements.md."""
    base = kv.Shape.read(kv.SHAPES / "base.toml")
    found = {policy: kv.simulated(policy, 4.0, base, 1.0, 1) for policy in ("none", "cap=11", "residency")}
    speeds = {policy: each["tokens_per_s"] for policy, each in found.items()}
    assert speeds["residency"] > 2.0 * speeds["none"]
    assert speeds["residency"] > 0.9 * speeds["cap=11"]
    assert found["none"]["read_again"] > 0.3
    assert found["residency"]["read_again"] < 0.03
    assert found["residency"]["turn_wait_s"]["worst"] < 75
