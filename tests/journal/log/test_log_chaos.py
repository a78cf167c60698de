"""A short run of the chaos program; `python tests/kits/log_chaos.py` is the long one."""

from log_chaos import run_chaos


def test_nothing_is_lost_or_doubled() -> None:
    found = run_chaos(seconds=15, nodes=3, seed=3)
    assert found["places"] > 20
    assert (found["lost"], found["doubled"], found["gaps"]) == (0, 0, 0), found
