"""Attacks on the disk: each ends at the session's own limit, says so, and leaves the machine with what it
had.
"""

import shutil

import pytest
from hostile_kit import Arena

from polarnode.containers.probe import default_state_dir
from polarnode.core.trajectory import Trajectory

pytestmark = pytest.mark.podman

LIMIT_MB = 48
RUNTIME = {"disk_mb": LIMIT_MB, "memory_mb": 384}
# What each writes at most, were nobody to end it: this machine has others' sessions too.
FILL = """
    import errno, os, sys, time
    from inside import tell, turn
    tell(first=turn())
    block = os.urandom(1 << 20)
    how = os.environ["HOW"]
    written = 0
    def write(path):
        global written
        with open(path, "wb", buffering=0) as file:
            for _ in range(20):
                file.write(block)
                written += 1
            return file
    try:
        if how == "one":
            with open("/work/full", "wb", buffering=0) as file:
                for _ in range(400):
                    file.write(block)
                    written += 1
        if how == "several":
            for number in range(20):
                write(f"/tmp/{number}" if number % 2 else f"/home/agent/{number}")
        if how == "unlinked":
            held = []
            for number in range(20):
                held.append(open(f"/var/tmp/{number}", "wb", buffering=0))
                os.unlink(f"/var/tmp/{number}")
                for _ in range(20):
                    held[-1].write(block)
                    written += 1
        if how == "small":
            for folder in range(200):
                os.mkdir(f"/work/{folder}")
                for number in range(200):
                    with open(f"/work/{folder}/{number}", "wb") as file:
                        file.write(block[:4096])
                    written += 1
    except OSError as error:
        tell(error=errno.errorcode[error.errno])
        sys.exit(3)
    tell(written=written)
    time.sleep(200)
"""


def fill(arena: Arena, how: str) -> Trajectory:
    free = shutil.disk_usage(default_state_dir()).free
    trajectory = arena.attack(
        FILL,
        env={"HOW": how},
        runtime=RUNTIME,
        evaluator={"name": "session_completed"},
        budgets={"run_s": 120},
    )
    assert free - shutil.disk_usage(default_state_dir()).free < 4 << 30, "nobody filled the disk"
    return trajectory


@pytest.mark.parametrize("how", ["several", "unlinked", "small"])
def test_excess_writer_is_ended_and_told(arena: Arena, how: str) -> None:
    trajectory = fill(arena, how)
    assert (trajectory.outcome.status, trajectory.outcome.reason) == (
        "failed",
        f"the session wrote more than its disk_mb ({LIMIT_MB})",
    ), trajectory.outcome
    assert trajectory.reward == 0.0
    assert len(trajectory.turns) == 1


def test_one_file_ends_at_limit(arena: Arena) -> None:
    """The kernel refuses what is beyond; what the harness then does is its own affair."""
    trajectory = fill(arena, "one")
    assert '"error": "EFBIG"' in arena.log(trajectory)
    assert (trajectory.outcome.status, trajectory.outcome.exit_code) == ("failed", 3)
