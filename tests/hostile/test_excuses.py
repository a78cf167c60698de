"""Acts by which an agent's own failure would look like the machine's, which is tried again: another attempt is
another draw, and a failure would be no sample.
"""

import pytest
from attrs import field, frozen
from hostile_kit import Arena

from polarnode.core.conversation import Json
from polarnode.core.trajectory import Status
from polarnode.groups.group import lost_to_the_machine

pytestmark = pytest.mark.podman

TRACED = """#!/usr/bin/python3
import ctypes, os
ctypes.CDLL(None).ptrace(0, 0, 0, 0)
os.execv("/bin/sh", ["sh", "-c", "read n; echo $((n * n))"])
"""
PLANTS = f"""
    import os
    from inside import turn
    turn()
    with open("prog", "w") as file:
        file.write({TRACED!r})
    os.chmod("prog", 0o755)
"""
CASE: Json = {"argv": ["./prog"], "stdin": "7", "stdout": "49"}
CASES: Json = {"name": "program_cases", "config": {"cases": [CASE]}}
APART: Json = {
    "name": "command",
    "config": {"separate": {}, "script": 'test "$(echo 7 | as-agent ./prog)" = 49'},
}
THERE: Json = {"name": "command", "config": {"script": "test -f out"}}


@frozen(kw_only=True)
class Act:
    """What a harness does, and what it must come to."""

    script: str
    evaluator: Json = THERE
    runtime: dict[str, Json] = field(factory=dict)
    status: Status = "completed"
    reward: float = 0.0


ACTS = {
    "it lets itself be traced": Act(
        script="""
            import ctypes, os
            from inside import turn
            turn()
            ctypes.CDLL(None).ptrace(0, 0, 0, 0)
            os.execv("/bin/true", ["true"])
        """,
        runtime={"ptrace": True},
        status="failed",
    ),
    "its program does": Act(script=PLANTS, evaluator=CASES, runtime={"ptrace": True}),
    "its program does, apart": Act(script=PLANTS, evaluator=APART, runtime={"ptrace": True}),
    "it may not": Act(script=PLANTS, evaluator=CASES, reward=1.0),
    "it removes its workdir": Act(
        script="""
            import shutil
            from inside import turn
            turn()
            shutil.rmtree("/work", ignore_errors=True)
        """
    ),
    "it closes its workdir": Act(
        script="""
            import os
            from inside import turn
            turn()
            os.chmod("/work", 0)
        """
    ),
    "it closes the folder of the reward": Act(
        script="""
            import os
            from inside import turn
            turn()
            os.makedirs("/work/a/b")
            os.chmod("/work/a/b", 0)
            os.chmod("/work/a", 0)
        """,
        evaluator={
            "name": "command",
            "config": {"script": "echo 0 > /work/a/b/reward", "reward_file": "/work/a/b/reward"},
        },
    ),
    "it removes the task's test": Act(
        script="""
            import os
            from inside import turn
            turn()
            os.remove("/work/inside.py")
        """,
        evaluator={"name": "command", "config": {"argv": ["/work/inside.py"]}},
    ),
    "its program ends as a missing one": Act(
        script="""
            import os
            from inside import turn
            turn()
            with open("prog", "w") as file:
                file.write("#!/bin/sh\\nexit 127\\n")
            os.chmod("prog", 0o755)
        """,
        evaluator={"name": "command", "config": {"separate": {}, "script": "as-agent ./prog"}},
    ),
    "it fills its memory with files": Act(
        script="""
            from inside import turn
            turn()
            with open("/dev/shm/x", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 20))
        """,
        runtime={"memory_mb": 48},
        status="failed",
    ),
    "its main thread ends": Act(
        script="""
            import ctypes, os, threading, time
            from inside import turn
            turn()
            if os.fork() == 0:
                os.setsid()
                threading.Thread(target=lambda: [time.sleep(0.05) or open("/work/out", "w") for _ in range(9**9)]).start()
                ctypes.CDLL(None).syscall(60, 0)
            time.sleep(1)
            os.remove("/work/out")
        """,
        evaluator={"name": "command", "config": {"script": "rm -f out; sleep 1; test -f out"}},
    ),
}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_no_act_excuses_the_agent(arena: Arena, act: Act) -> None:
    trajectory = arena.attack(act.script, evaluator=act.evaluator, runtime=act.runtime)
    outcome = trajectory.outcome
    assert not lost_to_the_machine(outcome), outcome
    assert (outcome.status, trajectory.reward) == (act.status, act.reward), (outcome, trajectory.metrics)


def test_stopped_process_holds_no_snapshot(arena: Arena) -> None:
    """CRIU would wait for it, the call for CRIU, and the session would end as the machine's loss."""
    script = """
        import os, signal, subprocess, time
        from inside import turn, tell
        turn()
        quiet = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True, **quiet)
        time.sleep(0.3)
        os.kill(sleeper.pid, signal.SIGSTOP)
        turn()
        turn()
    """
    snapshots = {"turns": [1], "freeze": True}
    trajectory = arena.attack(script, snapshot_at=snapshots, evaluator=THERE)
    assert trajectory.outcome.status == "completed", trajectory.outcome
    assert len(trajectory.turns) == 3
    kept = trajectory.metrics["snapshots"]
    assert isinstance(kept, dict)
    assert (kept["taken"], kept["frozen"]) == (1, 0)
