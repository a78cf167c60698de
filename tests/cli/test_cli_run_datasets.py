"""`polarnode run` on a dataset in the shape of SWE-bench, in real containers: solved, not solved, and what an
agent that looks for it finds.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import pytest
import trio
from podman_parts import settings, tools

from polarnode.containers.images import build_task_images
from polarnode.sources.reading import make_build

pytestmark = [pytest.mark.podman, pytest.mark.usefixtures("podman")]

SECRET = f"the-solution-{token_hex(6)}"
HIDDEN = f"the-hidden-test-{token_hex(6)}"
DOCKERFILE = "FROM localhost/polarnode/base\nUSER root\nCOPY repo /testbed\nWORKDIR /testbed\n"
# The repository's test command: what pytest prints, of tests that are functions.
CHECK = """\
import test_lib
for name in sorted(vars(test_lib)):
    if name.startswith("test_"):
        try:
            vars(test_lib)[name]()
        except AssertionError:
            print(f"FAILED test_lib.py::{name}")
        else:
            print(f"PASSED test_lib.py::{name}")
"""
TESTS = "import lib\n\n\ndef test_one():\n    assert lib.x\n"
TEST_PATCH = f"""\
diff --git a/test_lib.py b/test_lib.py
--- a/test_lib.py
+++ b/test_lib.py
@@ -3,3 +3,7 @@

 def test_one():
     assert lib.x
+
+
+def test_two():
+    assert lib.x == 2, "{HIDDEN}"
"""


def git(repo: Path, *argv: str) -> str:
    who = {
        f"GIT_{role}_{what}": value
        for role in ("AUTHOR", "COMMITTER")
        for what, value in (("NAME", "a"), ("EMAIL", "a@localhost"))
    }
    return subprocess.run(
        ["git", *argv], cwd=repo, check=True, capture_output=True, text=True, env={**os.environ, **who}
    ).stdout.strip()


@pytest.fixture
def dataset(tmp_path: Path) -> Iterator[Path]:
    """One row, and its image: a repository whose history goes on behind the base commit, as those of clones
    do.
    """
    repo = tmp_path / "environment" / "repo"
    repo.mkdir(parents=True)
    for name, text in (("lib.py", "x = 1\n"), ("test_lib.py", TESTS), ("check.py", CHECK)):
        (repo / name).write_text(text)
    git(repo, "init", "--quiet", "--initial-branch", "main")
    git(repo, "add", ".")
    git(repo, "commit", "--quiet", "-m", "base")
    git(repo, "tag", "v1")
    base = git(repo, "rev-parse", "HEAD")
    (repo / "lib.py").write_text(f"x = 2  # {SECRET}\n")
    git(repo, "commit", "--quiet", "--all", "-m", f"fix {SECRET}")
    git(repo, "tag", "v2")
    git(repo, "switch", "--quiet", "--create", "work", base)
    git(repo, "remote", "add", "origin", "https://example.invalid/repo")
    (tmp_path / "environment" / "Dockerfile").write_text(DOCKERFILE)
    build = make_build(tmp_path / "environment", "Dockerfile", limit_s=600.0)

    async def make() -> None:
        await build_task_images(settings(), [build], log=tmp_path / "images.log", report=print)

    async def remove() -> None:
        await tools(tmp_path / "images.log").output("rmi", "--force", build.image)

    trio.run(make)
    row = {
        "repo": "a/b",
        "instance_id": "a__b-1",
        "base_commit": base,
        "patch": SECRET,
        "test_patch": TEST_PATCH,
        "hints_text": SECRET,
    }
    row |= {"problem_statement": "x should be 2.", "version": "1", "image_name": build.image}
    row |= {"FAIL_TO_PASS": '["test_lib.py::test_two"]', "PASS_TO_PASS": '["test_lib.py::test_one"]'}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    yield file
    trio.run(remove)


def ran(dataset: Path, script: str) -> dict[str, object]:
    """The one trajectory of the dataset's task, worked on by a script."""
    folder = dataset.parent
    over = (
        '[harness]\nname = "shell"\ncommand = ["sh", "-c",'
        f' {json.dumps(script)}]\n[evaluator.config]\ntest_command = "python3 check.py"\n'
    )
    (folder / "with.toml").write_text(f"{over}[runtime]\nmemory_mb = 512\ncpus = 1\n")
    argv = [
        sys.executable,
        "-m",
        "polarnode.cli",
        "run",
        "--engine",
        "simulated",
        "--override",
        str(folder / "with.toml"),
        "--out",
        str(folder / "out"),
    ]
    done = subprocess.run([*argv, str(dataset)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [value] = [json.loads(line) for line in (folder / "out" / "trajectories.jsonl").read_text().splitlines()]
    found: dict[str, object] = value
    return found


def test_correct_solution_is_rewarded(dataset: Path) -> None:
    value = ran(dataset, "sed -i 's/x = 1/x = 2/' lib.py")
    assert value["reward"] == 1.0, value


def test_agent_cannot_find_the_solution(dataset: Path) -> None:
    """Its files, its environment, its processes and the history of its repository; a test of its own is not
    the row's.
    """
    places = (
        "/testbed /tmp /var/tmp /root /home /work /opt /usr/local /etc /proc/self/environ /proc/1/cmdline"
    )
    look = f"! grep -rsq -e {SECRET} -e {HIDDEN} {places} && ! env | grep -q -e {SECRET} -e {HIDDEN}"
    history = (
        f'! git log --all --reflog -p | grep -q {SECRET} && test "$(git tag)" = v1 && test -z "$(git remote)"'
        ' && test "$(git rev-list --all --count)" = 1'
    )
    forge = "printf 'import lib\\ndef test_one(): pass\\ndef test_two(): pass\\n' > test_lib.py"
    value = ran(dataset, f"{{ {look}; }} || exit 8; {{ {history}; }} || exit 9; {forge}")
    assert isinstance(value["outcome"], dict)
    assert value["outcome"]["exit_code"] == 0, value["outcome"]
    assert value["reward"] == 0.0, value
