"""What a harness leaves for the node to read: links, pipes, bombs and names. The node follows none, opens
none, and is held up by none.
"""

import tarfile
from typing import Any

import pytest
from hostile_kit import Arena, reported

pytestmark = pytest.mark.podman

PLANT = """
    import os, socket
    from inside import outcome, tell, turn
    tell(first=turn())
    os.symlink("/work/elsewhere", "/tmp/r1")
    os.mkfifo("/tmp/r2")
    os.makedirs("/tmp/r3/closed/deeper")
    open("/tmp/r3/closed/deeper/file", "w").close()
    os.chmod("/tmp/r3/closed", 0)
    os.symlink("/dev/zero", "/tmp/r4")
    with open("/tmp/r5", "w") as file:
        file.write("999")
    os.chmod("/tmp/r5", 0o444)
    with open("/tmp/r6", "wb") as file:
        outcome(lambda: file.truncate(1 << 40))
"""


def test_planted_reward_files_do_not_count(arena: Arena) -> None:
    """Six evaluators, each with a reward file where something stands already: each reads the number its own
    test wrote.
    """
    parts = [
        {"name": "command", "config": {"script": f"echo 0.5 > /tmp/r{n}", "reward_file": f"/tmp/r{n}"}}
        for n in range(1, 7)
    ]
    trajectory = arena.attack(PLANT, evaluator={"parts": parts})
    assert trajectory.outcome.status == "completed", trajectory.outcome
    assert trajectory.reward == 3.0


REWARDS = {
    "device": "rm -f /tmp/r; ln -s /dev/zero /tmp/r",
    "pipe": "mkfifo /tmp/r",
    "escape": "printf '\\033]0;owned\\007\\033[2J' > /tmp/r",
}


@pytest.mark.parametrize("what", REWARDS)
def test_invalid_reward_file_gives_no_reward(arena: Arena, what: str) -> None:
    """As where the test itself runs what the agent wrote. The session says what was wrong; no number is made
    up, and nothing waits on a pipe.
    """
    judge = {"name": "command", "config": {"script": REWARDS[what], "reward_file": "/tmp/r"}}
    trajectory = arena.attack("from inside import turn\nturn()\n", evaluator=judge)
    assert (trajectory.outcome.status, trajectory.outcome.boundary, trajectory.reward) == (
        "error",
        "evaluator",
        None,
    ), trajectory.outcome


MOVED = """
    import os
    from inside import outcome, turn
    turn()
    def swap(path, target):
        os.rename(path, path + "-away")
        os.symlink(target, path)
    print([outcome(lambda: swap("/home/agent/project", "/etc")), outcome(lambda: swap("/home/agent", "/root"))], flush=True)
"""


@pytest.mark.parametrize("fresh", [False, True])
def test_linked_workdir_leads_nowhere(arena: Arena, fresh: bool) -> None:
    """One below the home is its owner's to move. The node takes nothing through it, and says what it found; a
    home can not be moved.
    """
    runtime = {"workdir": "/home/agent/project", "artifacts": [".", "passwd", "/home/agent/project/shadow"]}
    judge = {"name": "command", "config": {"script": "test ! -e passwd"}, "fresh_runtime": fresh}
    trajectory = arena.attack(MOVED, runtime=runtime, evaluator=judge)
    assert "['DONE', " in arena.log(trajectory)
    assert ", 'DONE']" not in arena.log(trajectory)
    kept = trajectory.metrics["artifacts"]
    assert isinstance(kept, dict)
    assert kept.get("files", 0) == 0, kept
    if fresh:
        assert (trajectory.outcome.status, trajectory.outcome.boundary) == (
            "error",
            "evaluator",
        ), trajectory.outcome
    else:
        assert trajectory.reward == 0.0


TREE = """
    import os, socket, sys, tarfile
    from inside import outcome, tell, turn
    tell(first=turn())
    os.makedirs("out/many")
    os.chdir("out")
    for number in range(3000):
        open(f"many/{number}", "w").close()
    os.makedirs("loop/a")
    os.symlink("..", "loop/a/up")
    os.symlink("/etc/passwd", "passwd")
    os.symlink("/etc", "etc")
    os.symlink("/proc/1/root", "machine")
    os.symlink("../../../../../../etc/shadow", "climb")
    os.mkfifo("pipe")
    socket.socket(socket.AF_UNIX).bind("socket")
    for name in (b"new\\nline", b"\\x1b[2Jescape", b"not\\xffutf8", b"-rf", b"--checkpoint-action=exec=owned", b" ", b"a" * 255, b"..." , b"\\\\x", b"$(touch owned)", b"'\\""):
        with open(name, "w") as file:
            file.write("odd")
    with open("sparse", "wb") as file:
        tell(sparse=outcome(lambda: file.truncate(1 << 40)), smaller=outcome(lambda: file.truncate(100 << 20)))
    with open("secret", "w") as file:
        file.write("unread")
    os.chmod("secret", 0)
    os.link("secret", "again")
    with open("setuid", "w") as file:
        file.write("#!/bin/sh")
    os.chmod("setuid", 0o6777)
    with tarfile.open("bomb.tar", "w") as bomb:
        for name in ("../../../../etc/cron.d/owned", "/etc/owned", "many/../../../owned"):
            bomb.addfile(tarfile.TarInfo(name))
        link = tarfile.TarInfo("dir")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        bomb.addfile(link)
        for number in range(2000):
            bomb.addfile(tarfile.TarInfo("x/" * 50 + str(number)))
    at, depth = os.getcwd(), 0
    os.mkdir("deep")
    os.chdir("deep")
    for depth in range(150):
        os.mkdir("d" * 20)
        os.chdir("d" * 20)
    os.chdir(at)
    os.chdir("/work")
    tell(depth=depth)
"""


def test_hostile_tree_is_kept_and_judged(arena: Arena) -> None:
    """As artifacts, and as the workspace of a fresh runtime: deep, odd, sparse, linked out of itself, and
    with a bomb that nobody opens.
    """
    look = (
        "test -L out/passwd && test -L out/etc && test -f out/bomb.tar && test -d out/deep && test ! -e"
        " out/pipe.x && cp report.json /tmp/verdict.json"
    )
    judge: dict[str, Any] = {
        "name": "command",
        "config": {"script": look, "reward_file": "/tmp/verdict.json"},
        "fresh_runtime": True,
    }
    with arena.growing_at_most(300):
        trajectory = arena.attack(
            TREE,
            evaluator=judge,
            runtime={"artifacts": ["out", "out/passwd", "/etc/shadow", "/proc/1/environ", "none"]},
        )
    reported(trajectory)
    kept = trajectory.metrics["artifacts"]
    assert isinstance(kept, dict)
    assert "failed" not in kept, kept
    with tarfile.open(str(kept["path"])) as archive:
        members = {member.name: member for member in archive}
    assert {name for name in members if name.startswith("/") or ".." in name.split("/")} <= {
        "/etc/shadow",
        "/proc/1/environ",
    }, "no name climbs"
    assert members["out/passwd"].issym()
    assert members["out/etc"].issym()
    assert not [name for name in members if name.startswith(("out/etc/", "out/machine/", "out/loop/a/up/"))]
    assert not any(member.isdev() or member.isfifo() for member in members.values())
    assert "out/bomb.tar" in members
    assert len(members) > 3000
