"""Evaluators from files in real containers: as the agent's user, beside what an agent can leave in one, on a
clean one.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from evaluators_kit import finished
from podman_parts import LIFETIME_S, SMALL

from polarnode.containers.runtime import PodmanRuntime
from polarnode.containers.runtimes import NodeRuntimes
from polarnode.core.conversation import Json
from polarnode.core.errors import EvaluatorError
from polarnode.core.ports import Runtime
from polarnode.core.trajectory import Verdict
from polarnode.evaluators import command, harbor, swebench, test_on_output

pytestmark = pytest.mark.podman

REPO = "/work/repo"
RUNNER = """\
import importlib.util, pathlib, sys
sys.path.insert(0, ".")
for path in sorted(pathlib.Path("tests").glob("test_*.py")):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in [name for name in dir(module) if name.startswith("test_")]:
        try:
            getattr(module, name)()
            print("PASSED", f"{path}::{name}")
        except Exception as error:
            print("FAILED", f"{path}::{name} - {error!r}")
"""
TESTS = "from calc import add\n\n\ndef test_adds():\n    assert add(1, 2) == 3\n"
MAKE = f"""set -e
mkdir -p {REPO}/tests && cd {REPO}
printf 'def add(a, b):\\n    return a - b\\n' > calc.py
git init --quiet && git add --all && git commit --quiet --message one
"""
FIX = (
    "sed -i 's/a - b/a + b/' calc.py; printf '\\000\\377' > blob; git add --all; git commit --quiet --message"
    " mine; printf new > 'untracked file'"
)


@asynccontextmanager
async def repository(runtimes: NodeRuntimes, name: str) -> AsyncIterator[PodmanRuntime]:
    """A container with the repository as its image has it."""
    async with runtimes.open(SMALL, session_id=name, lifetime_s=LIFETIME_S) as runtime:
        await done(runtime, MAKE)
        await runtime.put(
            {f"{REPO}/run_tests.py": RUNNER.encode(), f"{REPO}/tests/test_calc.py": TESTS.encode()}
        )
        await done(runtime, f"cd {REPO}; git add --all; git commit --quiet --message tests")
        yield runtime


async def done(runtime: Runtime, script: str, user: str | None = None) -> None:
    ended = await runtime.run(["sh", "-c", script], user=user)
    assert ended.exit_code == 0, ended


async def run_on_output(left: Runtime, clean: Runtime) -> Verdict:
    config: dict[str, Json] = {
        "test_command": "python3 run_tests.py",
        "expected_output_json": {"test_adds": "PASSED"},
        "repo_dir": REPO,
        "exclude_patterns": ["tests/*", "run_tests.py"],
    }
    return await test_on_output.evaluate(finished(clean, config, left))


async def test_work_moves_to_clean_container(runtimes: NodeRuntimes) -> None:
    async with repository(runtimes, "left") as left, repository(runtimes, "clean") as clean:
        await done(
            left,
            f"cd {REPO}; {FIX}; echo x > closed; chmod 0 closed; echo 'def test_adds(): pass' >"
            " tests/test_calc.py",
        )
        await left.end_processes()
        verdict = await run_on_output(left, clean)
        assert verdict.reward == 1.0, verdict.metrics
        patch = verdict.metrics["patch"]
        assert isinstance(patch, dict)
        assert (patch["files"], patch["applied_by"]) == (3, "git")
        assert "closed" in str(patch["notes"]), "what git could not read is said"
        assert await clean.read(f"{REPO}/blob") == b"\0\xff"
        assert await clean.read(f"{REPO}/tests/test_calc.py") == TESTS.encode()


async def test_forgery_in_agent_container_fails(runtimes: NodeRuntimes) -> None:
    forge = f"""cd {REPO}
    echo 'print("PASSED tests/test_calc.py::test_adds"); raise SystemExit' > run_tests.py
    mkdir -p ~/.local/lib/python3/site-packages; printf '#!/bin/sh\\necho forged' > ~/git; chmod +x ~/git
    git config core.fsmonitor ~/git; git config filter.x.clean ~/git; echo '* filter=x' > .gitattributes
    """
    async with repository(runtimes, "forger") as left, repository(runtimes, "judge") as clean:
        await done(left, forge)
        verdict = await run_on_output(left, clean)
        assert verdict.reward == 0.0
        assert verdict.metrics["different"] == ["test_adds: FAILED, not PASSED"]


async def test_instance_judged_by_swebench_package(runtimes: NodeRuntimes) -> None:
    new = (
        "diff --git a/tests/test_new.py b/tests/test_new.py\nnew file mode 100644\n--- /dev/null\n+++"
        " b/tests/test_new.py\n@@ -0,0 +1,5 @@\n"
    )
    async with repository(runtimes, "instance") as left, repository(runtimes, "verifier") as clean:
        await done(left, f"cd {REPO}; {FIX}; echo 'def test_text(): pass' > tests/test_new.py")
        row: dict[str, Json] = {
            "instance_id": "local__calc-1",
            "repo": "local/calc",
            "base_commit": (
                (await clean.run(["git", "-C", REPO, "rev-parse", "HEAD"])).stdout.decode().strip()
            ),
            "test_patch": (
                new + "".join(f"+{line}\n" for line in TESTS.replace("test_adds", "test_text").splitlines())
            ),
            "FAIL_TO_PASS": ["tests/test_new.py::test_text", "tests/test_calc.py::test_adds"],
            "PASS_TO_PASS": [],
        }
        config: dict[str, Json] = {"instance": row, "test_command": "python3 run_tests.py", "repo_dir": REPO}
        verdict = await swebench.EVALUATOR.evaluate(finished(clean, config, left))
        assert verdict.reward == 1.0, verdict.metrics
        assert verdict.metrics["fail_to_pass"] == {"passed": 2, "failed": 0, "failures": []}


# ── harbor, in the agent's own container ──────────────────────────────────────

HARBOR: dict[str, Json] = {
    "tests": {
        "test.sh": 'test "$(cat answer.txt)" = kiwi; echo $((1 - $?)) > /logs/verifier/reward.txt',
        "data/a": "x",
    }
}


@pytest.mark.parametrize(("answer", "reward"), [("kiwi", 1.0), ("pear", 0.0)])
async def test_harbor_task_judged_in_place(runtimes: NodeRuntimes, answer: str, reward: float) -> None:
    """A Harbor task is judged where the agent worked."""
    async with runtimes.open(SMALL, session_id=f"harbor-{answer}", lifetime_s=LIFETIME_S) as runtime:
        await done(runtime, f"echo {answer} > answer.txt")
        verdict = await harbor.evaluate(finished(runtime, HARBOR))
        assert verdict.reward == reward, verdict.metrics
        assert await runtime.read("/tests/data/a") == b"x"


@pytest.mark.parametrize(
    "planted",
    [
        "mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; chown -R 1000 /logs /tests",
        (
            "mkdir -p /logs /tests/deep; ln -s /work /logs/verifier; echo 1 > /work/reward.txt; chmod 0"
            " /tests/deep"
        ),
        "mkdir -p /logs/verifier/reward.txt/deep; ln -s /work /tests; chmod 0 /logs/verifier/reward.txt",
    ],
)
async def test_planted_files_are_gone(runtimes: NodeRuntimes, planted: str) -> None:
    async with runtimes.open(SMALL, session_id="planted", lifetime_s=LIFETIME_S) as runtime:
        await runtime.run(["sh", "-c", planted], user="root")
        await runtime.run(
            [
                "sh",
                "-c",
                (
                    "mkdir /logs/verifier/mine /tests/mine; echo 1 > /logs/verifier/mine/x; chmod 0"
                    " /logs/verifier/mine"
                ),
            ]
        )
        config: dict[str, Json] = {
            "tests": {"test.sh": "find /tests /logs/verifier; echo 0.5 > /logs/verifier/reward.txt"}
        }
        verdict = await harbor.evaluate(finished(runtime, config))
        assert verdict.reward == 0.5
        assert str(verdict.metrics["output_tail"]).split() == [
            "/tests",
            "/tests/test.sh",
            "/logs/verifier",
            "/logs/verifier/.keep",
        ]


async def test_processes_of_tests_are_ended(runtimes: NodeRuntimes) -> None:
    config: dict[str, Json] = {
        "tests": {"test.sh": "setsid -f sleep 600; setsid -f sleep 601; echo 1 > /logs/verifier/reward.txt"}
    }
    async with runtimes.open(SMALL, session_id="daemons", lifetime_s=LIFETIME_S) as runtime:
        assert (await harbor.evaluate(finished(runtime, config))).reward == 1.0
        assert b"sleep" not in (await runtime.run(["ps", "-e", "-o", "comm"])).stdout


async def test_tests_may_run_as_root(runtimes: NodeRuntimes) -> None:
    config: dict[str, Json] = {
        "tests": {"test.sh": "id -u; echo 1 > /logs/verifier/reward.txt"},
        "user": "root",
    }
    async with runtimes.open(SMALL, session_id="root", lifetime_s=LIFETIME_S) as runtime:
        verdict = await harbor.evaluate(finished(runtime, config))
        assert (verdict.reward, verdict.metrics["output_tail"]) == (1.0, "0\n")


# ── command ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "planted",
    [
        "echo 1 > reward",
        "ln -s /etc/hostname reward",
        "mkfifo reward",
        "mkdir -p reward/deep; chmod 0 reward",
    ],
)
async def test_reward_path_cleared_before_test(runtimes: NodeRuntimes, planted: str) -> None:
    """Anything that stands at the reward file is gone before the test."""
    async with runtimes.open(SMALL, session_id="reward", lifetime_s=LIFETIME_S) as runtime:
        await done(runtime, planted)
        config: dict[str, Json] = {
            "script": "test ! -e reward && test ! -L reward && echo 0.25 > reward",
            "reward_file": "/work/reward",
        }
        assert (await command.evaluate(finished(runtime, config))).reward == 0.25


@pytest.mark.parametrize(
    "written",
    ["ln -s /etc/hostname reward", "mkfifo reward", "mkdir reward", "rm -rf folder; ln -s / folder", "true"],
)
async def test_special_reward_file_is_none(runtimes: NodeRuntimes, written: str) -> None:
    async with runtimes.open(SMALL, session_id="no-reward", lifetime_s=LIFETIME_S) as runtime:
        path = "/work/folder/etc/hostname" if "folder" in written else "/work/reward"
        with pytest.raises(EvaluatorError, match=f"exit code 0 and wrote no {path}"):
            await command.evaluate(finished(runtime, {"script": written, "reward_file": path}))


async def test_flood_keeps_its_end(runtimes: NodeRuntimes) -> None:
    async with runtimes.open(SMALL, session_id="flood", lifetime_s=LIFETIME_S) as runtime:
        verdict = await command.evaluate(
            finished(runtime, {"script": "head -c 50000000 /dev/zero | tr '\\0' x; echo end"})
        )
        assert verdict.reward == 1.0
        assert len(str(verdict.metrics["output_tail"])) == 2000
        assert str(verdict.metrics["output_tail"]).endswith("xend\n")
