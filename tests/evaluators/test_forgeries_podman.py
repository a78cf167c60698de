"""Forged rewards in real containers: each attack gets a reward of 1 where the test shares its container with
the agent, and 0 where it runs apart.

An attack is what an agent leaves in its workdir and home. None knows the answer, 7351.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest
from attrs import frozen
from evaluators_kit import finished
from podman_parts import LIFETIME_S, SMALL

from polarnode.containers.runtime import PodmanRuntime
from polarnode.containers.runtimes import NodeRuntimes
from polarnode.core.conversation import Json
from polarnode.core.ports import Runtime
from polarnode.evaluators import command, harbor, program_cases

pytestmark = pytest.mark.podman

TESTS = {"/tests/expected.txt": b"7351\n"}
COMPARES = "{run} ./program > /tmp/out; cmp /tmp/out /tests/expected.txt"


@frozen(kw_only=True)
class Attack:
    """`leaves`: what the agent's shell does. `test`: the task's test, in which {run} runs a program of the
    agent's. `reward_file`, `argv`: how the test is configured. `plain_files`: what is copied as data.
    """

    leaves: str
    test: str = COMPARES
    reward_file: str | None = None
    argv: bool = False
    plain_files: tuple[str, ...] = ()

    def config(self, run: str) -> dict[str, Json]:
        script = self.test.format(run=run)
        return {
            **({"argv": ["sh", "-c", script]} if self.argv else {"script": script}),
            **({"reward_file": self.reward_file} if self.reward_file else {}),
        }

    def apart(self) -> dict[str, Json]:
        separate: dict[str, Json] = {"plain_files": list(self.plain_files), "program_timeout": 20.0}
        return {**self.config("as-agent"), "separate": separate}


def program(text: str) -> str:
    """Leave a program."""
    return f"cat > program <<'END'\n#!/bin/sh\n{text}\nEND\nchmod +x program"


FILE = "/tmp/reward.txt"
HONEST: Mapping[str, Attack] = {
    "a program": Attack(leaves=program("echo 7351")),
    "a file": Attack(
        leaves="echo 7351 > out.txt", test="cmp out.txt /tests/expected.txt", plain_files=("out.txt",)
    ),
}
ATTACKS: Mapping[str, Attack] = {
    "F1: a .pth file in a home that is the workdir": Attack(
        leaves=(
            "d=$(python3 -c 'import site; print(site.getusersitepackages())'); mkdir -p $d;"
            " echo 'import os; os._exit(0)' > $d/x.pth"
        ),
        test="cd /; python3 -c 'import sys; sys.exit(1)'",
    ),
    "F2: json.py beside python3 -c": Attack(
        leaves="echo 'def load(file): return 7351' > json.py; echo 1 > out.json",
        test="python3 -c 'import json, sys; sys.exit(json.load(open(\"out.json\")) != 7351)'",
        plain_files=("out.json",),
    ),
    "F6: an output that links to the expected one": Attack(
        leaves="ln -s /tests/expected.txt out.txt",
        test="cmp out.txt /tests/expected.txt",
        plain_files=("out.txt",),
    ),
    "F7: the command line of the test": Attack(
        leaves=program("tr '\\0' ' ' < /proc/$PPID/cmdline | grep -o 7351"),
        test='out=$({run} ./program); test "$out" = 7351',
        argv=True,
    ),
    "F8: a daemon that waits for the reward file": Attack(
        leaves=program(
            f"setsid sh -c 'until test -e {FILE}; do sleep 0.01; done; echo 1 > x; mv x {FILE}' >/dev/null 2>&1 &"
        ),
        test="{run} ./program; echo 0 > " + FILE + "; sleep 0.3",
        reward_file=FILE,
    ),
    "the expected file is read where it is": Attack(leaves=program("cat /tests/expected.txt")),
    "the environment of the test": Attack(
        leaves=program("tr '\\0' '\\n' < /proc/$PPID/environ | sed -n 's/ANSWER=//p'"),
        test="export ANSWER=7351; sh -c '{run} ./program > /tmp/out; true'; cmp /tmp/out /tests/expected.txt",
    ),
    "the reward is written and the test killed": Attack(
        leaves=program(f"echo 1 > {FILE}; kill -9 $PPID; kill -9 -1"),
        test="{run} ./program; echo 0 > " + FILE,
        reward_file=FILE,
    ),
    "an open file of the test": Attack(
        leaves=program("echo 1 > /proc/$PPID/fd/7"),
        test="exec 7>>" + FILE + "; {run} ./program >/dev/null; test -s " + FILE + " || echo 0 >&7",
        reward_file=FILE,
    ),
    "a link where the test writes": Attack(
        leaves=program("echo 1") + "; ln -sf /tests/expected.txt /tmp/out",
    ),
    "git runs what the repository configures": Attack(
        leaves=(
            "git init -q; git config core.fsmonitor /work/forge; printf '#!/bin/sh\\necho 7351 > /tmp/out\\n' > forge;"
            " chmod +x forge"
        ),
        test="echo 0 > /tmp/out; {run} git status >/dev/null; cmp /tmp/out /tests/expected.txt",
    ),
    "a memory of the test": Attack(
        leaves=program(
            "python3 - <<'PY'\nimport os, re\npid = os.getppid()\n"
            "pid = int(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1])\n"
            "for line in open(f'/proc/{pid}/maps'):\n"
            "    if '[heap]' in line or '[stack]' in line:\n"
            "        begin, end = (int(each, 16) for each in line.split()[0].split('-'))\n"
            "        with open(f'/proc/{pid}/mem', 'rb') as memory:\n"
            "            memory.seek(begin)\n"
            "            if found := re.search(b'SECRET_([0-9]{4})', memory.read(end - begin)):\n"
            "                print(found[1].decode())\n"
            "                break\nPY"
        ),
        test='secret=SECRET_7351; {run} ./program > /tmp/out; test "SECRET_$(cat /tmp/out)" = "$secret"',
    ),
}
CLEAN = "rm -rf /tests/* /tmp/out /tmp/reward.txt ~/.local; find /work -mindepth 1 -delete"


async def done(runtime: Runtime, script: str) -> None:
    ended = await runtime.run(["sh", "-c", script])
    assert ended.exit_code == 0, ended


@asynccontextmanager
async def pair(runtimes: NodeRuntimes) -> AsyncIterator[tuple[PodmanRuntime, PodmanRuntime]]:
    """The agent's container and a clean one."""
    async with (
        runtimes.open(SMALL, session_id="agent", lifetime_s=LIFETIME_S) as left,
        runtimes.open(SMALL, session_id="test", lifetime_s=LIFETIME_S) as clean,
    ):
        yield left, clean


