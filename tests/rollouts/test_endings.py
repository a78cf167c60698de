"""How a run ended, from all that is known of it: a machine's fault is never called the agent's, nor the
agent's the machine's.
"""

from typing import Any

import pytest
import session_kit as kit
from attrs import evolve

from polarnode.core.errors import PolarnodeError, RuntimeFault
from polarnode.core.trajectory import Outcome
from polarnode.rollouts.evaluation import Ending, run_outcome

DIED = RuntimeFault("the container has ended")
FULL = "the machine's disk is nearly full and this session wrote the most, 9 MB"


@pytest.mark.parametrize(
    ("ending", "outcome"),
    [
        ({"ended": 0}, Outcome(status="completed", exit_code=0)),
        ({"ended": 3, "log_tail": "x"}, Outcome(status="failed", exit_code=3, log_tail="x")),
        ({"ended": None}, Outcome(status="timeout", clock="run")),
        ({"ended": 1, "spent_clock": "turns"}, Outcome(status="timeout", clock="turns", exit_code=1)),
        ({"ended": 0, "spent_clock": "repeats"}, Outcome(status="timeout", clock="repeats", exit_code=0)),
        ({"ended": 1, "cancelled": True, "because": "wrote"}, Outcome(status="cancelled", exit_code=1)),
        ({"ended": DIED}, Outcome(status="error", boundary="runtime")),
        ({"ended": 137, "because": "wrote more than its disk_mb"}, Outcome(status="failed", exit_code=137)),
        ({"ended": 137, "because": FULL, "for_room": True}, Outcome(status="error", boundary="runtime")),
        ({"ended": 137, "oom_kills": 2}, Outcome(status="failed", exit_code=137)),
        ({"ended": DIED, "oom_kills": 1}, Outcome(status="failed")),
        ({"ended": 0, "oom_kills": 1}, Outcome(status="completed", exit_code=0)),
    ],
)
def test_first_cause_decides_outcome(ending: dict[str, Any], outcome: Outcome) -> None:
    found = run_outcome(kit.order(), Ending(**ending))
    assert evolve(found, reason=None) == outcome


@pytest.mark.parametrize("ended", [137, DIED])
def test_out_of_memory_kill_is_reported(ended: "int | PolarnodeError") -> None:
    found = run_outcome(kit.order(), Ending(ended=ended, oom_kills=2))
    assert "the kernel ended 2 of its programs" in str(found.reason)
