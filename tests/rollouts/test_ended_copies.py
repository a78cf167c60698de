"""What a second home remembers of tasks that ended: found by id and by key, and bounded."""

import pytest
from polarnode.rollouts.ended_copies import EndedCopies

from polarnode.core.fleet import Epoch, TaskCopy
from polarnode.core.task import HarnessSpec, TaskSpec
from polarnode.rollouts import ended_copies

SPEC = TaskSpec(instruction="x", harness=HarnessSpec(name="pi"))


def copy(number: int, key: str | None) -> TaskCopy:
    return TaskCopy(
        task_id=f"t{number}",
        epoch=Epoch(1, number),
        home="j" + "a" * 16,
        second="j" + "b" * 16,
        spec=SPEC,
        idempotency_key=key,
        submitted=0.0,
    )


def test_the_latest_are_found_by_id_and_by_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_copies, "MOST", 2)
    found = EndedCopies()
    assert found.find("t1", "k1") == ()
    for number in (1, 2, 3):
        found.add(copy(number, None if number == 2 else f"k{number}"))
    (row,) = found.find("t3", None)
    assert (row.role, row.home, row.ended, row.epoch) == ("former", "j" + "a" * 16, True, Epoch(1, 3))
    assert found.find(None, "k3") == (row,)
    assert found.find("t1", None) == (), "the oldest of three is forgotten"
    assert found.find(None, "k1") == ()
    assert found.find(None, None) == ()
