"""Attacks by processes: ending everything, and outliving the harness to touch what is judged."""

from typing import Any

import pytest
from hostile_kit import Arena, reported
from live_kit import running

pytestmark = pytest.mark.podman

# Four ways to stay: an orphan, a session of its own, deaf to TERM, and forked so fast that no list of
# processes has it.
DAEMONS = """
import os, signal, subprocess, sys, time
from inside import turn, tell
tell(first=turn())
FORGE = '''
import os, signal, time
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
while True:
    for path in ("/tmp/reward.txt", "/work/reward.txt", "/tmp/verdict.json"):
        try:
            with open(path, "w") as file:
                file.write("999")
        except OSError:
            pass
    time.sleep(0.01)
'''
RUNNER = '''
import os, time
while True:
    if os.fork():
        os._exit(0)
    try:
        open("/tmp/reward.txt", "w").write("999")
    except OSError:
        pass
    time.sleep(0.005)
'''
mark = sys.argv[1] if len(sys.argv) > 1 else os.environ["MARK"]
subprocess.Popen([sys.executable, "-c", FORGE, mark], start_new_session=True)
subprocess.Popen(["nohup", sys.executable, "-c", FORGE, mark], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
subprocess.Popen(["sh", "-c", "trap '' TERM HUP INT; (setsid sh -c \\"trap '' TERM; while :; do echo 999 > /tmp/reward.txt; sleep 0.01; done\\" " + mark + " &) &"])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", RUNNER, mark])
    os._exit(0)
time.sleep(1)
tell(left=True)
"""
JUDGE = (
    "sleep 2; for each in /proc/[0-9]*; do tr '\\0' ' ' < $each/cmdline; echo; done > /work/seen.txt; echo"
    " 0.25 > /tmp/reward.txt; sleep 1"
)


@pytest.mark.parametrize("fresh", [False, True])
def test_surviving_processes_touch_no_reward(arena: Arena, fresh: bool) -> None:
    """Daemons of every kind write the reward file all the time. When it is judged, they are gone: the
    evaluator's own number is read.
    """
    mark = f"daemon-{'fresh' if fresh else 'same'}-{arena.node.node_id}"
    judge: dict[str, Any] = {
        "name": "command",
        "config": {"script": JUDGE, "reward_file": "/tmp/reward.txt"},
        "fresh_runtime": fresh,
    }
    trajectory = arena.attack(DAEMONS, evaluator=judge, env={"MARK": mark})
    assert trajectory.outcome.status == "completed", (trajectory.outcome, arena.log(trajectory))
    assert trajectory.reward == 0.25
    assert running(mark) == []


def test_swapped_judge_programs_harm_only_agent(arena: Arena) -> None:
    """With a judge in the same runtime a harness may spoil its own test; it can not make the node take a
    number nobody wrote.
    """
    spoil = """
        import os
        from inside import turn, tell
        tell(first=turn())
        for path in ("/tmp/reward.txt", "/tmp/verdict.json"):
            with open(path, "w") as file:
                file.write("999")
    """
    judge = {"name": "command", "config": {"script": "exit 0", "reward_file": "/tmp/reward.txt"}}
    trajectory = arena.attack(spoil, evaluator=judge)
    assert (trajectory.reward, trajectory.outcome.status, trajectory.outcome.boundary) == (
        None,
        "error",
        "evaluator",
    ), trajectory.outcome


def test_kill_of_everything_ends_only_harness(arena: Arena) -> None:
    """`kill -9 -1` as the user, and as whatever root is in there: the container stays, the turn is kept, the
    session is judged.
    """
    kill = """
        import os, signal, subprocess
        from inside import turn, tell
        tell(first=turn())
        subprocess.Popen(["sleep", "1000"])
        os.kill(-1, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    trajectory = arena.attack(kill)
    assert (trajectory.outcome.status, trajectory.outcome.exit_code) == ("failed", 137)
    assert (trajectory.reward, len(trajectory.turns)) == (1.0, 1)


def test_first_process_is_out_of_reach(arena: Arena) -> None:
    signals = """
        import ctypes, os, signal
        from inside import outcome, turn, tell
        libc = ctypes.CDLL(None, use_errno=True)
        def checked(result):
            if result != 0:
                raise OSError(ctypes.get_errno(), "no")
        tell(
            kill=outcome(lambda: os.kill(1, signal.SIGKILL)),
            stop=outcome(lambda: os.kill(1, signal.SIGSTOP)),
            trace=outcome(lambda: checked(libc.ptrace(16, 1, 0, 0))),
            memory=outcome(lambda: open("/proc/1/mem", "rb")),
            environ=outcome(lambda: open("/proc/1/environ", "rb").read()),
            root=outcome(lambda: os.listdir("/proc/1/root")),
            fd=outcome(lambda: os.listdir("/proc/1/fd")),
            oom=outcome(lambda: os.write(os.open("/proc/1/oom_score_adj", os.O_WRONLY), b"1000")),
            spared=outcome(lambda: os.write(os.open("/proc/self/oom_score_adj", os.O_WRONLY), b"-1000")),
            turn=turn(),
        )
    """
    found = reported(arena.attack(signals))
    done = {name for name, said in found.items() if said == "DONE"}
    assert done == set(), found
    assert found["turn"] == 200