async def judged(runtime: PodmanRuntime, config: dict[str, Json], left: PodmanRuntime) -> float:
    await runtime.put(TESTS)
    return (await command.evaluate(finished(runtime, config, left))).reward


async def test_separate_test_is_never_forged(runtimes: NodeRuntimes) -> None:
    """No attack forges a test that runs apart."""
    rewards: dict[str, tuple[float, float]] = {}
    async with pair(runtimes) as (left, clean):
        for name, attack in {**HONEST, **ATTACKS}.items():
            await done(left, attack.leaves)
            apart = await judged(clean, attack.apart(), left)
            rewards[name] = (await judged(left, attack.config(""), left), apart)
            for runtime in (left, clean):
                await done(runtime, CLEAN)
    assert rewards == {**dict.fromkeys(HONEST, (1.0, 1.0)), **dict.fromkeys(ATTACKS, (1.0, 0.0))}


# ── as-agent ──────────────────────────────────────────────────────────────────

# Each line: a number, then what a test sees of `as-agent`.
ASKS = """
echo 1 "$(as-agent printf '<%s>' 'a b' '' '*')"
echo 2 "$(printf 'a\\000b' | as-agent od -An -tx1)"
as-agent sh -c 'echo to stderr >&2; exit 7' 2>/tmp/err; echo 3 $? "$(cat /tmp/err)"
as-agent sh -c 'sleep 600 & setsid sleep 600 & echo ended'; echo 4 $?
as-agent sh -c 'yes | head -c 9000000' 2>&1 | tail -c 60
as-agent sleep 600 2>&1; echo 6 $?
as-agent sh -c 'ls -d /tests /usr/local/bin/as-agent /tmp/polarnode-agent 2>&1 | grep -vc No; pgrep sleep; id -u; pwd'
as-agent ./no-program >/dev/null 2>&1; echo 8 $?
ls fifo big 2>&1 | sort
for i in 1 2 3 4 5 6; do as-agent echo "parallel $i" & done | sort; wait
as-agent sh -c 'kill -9 -1; kill -9 $$' 2>/dev/null; echo 11 $?
as-agent "$(printf '\\377')" 2>&1; as-agent 2>&1; echo 12 $?
"""
SEEN = """\
1 <a b><><*>
2  61 00 62
3 7 to stderr
ended
4 0
as-agent: the program's output is longer than 8 MiB
as-agent: ended after 3 seconds
6 124
0
1000
/work
8 127
ls: cannot access 'big': No such file or directory
ls: cannot access 'fifo': No such file or directory
parallel 1
parallel 2
parallel 3
parallel 4
parallel 5
parallel 6
11 137
as-agent: a request is a program and its arguments, in UTF-8
usage: as-agent PROGRAM [ARGUMENT...]
12 125
"""


async def test_separate_test_output_is_bounded(runtimes: NodeRuntimes) -> None:
    """A test apart gets bounded output and exit codes."""
    config: dict[str, Json] = {
        "script": f"exec 2>&1\n{ASKS}",
        "separate": {"plain_files": ["fifo", "big"], "program_timeout": 3.0},
    }
    async with pair(runtimes) as (left, clean):
        await done(left, "mkfifo fifo; truncate -s 9M big; touch fifo-reader")
        assert left.shift != clean.shift, "another user of the machine"
        verdict = await command.evaluate(finished(clean, config, left))
        assert str(verdict.metrics["output_tail"]).splitlines() == SEEN.splitlines()
        assert verdict.metrics["separate"] == {"programs": 16, "missing_files": ["fifo", "big"]}
        assert not await left.busy()


async def test_harbor_test_runs_separately(runtimes: NodeRuntimes) -> None:
    config: dict[str, Json] = {
        "tests": {
            "test.sh": 'test "$(as-agent ./program)" = "$(cat $TEST_DIR/expected)";'
            " echo $((1 - $?)) > /logs/verifier/reward.txt",
            "expected": "7351\n",
        },
        "separate": {},
    }
    async with pair(runtimes) as (left, clean):
        await done(left, program("echo 1 > /logs/verifier/reward.txt; cat /tests/expected; echo 7351"))
        assert (await harbor.evaluate(finished(clean, config, left))).reward == 1.0
        assert await left.read("/tests/expected") is None
        await done(left, program("mkdir -p /tests; cat /tests/expected"))
        assert (await harbor.evaluate(finished(clean, config, left))).reward == 0.0


# ── program_cases ─────────────────────────────────────────────────────────────

CASES: Mapping[str, tuple[str, dict[str, Json], str | None]] = {
    # what the program is, its case, why it fails
    "honest": (program("tr a-z A-Z"), {"stdin": "kiwi\n", "stdout": "KIWI"}, None),
    "files": (program("cp in out"), {"files": {"in": "x"}, "outputs": {"out": {"exact": "x"}}}, None),
    "a link": (program("ln -s /etc/hostname out"), {"outputs": {"out": "agent"}}, "out is no file"),
    "a pipe": (program("mkfifo out"), {"outputs": {"out": "x"}}, "out is no file"),
    "an earlier file": (program("true") + "; echo x > out", {"outputs": {"out": "x"}}, "out is no file"),
    "too much": (program("yes | head -c 2000000"), {"stdout": "y"}, "stdout: it is longer than 1 MiB"),
    "too long": (program("exec sleep 600"), {"timeout": 1.0}, "it ran longer than 1 s"),
    "killed": (program("kill -9 -1; kill -9 $$"), {}, "it ended with exit code 137"),
    "a daemon that holds the output open": (program("sleep 600 & echo x"), {"stdout": "x"}, None),
    "a daemon that writes later": (
        program("(sleep 0.2; echo x > out) & echo y > out"),
        {"outputs": {"out": "x"}},
        "out: it differs in line 1",
    ),
    "the expected value": (
        program("cat /proc/$PPID/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -o 7351"),
        {"stdout": "7351", "exit_code": None},
        "stdout: it differs in line 1",
    ),
    "closed folders": (
        program("true") + "; mkdir -p out/deep; chmod 0 out",
        {"outputs": {"out": "x"}},
        "out is no file",
    ),
    "no program": ("true", {}, "it ended with exit code 127"),
}


async def test_case_judged_by_outputs_alone(runtimes: NodeRuntimes) -> None:
    failed: dict[str, str | None] = {}
    async with runtimes.open(SMALL, session_id="cases", lifetime_s=LIFETIME_S) as runtime:
        for name, (leaves, case, _) in CASES.items():
            await done(runtime, leaves)
            verdict = await program_cases.evaluate(
                finished(runtime, {"argv": ["./program"], "cases": [case]})
            )
            reasons = [each["reason"] for each in verdict.metrics.get("failed", [])]  # type: ignore[union-attr,call-overload,index]
            assert verdict.reward == float(not reasons)
            failed[name] = reasons[0] if reasons else None
            assert not await runtime.busy()
            await done(runtime, CLEAN)
    assert failed == {name: why for name, (_, _, why) in CASES.items()}
